"""One kill of each role's process, one deletion of each pod and of each object, while training goes on: what was not
hit does not notice, and the goal is reached.
"""

from __future__ import annotations

import signal

import pytest

from rlsrl.testing.faults import ROLES, Faults, begin, reach_the_goal
from rlsrl.testing.kubectl import Experiment, Namespace, Nodes
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
"""Objects without which running pods go on."""


def heals(experiment: Experiment, faults: Faults, kind: str, name: str) -> None:
    """An object that is deleted comes again, with what it held, and nobody notices."""
    where = experiment.where
    before = where.get(kind, name)
    assert before is not None
    faults.make(f"deletion of {kind} {name}", [], lambda: where.delete(kind, name))
    healed = until(lambda: where.get(kind, name), f"{name} is there again")
    assert healed["metadata"]["uid"] != before["metadata"]["uid"]
    assert healed.get("data") == before.get("data"), name


def test_no_fault_stops_training_or_touches_who_was_not_hit(
    where: Namespace, hands: Nodes, recovered: Recovered
) -> None:
    experiment = begin(where)
    faults = Faults(experiment, recovered)
    for role in ROLES:
        victim = experiment.pods(role)[0]
        faults.make(f"SIGKILL of {role}", [role], lambda victim=victim: hands.kill(victim))  # type: ignore[misc]
    for role in ROLES:
        name = experiment.pods(role)[-1]["metadata"]["name"]
        faults.make(f"deletion of a pod: {role}", [role], lambda name=name: where.delete("pod", name))  # type: ignore[misc]
    for kind, role in WORKLOADS:
        name = f"{experiment.name}-{role}"
        faults.make(f"deletion of {kind} {role}", [role], lambda kind=kind, name=name: where.delete(kind, name))  # type: ignore[misc]
    for kind in QUIET:
        for each in where.list(kind, experiment=experiment.name):
            heals(experiment, faults, kind, each["metadata"]["name"])

    reach_the_goal(experiment)
    status = experiment.status
    assert float(status["training"]["returnMean"]) >= 7.5
    # A kill, a deleted pod and a deleted StatefulSet of the gang; a gang that was hit twice in one go counts once.
    assert 3 <= status["restarts"] <= 6


@pytest.mark.full
def test_a_process_that_is_stopped_is_one_failure(where: Namespace, hands: Nodes, recovered: Recovered) -> None:
    """Its own kubelet finds it, and nobody else is restarted."""
    experiment = begin(where)
    faults = Faults(experiment, recovered)
    for role in ROLES:
        victim = experiment.pods(role)[-1]
        faults.make(f"SIGSTOP of {role}", [role], lambda victim=victim: hands.kill(victim, sig=signal.SIGSTOP))  # type: ignore[misc]
    reach_the_goal(experiment)
