"""Do recurrent policies solve tasks that need memory, and does a network without memory of equal size not?

    python benchmarks/memory_tasks.py                    # three seeds of each variant, one to three minutes each run
    python benchmarks/memory_tasks.py "delayed cue"      # one of the tasks

Each run is an example of ``examples/`` with changes, to a fixed number of env steps. An evaluator tags the best
version. The figure of a run is that version's mean return over 200 episodes with other seeds, without exploration.

Finished runs are kept in ``docs/benchmarks/memory-tasks.json``: an interrupted comparison continues. The exit status is
0 if every run of a variant with memory reaches its goal and none without memory exceeds its limit, else 1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import machine
import yaml
from contestants import OUR_PROGRAM
from machine import REPOSITORY
from results import FOLDER, kept, log, write

EXAMPLES = REPOSITORY / "examples"
EPISODES, FIRST_SEED = 200, 1_000_000
RUN_SECONDS = 1800.0
KEPT = "memory-tasks"
EVALUATORS = "evaluators={environments: 10, episodesPerEnvironment: 5}"
LSTM = "policy.network.recurrent.kind=lstm"
WITHOUT_MEMORY = "policy.network={mlp: {hiddenSizes: [112, 112]}}"
"""As many parameters as a GRU of 64 units behind a hidden layer of 64."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """An algorithm with a network."""

    example: str
    changes: tuple[str, ...] = ()
    """Of the example's spec, besides those of the task."""
    env_steps: int | None = None
    """Other ones than the task's."""
    least: float | None = None
    """The mean return that every run has to reach."""
    most: float | None = None
    """The mean return that no run may exceed."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """An environment that needs memory."""

    env_steps: int
    every_steps: int
    """Training steps between stored versions."""
    variants: Mapping[str, Variant]


CUE_VTRACE = "{learningRate: 0.003, discount: 0.95, entropyCoefficient: 0.01, minibatchSize: 512, sequenceLength: 32}"
CARTPOLE_VTRACE = (
    "{learningRate: 0.002, entropyCoefficient: 0.01, normalizeRewards: true, minibatchSize: 256, sequenceLength: 32}"
)
CUE, CUE_DQN = "delayed-cue.yaml", "delayed-cue-dqn.yaml"
CARTPOLE, CARTPOLE_DQN = "cartpole-without-velocities.yaml", "cartpole-without-velocities-dqn.yaml"
TASKS: Mapping[str, Task] = {
    "delayed cue": Task(
        env_steps=150_000,
        every_steps=10,
        variants={
            "PPO, GRU": Variant(example=CUE, least=0.95),
            "PPO, LSTM": Variant(example=CUE, changes=(LSTM,), least=0.95),
            "V-trace, GRU": Variant(
                example=CUE,
                changes=(f"algorithm={{vtrace: {CUE_VTRACE}}}", "actors.rolloutLength=32"),
                env_steps=500_000,
                least=0.95,
            ),
            "R2D2, GRU": Variant(example=CUE_DQN, least=0.95),
            "PPO, no memory": Variant(example=CUE, changes=(WITHOUT_MEMORY,), most=0.6),
        },
    ),
    "cartpole without velocities": Task(
        env_steps=100_000,
        every_steps=20,
        variants={
            "PPO, GRU": Variant(example=CARTPOLE, changes=("policy.network.recurrent.kind=gru",), least=400),
            "PPO, LSTM": Variant(example=CARTPOLE, least=400),
            "V-trace, GRU": Variant(
                example=CARTPOLE,
                changes=("policy.network.recurrent.kind=gru", f"algorithm={{vtrace: {CARTPOLE_VTRACE}}}"),
                env_steps=700_000,
                least=350,
            ),
            "R2D2, LSTM": Variant(example=CARTPOLE_DQN, least=150),
            "DQN, no memory": Variant(
                example=CARTPOLE_DQN,
                changes=("policy.network={mlp: {hiddenSizes: [128, 128], activation: relu, dueling: true}}",),
                most=150,
            ),
            "PPO, no memory": Variant(example=CARTPOLE, changes=(WITHOUT_MEMORY,), most=200),
        },
    ),
}


def settings_of(task: Task, variant: Variant) -> dict[str, Any]:
    """Return all that the figures of a variant's runs depend on, but for the code."""
    return {
        "example": yaml.safe_load((EXAMPLES / variant.example).read_text())["spec"],
        "changes": [*variant.changes],
        "env_steps": variant.env_steps or task.env_steps,
        "every_steps": task.every_steps,
        "evaluators": EVALUATORS,
        "played": [EPISODES, FIRST_SEED],
    }


def trained(task: Task, variant: Variant, *, seed: int) -> dict[str, Any]:
    """Return the figures of one run."""
    changes = (
        f"seed={seed}",
        f"stop={{envSteps: {variant.env_steps or task.env_steps}}}",
        f"parameters.everySteps={task.every_steps}",
        EVALUATORS,
        *variant.changes,
    )
    given = [part for change in changes for part in ("--set", f"spec.{change}")]
    with tempfile.TemporaryDirectory(prefix="rlsrl-bench-") as name:
        run = ["run", str(EXAMPLES / variant.example), "--run-dir", "run", *given]
        _call(Path(name), run)
        summary = json.loads((Path(name) / "run" / "summary.json").read_text())
        play = ["eval", "run", "--tag", "best", "--episodes", str(EPISODES), "--seed", str(FIRST_SEED), "--json"]
        played = json.loads(_call(Path(name), play))
    return {
        "played": played["return_mean"],
        "version": played["version"],
        "return_mean": summary["return_mean"],
        "training_seconds": summary["training_seconds"],
    }


def _call(folder: Path, arguments: list[str]) -> str:
    command = [str(OUR_PROGRAM), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=RUN_SECONDS, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)} exited with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def failures(name: str, runs: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Iterator[str]:
    """Yield what the runs of a task miss, by variant and seed."""
    for label, variant in TASKS[name].variants.items():
        for seed, run in runs.get(label, {}).items():
            if variant.least is not None and run["played"] < variant.least:
                yield f"{name}, {label}, seed {seed}: {run['played']:.2f}, below {variant.least}"
            if variant.most is not None and run["played"] > variant.most:
                yield f"{name}, {label}, seed {seed}: {run['played']:.2f}, above {variant.most}"


def main() -> int:
    """Make the runs that are not kept yet, and judge all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", default=[*TASKS], metavar="TASK", help=f"of {', '.join(TASKS)}")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.tasks if name not in TASKS]:
        parser.error(f"{unknown[0]!r} is no task; allowed: {', '.join(TASKS)}")
    document = kept(KEPT) or {"tasks": {}}
    for name in arguments.tasks:
        task = TASKS[name]
        known = document["tasks"].setdefault(name, {})
        for label, variant in task.variants.items():
            settings = settings_of(task, variant)
            if known.get(label, {}).get("settings") != settings:
                known[label] = {"settings": settings, "runs": {}}
            runs = known[label]["runs"]
            for seed in range(1, arguments.seeds + 1):
                if str(seed) in runs:
                    continue
                commit = machine.described(REPOSITORY)["commit"]
                runs[str(seed)] = {**trained(task, variant, seed=seed), "commit": commit}
                log(f"{name}, {label}, seed {seed}: {runs[str(seed)]}")
                document["when"] = datetime.now(UTC).isoformat(timespec="seconds")
                write(FOLDER / f"{KEPT}.json", {**document, "machine": machine.described(REPOSITORY)})
    missed = [
        line
        for name, variants in document["tasks"].items()
        if name in TASKS
        for line in failures(name, {label: each["runs"] for label, each in variants.items()})
    ]
    for line in missed:
        log(line)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
