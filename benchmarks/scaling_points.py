"""What is measured for the model of ``scaling.py``: real runs of ``rlsrl run`` on a grid, and how quiet it was."""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from figures import QUIET_SHARE
from machine import Usage, shares

from rlsrl.local.metrics_log import read_rows, training_rows

STEP_SECONDS = {"fast": 0.0, "slow": 0.0005}
"""How much longer than its computation a step of the environment takes, by its name."""
LANES, NUM_STEPS, MINIBATCH_SIZE = 16, 64, 256
WARM_SECONDS = 2.0
"""Of training, before a window begins."""
FAILED_SECONDS = 120.0
"""A run that takes so much longer than it should has failed."""
CORES = os.cpu_count() or 1
QUIET_CORES = QUIET_SHARE * CORES
"""What other programs may use beside a run that is to count."""
FOLDER = Path(__file__).parent
RUN = (sys.executable, "-c", "from rlsrl.cli import main; main()", "run")


def environment_of(name: str) -> dict[str, Any]:
    """CartPole as it is, or as one whose step sleeps: as an experiment says it."""
    return {"factory": "environments:make", "kwargs": {"env_id": "CartPole-v1", "step_seconds": STEP_SECONDS[name]}}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One place of the grid."""

    environment: str
    ranks: int
    policy_workers: int
    actors: int

    def __str__(self) -> str:
        acting = f"{self.policy_workers} policy" if self.policy_workers else "inline"
        return f"{self.environment}, {self.actors} actors, {acting}, {self.ranks} ranks"

    def document(self, *, wall_seconds: float) -> dict[str, Any]:
        """The experiment. It hardly learns: a policy that stays random ends as many episodes at the end as before."""
        spec: dict[str, Any] = {
            "seed": 1,
            "environment": environment_of(self.environment),
            "algorithm": {"ppo": {"learningRate": 1e-9, "epochs": 1, "minibatchSize": MINIBATCH_SIZE}},
            "actors": {"replicas": self.actors, "environmentsPerActor": LANES, "rolloutLength": NUM_STEPS},
            "trainers": {"replicas": self.ranks},
            "parameters": {"everySeconds": 3600},
            "stop": {"wallSeconds": wall_seconds},
        }
        if self.policy_workers:
            spec["actors"]["ringSize"] = 2
            spec["policyWorkers"] = {"replicas": self.policy_workers}
        return {
            "apiVersion": "rlsrl.dev/v1alpha1",
            "kind": "RLExperiment",
            "metadata": {"name": "scaling"},
            "spec": spec,
        }


GRID = tuple(
    Setting(environment=environment, ranks=ranks, policy_workers=policy_workers, actors=actors)
    for environment, ranks, policy_workers, actors in itertools.product(STEP_SECONDS, (1, 2), (0, 1, 2), (1, 2, 4))
)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One run of a setting."""

    fps: float
    """Transitions trained a second."""
    others: float
    """Cores that other programs used meanwhile, the mean."""

    @property
    def is_quiet(self) -> bool:
        """Whether the run had the machine for itself."""
        return self.others <= QUIET_CORES


@dataclass(frozen=True, kw_only=True)
class Point:
    """A setting, and what was measured of it."""

    setting: Setting
    samples: tuple[Sample, ...]

    @property
    def counted(self) -> tuple[Sample, ...]:
        """The quiet runs; all of them if none was quiet."""
        return tuple(sample for sample in self.samples if sample.is_quiet) or self.samples

    @property
    def fps(self) -> float:
        """The median."""
        return statistics.median(sample.fps for sample in self.counted)

    @property
    def spread(self) -> float:
        """From the least to the most, as a share of the median."""
        rates = [sample.fps for sample in self.counted]
        return (max(rates) - min(rates)) / self.fps

    @property
    def others(self) -> float:
        """Cores that other programs used beside the run that is counted, the median."""
        return statistics.median(sample.others for sample in self.counted)

    @property
    def is_quiet(self) -> bool:
        """Whether the runs that are counted were quiet."""
        return all(sample.is_quiet for sample in self.counted)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self.setting), "samples": [asdict(sample) for sample in self.samples]}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Point:
        samples = tuple(Sample(**sample) for sample in value["samples"])
        return cls(
            setting=Setting(**{name: entry for name, entry in value.items() if name != "samples"}), samples=samples
        )


def measure(settings: Sequence[Setting], *, repeats: int, window_seconds: float) -> list[Point]:
    """Run every setting once, then every one again: a busy moment of the machine hits all alike.

    Those with fewer quiet runs than ``repeats`` are run up to twice as often.
    """
    samples: dict[Setting, list[Sample]] = {setting: [] for setting in settings}
    for turn in range(2 * repeats):
        for setting, found in samples.items():
            if sum(sample.is_quiet for sample in found) >= repeats:
                continue
            sample = run(setting, window_seconds=window_seconds)
            found.append(sample)
            print(
                f"turn {turn + 1}, {setting}: {sample.fps:,.0f} a second, others {sample.others:.2f} cores", flush=True
            )
    return [Point(setting=setting, samples=tuple(found)) for setting, found in samples.items()]


def run(setting: Setting, *, window_seconds: float) -> Sample:
    """One run.

    Raises:
        RuntimeError: it failed; the text has its last words.
    """
    wall_seconds = WARM_SECONDS + window_seconds
    with tempfile.TemporaryDirectory() as folder:
        file, run_folder = Path(folder) / "experiment.yaml", Path(folder) / "run"
        file.write_text(yaml.safe_dump(setting.document(wall_seconds=wall_seconds)))
        path = os.pathsep.join(filter(None, (str(FOLDER), os.environ.get("PYTHONPATH"))))
        before = Usage.now()
        done = subprocess.run(
            [*RUN, str(file), "--run-dir", str(run_folder)],
            env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=wall_seconds + FAILED_SECONDS, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{setting}: exit code {done.returncode}\n{done.stdout[-2000:]}")
        _, others = shares(before, Usage.now())
        return Sample(fps=_rate(run_folder / "metrics.jsonl"), others=others * CORES)


def _rate(metrics: Path) -> float:
    """Transitions trained a second, from the run's own rows: whole training steps, after the warm-up."""
    rows = [row.scalars for row in training_rows(read_rows(metrics))]
    settled = [row for row in rows if row["train_seconds"] >= WARM_SECONDS]
    first, last = settled[0], settled[-1]
    return (last["env_steps"] - first["env_steps"]) / (last["train_seconds"] - first["train_seconds"])
