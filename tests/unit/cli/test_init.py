"""``rlsrl init``: the project it writes is valid, its modules load, its own tests pass."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from rlsrl.api.load import load_file
from rlsrl.cli import COMMANDS, main
from rlsrl.cli.init import experiment_name, templates
from rlsrl.envs.check import check_environment
from rlsrl.envs.factory import EnvironmentSource, environment_spec, make_environment
from rlsrl.policies.build import build_network
from rlsrl.runtime.references import load_callable

FILES = {"README.md", "experiment.yaml", "my_env.py", "my_network.py", "test_my_env.py"}
ALGORITHM_FILES = {"my_algorithm.py", "test_my_algorithm.py"}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "Robot Arm_2"
    result = CliRunner().invoke(main, ["init", str(folder)])
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture
def project_with_algorithm(tmp_path: Path) -> Path:
    folder = tmp_path / "robot"
    result = CliRunner().invoke(main, ["init", "--algorithm", str(folder)])
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture
def importable(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the project on the import path, as the local controller does for its workers."""
    monkeypatch.syspath_prepend(project)
    for name in ("my_env", "my_network"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return project


def test_the_project_is_complete_and_its_experiment_valid(project: Path) -> None:
    assert {path.name for path in project.iterdir()} == FILES
    experiment = load_file(project / "experiment.yaml")
    assert experiment.metadata.name == "robot-arm-2"
    assert experiment.spec.stop.return_mean is not None
    assert experiment.spec.stop.env_steps is not None
    assert "runs/robot-arm-2" in (project / "README.md").read_text()


def test_the_commands_the_readme_names_exist(project: Path) -> None:
    named = set(re.findall(r"rlsrl (\w+)", (project / "README.md").read_text()))
    assert {"run", "eval", "validate"} <= named <= set(COMMANDS)


def test_pytest_is_installed_before_its_call(tmp_path: Path) -> None:
    printed = CliRunner().invoke(main, ["init", str(tmp_path / "robot")]).output
    for text in (printed, (tmp_path / "robot" / "README.md").read_text()):
        assert 0 < text.find("pip install pytest") < text.find("python -m pytest"), text


def test_environment_and_network_are_what_the_experiment_names_and_fit_each_other(importable: Path) -> None:
    spec = load_file(importable / "experiment.yaml").spec
    source = EnvironmentSource(factory=spec.environment.factory, kwargs=spec.environment.kwargs)
    check_environment(make_environment(source))
    custom = spec.policy.network.custom
    assert custom is not None
    factory = load_callable(custom.factory, where="network factory")
    build_network(factory, environment_spec(source), custom.kwargs, seed=0)


def test_with_an_algorithm_the_experiment_names_it(project: Path, project_with_algorithm: Path) -> None:
    assert {path.name for path in project_with_algorithm.iterdir()} == FILES | ALGORITHM_FILES
    assert load_file(project / "experiment.yaml").spec.algorithm.custom is None
    custom = load_file(project_with_algorithm / "experiment.yaml").spec.algorithm.custom
    assert custom is not None
    assert custom.factory == "my_algorithm:MyAlgorithm"
    readmes = [(folder / "README.md").read_text() for folder in (project, project_with_algorithm)]
    assert ["my_algorithm" in text for text in readmes] == [False, True]
    assert not any("%" in text for text in readmes)


@pytest.mark.slow
def test_the_projects_own_tests_pass(project: Path, project_with_algorithm: Path) -> None:
    assert "4 passed" in output_of_tests(project)
    assert "5 passed" in output_of_tests(project_with_algorithm)


def output_of_tests(project: Path) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_an_empty_folder_is_taken_and_a_missing_parent_made(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "not" / "there"):
        assert CliRunner().invoke(main, ["init", str(folder)]).exit_code == 0
        assert {path.name for path in folder.iterdir()} == FILES


def test_a_folder_with_something_in_it_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    result = CliRunner().invoke(main, ["init", str(tmp_path)])
    assert result.exit_code == 2
    assert "is not empty (notes.txt)" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    result = CliRunner().invoke(main, ["init", str(tmp_path / "file")])
    assert result.exit_code == 2
    assert "is a file" in result.output


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("robot", "robot"),
        ("My Robot_2", "my-robot-2"),
        ("2-fast-4-you", "fast-4-you"),
        ("---", "my-experiment"),
        ("", "my-experiment"),
        ("päckchen", "p-ckchen"),
        ("a" * 60, "a" * 40),
        ("a" * 39 + "-b", "a" * 39),
    ],
)
def test_experiment_names_are_made_from_folder_names(folder: str, name: str) -> None:
    assert experiment_name(folder) == name


def test_the_wheel_would_hold_the_templates() -> None:
    """hatchling packs all files in the package's folder that git does not ignore."""
    names = FILES | ALGORITHM_FILES
    assert set(templates(has_algorithm=True)) == names
    root = Path(__file__).parents[3]
    ignored = subprocess.run(
        ["git", "check-ignore", *(f"worker/rlsrl/cli/templates/{name}.template" for name in names)],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ignored.stdout == ""
