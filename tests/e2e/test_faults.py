"""One kill of each role's process, one deletion of each pod and of each object, while training goes on: what was not
hit does not notice, and the goal is reached.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest

from rlsrl.testing.kubectl import Experiment, Namespace, Nodes, Object
from rlsrl.testing.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

GATE = "/tmp/gate"
ROLES = {"coordinator": 1, "trainer": 2, "buffer": 1, "policy": 1, "actor": 2, "evaluator": 1}
EXPERIMENT: Object = {
    "apiVersion": "rlsrl.dev/v1alpha1",
    "kind": "RLExperiment",
    "metadata": {"name": "faults"},
    "spec": {
        "environment": {"factory": "rlsrl.testing.environments:GatedEnv", "kwargs": {"gate": GATE}},
        "policy": {"network": {"mlp": {"hiddenSizes": [16]}}},
        "algorithm": {"ppo": {"epochs": 2, "minibatchSize": 256}},
        "actors": {"replicas": 2, "environments": 8, "rolloutLength": 64},
        "policyWorkers": {"replicas": 1},
        "bufferWorkers": {"replicas": 1},
        "trainers": {"replicas": 2},
        "evaluators": {"replicas": 1, "environments": 2},
        "parameters": {"everySeconds": 1},
        "stop": {"returnMean": 7.5, "episodes": 50},
        "restarts": {"budget": 20, "decaySeconds": 600},
    },
}
"""It trains until the test opens the gate."""
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


def role_of(pod: Object) -> str:
    return str(pod["metadata"]["labels"]["rlsrl.dev/role"])


def lives(experiment: Experiment, *, without: str = "") -> dict[str, tuple[str, int]]:
    """Uid and restarts of every pod of the other roles."""
    return {
        pod["metadata"]["name"]: (
            pod["metadata"]["uid"],
            sum(each["restartCount"] for each in pod["status"].get("containerStatuses", ())),
        )
        for pod in experiment.pods()
        if role_of(pod) != without
    }


def is_ready(pod: Object) -> bool:
    ready = [each["status"] for each in pod["status"].get("conditions", ()) if each["type"] == "Ready"]
    return ready == ["True"] and "deletionTimestamp" not in pod["metadata"]


def all_ready(experiment: Experiment) -> bool:
    ready = [role_of(pod) for pod in experiment.pods() if is_ready(pod)]
    return all(ready.count(role) == count for role, count in ROLES.items())


class Faults:
    """Does something to an experiment and waits until it is well again."""

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = experiment
        self.seconds: dict[str, float] = {}

    def make(self, what: str, role: str, fault: Callable[[], object]) -> None:
        """After the fault every pod is ready and training goes on; pods of other roles are those of before."""
        experiment = self._experiment
        before = lives(experiment, without=role)
        began = time.monotonic()
        fault()
        try:
            until(lambda: self._hit(role) or not role, f"{what}: seen")
            until(lambda: all_ready(experiment), f"{what}: every pod is ready again")
            steps = experiment.env_steps()
            until(lambda: experiment.env_steps() > steps, f"{what}: training goes on")
        except TimeoutError as error:
            raise AssertionError(f"{error}\n{experiment.story()}") from None
        self.seconds[what] = time.monotonic() - began
        assert lives(experiment, without=role) == before, what
        self._known = lives(experiment)

    def start(self) -> None:
        """Remember who is there."""
        self._known = lives(self._experiment)

    def _hit(self, role: str) -> bool:
        """Whether a pod of the role is another, or restarted, or gone."""
        mine = {name: life for name, life in self._known.items() if f"-{role}-" in name}
        return any(lives(self._experiment).get(name) != life for name, life in mine.items())


def begin(where: Namespace) -> tuple[Experiment, Faults]:
    """A run that trains, with all its pods, and goes on until it is let."""
    where.apply(EXPERIMENT)
    experiment = Experiment(where, "faults")
    experiment.await_phase("Running")
    until(lambda: all_ready(experiment), "every pod is ready")
    until(lambda: experiment.env_steps() > 0, "it trains")
    faults = Faults(experiment)
    faults.start()
    return experiment, faults


def reach_the_goal(experiment: Experiment, faults: Faults) -> None:
    """Let it, to its end: only the coordinator stays, and the ledger adds up."""
    for pod in experiment.pods("actor"):
        experiment.where.kubectl("exec", pod["metadata"]["name"], "--", "touch", GATE)
    experiment.await_phase("Succeeded")
    print("\n".join(f"{what:50s} {seconds:6.1f} s" for what, seconds in faults.seconds.items()))  # noqa: T201
    until(lambda: [role_of(pod) for pod in experiment.pods()] == ["coordinator"], "only the coordinator stays")
    adds_up(experiment)


def test_no_fault_stops_training_or_touches_who_was_not_hit(where: Namespace, hands: Nodes) -> None:
    experiment, faults = begin(where)

    for role in ROLES:
        victim = experiment.pods(role)[0]
        faults.make(f"kill {role}", role, lambda victim=victim: hands.kill(victim))  # type: ignore[misc]
    for role in ROLES:
        name = experiment.pods(role)[-1]["metadata"]["name"]
        faults.make(f"delete pod {role}", role, lambda name=name: where.delete("pod", name))  # type: ignore[misc]
    for kind, role in WORKLOADS:
        name = f"{experiment.name}-{role}"
        faults.make(f"delete {kind} {role}", role, lambda kind=kind, name=name: where.delete(kind, name))  # type: ignore[misc]
    for kind in QUIET:
        for each in where.list(kind, experiment=experiment.name):
            name, uid = each["metadata"]["name"], each["metadata"]["uid"]
            faults.make(f"delete {kind} {name}", "", lambda kind=kind, name=name: where.delete(kind, name))  # type: ignore[misc]
            healed = until(lambda kind=kind, name=name: where.get(kind, name), f"{name} is there again")  # type: ignore[misc]
            assert healed["metadata"]["uid"] != uid
            assert healed.get("data") == each.get("data"), name

    reach_the_goal(experiment, faults)
    status = experiment.status
    assert float(status["training"]["returnMean"]) >= 7.5
    # A kill, a deleted pod and a deleted StatefulSet of the gang; a gang that was hit twice in one go counts once.
    assert 3 <= status["restarts"] <= 6


@pytest.mark.full
def test_a_process_that_is_stopped_is_one_failure(where: Namespace, hands: Nodes) -> None:
    """Its own kubelet finds it, and nobody else is restarted."""
    experiment, faults = begin(where)
    for role in ROLES:
        victim = experiment.pods(role)[-1]
        faults.make(f"stop {role}", role, lambda victim=victim: hands.kill(victim, sig=signal.SIGSTOP))  # type: ignore[misc]
    reach_the_goal(experiment, faults)


def adds_up(experiment: Experiment) -> None:
    """The ledger of a run that is over, whoever is gone."""
    until(lambda: experiment.ledger()["unsettled"] == 0, "the ledger is settled")
    ledger = experiment.ledger()
    assert ledger["balanced"], ledger
    assert ledger["trained"] > 0, ledger
