"""Draw one learning curve of each program: SAC on HalfCheetah-v5, an update an env step, for 100,000 env steps.

    python benchmarks/halfcheetah_sac.py            # three runs, a quarter of an hour each

Settings are those of the workload S1. The figure is the mean return of five episodes without exploration, every 5,000
env steps. Finished runs are kept in ``docs/benchmarks/halfcheetah-sac.json``: an interrupted comparison continues. One
run each decides nothing; what decides is ``learning.py pendulum-sac``.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import machine
from compare_curves import draw
from contestants import PEERS, Contestant, Rlsrl
from figures import SINGLE_FILE, STABLE_BASELINES3
from machine import REPOSITORY
from results import FOLDER, kept, log, write
from turns import ended_by_signals, whole_run
from workloads import REPLAY_WORKLOADS

SEED = 1
RUN_SECONDS = 4 * 3600.0
KEPT = "halfcheetah-sac"
PICTURE = REPOSITORY / "docs" / "results" / f"{KEPT}.png"
# One thread each, and no figure is a time: other work does not matter.
WORKLOAD = replace(
    REPLAY_WORKLOADS["S1"], total_steps=100_000, evaluate_every=5000, evaluation_episodes=5, trainer_threads=1
)


def contestants() -> list[Contestant]:
    """Return the programs that take part."""
    peers = {peer.name: peer for peer in PEERS}
    return [Rlsrl(), peers[SINGLE_FILE], peers[STABLE_BASELINES3]]


def run_of(contestant: Contestant) -> dict[str, Any]:
    """Return the evaluations of one run, (env steps, mean return), with its commit."""
    commit = machine.described(REPOSITORY)["commit"]
    contestant.install()
    setting = contestant.settings(WORKLOAD)[0]  # one thread
    progress = whole_run(contestant, WORKLOAD, setting, seed=SEED, seconds=RUN_SECONDS)
    return {"commit": commit, "evaluations": progress.evaluations}


def inputs() -> Mapping[str, Any]:
    """Return what decides the curves besides the code: runs with other inputs are made again."""
    return {each.name: each.inputs(WORKLOAD, seed=SEED) for each in contestants()}


def main() -> None:
    """Make the runs that are not kept yet, and draw them."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    ended_by_signals()
    document = kept(KEPT) or {}
    if document.get("inputs") != inputs():
        document = {"inputs": inputs(), "runs": {}}
    runs = document["runs"]
    for contestant in contestants():
        if contestant.name not in runs:
            runs[contestant.name] = run_of(contestant)
            write(FOLDER / f"{KEPT}.json", {**document, "machine": machine.described(REPOSITORY)})
        steps, last = runs[contestant.name]["evaluations"][-1]
        log(f"{contestant.name}: mean return {last:,.1f} after {steps:,.0f} env steps")
    curves = {name: [run["evaluations"]] for name, run in runs.items()}
    draw(curves, PICTURE, title="SAC on HalfCheetah-v5, one run each", figures="mean return of five greedy episodes")


if __name__ == "__main__":
    main()
