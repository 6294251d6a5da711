"""What befalls an experiment on a cluster, and whether it is well again: all there, training on, others untouched."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from rlsrl.api.pods import ROLE_LABEL
from rlsrl.testing.cluster_api import Object
from rlsrl.testing.kubectl import ClusterExperiment, Namespace
from rlsrl.testing.recovery import Recovered
from rlsrl.testing.waiting import DEADLINE_SECONDS, until

GATE = "/tmp/gate"
STEP_SECONDS = 0.002
"""Of the environment: its steps limit throughput, and not the few cores on which everybody also starts anew."""
NAME = "faults"
ROLES = {
    "coordinator": "",
    "trainer": "trainers",
    "buffer": "bufferWorkers",
    "policy": "policyWorkers",
    "actor": "actors",
    "evaluator": "evaluators",
}
"""Every role, and the field of the spec that has its replicas; of coordinators there is one."""


def gated_experiment(**spec: Any) -> Object:
    """One with every role, which trains until the test opens its gate."""
    told = {
        "environment": {
            "factory": "rlsrl.testing.environments:GatedEnv",
            "kwargs": {"gate": GATE, "step_seconds": STEP_SECONDS},
        },
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
    }
    return {
        "apiVersion": "rlsrl.dev/v1alpha1",
        "kind": "RLExperiment",
        "metadata": {"name": NAME},
        "spec": told | spec,
    }


def role_of(pod: Object) -> str:
    """Whose pod it is."""
    return str(pod["metadata"]["labels"][ROLE_LABEL])


def is_ready(pod: Object) -> bool:
    """Whether it does its work, and is meant to."""
    ready = [each["status"] for each in pod["status"].get("conditions", ()) if each["type"] == "Ready"]
    return ready == ["True"] and "deletionTimestamp" not in pod["metadata"]


def wanted(experiment: ClusterExperiment) -> Counter[str]:
    """How many pods of each role it asks for."""
    spec = experiment.object["spec"]
    return Counter({role: spec.get(field, {}).get("replicas", 0) if field else 1 for role, field in ROLES.items()})


def all_ready(experiment: ClusterExperiment) -> bool:
    """Whether every role has its pods."""
    return Counter(role_of(pod) for pod in experiment.pods() if is_ready(pod)) == wanted(experiment)


def lives(experiment: ClusterExperiment, *, without: Sequence[str] = ()) -> dict[str, tuple[str, int]]:
    """Uid and restarts of every pod of the other roles."""
    return {
        pod["metadata"]["name"]: (
            pod["metadata"]["uid"],
            sum(each["restartCount"] for each in pod["status"].get("containerStatuses", ())),
        )
        for pod in experiment.pods()
        if role_of(pod) not in without
    }


def goes_on(experiment: ClusterExperiment, *, timeout: float = DEADLINE_SECONDS) -> None:
    """Wait for environment steps that nobody has seen yet."""
    steps = experiment.env_steps()
    until(lambda: experiment.env_steps() > steps, "training goes on", timeout=timeout)


def begin(where: Namespace, **spec: Any) -> ClusterExperiment:
    """A run that trains, with all its pods, and goes on until it is let."""
    where.apply(gated_experiment(**spec))
    experiment = ClusterExperiment(where, NAME)
    experiment.await_phase("Running")
    until(lambda: all_ready(experiment), "every pod is ready")
    until(lambda: experiment.env_steps() > 0, "it trains")
    return experiment


def reach_the_goal(experiment: ClusterExperiment) -> None:
    """Let it, to its end: only the coordinator stays, and the ledger adds up."""
    for pod in experiment.pods("actor"):
        if is_ready(pod):
            experiment.where.kubectl("exec", pod["metadata"]["name"], "--", "touch", GATE)
    experiment.await_phase("Succeeded")
    until(lambda: [role_of(pod) for pod in experiment.pods()] == ["coordinator"], "only the coordinator stays")
    until(lambda: experiment.ledger()["unsettled"] == 0, "the ledger is settled")
    ledger = experiment.ledger()
    assert ledger["balanced"], ledger
    assert ledger["trained"] > 0, ledger


class Faults:
    """Does something to an experiment, and waits until it is well again."""

    def __init__(self, experiment: ClusterExperiment, recovered: Recovered) -> None:
        """``recovered`` hears of each fault."""
        self._experiment = experiment
        self._recovered = recovered

    def make(
        self, what: str, roles: Sequence[str], fault: Callable[[], object], *, timeout: float = DEADLINE_SECONDS
    ) -> None:
        """After the fault the roles' pods are others or were restarted, all are ready, training goes on, and the pods
        of other roles are those of before.

        Raises:
            AssertionError: it was not so, or not in time.
        """
        experiment = self._experiment
        before = lives(experiment)
        others = lives(experiment, without=roles)
        hit = before.keys() - others.keys()
        began = time.monotonic()
        fault()
        try:
            if roles:
                until(lambda: _is_hit(experiment, before, hit), "it is seen", timeout=timeout)
            until(lambda: all_ready(experiment), "every pod is ready again", timeout=timeout)
            goes_on(experiment, timeout=timeout)
        except TimeoutError as error:
            raise AssertionError(f"{what}: {error}\n{experiment.status_text()}") from None
        self._recovered(what, time.monotonic() - began)
        after = lives(experiment, without=roles)
        assert after == others, f"{what}: {others} became {after}"


def _is_hit(experiment: ClusterExperiment, before: dict[str, tuple[str, int]], names: set[str]) -> bool:
    """Whether one of these pods is another, or restarted, or gone, or going: that of a lost node is for long."""
    now = lives(experiment)
    going = {pod["metadata"]["name"] for pod in experiment.pods() if "deletionTimestamp" in pod["metadata"]}
    return any(name in going or now.get(name) != before[name] for name in names)
