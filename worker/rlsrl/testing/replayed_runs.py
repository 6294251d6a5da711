"""Runs that replay: whether they train as often as their ratio says; on a cluster, what a buffer worker has found."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rlsrl.api.load import load_text
from rlsrl.api.spec import ExperimentSpec
from rlsrl.buffers.replay.ratio import ROUNDING
from rlsrl.parameters.terminal import TERMINAL_KEY
from rlsrl.testing.faults import reach_the_goal
from rlsrl.testing.kubectl import ClusterExperiment, run
from rlsrl.testing.waiting import until
from rlsrl.workers.build.store_files import FOUND
from rlsrl.workers.progress import ENV_STEPS


def minibatches_behind(spec: ExperimentSpec, counts: Mapping[str, Any]) -> float:
    """Return how many minibatches training is behind gathering, by the ratio.

    Args:
        spec: Of an algorithm that replays. No edit has changed the ratio.
        counts: ``env_steps`` and ``minibatches`` of one moment, as a stored version and a run's summary have them.
    """
    replay, ratio = spec.algorithm.chosen.draws_from, spec.pacing.train_steps_per_env_step
    assert replay is not None and ratio is not None, "the algorithm replays"
    return float(ratio * max(0, counts["env_steps"] - replay.start) - counts["minibatches"])


def is_in_pace(spec: ExperimentSpec, counts: Mapping[str, Any], *, has_all: bool) -> bool:
    """Return whether training does not lead, and is behind by no more than it may be.

    Each trainer counts what its own actors gather, and all make the same steps.

    Args:
        spec: See ``minibatches_behind``.
        counts: See ``minibatches_behind``.
        has_all: Whether training made every step that was due: a trainer lacks less than one.
    """
    of_a_trainer = spec.updates_per_train_step if has_all else spec.train_steps_behind
    return -ROUNDING <= minibatches_behind(spec, counts) <= of_a_trainer * spec.trainers.replicas


def reach_the_goal_by_the_ratio(experiment: ClusterExperiment) -> None:
    """As ``reach_the_goal``, but first wait until training keeps pace again, and at the end check that it has."""
    steps = _newest(experiment)["train_steps"]

    def keeps_pace() -> bool:
        counts = _newest(experiment)
        return bool(counts["train_steps"] > steps) and is_in_pace(_spec(experiment), counts, has_all=False)

    until(keeps_pace, "training keeps pace with gathering")
    reach_the_goal(experiment)
    check_ratio(experiment)


def check_ratio(experiment: ClusterExperiment) -> None:
    """Check that an experiment that has succeeded trained as often as its ratio says, and counted no transition twice.

    A run that ends by env steps trains what it has gathered, to within one training step of each trainer. Other ends
    may come while training is behind by as much as it may be.

    Raises:
        AssertionError: one of these does not hold.
    """
    record, spec = _newest(experiment)[TERMINAL_KEY], _spec(experiment)
    counts, ledger = record["result"], experiment.ledger()
    behind = minibatches_behind(spec, counts)
    print(
        f"{experiment.name}: {counts['minibatches']} minibatches, {behind:.1f} behind {counts['env_steps']} env steps"
    )
    assert is_in_pace(spec, counts, has_all=record["reason"] == ENV_STEPS), f"{behind} minibatches behind: {record}"
    assert counts["env_steps"] <= ledger["produced"], f"a transition was counted twice: {record} {ledger}"


def found_transitions(experiment: ClusterExperiment, pod: str) -> int:
    """Return how many transitions the ready buffer worker in a pod found at its start; 0 without a usable store."""
    lines = experiment.where.kubectl("logs", pod).splitlines()
    events = [json.loads(line) for line in lines if line.startswith("{") and f'"{FOUND}"' in line]
    return int(events[-1]["transitions"]) if events else 0


def _newest(experiment: ClusterExperiment) -> Mapping[str, Any]:
    """Return the metadata of the newest version that the coordinator has stored."""
    listed = run("kubectl", "rlsrl", "params", "list", experiment.name, "-n", experiment.where.name, "--json")
    metadata: Mapping[str, Any] = json.loads(listed)[-1]["metadata"]
    return metadata


def _spec(experiment: ClusterExperiment) -> ExperimentSpec:
    return load_text(json.dumps(experiment.document)).spec
