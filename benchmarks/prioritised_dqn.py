"""Does DQN learn more on LunarLander with draws by priority and double Q-learning? Five seeds of each.

    python benchmarks/prioritised_dqn.py            # ten runs of 300,000 env steps, some minutes each

Both variants have the same network, rates and number of updates; the plain one draws uniformly, and its target network
chooses the next action, too (Mnih et al. 2015). The figure of a run is the mean return of 100 episodes without
exploration by its last version. Beside it is the mean return of its last 100 episodes.

Finished runs are kept in ``docs/benchmarks/prioritised-dqn.json``: an interrupted comparison continues. The exit status
is 0 if the median of the prioritised runs is the higher one, else 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import machine
import yaml
from contestants import OUR_PROGRAM
from greedy import SEEDS_APART, last_version, mean_return
from machine import REPOSITORY
from results import FOLDER, kept, log, write

ENV_ID = "LunarLander-v3"
EPISODES = 100
RUN_SECONDS = 1800.0
KEPT = "prioritised-dqn"
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "plain": {"double": False},
    "prioritised, double": {
        "double": True,
        "importanceExponent": 0.4,
        "importanceExponentSchedule": {"linear": {"to": 1}},
    },
}
STORES: Mapping[str, Mapping[str, Any]] = {"plain": {}, "prioritised, double": {"priorities": {}}}


def experiment(variant: str, *, seed: int, env_steps: int) -> dict[str, Any]:
    """Return the experiment of a variant."""
    dqn = {
        "learningRate": 5e-4,
        "minibatchSize": 64,
        "replay": {"capacity": 100_000, "start": 5000, **STORES[variant]},
        "targetPeriod": 500,
        "epsilon": 1,
        "epsilonSchedule": {"linear": {"to": 0.05, "envSteps": 50_000}},
        **VARIANTS[variant],
    }
    return {
        "apiVersion": "rlsrl.dev/v1alpha1",
        "kind": "RLExperiment",
        "metadata": {"name": "lunarlander-dqn"},
        "spec": {
            "seed": seed,
            "environment": {"id": ENV_ID},
            "policy": {"network": {"mlp": {"hiddenSizes": [128, 128], "activation": "relu"}}},
            "algorithm": {"dqn": dqn},
            "actors": {"replicas": 1, "environments": 8, "rolloutLength": 16},
            "pacing": {"trainStepsPerEnvStep": 0.25},
            "stop": {"envSteps": env_steps},
        },
    }


def trained(variant: str, *, seed: int, env_steps: int) -> dict[str, Any]:
    """Return the figures of one run."""
    with tempfile.TemporaryDirectory(prefix="rlsrl-bench-") as name:
        folder = Path(name)
        (folder / "experiment.yaml").write_text(yaml.safe_dump(experiment(variant, seed=seed, env_steps=env_steps)))
        command = [str(OUR_PROGRAM), "run", "experiment.yaml", "--run-dir", "run"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=RUN_SECONDS, check=False)
        if done.returncode:
            raise SystemExit(f"{variant}, seed {seed}, exited with {done.returncode}:\n{done.stdout}{done.stderr}")
        summary = json.loads((folder / "run" / "summary.json").read_text())
        actor, parameters = last_version(folder / "run")
        played = mean_return(actor, parameters, ENV_ID, episodes=EPISODES, seed=SEEDS_APART * seed)
    return {"played": played, "return_mean": summary["return_mean"], "training_seconds": summary["training_seconds"]}


def main() -> int:
    """Make the runs that are not kept yet, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--env-steps", type=int, default=300_000)
    arguments = parser.parse_args()
    conditions = {variant: experiment(variant, seed=0, env_steps=arguments.env_steps) for variant in VARIANTS}
    document = kept(KEPT) or {}
    if document.get("conditions") != conditions:
        document = {"conditions": conditions, "runs": {variant: {} for variant in VARIANTS}}
    for seed in range(1, arguments.seeds + 1):
        for variant, runs in document["runs"].items():
            if str(seed) not in runs:
                commit = machine.described(REPOSITORY)["commit"]
                runs[str(seed)] = {**trained(variant, seed=seed, env_steps=arguments.env_steps), "commit": commit}
                log(f"{variant}, seed {seed}: {runs[str(seed)]}")
                write(FOLDER / f"{KEPT}.json", document)
    medians = {
        variant: statistics.median(run["played"] for run in runs.values()) for variant, runs in document["runs"].items()
    }
    document |= {"medians": medians, "when": datetime.now(UTC).isoformat(timespec="seconds")}
    write(FOLDER / f"{KEPT}.json", {**document, "machine": machine.described(REPOSITORY)})
    log(f"medians of the mean return of {EPISODES} episodes: {medians}")
    plain, prioritised = medians.values()
    return 0 if prioritised > plain else 1


if __name__ == "__main__":
    sys.exit(main())
