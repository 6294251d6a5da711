import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import rlsrl
from rlsrl.cli import COMMANDS, main
from rlsrl.cli.errors import UserError
from rlsrl.cli.text import wrapped
from rlsrl.testing.cluster_objects import experiment, pod
from rlsrl.testing.kubectl_standin import KubectlStandIn

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "cartpole.yaml"
HEAVY = {"torch", "gymnasium", "grpc", "numpy", "matplotlib", "tensorboardX", "rich"}


def modules_after(*arguments: str) -> set[str]:
    """Return the top-level modules that a command imports."""
    script = (
        "import json, sys\n"
        "from rlsrl.cli import main\n"
        "try:\n    main()\n"
        "finally:\n    print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})), file=sys.stderr)\n"
    )
    source_root = str(Path(rlsrl.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, "PYTHONPATH": source_root},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return set(json.loads(done.stderr.splitlines()[-1]))


def test_help_imports_nothing_heavy_not_even_the_spec() -> None:
    modules = modules_after("--help")

    assert "rlsrl" in modules
    assert not modules & (HEAVY | {"pydantic", "yaml"})


def test_checking_a_file_imports_nothing_heavy() -> None:
    modules = modules_after("validate", str(EXAMPLE))

    assert "pydantic" in modules
    assert not modules & HEAVY


@pytest.mark.parametrize("command", ["status", "why", "logs"])
def test_asking_a_cluster_imports_nothing_heavy(cluster: KubectlStandIn, command: str) -> None:
    trainer = pod("cartpole-trainer-0", "trainer")
    cluster.show(experiment("Running"), trainer)
    cluster.log("cartpole-trainer-0", "a line")
    assert not modules_after(command, "cartpole") & HEAVY


def test_help_lists_every_command_with_what_it_does() -> None:
    text = CliRunner().invoke(main, ["--help"]).output

    for name, entry in COMMANDS.items():
        assert f"  {name} " in text
        assert entry.help in text


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_there_and_has_help(name: str) -> None:
    result = CliRunner().invoke(main, [name, "--help"])

    assert result.exit_code == 0, result.output
    assert isinstance(main.get_command(click.Context(main), name), click.Command)


def test_an_unknown_command_is_a_user_error() -> None:
    result = CliRunner().invoke(main, ["valdate"])

    assert result.exit_code == 2
    assert "No such command 'valdate'. (did you mean 'validate'?)" in result.output


def test_ctrl_c_while_a_command_is_imported_has_the_exit_status_of_the_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("importlib.import_module", interrupted)

    assert CliRunner().invoke(main, ["run", "experiment.yaml"]).exit_code == 130


def test_a_user_error_is_one_line_and_exit_code_2() -> None:
    @click.command()
    def fail() -> None:
        raise UserError("the disk is full: free 3 GB")

    result = CliRunner().invoke(fail)

    assert (result.exit_code, result.stderr) == (2, "Error: the disk is full: free 3 GB\n")


def test_valid_files_are_reported_with_their_warnings(tmp_path: Path) -> None:
    uneven = tmp_path / "uneven.yaml"
    uneven.write_text(EXAMPLE.read_text().replace("replicas: 1", "replicas: 3"))

    result = CliRunner().invoke(main, ["validate", str(EXAMPLE), str(uneven)])

    assert result.exit_code == 0
    valid, also_valid, warning = result.stdout.splitlines()
    assert (valid, also_valid) == (f"{EXAMPLE}: valid", f"{uneven}: valid")
    assert warning.startswith(f"{uneven}: warning: 8 environments do not divide evenly over 3 workers")


def test_all_problems_of_all_files_are_named_with_exit_code_2(tmp_path: Path) -> None:
    broken, absent = tmp_path / "broken.yaml", tmp_path / "absent.yaml"
    broken.write_text(EXAMPLE.read_text().replace("epochs: 4", "epochs: 0").replace("replicas: 1", "replica: 1"))

    result = CliRunner().invoke(main, ["validate", str(broken), str(EXAMPLE), str(absent)])

    assert result.exit_code == 2
    assert result.stdout == f"{EXAMPLE}: valid\n"
    assert "spec.algorithm.ppo.epochs: value 0 is out of range" in result.stderr
    assert "did you mean: spec.actors.replicas" in result.stderr
    assert f"{absent}: cannot be read: No such file" in result.stderr
    assert result.stderr.splitlines()[-1] == "Error: 3 problems"


def test_fields_can_be_set_before_checking() -> None:
    good = CliRunner().invoke(main, ["validate", str(EXAMPLE), "--set", "seed=3", "--set", "actors.environments=16"])
    bad = CliRunner().invoke(main, ["validate", str(EXAMPLE), "--set", "seed=-3"])

    assert good.exit_code == 0
    assert bad.exit_code == 2
    assert "--set seed=-3: spec.seed: value -3 is out of range" in bad.stderr


def test_the_schema_is_printed_as_json() -> None:
    result = CliRunner().invoke(main, ["schema"])

    assert result.exit_code == 0
    assert "spec" in json.loads(result.stdout)["properties"]


def test_a_field_is_explained_and_an_unknown_one_is_a_user_error() -> None:
    known = CliRunner().invoke(main, ["explain", "spec.stop"])
    unknown = CliRunner().invoke(main, ["explain", "spec.stpo"])

    assert "returnMean" in known.stdout
    assert unknown.exit_code == 2
    assert "did you mean spec.stop?" in unknown.stderr


def test_long_lines_are_wrapped_for_a_terminal_and_nowhere_else() -> None:
    text = "x.yaml:1:1: spec: is wrong\n    allowed: " + ", ".join(["environments"] * 4)

    assert wrapped(text, None) == text
    assert wrapped(text, 45).splitlines() == [
        "x.yaml:1:1: spec: is wrong",
        "    allowed: environments, environments,",
        "        environments, environments",
    ]


def test_a_cluster_command_names_the_local_run_of_that_name(
    cluster: KubectlStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.show()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "toy").mkdir(parents=True)
    (tmp_path / "runs" / "toy" / "controller.json").touch()

    local, path, unknown = (CliRunner().invoke(main, ["status", name]) for name in ("toy", "runs/toy", "other"))

    assert "toy is a run on this machine: `rlsrl top toy` shows it, its logs are in runs/toy/logs" in local.stderr
    assert path.stderr == (
        "Error: runs/toy is not the name of an experiment on the cluster\n"
        "runs/toy is a run on this machine: `rlsrl top runs/toy` shows it, its logs are in runs/toy/logs\n"
    )
    assert "is a run on this machine" not in unknown.stderr
