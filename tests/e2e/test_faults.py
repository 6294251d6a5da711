"""Kill each role's process, delete each pod and each object during training: other pods are not affected, and the run
reaches its goal.
"""

from __future__ import annotations

import re
import signal

import pytest

from rlsrl.testing.faults import ROLES, Faults, begin, reach_the_goal
from rlsrl.testing.kubectl import ClusterExperiment, Namespace, Nodes
from rlsrl.testing.recovery import Recovered
from rlsrl.testing.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

WORKLOADS = (
    ("statefulset", "coordinator"),
    ("statefulset", "trainer"),
    ("deployment", "buffer"),
    ("deployment", "policy"),
    ("deployment", "actor"),
    ("deployment", "evaluator"),
)
QUIET = ("configmaps", "secrets", "services", "networkpolicies")
"""Objects whose deletion does not affect running pods."""


class Hand:
    """Injects faults of every kind, one at a time."""

    def __init__(self, experiment: ClusterExperiment, hands: Nodes, recovered: Recovered) -> None:
        self._experiment = experiment
        self._where = experiment.where
        self._hands = hands
        self._faults = Faults(experiment, recovered)

    def signal(self, role: str, sig: signal.Signals) -> None:
        victim = self._experiment.pods(role)[0]
        self._faults.make(f"{sig.name} of {role}", [role], lambda: self._hands.kill(victim, sig=sig))

    def delete_pod(self, role: str) -> None:
        name = self._experiment.pods(role)[-1]["metadata"]["name"]
        self._faults.make(f"deletion of a pod: {role}", [role], lambda: self._where.delete("pod", name))

    def delete_workload(self, kind: str, role: str) -> None:
        name = f"{self._experiment.name}-{role}"
        self._faults.make(f"deletion of {kind} {role}", [role], lambda: self._where.delete(kind, name))

    def delete_quietly(self, kind: str, name: str) -> None:
        """Delete an object; the operator restores it with its contents, and no pod changes."""
        before = self._where.get(kind, name)
        assert before is not None
        self._faults.make(f"deletion of {kind} {name}", [], lambda: self._where.delete(kind, name))
        healed = until(lambda: self._where.get(kind, name), f"{name} is there again")
        assert healed["metadata"]["uid"] != before["metadata"]["uid"]
        assert healed.get("data") == before.get("data"), name


def test_one_fault_of_each_kind(where: Namespace, hands: Nodes, recovered: Recovered) -> None:
    experiment = begin(where)
    hand = Hand(experiment, hands, recovered)
    hand.signal("policy", signal.SIGKILL)
    hand.delete_pod("trainer")
    until(lambda: experiment.condition("Resumed").get("status") == "True", "the experiment says from where it resumed")
    cost = experiment.condition("Resumed")["message"]
    assert re.fullmatch(
        r"attempt 2 resumed from version 1\.\d+(; training steps lost after it: at least [\d,]+ \(.*\))?"
        rf"; attempt 1 is over: {experiment.name}-trainer-\d .*",
        cost,
    ), cost
    hand.delete_workload("statefulset", "coordinator")
    hand.delete_quietly("secrets", where.list("secrets", experiment=experiment.name)[0]["metadata"]["name"])
    reach_the_goal(experiment)
    assert experiment.status["restarts"] == 1


@pytest.mark.full
def test_no_fault_stops_training_or_affects_other_pods(where: Namespace, hands: Nodes, recovered: Recovered) -> None:
    experiment = begin(where)
    hand = Hand(experiment, hands, recovered)
    for role in ROLES:
        hand.signal(role, signal.SIGKILL)
    for role in ROLES:
        hand.delete_pod(role)
    for kind, role in WORKLOADS:
        hand.delete_workload(kind, role)
    for kind in QUIET:
        for each in where.list(kind, experiment=experiment.name):
            hand.delete_quietly(kind, each["metadata"]["name"])

    reach_the_goal(experiment)
    status = experiment.status
    assert float(status["training"]["returnMean"]) >= 7.5
    # A kill, a deleted pod and a deleted StatefulSet of the gang; a gang that was hit twice in one go counts once.
    assert 3 <= status["restarts"] <= 6


@pytest.mark.full
def test_a_process_that_is_stopped_is_one_failure(where: Namespace, hands: Nodes, recovered: Recovered) -> None:
    """The kubelet restarts the stopped process, and no other process restarts."""
    experiment = begin(where)
    hand = Hand(experiment, hands, recovered)
    for role in ROLES:
        hand.signal(role, signal.SIGSTOP)
    reach_the_goal(experiment)
