"""Algorithms that replay train as pods: transitions are on pods' disks or on volumes."""

from __future__ import annotations

import json
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlsrl.api.pods import is_ready
from rlsrl.testing.cluster_api import Object
from rlsrl.testing.faults import GATE, STEP_SECONDS, Faults, all_ready, begin, role_of
from rlsrl.testing.kubectl import ClusterExperiment, Namespace, Nodes
from rlsrl.testing.recovery import Recovered
from rlsrl.testing.replayed_runs import check_ratio, found_transitions, reach_the_goal_by_the_ratio
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
    check_ratio(experiment)


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
    reach_the_goal_by_the_ratio(experiment)
    assert experiment.status["restarts"] == 2


CARTPOLE = Path(__file__).parents[2] / "examples" / "cartpole-dqn.yaml"


def edit(experiment: ClusterExperiment, **spec: Any) -> None:
    patch = json.dumps({"spec": spec})
    experiment.where.kubectl("patch", "rlexperiment", experiment.name, "--type=merge", "-p", patch)


def claims(experiment: ClusterExperiment) -> set[str]:
    """Return the names of the buffer workers' claims."""
    found = experiment.where.list("persistentvolumeclaims", experiment=experiment.name, role="buffer")
    return {each["metadata"]["name"] for each in found if "deletionTimestamp" not in each["metadata"]}


@pytest.mark.full
def test_dqn_with_two_buffer_workers_reaches_its_goal_and_a_deleted_one_keeps_its_transitions(where: Namespace) -> None:
    document: Object = yaml.safe_load(CARTPOLE.read_text())
    document["spec"]["actors"]["replicas"] = 2
    document["spec"] |= {
        "bufferWorkers": {"replicas": 2, "volume": {"size": "64Mi"}},
        "stop": {"returnMean": 475, "envSteps": 400_000},
    }
    where.apply(document)
    experiment = ClusterExperiment(where, document["metadata"]["name"])
    experiment.await_phase("Running")
    until(lambda: experiment.env_steps() > 10_000, "it has gathered")
    before = experiment.pods("buffer")[0]
    name = before["metadata"]["name"]
    assert claims(experiment) == {f"state-{each['metadata']['name']}" for each in experiment.pods("buffer")}
    where.delete("pod", name, wait=True)

    def is_back() -> bool:
        pod = where.get("pod", name)
        return pod is not None and pod["metadata"]["uid"] != before["metadata"]["uid"] and is_ready(pod)

    until(is_back, "the pod is back")
    assert found_transitions(experiment, name) > 3000, "one of two equal parts"
    experiment.await_phase("Succeeded", seconds=900)
    assert float(experiment.status["training"]["returnMean"]) >= 475
    assert experiment.status["restarts"] == 0, "trainers go on without a buffer worker"
    until(lambda: [role_of(pod) for pod in experiment.pods()] == ["coordinator"], "only the coordinator remains")
    until(lambda: experiment.ledger()["unsettled"] == 0, "the ledger is settled")
    ledger = experiment.ledger()
    assert ledger["balanced"], ledger
    assert (ledger["in_buffer"], ledger["lost"]["receiver_died"]) == (0, 0), ledger
    check_ratio(experiment)


def test_stores_of_buffer_workers_outlive_faults_and_suspension_and_go_with_the_role(
    where: Namespace, hands: Nodes, recovered: Recovered
) -> None:
    experiment = begin(
        where,
        algorithm={"dqn": {"minibatchSize": 64, "replay": {"capacity": 5000, "start": 500, "priorities": {}}}},
        pacing={"trainStepsPerEnvStep": 0.1},
        trainers={"replicas": 1},
        bufferWorkers={"replicas": 2, "volume": {"size": "16Mi"}},
    )
    faults = Faults(experiment, recovered)
    victim = experiment.pods("buffer")[-1]
    name = victim["metadata"]["name"]
    kill = partial(hands.kill, victim, sig=signal.SIGKILL)
    faults.make("SIGKILL of buffer with replay", ["buffer"], kill)
    faults.make("deletion of a pod: buffer with replay", ["buffer"], lambda: where.delete("pod", name))
    for role in ("trainer", "coordinator", "actor"):
        kill = partial(hands.kill, experiment.pods(role)[-1], sig=signal.SIGKILL)
        faults.make(f"SIGKILL of {role}, replay in buffer workers", [role], kill)
    assert found_transitions(experiment, name)
    held = claims(experiment)
    assert len(held) == 2
    edit(experiment, suspend=True)
    experiment.await_phase("Suspended")
    until(lambda: not experiment.pods(), "no pod is left")
    assert claims(experiment) == held
    edit(experiment, suspend=False)
    experiment.await_phase("Running")
    until(lambda: all_ready(experiment), "every pod is ready")
    assert found_transitions(experiment, name), "a suspension keeps them"
    where.delete("persistentvolumeclaim", f"state-{name}")
    until(lambda: experiment.condition("VolumeIntact").get("reason") == "ShardClaimDeleting", "its end is reported")
    faults.make("deletion of a pod and its claim: buffer with replay", ["buffer"], lambda: where.delete("pod", name))
    until(lambda: experiment.condition("VolumeIntact").get("reason") == "ShardClaimReplaced", "the loss is reported")
    assert claims(experiment) == held
    assert found_transitions(experiment, name) == 0
    assert experiment.ledger()["lost"]["receiver_died"] > 0
    edit(experiment, bufferWorkers=None)
    until(lambda: where.get("statefulset", f"{experiment.name}-buffer") is None, "the role is gone")
    until(lambda: not claims(experiment), "its volumes go with it")
    until(lambda: all_ready(experiment), "every pod is ready")
    reach_the_goal_by_the_ratio(experiment)
