"""The wheel has what git has of the packages, works without the clone, and trains in a clean environment."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("worker/rlsrl", "operator/rlsrl_operator")
EXPERIMENT = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {name: small}
spec:
  environment: {id: CartPole-v1}
  algorithm: {ppo: {minibatchSize: 64}}
  actors: {environments: 2, rolloutLength: 32}
  trainers: {compile: "off"}
  stop: {trainSteps: 3}
"""


def call(folder: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command that finds neither the clone nor its environment, unless the variables say where."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return subprocess.run(
        command, cwd=folder, env={**kept, **variables}, capture_output=True, text=True, timeout=900, check=False
    )


def pip(folder: Path, *arguments: str) -> None:
    """Run the pip of the tests."""
    done = call(folder, sys.executable, "-m", "pip", *arguments)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the wheel, built by the build backend that is installed, else by a downloaded one."""
    folder = tmp_path_factory.mktemp("wheel")
    here = ("--no-build-isolation",) if importlib.util.find_spec("hatchling") else ()
    pip(folder, "wheel", "--quiet", "--no-deps", *here, "--wheel-dir", ".", str(ROOT))
    (built,) = folder.glob("rlsrl-*.whl")
    return built


def test_the_wheel_has_all_files_of_the_packages(wheel: Path) -> None:
    listed = subprocess.run(["git", "ls-files", *PACKAGES], cwd=ROOT, capture_output=True, text=True, check=True)
    tracked = {path.partition("/")[2] for path in listed.stdout.splitlines()}
    assert {"rlsrl/py.typed", "rlsrl/ui/static/index.html", "rlsrl/cli/templates/README.md.template"} <= tracked
    with ZipFile(wheel) as archive:
        assert tracked - set(archive.namelist()) == set()


def test_the_installed_wheel_works_without_the_clone(wheel: Path, tmp_path: Path) -> None:
    installed = tmp_path / "installed"
    pip(tmp_path, "install", "--quiet", "--no-deps", "--no-index", "--target", str(installed), str(wheel))
    # Without `site` Python does not read the file that puts the clone on the path of its environment.
    python = (sys.executable, "-S")
    found = os.pathsep.join([str(installed), sysconfig.get_path("purelib")])

    imports = "import rlsrl, rlsrl_operator; print(rlsrl.__file__, rlsrl_operator.__file__, sep='\\n')"
    imported = call(tmp_path, *python, "-c", imports, PYTHONPATH=found)
    assert imported.returncode == 0, imported.stderr
    assert all(Path(file).is_relative_to(installed) for file in imported.stdout.splitlines()), imported.stdout

    (tmp_path / "small.yaml").write_text(EXPERIMENT)
    rlsrl = str(installed / "bin" / "rlsrl")
    for arguments in (("--help",), ("validate", "small.yaml"), ("init", "project")):
        done = call(tmp_path, *python, rlsrl, *arguments, PYTHONPATH=found)
        assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "project" / "my_env.py").is_file(), "a file of the package's data"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_wheel_trains_in_a_clean_environment(wheel: Path, tmp_path: Path) -> None:
    assert call(tmp_path, sys.executable, "-m", "venv", "clean").returncode == 0
    python, rlsrl = (str(tmp_path / "clean" / "bin" / name) for name in ("python", "rlsrl"))
    constraints = str(ROOT / "constraints.txt")
    named = f"{wheel}[rpc,env,torch,local]"
    installed = call(tmp_path, python, "-m", "pip", "install", "--quiet", "--constraint", constraints, named)
    assert installed.returncode == 0, installed.stderr
    (tmp_path / "small.yaml").write_text(EXPERIMENT)
    found = call(tmp_path, python, "-c", "import rlsrl; print(rlsrl.__file__)")
    assert found.stdout.startswith(str(tmp_path / "clean")), "not that of the clone"

    for command in (("validate", "small.yaml"), ("run", "small.yaml"), ("plot", "small"), ("params", "list", "small")):
        done = call(tmp_path, rlsrl, *command)
        assert done.returncode == 0, done.stdout + done.stderr
    acts = "import rlsrl; policy = rlsrl.load('small'); print(policy.act([0.0, 0.0, 0.1, 0.0]))"
    acted = call(tmp_path, python, "-c", acts)
    assert acted.stdout.strip() in ("0", "1"), acted.stderr

    for command, extra in (
        (("video", "small"), "video"),
        (("export", "small", "--format", "onnx"), "onnx"),
        (("run", "small.yaml", "--fresh", "--set", "environment.id=HalfCheetah-v5"), "mujoco"),
        (("run", "small.yaml", "--fresh", "--set", "environment.id=BipedalWalker-v3"), "box2d"),
        (("run", "small.yaml", "--fresh", "--set", "environment.id=ALE/Pong-v5"), "atari"),
    ):
        done = call(tmp_path, rlsrl, *command)
        assert done.returncode == 2, done.stdout + done.stderr
        assert f"pip install 'rlsrl[{extra}]'" in done.stderr
