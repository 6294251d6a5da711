"""Algorithms that replay train as pods: each trainer rank has a store of its own, on the disk of its pod."""

from __future__ import annotations

import signal
from functools import partial

import pytest

from rlsrl.testing.cluster_api import Object
from rlsrl.testing.faults import GATE, STEP_SECONDS, Faults, begin, reach_the_goal
from rlsrl.testing.kubectl import ClusterExperiment, Namespace, Nodes
from rlsrl.testing.recovery import Recovered
from rlsrl.testing.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

START, RATIO = 1000, 1.0
PENDULUM: Object = {
    "apiVersion": "rlsrl.dev/v1alpha1",
    "kind": "RLExperiment",
    "metadata": {"name": "pendulum"},
    "spec": {
        "seed": 1,
        "environment": {"id": "Pendulum-v1"},
        "policy": {"network": {"mlp": {"hiddenSizes": [256, 256], "activation": "relu"}}},
        "algorithm": {
            "sac": {
                "learningRate": 0.001,
                "criticLearningRate": 0.001,
                "minibatchSize": 256,
                "replay": {"capacity": 100_000, "start": START},
            }
        },
        "actors": {"replicas": 2, "environments": 4, "rolloutLength": 8},
        "trainers": {"replicas": 2},
        "pacing": {"trainStepsPerEnvStep": RATIO},
        "stop": {"returnMean": -200.0, "episodes": 10, "envSteps": 30_000},
    },
}


@pytest.mark.full
def test_sac_with_two_ranks_reaches_its_goal(where: Namespace) -> None:
    where.apply(PENDULUM)
    experiment = ClusterExperiment(where, "pendulum")
    experiment.await_phase("Running")
    until(lambda: experiment.env_steps() > 0, "the first numbers")
    assert len({pod["spec"]["nodeName"] for pod in experiment.pods("trainer")}) == 2, "ranks on different nodes"
    experiment.await_phase("Succeeded", seconds=900)
    assert float(experiment.status["training"]["returnMean"]) >= -200
    assert experiment.status["restarts"] == 0
    until(lambda: experiment.ledger()["unsettled"] == 0, "the ledger is settled")
    ledger = experiment.ledger()
    assert ledger["balanced"]
    assert ledger["dropped"]["evicted"] == 0, "fewer transitions than the capacity"


def test_replay_with_two_ranks_survives_kills_and_deletions(
    where: Namespace, hands: Nodes, recovered: Recovered
) -> None:
    experiment = begin(
        where,
        environment={
            "factory": "rlsrl.testing.environments:GatedEnv",
            "kwargs": {"gate": GATE, "step_seconds": STEP_SECONDS, "has_vectors": True},
        },
        algorithm={"sac": {"minibatchSize": 64, "replay": {"capacity": 5000, "start": 500, "priorities": {}}}},
        pacing={"trainStepsPerEnvStep": 0.1},
        bufferWorkers=None,
    )
    faults = Faults(experiment, recovered)
    for role in ("trainer", "actor"):
        victim = experiment.pods(role)[-1]
        kill = partial(hands.kill, victim, sig=signal.SIGKILL)
        faults.make(f"SIGKILL of {role} with replay", [role], kill)
    name = experiment.pods("trainer")[0]["metadata"]["name"]
    faults.make("deletion of a pod: trainer with replay", ["trainer"], lambda: where.delete("pod", name))
    reach_the_goal(experiment)
    assert experiment.status["restarts"] == 2
