"""The points that ``scaling.py`` compares the model with: real runs of ``rlsrl run``, and how quiet the machine was."""

from __future__ import annotations

import itertools
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from environments import ATARI_ARGUMENTS
from figures import QUIET_SHARE
from machine import Usage, shares
from turns import ENDED_WELL, end
from workloads import ENDLESS_STEPS

from rlsrl.local.metrics_log import read_rows, training_rows

STEP_SECONDS = {"fast": 0.0, "slow": 0.0005}
"""Seconds that a step of CartPole sleeps, by the environment's name."""
IMAGES = "images"
"""The environment whose observations are stacks of four frames of Pong."""
PENDULUM = "pendulum"
"""Pendulum-v1, whose actions are vectors."""
ENVIRONMENTS = (*STEP_SECONDS, IMAGES, PENDULUM)
LANES, NUM_STEPS, MINIBATCH_SIZE = 16, 64, 256
WARM_SECONDS = 2.0
"""Seconds of training before a window begins, from the first step, which waits for the compiler."""
FAILED_SECONDS = 240.0
"""A run that takes so much longer than its window has failed."""
POLL_SECONDS = 0.5
CORES = os.cpu_count() or 1
QUIET_CORES = QUIET_SHARE * CORES
"""Cores that other programs may use beside a run that counts."""
FOLDER = Path(__file__).parent
RUN = (sys.executable, "-c", "from rlsrl.cli import main; main()", "run")


def environment_of(name: str) -> dict[str, Any]:
    """Return the environment's section of the spec."""
    if name == IMAGES:
        return {"id": "ALE/Pong-v5", "kwargs": dict(ATARI_ARGUMENTS), "atari": {}, "frameStack": 4}
    if name == PENDULUM:
        return {"id": "Pendulum-v1"}
    return {"factory": "environments:make", "kwargs": {"env_id": "CartPole-v1", "step_seconds": STEP_SECONDS[name]}}


Feature = Literal[
    "", "compiled", "threads", "evaluator", "lent core", "two epochs", "four epochs",
    "dqn", "dqn by priority", "dqn eager", "dqn images", "dqn large", "sac", "sac eager", "td3", "td3 wide",
]  # fmt: skip
"""What a setting has beside the grid: compiled training steps, environment threads, an evaluator that plays all the
time, images whose compiled training uses an idle core, more epochs, or an algorithm that draws from a store."""
EPOCHS: dict[Feature, int] = {"two epochs": 2, "four epochs": 4}


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """An algorithm that draws from a store. Its dense networks have two hidden layers."""

    algorithm: Literal["dqn", "sac", "td3"]
    units: int | None
    """Of each hidden layer; None: the network for images."""
    minibatch_size: int
    updates_per_env_step: float
    by_priority: bool = False
    compiled: bool = True

    def algorithm_block(self) -> dict[str, Any]:
        replay: dict[str, Any] = {"capacity": 10_000, "start": 1_000}
        if self.by_priority:
            replay["priorities"] = {}
        block: dict[str, Any] = {"learningRate": 1e-9, "minibatchSize": self.minibatch_size, "replay": replay}
        if self.algorithm == "dqn":
            return {"dqn": {**block, "epsilon": 1}}
        return {self.algorithm: {**block, "criticLearningRate": 1e-9, "critic": {"hiddenSizes": [self.units] * 2}}}

    def network(self) -> dict[str, Any]:
        if self.units is None:
            return {"cnn": {"precision": "bfloat16"}}
        return {"mlp": {"hiddenSizes": [self.units] * 2, "activation": "relu"}}


DRAWN: dict[Feature, Drawn] = {
    "dqn": Drawn(algorithm="dqn", units=64, minibatch_size=64, updates_per_env_step=0.25),
    "dqn by priority": Drawn(
        algorithm="dqn", units=128, minibatch_size=128, updates_per_env_step=0.25, by_priority=True
    ),
    "dqn eager": Drawn(algorithm="dqn", units=256, minibatch_size=32, updates_per_env_step=0.25, compiled=False),
    "dqn images": Drawn(algorithm="dqn", units=None, minibatch_size=64, updates_per_env_step=0.0625),
    "dqn large": Drawn(algorithm="dqn", units=256, minibatch_size=256, updates_per_env_step=0.25),
    "sac": Drawn(algorithm="sac", units=64, minibatch_size=256, updates_per_env_step=0.5),
    "sac eager": Drawn(algorithm="sac", units=256, minibatch_size=64, updates_per_env_step=0.5, compiled=False),
    "td3": Drawn(algorithm="td3", units=256, minibatch_size=128, updates_per_env_step=0.5),
    "td3 wide": Drawn(algorithm="td3", units=512, minibatch_size=256, updates_per_env_step=0.125),
}
"""Settings with replay. None has the networks, the minibatches and the environment of a benchmark."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting of the grid, or one that tries a feature."""

    environment: str
    ranks: int = 1
    policy_workers: int = 0
    actors: int
    feature: Feature = ""

    def __str__(self) -> str:
        acting = f"{self.policy_workers} policy" if self.policy_workers else "inline"
        feature = f", {self.feature}" if self.feature else ""
        return f"{self.environment}, {self.actors} actors, {acting}, {self.ranks} ranks{feature}"

    def document(self) -> dict[str, Any]:
        """Return the experiment.

        It hardly learns, so that the policy stays random and episodes end as often at the end as at the beginning.
        """
        epochs, drawn = EPOCHS.get(self.feature, 1), DRAWN.get(self.feature)
        compiled = self.feature in ("compiled", "lent core") if drawn is None else drawn.compiled
        spec: dict[str, Any] = {
            "seed": 1,
            "environment": environment_of(self.environment),
            "algorithm": {"ppo": {"learningRate": 1e-9, "epochs": epochs, "minibatchSize": MINIBATCH_SIZE}},
            "actors": {"replicas": self.actors, "environmentsPerActor": LANES, "rolloutLength": NUM_STEPS},
            "trainers": {"replicas": self.ranks, "compile": "upfront" if compiled else "off"},
            "parameters": {"everySeconds": 3600},
            "stop": {"envSteps": ENDLESS_STEPS},
        }
        if self.policy_workers:
            spec["actors"]["ringSize"] = 2
            spec["policyWorkers"] = {"replicas": self.policy_workers}
        if self.feature == "threads":
            spec["actors"]["vectorization"] = "threads"
        if self.feature == "evaluator":
            # An evaluation takes longer than the window; it begins with the first version.
            spec["evaluators"] = {"replicas": 1, "episodesPerEnvironment": 10_000, "maxSteps": ENDLESS_STEPS}
            spec["parameters"] = {"everySeconds": 1}
        if self.environment == IMAGES:
            spec["policy"] = {"network": {"cnn": {"precision": "bfloat16"}}}
        if drawn is not None:
            spec["algorithm"], spec["policy"] = drawn.algorithm_block(), {"network": drawn.network()}
            spec["pacing"] = {"trainStepsPerEnvStep": drawn.updates_per_env_step}
        return {
            "apiVersion": "rlsrl.dev/v1alpha1",
            "kind": "RLExperiment",
            "metadata": {"name": "scaling"},
            "spec": spec,
        }


def _environment_for(drawn: Drawn) -> str:
    if drawn.algorithm != "dqn":
        return PENDULUM
    return "fast" if drawn.units is not None else IMAGES


GRID = tuple(
    Setting(environment=environment, ranks=ranks, policy_workers=policy_workers, actors=actors)
    for environment, ranks, policy_workers, actors in itertools.product(STEP_SECONDS, (1, 2), (0, 1, 2), (1, 2, 4))
)
FEATURES = (
    *(Setting(environment="fast", actors=actors, feature="compiled") for actors in (1, 2, 4)),
    *(Setting(environment="slow", actors=actors, feature="threads") for actors in (1, 2)),
    *(Setting(environment="fast", actors=actors, feature="evaluator") for actors in (1, 2, 4)),
    *(Setting(environment=IMAGES, actors=actors, feature="lent core") for actors in (1, 2)),
    *(Setting(environment=IMAGES, actors=actors) for actors in (1, 2, 4)),
    *(Setting(environment="fast", actors=actors, feature=epochs) for epochs in EPOCHS for actors in (1, 2)),
    *(Setting(environment=_environment_for(drawn), actors=1, feature=feature) for feature, drawn in DRAWN.items()),
    Setting(environment="fast", actors=2, feature="dqn"),
    Setting(environment=PENDULUM, actors=2, feature="sac"),
)
"""Settings beside the grid. The seven before those with replay tell apart what the grid mixes: the costs of acting and
of training."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One run of a setting."""

    fps: float
    """Transitions trained a second."""
    others: float
    """Cores that other programs used during the run, the mean."""

    @property
    def is_quiet(self) -> bool:
        """Whether the run had the machine for itself."""
        return self.others <= QUIET_CORES


@dataclass(frozen=True, kw_only=True)
class Point:
    """A setting and its runs."""

    setting: Setting
    samples: tuple[Sample, ...]

    @property
    def counted(self) -> tuple[Sample, ...]:
        """The quiet runs, or all of them if none was quiet."""
        return tuple(sample for sample in self.samples if sample.is_quiet) or self.samples

    @property
    def fps(self) -> float:
        """The median rate of the counted runs."""
        return statistics.median(sample.fps for sample in self.counted)

    @property
    def spread(self) -> float:
        """The range of the counted rates, as a share of the median."""
        rates = [sample.fps for sample in self.counted]
        return (max(rates) - min(rates)) / self.fps

    @property
    def others(self) -> float:
        """Cores that other programs used during the counted runs, the median."""
        return statistics.median(sample.others for sample in self.counted)

    @property
    def is_quiet(self) -> bool:
        """Whether the counted runs were quiet."""
        return all(sample.is_quiet for sample in self.counted)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self.setting), "samples": [asdict(sample) for sample in self.samples]}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Point:
        samples = tuple(Sample(**sample) for sample in value["samples"])
        return cls(
            setting=Setting(**{name: entry for name, entry in value.items() if name != "samples"}), samples=samples
        )


def measure(known: Mapping[Setting, Sequence[Sample]], *, repeats: int, window_seconds: float) -> list[Point]:
    """Run settings until each has ``repeats`` quiet runs, with those that are ``known``; at most twice as often.

    Each setting is run once before any is run again, so that a busy moment of the machine affects all alike.
    """
    samples = {setting: list(found) for setting, found in known.items()}
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
    """Run a setting until its window is over, and end it as a user does.

    Raises:
        RuntimeError: the run failed; the text has the end of its output.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file, metrics, output = folder / "experiment.yaml", folder / "run" / "metrics.jsonl", folder / "out"
        file.write_text(yaml.safe_dump(setting.document()))
        path = os.pathsep.join(filter(None, (str(FOLDER), os.environ.get("PYTHONPATH"))))
        before = Usage.now()
        with output.open("wb") as stream:
            process = subprocess.Popen(
                [*RUN, str(file), "--run-dir", str(folder / "run")],
                env={**os.environ, "PYTHONPATH": path}, stdin=subprocess.DEVNULL, stdout=stream,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        try:
            deadline = time.monotonic() + window_seconds + FAILED_SECONDS
            while (rate := _rate(metrics, window_seconds)) is None:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{setting}: no rate\n{output.read_text(errors='replace')[-2000:]}")
                time.sleep(POLL_SECONDS)
            _, others = shares(before, Usage.now())
        finally:
            end(process, signal.SIGINT)
        if process.returncode not in ENDED_WELL:
            text = output.read_text(errors="replace")[-2000:]
            raise RuntimeError(f"{setting}: exit code {process.returncode}\n{text}")
        return Sample(fps=rate, others=others * CORES)


def _rate(metrics: Path, window_seconds: float) -> float | None:
    """Return transitions trained a second over whole training steps, or None before the window is over."""
    rows = [row.scalars for row in training_rows(read_rows(metrics))]
    settled = [row for row in rows if row["train_seconds"] >= rows[0]["train_seconds"] + WARM_SECONDS]
    if not settled or (seconds := settled[-1]["train_seconds"] - settled[0]["train_seconds"]) < window_seconds:
        return None
    return (settled[-1]["env_steps"] - settled[0]["env_steps"]) / seconds
