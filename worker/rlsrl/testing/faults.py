"""Cause faults in an experiment on a cluster, and check that it recovers and that other roles are not affected."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from pydantic.alias_generators import to_camel

from rlsrl.api.pods import ROLE_LABEL, is_ready, restarts
from rlsrl.api.roles import ROLES as _ROLES
from rlsrl.testing.cluster_api import Object
from rlsrl.testing.kubectl import ClusterExperiment, Namespace
from rlsrl.testing.recovery import Recovered
from rlsrl.testing.waiting import DEADLINE_SECONDS, until

GATE = "/tmp/gate"
STEP_SECONDS = 0.002
"""Duration of an environment step. It limits throughput, so that the few cores are free for restarting pods."""
NAME = "faults"
ROLES = {role.name: to_camel(role.section or "") for role in _ROLES}
"""Every role, and the field of the spec with its replicas. There is always one coordinator."""


def gated_experiment(**spec: Any) -> Object:
    """Return an experiment with every role. It trains until the test opens its gate."""
    defaults = {
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
        "spec": defaults | spec,
    }


def role_of(pod: Object) -> str:
    """Return the pod's role."""
    return str(pod["metadata"]["labels"][ROLE_LABEL])


def wanted(experiment: ClusterExperiment) -> Counter[str]:
    """Return how many pods of each role the experiment requires."""
    spec = experiment.object["spec"]
    return Counter({role: spec.get(field, {}).get("replicas", 0) if field else 1 for role, field in ROLES.items()})


def all_ready(experiment: ClusterExperiment) -> bool:
    """Return whether all pods of every role are ready."""
    return Counter(role_of(pod) for pod in experiment.pods() if is_ready(pod)) == wanted(experiment)


def lives(experiment: ClusterExperiment, *, without: Sequence[str] = ()) -> dict[str, tuple[str, int]]:
    """Return the uid and the restarts of every pod, except those of the roles in ``without``."""
    return {
        pod["metadata"]["name"]: (pod["metadata"]["uid"], restarts(pod))
        for pod in experiment.pods()
        if role_of(pod) not in without
    }


def goes_on(experiment: ClusterExperiment, *, timeout: float = DEADLINE_SECONDS) -> None:
    """Wait for new environment steps."""
    steps = experiment.env_steps()
    until(lambda: experiment.env_steps() > steps, "training continues", timeout=timeout)


def begin(where: Namespace, **spec: Any) -> ClusterExperiment:
    """Start an experiment and wait until all its pods are ready and it trains. It trains until ``reach_the_goal``."""
    where.apply(gated_experiment(**spec))
    experiment = ClusterExperiment(where, NAME)
    experiment.await_phase("Running")
    until(lambda: all_ready(experiment), "every pod is ready")
    until(lambda: experiment.env_steps() > 0, "it trains")
    return experiment


def reach_the_goal(experiment: ClusterExperiment) -> None:
    """Open the gate and wait for the end: only the coordinator remains, and the ledger's equation holds."""
    for pod in experiment.pods("actor"):
        if is_ready(pod):
            experiment.where.kubectl("exec", pod["metadata"]["name"], "--", "touch", GATE)
    experiment.await_phase("Succeeded")
    until(lambda: [role_of(pod) for pod in experiment.pods()] == ["coordinator"], "only the coordinator remains")
    until(lambda: experiment.ledger()["unsettled"] == 0, "the ledger is settled")
    ledger = experiment.ledger()
    assert ledger["balanced"], ledger
    assert ledger["trained"] > 0, ledger


class Faults:
    """Causes faults in an experiment, and waits until it has recovered."""

    def __init__(self, experiment: ClusterExperiment, recovered: Recovered) -> None:
        """``recovered`` is called with each fault and its recovery time."""
        self._experiment = experiment
        self._recovered = recovered

    def make(
        self, what: str, roles: Sequence[str], fault: Callable[[], object], *, timeout: float = DEADLINE_SECONDS
    ) -> None:
        """Cause a fault, and wait until the experiment has recovered.

        It has recovered when a pod of the roles was replaced or restarted, all pods are ready, and training continues.

        Then check that the pods of other roles are unchanged.

        Raises:
            AssertionError: one of these does not hold, or not in time.
        """
        experiment = self._experiment
        before = lives(experiment)
        others = lives(experiment, without=roles)
        hit = before.keys() - others.keys()
        began = time.monotonic()
        fault()
        try:
            if roles:
                until(lambda: _is_hit(experiment, before, hit), "a pod is replaced or restarted", timeout=timeout)
            until(lambda: all_ready(experiment), "every pod is ready again", timeout=timeout)
            goes_on(experiment, timeout=timeout)
        except TimeoutError as error:
            raise AssertionError(f"{what}: {error}\n{experiment.status_text()}") from None
        self._recovered(what, time.monotonic() - began)
        after = lives(experiment, without=roles)
        assert after == others, f"{what}: {others} became {after}"


def _is_hit(experiment: ClusterExperiment, before: dict[str, tuple[str, int]], names: set[str]) -> bool:
    """Return whether one of these pods was replaced, restarted or deleted, or is being deleted, as on a lost node."""
    now = lives(experiment)
    deleting = {pod["metadata"]["name"] for pod in experiment.pods() if "deletionTimestamp" in pod["metadata"]}
    return any(name in deleting or now.get(name) != before[name] for name in names)
