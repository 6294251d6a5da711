"""Who is measured, each as a user starts it, in an environment of its own."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import yaml
from workloads import Workload

HERE = Path(__file__).parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlsrl" / "benchmarks"
ENDLESS_SECONDS = 3600.0
Point = tuple[float, float]
"""(Unix seconds, environment steps whose training is finished)."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class Contestant(Protocol):
    """A program that trains until it is told to end."""

    name: str

    def settings(self, workload: Workload) -> Sequence[Sequence[str]]:
        """Ways to use the machine, of which the fastest counts."""

    def command(self, workload: Workload, setting: Sequence[str], folder: Path) -> list[str]:
        """What to start; ``folder`` is for its files, and its standard output goes to ``out`` there."""

    def environment(self) -> Mapping[str, str]:
        """Of the process, beside this one's."""

    def progress(self, folder: Path) -> list[Point]:
        """How far it has come, since its beginning."""


@dataclass(frozen=True)
class Rlsrl:
    """``rlsrl run`` of this environment."""

    name: str = "rlsrl"

    def settings(self, workload: Workload) -> Sequence[Sequence[str]]:
        """As the workload says."""
        del workload
        return [()]

    def command(self, workload: Workload, setting: Sequence[str], folder: Path) -> list[str]:
        """See ``Contestant``."""
        del setting
        file = folder / "experiment.yaml"
        file.write_text(yaml.safe_dump(workload.experiment(), sort_keys=False))
        return [str(Path(sys.executable).with_name("rlsrl")), "run", str(file), "--run-dir", str(folder / "run")]

    def environment(self) -> Mapping[str, str]:
        """Its workers set their threads themselves."""
        return {"PYTHONPATH": str(HERE)}

    def progress(self, folder: Path) -> list[Point]:
        """From the learning curve."""
        path = folder / "run" / "metrics.jsonl"
        rows = [json.loads(line) for line in _whole_lines(path)]
        return [(row["wall"], row["scalars"]["env_steps"]) for row in rows if row["role"] == "trainer"]


@dataclass(frozen=True)
class Peer:
    """A program of this folder, in a virtual environment that is made for it."""

    name: str
    program: str
    requirements: tuple[str, ...]
    vectors: tuple[str, ...]
    """How its environments may step: where in its own process, where each in another."""
    native: str | None = None
    """How it uses an environment's own vectorisation."""
    extra: tuple[str, ...] = ()
    threads: tuple[int, ...] = field(default=(1, 2))

    def settings(self, workload: Workload) -> Sequence[Sequence[str]]:
        """Environments here or in processes, torch with one thread or with two."""
        vectors = self.vectors if not workload.native or self.native is None else (self.native,)
        return [("--vector", vector, "--threads", str(threads)) for vector in vectors for threads in self.threads]

    def command(self, workload: Workload, setting: Sequence[str], folder: Path) -> list[str]:
        """See ``Contestant``."""
        del folder
        words = [*workload.peer_arguments(), *self.extra, "--seconds", str(ENDLESS_SECONDS), *setting]
        return [str(self._python()), str(HERE / self.program), *words]

    def environment(self) -> Mapping[str, str]:
        """Torch's threads are its own affair; numpy has one."""
        return {"OPENBLAS_NUM_THREADS": "1"}

    def progress(self, folder: Path) -> list[Point]:
        """From what it prints."""
        told = [json.loads(line) for line in _whole_lines(folder / "out") if line.startswith("{")]
        return [(line["wall"], line["env_steps"]) for line in told]

    def _python(self) -> Path:
        constraints = (HERE.parent / "constraints.txt").read_text()
        mark = hashlib.sha256("\n".join((sys.version, constraints, *self.requirements)).encode()).hexdigest()[:16]
        home = CACHE / f"{self.name}-{mark}"
        python = home / "bin" / "python"
        if not (home / "complete").exists():
            print(f"an environment for {self.name} is made in {home}", file=sys.stderr)
            venv.create(home, with_pip=True, clear=True)
            pip = [str(python), "-m", "pip", "install", "--quiet", "--constraint", str(HERE.parent / "constraints.txt")]
            subprocess.run([*pip, *self.requirements], check=True)
            (home / "complete").touch()
        return python


_COMMON = ("torch", "gymnasium[mujoco]", "ale-py", "opencv-python-headless")
STABLE_BASELINES3 = Peer(
    name="stable-baselines3",
    program="stable_baselines3_ppo.py",
    requirements=("stable-baselines3", *_COMMON),
    vectors=("dummy", "subproc"),
)
SINGLE_FILE = Peer(
    name="single-file",
    program="reference_ppo.py",
    requirements=_COMMON,
    vectors=("sync", "async"),
    native="native",
    extra=("--no-clip-value-loss",),
)
PEERS: tuple[Peer, ...] = (STABLE_BASELINES3, SINGLE_FILE)


def _whole_lines(path: Path) -> list[str]:
    """Of a file that somebody writes; none before it is there."""
    try:
        return path.read_text(errors="replace").rpartition("\n")[0].splitlines()
    except FileNotFoundError:
        return []
