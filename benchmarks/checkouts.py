"""A commit as a contestant: its own checkout, its own Python environment, its own definition of the workload."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contestants import Rlsrl, has_trained
from machine import REPOSITORY
from profiles import RunProfile
from workloads import Workload

SETUP_SECONDS = 30 * 60.0
"""A commit's dependencies have to be installed within this time."""
COMMAND_SECONDS = 120.0
"""A git command, or a commit that prints its workload, has to end within this time."""
SOURCES = ("worker", "operator", "benchmarks")
"""Folders of a checkout that its processes import from."""
PRINT_EXPERIMENT = """
import json, sys
from workloads import WORKLOADS
print(json.dumps(WORKLOADS[sys.argv[1]].experiment(seed=1)))
"""
"""What a commit's ``benchmarks/workloads.py`` has to offer, in every commit that is to be compared."""


class CheckoutFailed(Exception):
    """A commit cannot be checked out, or cannot be run; the text says why and what to do."""


@dataclass(frozen=True, kw_only=True)
class CommitRun(Rlsrl):
    """``rlsrl run`` of one commit, on the experiment that this commit's own workload defines."""

    sources: Path
    """The checkout."""
    experiment: Mapping[str, Any]

    def inputs(self, workload: Workload, *, seed: int) -> Any:
        """Return the commit's own experiment, not that of the measuring checkout."""
        del workload, seed
        return self.experiment

    def environment(self) -> Mapping[str, str]:
        """Return variables that make Python import the commit's own sources."""
        return import_path(self.sources)

    def has_started(self, folder: Path) -> bool:
        """Return whether a training step has finished."""
        return has_trained(self.progress(folder))

    def profile(self, folder: Path) -> RunProfile | None:
        """Return None: profiles are not compared, and workers of another commit may show other metrics."""
        del folder
        return None


def import_path(sources: Path) -> dict[str, str]:
    """Return the variables that make Python import a checkout's own sources before installed packages."""
    return {"PYTHONPATH": os.pathsep.join(str(sources / folder) for folder in SOURCES)}


def commit_of(revision: str, repository: Path = REPOSITORY) -> str:
    """Return the commit's 12-digit name.

    Raises:
        CheckoutFailed: the repository has no such commit.
    """
    return _git(repository, "rev-parse", "--verify", "--short=12", f"{revision}^{{commit}}")


def check_out(commit: str, folder: Path, repository: Path = REPOSITORY) -> Path:
    """Return a checkout of the commit in ``folder``; makes it if it is missing.

    Raises:
        CheckoutFailed: git refuses, or the checkout was edited.
    """
    path = folder / commit
    if not path.exists():
        _git(repository, "worktree", "prune")  # forget checkouts whose folder somebody removed
        _git(repository, "worktree", "add", "--detach", str(path), commit)
    found = _git(path, "rev-parse", "--short=12", "HEAD")
    if found != commit or _git(path, "status", "--porcelain", "--untracked-files=no"):
        raise CheckoutFailed(f"{path} is not {commit} as it was committed: remove it (git worktree remove --force)")
    return path


def prepare(name: str, sources: Path, workload: str, repository: Path = REPOSITORY) -> CommitRun:
    """Return the contestant of a checkout, with a Python environment.

    Raises:
        CheckoutFailed: its dependencies cannot be installed, or it does not know the workload.
    """
    environment = sources / ".venv"
    if not environment.exists():
        if dependencies_of(sources) == dependencies_of(repository):
            environment.symlink_to(sys.prefix)
        else:
            make = ("make", "setup", f"PYTHON={Path(sys.base_prefix) / 'bin' / 'python3'}")
            _run(make, sources, "its dependencies cannot be installed", seconds=SETUP_SECONDS)
    python = environment / "bin" / "python"
    words = (str(python), "-c", PRINT_EXPERIMENT, workload)
    printed = _run(words, sources, f"it does not define {workload}", seconds=COMMAND_SECONDS)
    return CommitRun(
        name=name, program=python.with_name("rlsrl"), sources=sources, experiment=json.loads(printed.splitlines()[-1])
    )


def dependencies_of(sources: Path) -> tuple[Any, ...]:
    """Return all that decides which packages ``make setup`` installs; equal values share an environment."""
    project = tomllib.loads((sources / "pyproject.toml").read_text())["project"]
    wanted = ("requires-python", "dependencies", "optional-dependencies", "scripts")
    return (*(project.get(key) for key in wanted), (sources / "constraints.txt").read_text())


def _git(folder: Path, *words: str) -> str:
    return _run(("git", *words), folder, f"git {words[0]} failed", seconds=COMMAND_SECONDS).strip()


def _run(words: tuple[str, ...], folder: Path, failure: str, *, seconds: float) -> str:
    """Run a command that imports the folder's own sources, and return its output."""
    try:
        done = subprocess.run(
            words,
            cwd=folder,
            env={**os.environ, **import_path(folder)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired as error:
        raise CheckoutFailed(f"{folder}: {failure}: no end within {seconds:.0f} s") from error
    except subprocess.CalledProcessError as error:
        raise CheckoutFailed(f"{folder}: {failure}:\n{error.stderr[-2000:]}") from error
    return done.stdout
