"""Missing packages: one error that names the extra, also with the base dependencies alone. Processes refuse modules."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable
from functools import cache
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest

from rlsrl.envs.factory import EnvironmentSource, environment_interface
from rlsrl.runtime.extras import EXTRAS, TRAINING, TRAINING_MODULES, NotInstalled, extras_named, pip_install
from rlsrl.testing.stored_runs import BALANCES, CARTPOLE, make_run, push

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REFUSES = """
import os, sys

class Refusing:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        is_refused = name.partition(".")[0] in os.environ["REFUSED"].split(",")
        return None if is_refused else self.finder.find_spec(name, path, target)

sys.meta_path = [Refusing(finder) for finder in sys.meta_path]
"""
COMMAND = "import sys; from rlsrl.cli import main; sys.argv[0] = 'rlsrl'; main()"

Without = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def without(tmp_path: Path) -> Without:
    """Run a program, in a process that has all modules but the named ones; so have its children."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(REFUSES)
    path = os.pathsep.join([str(tmp_path / "site"), *filter(None, sys.path)])

    def run(modules: Iterable[str], program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PYTHONPATH": path, "REFUSED": ",".join(modules)}
        command = [sys.executable, "-c", program, *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
        )

    return run


def top_level(modules: Iterable[str]) -> set[str]:
    return {module.partition(".")[0] for module in modules}


def distributions(requirements: Iterable[str]) -> set[str]:
    return {normalized(re.split(r"[^A-Za-z0-9._-]", requirement)[0]) for requirement in requirements}


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


INSTALLED = cache(packages_distributions)
"""The distributions of each module. It takes a second."""


def distributions_of(module: str) -> set[str]:
    return {normalized(name) for name in INSTALLED()[module]}


def test_the_named_extra_installs_the_module() -> None:
    for module in EXTRAS:
        (name,) = top_level([module])
        assert distributions_of(name) & distributions(PROJECT["optional-dependencies"][EXTRAS[module]]), module
    assert all(EXTRAS[module] in TRAINING for module in TRAINING_MODULES)
    assert f"RUN_EXTRAS := {','.join(TRAINING)}\n" in (ROOT / "Makefile").read_text()


def imported_by(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= top_level(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= top_level([node.module])
    return found


def test_whatever_rlsrl_imports_is_a_base_dependency_or_has_an_extra() -> None:
    package = ROOT / "worker" / "rlsrl"
    files = [path for path in package.rglob("*.py") if not path.is_relative_to(package / "testing")]
    imported = set().union(*map(imported_by, files)) - set(sys.stdlib_module_names) - {"rlsrl"}
    assert {"torch", "grpc", "click"} <= imported
    base = distributions(PROJECT["dependencies"])
    base |= {needed for name in base for needed in distributions(requires(name) or [])}
    assert {name for name in imported if not distributions_of(name) & base} <= top_level(EXTRAS)


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        (["run", "small.yaml"], "local"),
        (["edit", "small"], "rpc"),
        (["params", "list", "small"], "rpc"),
        (["size", "small.yaml"], "rpc"),
        (["ui"], "ui"),
        (["serve-environment", "--id", "CartPole-v1"], "http"),
    ],
)
def test_with_the_base_dependencies_alone_a_command_names_the_extra(
    without: Without, tmp_path: Path, command: list[str], extra: str
) -> None:
    (tmp_path / "small.yaml").write_text(CARTPOLE)
    done = without(top_level(EXTRAS), COMMAND, *command)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    (line,) = done.stderr.splitlines()
    assert re.match(rf"Error: the package '\w+' is not installed; run: pip install 'rlsrl\[{extra}\]'", line)
    assert ("training on this machine needs 'rlsrl[rpc,env,torch,local]'" in line) == (extra in TRAINING)


def test_with_the_base_dependencies_alone_experiments_can_be_validated(without: Without, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(CARTPOLE)
    done = without(top_level(EXTRAS), COMMAND, "validate", "small.yaml")
    assert (done.returncode, done.stdout) == (0, "small.yaml: valid\n"), done.stderr


def test_with_the_base_dependencies_alone_the_doctor_names_each_cure(without: Without, tmp_path: Path) -> None:
    replays = CARTPOLE.replace("id: CartPole-v1}", "id: CartPole-v1}\n  algorithm: {dqn: {}}")
    (tmp_path / "small.yaml").write_text(replays + "  pacing: {trainStepsPerEnvStep: 1}\n")
    done = without(top_level(EXTRAS), COMMAND, "doctor", "small.yaml")
    assert done.returncode == 1, done.stderr
    for module, extra in (("grpc", "rpc"), ("gymnasium", "env"), ("torch", "torch"), ("rich", "local")):
        missing = f"{module}: cannot be imported: ModuleNotFoundError: No module named '{module}'"
        assert f"FAILED  {missing}\n        cure: pip install 'rlsrl[{extra}]'\n" in done.stdout
    stores = (
        "FAILED  replay stores: unknown: the package 'numpy' is not installed\n        cure: pip install 'rlsrl[rpc]'"
    )
    assert stores in done.stdout
    assert done.stderr == "balance cannot run here: grpc, gymnasium, torch, rich, replay stores\n"


def test_a_run_begins_only_with_all_that_its_workers_import(without: Without, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(CARTPOLE)
    missing = "the packages torch, gymnasium are not installed; run: pip install 'rlsrl[env,torch]'"
    done = without(["torch", "gymnasium"], COMMAND, "run", "small.yaml")
    assert (done.returncode, done.stderr) == (2, f"Error: {missing}\n")
    program = "import rlsrl\ntry: rlsrl.train('small.yaml')\nexcept rlsrl.NotInstalled as error: print(error)"
    done = without(["torch", "gymnasium"], program)
    assert done.stdout == f"{missing}\n", done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_program_gets_an_error_that_names_the_extra(without: Without) -> None:
    program = (
        "import rlsrl\nfor name in ('load', 'train', 'compare', 'plot', 'Run', 'RunFolderError'):\n"
        "    try: getattr(rlsrl, name)\n    except ModuleNotFoundError as error: print(type(error).__name__, error)\n"
        "print(rlsrl.SpecError.__name__, rlsrl.ConfigurationError.__name__)"
    )
    done = without(top_level(EXTRAS), program)
    *missing, last = done.stdout.splitlines()
    assert len(missing) == 6, done.stderr
    assert all(re.match(r"NotInstalled the package '\w+' is not installed; run: pip", line) for line in missing)
    assert last == "SpecError ConfigurationError"


CALLS = """
import sys
from pathlib import Path
from types import SimpleNamespace
from click.testing import CliRunner
import rlsrl
from rlsrl.api.load import load_text
from rlsrl.cli import main
from rlsrl.local.session import draw_curve
from rlsrl.testing.stored_runs import CARTPOLE

def act():
    try:
        rlsrl.load("balance").act([0.0] * 4)
    except rlsrl.NotInstalled as error:
        print(error)

def curve():
    folder = SimpleNamespace(metrics=Path("balance/metrics.jsonl"), curve=Path("curve.png"))
    print(draw_curve(folder, load_text(CARTPOLE)))

for name in sys.argv[1:]:
    if name in ("act", "curve"):
        globals()[name]()
    else:
        print(CliRunner().invoke(main, name.split()).output.strip())
"""


def test_what_is_missing_at_run_time_is_named(without: Without, tmp_path: Path) -> None:
    run = make_run(tmp_path / "balance", CARTPOLE)
    push(run, 1, BALANCES, exported=None, interface=environment_interface(EnvironmentSource(id="CartPole-v1")))
    rows = [{"step": n, "wall": 0.0, "role": "trainer", "scalars": {"env_steps": n, "return_mean": n}} for n in (1, 2)]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))

    of_torch = without(["torch"], CALLS, "act", "eval balance", "export balance --format torch")
    assert len(of_torch.stdout.splitlines()) == 3, of_torch.stderr
    for line in of_torch.stdout.splitlines():
        assert "the package 'torch' is not installed; run: pip install 'rlsrl[torch]'" in line
    others = without(["gymnasium", "matplotlib"], CALLS, "eval balance", "plot balance", "curve")
    evaluated, *drawn = others.stdout.splitlines()
    assert "environment 'CartPole-v1': the package 'gymnasium' is not installed; run: pip install" in evaluated
    assert len(drawn) == 2, others.stderr
    assert all("'matplotlib' is not installed; run: pip install 'rlsrl[local]'" in line for line in drawn)


def test_a_module_that_the_users_own_code_lacks_stays_as_it_is(
    without: Without, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(NotInstalled, match=re.escape(pip_install("torch"))) as caught, extras_named():
        exec("import torch", {"__name__": "rlsrl.policies.networks"})
    assert (caught.value.name, caught.value.cure) == ("torch", "pip install 'rlsrl[torch]'")
    for importer, module in (
        ("my_env", "torch"),
        ("rlsrl.runs.run", "rich.of_another_version"),
        ("rlsrl.cli", "robot"),
    ):
        with pytest.raises(ModuleNotFoundError, match=module) as raw, extras_named():
            exec(f"import {module}", {"__name__": importer})
        assert type(raw.value) is ModuleNotFoundError

    (tmp_path / "my_env.py").write_text("import matplotlib\n")
    (tmp_path / "mine.yaml").write_text(CARTPOLE.replace("id: CartPole-v1", "factory: 'my_env:make'"))
    done = without(["matplotlib"], COMMAND, "size", "mine.yaml")
    assert done.returncode == 2
    assert "importing 'my_env' needs 'matplotlib', which is not installed" in done.stderr
    assert "pip install" not in done.stderr
