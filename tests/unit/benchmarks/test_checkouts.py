"""A commit's checkout, its environment and its own definition of a workload."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from checkouts import CheckoutFailed, check_out, commit_of, dependencies_of, prepare
from workloads import WORKLOADS

PYPROJECT = '[project]\nname = "x"\nrequires-python = ">=3.11"\ndependencies = ["{package}"]\n'
WORKLOAD = """
class Workload:
    def experiment(self, seed):
        return {{"spec": {spec!r}, "seed": seed}}
WORKLOADS = {{"W1": Workload()}}
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Two commits, tagged old and new, whose W1 differs."""
    folder = tmp_path / "repository"
    (folder / "benchmarks").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PYPROJECT.format(package="click"))
    (folder / "constraints.txt").write_text("click==8\n")
    (folder / ".gitignore").write_text(".venv\n__pycache__/\n")
    git(folder, "init")
    for tag in ("old", "new"):
        (folder / "benchmarks" / "workloads.py").write_text(WORKLOAD.format(spec=tag))
        git(folder, "add", ".")
        git(folder, "commit", "-m", tag)
        git(folder, "tag", tag)
    return folder


def git(folder: Path, *words: str) -> None:
    who = ["-c", "user.name=tests", "-c", "user.email=tests@localhost"]
    subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)


def test_each_commit_runs_its_own_workload_from_its_own_sources(repository: Path, tmp_path: Path) -> None:
    for tag in ("old", "new"):
        sources = check_out(commit_of(tag, repository), tmp_path / "trees", repository)
        run = prepare("base", sources, "W1", repository)
        assert run.inputs(WORKLOADS["W1"], seed=5) == {"spec": tag, "seed": 1}
        assert run.environment()["PYTHONPATH"].startswith(f"{sources / 'worker'}:")
        assert run.program == sources / ".venv" / "bin" / "rlsrl"


def test_equal_dependencies_share_an_environment(repository: Path, tmp_path: Path) -> None:
    sources = check_out(commit_of("old", repository), tmp_path / "trees", repository)
    prepare("base", sources, "W1", repository)
    assert (sources / ".venv").resolve() == Path(sys.prefix).resolve()


@pytest.mark.parametrize(
    ("file", "text"), [("pyproject.toml", PYPROJECT.format(package="click>=9")), ("constraints.txt", "click==9\n")]
)
def test_other_packages_are_other_dependencies(repository: Path, file: str, text: str) -> None:
    before = dependencies_of(repository)
    (repository / "pyproject.toml").write_text(PYPROJECT.format(package="click") + "[tool.ruff]\nline-length = 1\n")
    assert dependencies_of(repository) == before, "what installs nothing does not count"
    (repository / file).write_text(text)
    assert dependencies_of(repository) != before


def test_a_checkout_is_made_once_and_may_not_be_edited(repository: Path, tmp_path: Path) -> None:
    commit = commit_of("old", repository)
    sources = check_out(commit, tmp_path / "trees", repository)
    assert check_out(commit, tmp_path / "trees", repository) == sources
    (sources / "constraints.txt").write_text("edited\n")
    with pytest.raises(CheckoutFailed, match=f"{commit} is not {commit} as it was committed: remove it"):
        check_out(commit, tmp_path / "trees", repository)


def test_a_removed_checkout_is_made_again(repository: Path, tmp_path: Path) -> None:
    commit = commit_of("old", repository)
    sources = check_out(commit, tmp_path / "trees", repository)
    sources.rename(tmp_path / "elsewhere")
    assert check_out(commit, tmp_path / "trees", repository).exists()


def test_a_failure_names_the_folder_and_what_git_or_python_printed(repository: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckoutFailed, match="repository: git rev-parse failed:\nfatal: Needed a single revision"):
        commit_of("nowhere", repository)
    sources = check_out(commit_of("old", repository), tmp_path / "trees", repository)
    with pytest.raises(CheckoutFailed, match=r"it does not define W9:\n(?s:.*)KeyError: 'W9'"):
        prepare("base", sources, "W9", repository)
