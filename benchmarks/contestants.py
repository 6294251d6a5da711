"""Who is measured: each as a user starts it, in an environment of its own, ended as a user ends it."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import yaml
from figures import RLSRL, SAMPLE_FACTORY, SINGLE_FILE, STABLE_BASELINES3, Point
from peer_environments import python_of, requirements_of
from profiles import RunProfile
from workloads import CORES, Workload

from rlsrl.local.metrics_log import read_rows, training_rows

HERE = Path(__file__).parent
OUTPUT = "out"
"""The file for what a contestant prints."""
RUN = "run"
"""rlsrl's run folder."""
OUR_PROGRAM = Path(sys.executable).with_name("rlsrl")
TELLING_PINS = ("torch", "numpy", "gymnasium", "ale-py", "mujoco")
"""Of a peer's pins, those that are told with its results beside its own."""
UP_TO_CORES = sorted({1, 2, CORES})
"""Threads or processes that are tried."""
Setting = tuple[str, ...]
"""Words that say how a program uses the machine."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a contestant has come, at each moment at which it said so."""

    points: Sequence[Point]
    return_means: Sequence[float | None]
    """Beside each point; None before an episode has ended."""


class Contestant(Protocol):
    """A program that trains until it is told to end, or until it has reached the workload's goal."""

    @property
    def name(self) -> str: ...
    @property
    def end_signal(self) -> signal.Signals:
        """By which users end it."""

    @property
    def versions(self) -> Mapping[str, str]:
        """Of what it is made of."""

    @property
    def is_optional(self) -> bool:
        """Whether the others are measured without it where it cannot be installed."""

    def install(self) -> None:
        """Make what it runs in, if that is not there.

        Raises:
            PeerUnavailable: that is not possible here.
        """

    def unable(self, workload: Workload) -> str | None:
        """Why it cannot be measured on a workload; None if it can."""

    def settings(self, workload: Workload) -> Sequence[Setting]:
        """Ways to use the machine, of which the fastest counts."""

    def told(self, workload: Workload, *, seed: int) -> Any:
        """What it is told of a workload, whatever its setting; can be written as JSON."""

    def command(self, workload: Workload, setting: Setting, folder: Path, *, seed: int) -> list[str]:
        """What to start, once it is installed; ``folder`` is for its files."""

    def environment(self) -> Mapping[str, str]:
        """Variables beside this process's."""

    def has_started(self, folder: Path) -> bool:
        """Whether it trains, and can be watched."""

    def progress(self, folder: Path) -> Progress:
        """From what it has written until now."""

    def profile(self, folder: Path) -> RunProfile | None:
        """Where its time has gone until now; None where it does not say."""

    def check(self, folder: Path) -> None:
        """Look at what an ended run left.

        Raises:
            ContestantFailed: it is no run that may count.
        """


class ContestantFailed(Exception):
    """A contestant did not train as it should; the text says how and has its last words."""


@dataclass(frozen=True, kw_only=True)
class Rlsrl:
    """The real ``rlsrl run`` of this environment: with ledger, metrics, durable versions and all."""

    name: str = RLSRL
    program: Path = OUR_PROGRAM
    end_signal: signal.Signals = signal.SIGINT
    is_optional: bool = False

    @property
    def versions(self) -> Mapping[str, str]:
        """Its own; the rest is this environment's, which is described with the machine."""
        return {RLSRL: version(RLSRL)}

    def install(self) -> None:
        """It is there: this is its repository."""

    def unable(self, workload: Workload) -> str | None:
        """Workloads are written for it."""
        del workload
        return None

    def settings(self, workload: Workload) -> Sequence[Setting]:
        """As the workload's experiment says."""
        del workload
        return [()]

    def told(self, workload: Workload, *, seed: int) -> Any:
        """Its experiment."""
        return workload.experiment(seed=seed)

    def command(self, workload: Workload, setting: Setting, folder: Path, *, seed: int) -> list[str]:
        """See ``Contestant``."""
        file = folder / "experiment.yaml"
        file.write_text(yaml.safe_dump(self.told(workload, seed=seed), sort_keys=False))
        return [str(self.program), "run", str(file), "--run-dir", str(folder / RUN), *setting]

    def environment(self) -> Mapping[str, str]:
        """Where its actors find the environments of this folder; its workers set their threads themselves."""
        paths = [str(HERE), os.environ.get("PYTHONPATH", "")]
        return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}

    def has_started(self, folder: Path) -> bool:
        """Once a step is trained, and its workers have told where they show their metrics."""
        return has_trained(self.progress(folder)) and self.profile(folder) is not None

    def progress(self, folder: Path) -> Progress:
        """From the learning curve: what the trainer said after a step."""
        rows = training_rows(read_rows(folder / RUN / "metrics.jsonl"))
        return Progress(
            points=[(row.wall, row.scalars["env_steps"]) for row in rows],
            return_means=[row.scalars.get("return_mean") for row in rows],
        )

    def profile(self, folder: Path) -> RunProfile | None:
        """From the workers' metrics."""
        return RunProfile.read(folder / RUN)

    def check(self, folder: Path) -> None:
        """Its ledger adds up: what it trained is what its actors produced."""
        try:
            ledger = json.loads((folder / RUN / "summary.json").read_text())["ledger"]
        except (OSError, ValueError, KeyError) as error:
            raise ContestantFailed(f"{self.name}: the run left no summary: {error!r}\n{last_words(folder)}") from error
        if not ledger.get("balanced"):
            raise ContestantFailed(f"{self.name}: the ledger does not add up: {ledger}")


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A program of this folder that shares no code with rlsrl."""

    name: str
    program: str
    ways: tuple[Setting, ...]
    """To use the machine: with environments in its own process or in others, with few threads of torch's or many."""
    waiting_ways: tuple[Setting, ...] = ()
    """More of them, where environments wait without a processor."""
    native_ways: tuple[Setting, ...] = ()
    """Those where an environment's own vectorisation is for everybody; without any, the ordinary ones."""
    extra: tuple[str, ...] = ()
    env_ids: tuple[str, ...] = ()
    """The environments that it can step; all of them if none is named."""
    python: Callable[[str], Path] = python_of
    """Gives the Python of a peer's environment, by its name."""
    end_signal: signal.Signals = signal.SIGTERM
    is_optional: bool = False
    """Whether the others are measured without it where it cannot be installed."""

    @property
    def versions(self) -> Mapping[str, str]:
        """Its pins."""
        pins = (line.partition("==") for line in requirements_of(self.name).read_text().splitlines() if "==" in line)
        return {name: pin for name, _, pin in pins if name in (self.name, *TELLING_PINS)}

    def install(self) -> None:
        """See ``Contestant``."""
        self.python(self.name)

    def unable(self, workload: Workload) -> str | None:
        """Environments are what it may lack."""
        if not self.env_ids or workload.env_id in self.env_ids:
            return None
        return f"{self.name} is measured on {', '.join(self.env_ids)} alone: its Gymnasium has no {workload.env_id}"

    def settings(self, workload: Workload) -> Sequence[Setting]:
        """See ``Contestant``."""
        if workload.vectorization == "native" and self.native_ways:
            return self.native_ways
        return (*self.ways, *self.waiting_ways) if workload.step_seconds else self.ways

    def told(self, workload: Workload, *, seed: int) -> Any:
        """Its arguments."""
        return [*workload.peer_arguments(seed=seed), *self.extra]

    def command(self, workload: Workload, setting: Setting, folder: Path, *, seed: int) -> list[str]:
        """See ``Contestant``."""
        del folder
        words = [*self.told(workload, seed=seed), *setting]
        return [str(self.python(self.name)), str(HERE / self.program), *words]

    def environment(self) -> Mapping[str, str]:
        """Torch's threads are its setting's affair; numpy has one. Nothing of ours is on its path."""
        return {"OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": ""}

    def has_started(self, folder: Path) -> bool:
        """Once an iteration is trained."""
        return has_trained(self.progress(folder))

    def progress(self, folder: Path) -> Progress:
        """From what it prints after each iteration."""
        lines = [told for line in _whole_lines(folder / OUTPUT) if (told := _told(line))]
        return Progress(
            points=[(line["wall"], line["env_steps"]) for line in lines],
            return_means=[line["return_mean"] for line in lines],
        )

    def profile(self, folder: Path) -> RunProfile | None:
        """It keeps none."""
        del folder
        return None

    def check(self, folder: Path) -> None:
        """Whether it trained is all there is to see, and its progress shows that."""
        del folder


def _ways(*vectors: str) -> tuple[Setting, ...]:
    return tuple(("--vector", vector, "--threads", str(threads)) for vector in vectors for threads in UP_TO_CORES)


def _workers(*numbers: int) -> tuple[Setting, ...]:
    return tuple(("--workers", str(number)) for number in numbers)


PEERS: tuple[Peer, ...] = (
    Peer(name=STABLE_BASELINES3, program="stable_baselines3_ppo.py", ways=_ways("dummy", "subproc")),
    Peer(
        name=SINGLE_FILE,
        program="reference_ppo.py",
        ways=_ways("sync", "async"),
        native_ways=_ways("native"),
        extra=("--no-clip-value-loss",),
    ),
    Peer(
        name=SAMPLE_FACTORY,
        program="sample_factory_appo.py",
        ways=(("--serial",), *_workers(*UP_TO_CORES)),
        waiting_ways=_workers(8, 16),  # one waits for its environments one after the other
        env_ids=("CartPole-v1", "ALE/Pong-v5"),
        is_optional=True,
    ),
)


def has_trained(progress: Progress) -> bool:
    """Return whether a contestant has finished a training step."""
    return any(steps > 0 for _, steps in progress.points)


def last_words(folder: Path, *, characters: int = 2000) -> str:
    """The end of what a contestant printed."""
    try:
        return (folder / OUTPUT).read_text(errors="replace")[-characters:]
    except FileNotFoundError:
        return ""


def _whole_lines(path: Path) -> list[str]:
    """Of a file that somebody writes; none before it is there."""
    try:
        return path.read_text(errors="replace").rpartition("\n")[0].splitlines()
    except FileNotFoundError:
        return []


def _told(line: str) -> dict[str, Any] | None:
    """What a peer told of its progress in a line, if it did. Its other processes write into the same file, behind such
    a line and into it."""
    try:
        value, _ = json.JSONDecoder().raw_decode(line)
    except json.JSONDecodeError:
        return None
    return value if isinstance(value, dict) and value.keys() >= {"wall", "env_steps", "return_mean"} else None
