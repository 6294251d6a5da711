"""The contestants. Each starts as a user starts it, in its own environment, and ends as a user ends it."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import yaml
from environments import WITHOUT_VELOCITIES
from figures import JAX, RLSRL, SAMPLE_FACTORY, SINGLE_FILE, SINGLE_FILE_COMPILED, STABLE_BASELINES3, Point
from greedy import PlayedVersions
from peer_environments import python_of, requirements_of
from profiles import RunProfile
from workloads import CORES, Workload

from rlsrl.local.metrics_log import read_rows, training_rows

HERE = Path(__file__).parent
OUTPUT = "out"
"""File for a contestant's output."""
RUN = "run"
"""rlsrl's run folder."""
OUR_PROGRAM = Path(sys.executable).with_name("rlsrl")
TELLING_PINS = ("torch", "numpy", "gymnasium", "ale-py", "mujoco")
"""Pins that a peer's results name beside its own version."""
UP_TO_CORES = sorted({1, 2, CORES})
"""Numbers of threads or processes to try."""
Setting = tuple[str, ...]
"""Arguments that choose how a program uses the machine."""


Evaluations = Sequence[tuple[float, float]]
"""(Env steps, mean return), the oldest first."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """A contestant's own reports of its progress."""

    points: Sequence[Point]
    return_means: Sequence[float | None]
    """For each point; None before the first end of an episode."""
    evaluations: Evaluations = ()
    """Of episodes without exploration, if the workload has such evaluations."""


class Contestant(Protocol):
    """A program that trains until a signal or the workload's goal."""

    @property
    def name(self) -> str: ...
    @property
    def end_signal(self) -> signal.Signals:
        """The signal with which users end it."""

    @property
    def versions(self) -> Mapping[str, str]:
        """Versions of its packages."""

    @property
    def is_optional(self) -> bool:
        """Whether the others are measured without it if it cannot be installed."""

    def install(self) -> None:
        """Make its environment if it is missing.

        Raises:
            PeerUnavailable: the environment cannot be made on this machine.
        """

    def unable(self, workload: Workload) -> str | None:
        """Return why it cannot be measured on a workload, or None."""

    def settings(self, workload: Workload) -> Sequence[Setting]:
        """Return the ways to use the machine to try. The fastest counts."""

    def inputs(self, workload: Workload, *, seed: int) -> Any:
        """Return its inputs for a workload, without its setting, as a JSON value."""

    def command(self, workload: Workload, setting: Setting, folder: Path, *, seed: int) -> list[str]:
        """Return the command to start. ``folder`` is for its files."""

    def environment(self) -> Mapping[str, str]:
        """Return environment variables to add to this process's."""

    def has_started(self, folder: Path) -> bool:
        """Return whether it trains and can be measured."""

    def progress(self, folder: Path) -> Progress:
        """Return its progress until now."""

    def evaluations(self, workload: Workload, folder: Path, *, seed: int) -> Callable[[], Evaluations]:
        """Return a function that returns the evaluations until now of a run with that seed."""

    def profile(self, folder: Path) -> RunProfile | None:
        """Return how its time was spent until now, or None if it does not report that."""

    def check(self, folder: Path) -> None:
        """Check the files of an ended run.

        Raises:
            ContestantFailed: the run is not valid.
        """


class ContestantFailed(Exception):
    """A contestant did not train correctly; the text says how, with the end of its output."""


@dataclass(frozen=True, kw_only=True)
class Rlsrl:
    """``rlsrl run`` of this environment, with everything switched on: ledger, metrics, durable versions."""

    name: str = RLSRL
    program: Path = OUR_PROGRAM
    end_signal: signal.Signals = signal.SIGINT
    is_optional: bool = False

    @property
    def versions(self) -> Mapping[str, str]:
        """rlsrl's version. The machine's description has the versions of other packages."""
        return {RLSRL: version(RLSRL)}

    def install(self) -> None:
        """Do nothing: this repository has it."""

    def unable(self, workload: Workload) -> str | None:
        """Return None: it runs all workloads."""
        del workload
        return None

    def settings(self, workload: Workload) -> Sequence[Setting]:
        """Return one empty setting: the workload's experiment decides."""
        del workload
        return [()]

    def inputs(self, workload: Workload, *, seed: int) -> Any:
        """Return its experiment."""
        return workload.experiment(seed=seed)

    def command(self, workload: Workload, setting: Setting, folder: Path, *, seed: int) -> list[str]:
        """Return the ``rlsrl run`` command, with the experiment in ``folder``."""
        file = folder / "experiment.yaml"
        file.write_text(yaml.safe_dump(self.inputs(workload, seed=seed), sort_keys=False))
        return [str(self.program), "run", str(file), "--run-dir", str(folder / RUN), *setting]

    def environment(self) -> Mapping[str, str]:
        """Return the import path of this folder's environments. Workers set their threads themselves."""
        paths = [str(HERE), os.environ.get("PYTHONPATH", "")]
        return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}

    def has_started(self, folder: Path) -> bool:
        """Return whether a step is trained and the workers have published their metrics addresses."""
        return has_trained(self.progress(folder)) and self.profile(folder) is not None

    def progress(self, folder: Path) -> Progress:
        """Return the points of the learning curve, one per training step."""
        rows = training_rows(read_rows(folder / RUN / "metrics.jsonl"))
        return Progress(
            points=[(row.wall, row.scalars["env_steps"]) for row in rows],
            return_means=[row.scalars.get("return_mean") for row in rows],
        )

    def evaluations(self, workload: Workload, folder: Path, *, seed: int) -> Callable[[], Evaluations]:
        """Return a function that plays the stored versions if the workload has evaluations."""
        every, episodes = workload.evaluations
        if not every:
            return lambda: ()
        return PlayedVersions(folder / RUN, workload.env_id, episodes=episodes, seed=seed)

    def profile(self, folder: Path) -> RunProfile | None:
        """Return the times from the workers' metrics."""
        return RunProfile.read(folder / RUN)

    def check(self, folder: Path) -> None:
        """Check that the ledger balances.

        Raises:
            ContestantFailed: it does not, or the run left no summary.
        """
        try:
            ledger = json.loads((folder / RUN / "summary.json").read_text())["ledger"]
        except (OSError, ValueError, KeyError) as error:
            raise ContestantFailed(
                f"{self.name}: the run left no summary: {error!r}\n{end_of_output(folder)}"
            ) from error
        if not ledger.get("balanced"):
            raise ContestantFailed(f"{self.name}: the ledger does not add up: {ledger}")


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A program of this folder that shares no code with rlsrl."""

    name: str
    programs: Mapping[str, Setting]
    """By ``Workload.program``: its file, and arguments that every run has."""
    ways: tuple[Setting, ...]
    """Ways to use the machine: environments in its own process or in others, few or many torch threads."""
    waiting_ways: tuple[Setting, ...] = ()
    """More ways, for environments that wait without a processor."""
    native_ways: tuple[Setting, ...] = ()
    """Ways for native vectorisation. If empty, ``ways`` are used."""
    pins: str = ""
    """The name of its pins, if another peer has the same."""
    env_ids: tuple[str, ...] = ()
    """Environments that it supports. Empty: all."""
    workloads: tuple[str, ...] = ()
    """Names of those that it takes part in. Empty: all that it can."""
    python: Callable[[str], Path] = python_of
    """Returns the Python of a peer's environment, by the peer's name."""
    end_signal: signal.Signals = signal.SIGTERM
    is_optional: bool = False
    """Whether the others are measured without it if it cannot be installed."""

    @property
    def versions(self) -> Mapping[str, str]:
        """Versions from its pins."""
        lines = requirements_of(self.pins or self.name).read_text().splitlines()
        pins = (line.partition("==") for line in lines if "==" in line)
        return {name: pin for name, _, pin in pins if name in (self.name, *TELLING_PINS)}

    def install(self) -> None:
        """Make the peer's environment if it is missing."""
        self.python(self.pins or self.name)

    def unable(self, workload: Workload) -> str | None:
        """Return why it has no such program or environment, or None."""
        if workload.program not in self.programs:
            return f"{self.name} is not measured with {workload.program}"
        if self.workloads and workload.name not in self.workloads:
            return f"{self.name} is measured only in {', '.join(self.workloads)}"
        if not self.env_ids or workload.env_id in self.env_ids:
            return None
        return f"{self.name} is measured only on {', '.join(self.env_ids)}: its Gymnasium has no {workload.env_id}"

    def settings(self, workload: Workload) -> Sequence[Setting]:
        """Return the ways that fit the workload."""
        if not workload.is_gathered_by_workers:
            return [("--threads", str(threads)) for threads in UP_TO_CORES]
        if workload.vectorization == "native" and self.native_ways:
            return self.native_ways
        return (*self.ways, *self.waiting_ways) if workload.step_seconds else self.ways

    def inputs(self, workload: Workload, *, seed: int) -> Any:
        """Return its arguments."""
        return [*workload.peer_arguments(seed=seed), *self.programs[workload.program][1:]]

    def command(self, workload: Workload, setting: Setting, folder: Path, *, seed: int) -> list[str]:
        """Return the command of the peer's program."""
        del folder
        words = [*self.inputs(workload, seed=seed), *setting]
        program = self.programs[workload.program][0]
        return [str(self.python(self.pins or self.name)), str(HERE / program), *words]

    def environment(self) -> Mapping[str, str]:
        """Return one numpy thread and an empty import path. The setting chooses torch's threads."""
        return {"OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": ""}

    def has_started(self, folder: Path) -> bool:
        """Return whether an iteration is trained."""
        return has_trained(self.progress(folder))

    def progress(self, folder: Path) -> Progress:
        """Return the points that it prints after each iteration."""
        lines = [report for line in _whole_lines(folder / OUTPUT) if (report := _report(line))]
        return Progress(
            points=[(line["wall"], line["env_steps"]) for line in lines],
            return_means=[None if math.isnan(line["return_mean"]) else line["return_mean"] for line in lines],
            evaluations=[(line["env_steps"], line["greedy_return"]) for line in lines if "greedy_return" in line],
        )

    def evaluations(self, workload: Workload, folder: Path, *, seed: int) -> Callable[[], Evaluations]:
        """Return a function that returns what it has printed of its evaluations."""
        del workload, seed
        return lambda: self.progress(folder).evaluations

    def profile(self, folder: Path) -> RunProfile | None:
        """Return None: it reports no times."""
        del folder
        return None

    def check(self, folder: Path) -> None:
        """Do nothing: its progress shows whether it trained."""
        del folder


def _ways(*vectors: str) -> tuple[Setting, ...]:
    return tuple(("--vector", vector, "--threads", str(threads)) for vector in vectors for threads in UP_TO_CORES)


def _workers(*numbers: int) -> tuple[Setting, ...]:
    return tuple(("--workers", str(number)) for number in numbers)


PEERS: tuple[Peer, ...] = (
    Peer(
        name=STABLE_BASELINES3,
        programs={
            "ppo": ("stable_baselines3_ppo.py",),
            "ppo, lstm": ("stable_baselines3_recurrent_ppo.py",),
            "dqn": ("stable_baselines3_replay.py",),
            "sac": ("stable_baselines3_replay.py",),
            "td3": ("stable_baselines3_replay.py",),
        },
        ways=_ways("dummy", "subproc"),
    ),
    Peer(
        name=SINGLE_FILE,
        programs={
            "ppo": ("reference_ppo.py", "--no-clip-value-loss"),
            **dict.fromkeys(("ppo, lstm", "ppo, gru"), ("reference_recurrent_ppo.py", "--no-clip-value-loss")),
            "dqn": ("reference_dqn.py",),
            "sac": ("reference_twin_critics.py",),
            "td3": ("reference_twin_critics.py",),
        },
        ways=_ways("sync", "async"),
        native_ways=_ways("native"),
    ),
    Peer(
        name=SINGLE_FILE_COMPILED,
        programs={"dqn": ("reference_dqn.py", "--compile"), "sac": ("reference_twin_critics.py", "--compile")},
        pins=SINGLE_FILE,
        ways=(),
    ),
    Peer(
        name=SAMPLE_FACTORY,
        programs=dict.fromkeys(("ppo", "ppo, lstm", "ppo, gru"), ("sample_factory_appo.py",)),
        ways=(("--serial",), *_workers(*UP_TO_CORES)),
        waiting_ways=_workers(8, 16),  # a worker waits for its environments one after the other
        env_ids=("CartPole-v1", "ALE/Pong-v5", WITHOUT_VELOCITIES),
        is_optional=True,
    ),
    Peer(
        name=JAX,
        programs={"ppo": ("jax_ppo.py",)},
        ways=tuple(("--threads", str(threads)) for threads in UP_TO_CORES),
        workloads=("W1", "W1N", "B1", "B1N"),
        is_optional=True,
    ),
)


def has_trained(progress: Progress) -> bool:
    """Return whether a contestant has finished a training step."""
    return any(steps > 0 for _, steps in progress.points)


def end_of_output(folder: Path, *, characters: int = 2000) -> str:
    """Return the end of a contestant's output."""
    try:
        return (folder / OUTPUT).read_text(errors="replace")[-characters:]
    except FileNotFoundError:
        return ""


def _whole_lines(path: Path) -> list[str]:
    """Return the complete lines of a file that is being written; none if it is missing."""
    try:
        return path.read_text(errors="replace").rpartition("\n")[0].splitlines()
    except FileNotFoundError:
        return []


def _report(line: str) -> dict[str, Any] | None:
    """Return a peer's progress report from a line of its output, or None.

    The peer's other processes write into the same file, also at the end of such a line.
    """
    try:
        value, _ = json.JSONDecoder().raw_decode(line)
    except json.JSONDecodeError:
        return None
    return value if isinstance(value, dict) and value.keys() >= {"wall", "env_steps", "return_mean"} else None
