"""Random edits during training: the operator completes each edit; at the end the objects are those of the last spec."""

from __future__ import annotations

import copy
import json
import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from rlsrl.api.edits import edits, refused
from rlsrl.api.load import SpecError, load_text
from rlsrl.api.pods import is_ready
from rlsrl.testing.cluster_api import Object
from rlsrl.testing.faults import (
    NAME,
    all_ready,
    gated_experiment,
    goes_on,
    reach_the_goal,
)
from rlsrl.testing.kubectl import ClusterExperiment, Namespace, namespace
from rlsrl.testing.manifest_diff import Manifests, decided_by_spec, difference
from rlsrl.testing.recovery import Recovered
from rlsrl.testing.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(1500)]

SEED = 1
NUM_TRANSITIONS = 10
FIELDS_AT_ONCE = 3
KINDS = (
    *("configmaps", "persistentvolumeclaims", "pods", "secrets", "services", "deployments", "statefulsets"),
    *("networkpolicies", "rlexperiments"),
)
NOT_OURS = ("kube-root-ca.crt",)
DRAWS: dict[str, Callable[[random.Random], Any]] = {
    "actors": lambda rng: {
        "replicas": rng.randint(1, 3),
        "environments": 8,
        "rolloutLength": rng.choice([32, 64]),
    },
    "policyWorkers": lambda rng: rng.choice([None, {"replicas": 1}, {"replicas": 2}]),
    "bufferWorkers": lambda rng: rng.choice([None, {"replicas": 1}, {"replicas": 2}]),
    "evaluators": lambda rng: rng.choice([None, {"replicas": 1, "environments": 2}]),
    "trainers": lambda rng: {"replicas": rng.randint(1, 2)},
    "algorithm": lambda rng: {
        "ppo": {"epochs": rng.randint(1, 3), "minibatchSize": 256, "learningRate": rng.choice([1e-4, 3e-4])}
    },
    "pacing": lambda rng: {"maxPolicyLag": rng.randint(1, 3)},
    "parameters": lambda rng: {"everySeconds": rng.randint(1, 3)},
    "restarts": lambda rng: {"budget": rng.randint(1, 20), "decaySeconds": 600},
    "suspend": lambda rng: rng.random() < 0.5,
}
"""Possible values of the spec's fields; None: missing."""


def legal_transition(rng: random.Random, before: Object) -> tuple[str, Object]:
    """Return random edits and the edited document; no two consecutive documents are suspended."""
    for _ in range(1000):
        after = copy.deepcopy(before)
        for name in rng.sample([*DRAWS], rng.randint(1, FIELDS_AT_ONCE)):
            drawn = DRAWS[name](rng)
            after["spec"].pop(name, None)
            after["spec"].update({} if drawn is None else {name: drawn})
        try:
            was, would_be = (load_text(json.dumps(each)) for each in (before, after))
        except SpecError:
            continue
        rests = was.spec.suspend and would_be.spec.suspend
        done = [each.path.removeprefix("spec.") for each in edits(was, would_be)]
        if done and not refused(was, would_be) and not rests:
            return ", ".join(done), after
    raise AssertionError(f"no edit of this is found: {before}")


def is_complete(experiment: ClusterExperiment, spec: Object) -> bool:
    """Return whether the edit is complete: the expected pods exist and work."""
    found, pods = experiment.object, experiment.pods()
    status = found.get("status", {})
    if status.get("observedGeneration") != found["metadata"]["generation"]:
        return False
    if spec.get("suspend"):
        return status["phase"] == "Suspended" and not pods
    ready = status["phase"] == "Running" and experiment.condition("Ready").get("status") == "True"
    return ready and all_ready(experiment) and all(map(is_ready, pods))


def complete(experiment: ClusterExperiment, document: Object) -> float:
    """Apply the document and wait until the edit is complete and training continues; return the seconds."""
    began = time.monotonic()
    experiment.where.apply(document)
    try:
        until(lambda: is_complete(experiment, document["spec"]), "the edit is complete")
        if not document["spec"].get("suspend"):
            goes_on(experiment)
            until(lambda: experiment.condition("Durable").get("status") == "True", "the newest weights are durable")
    except TimeoutError as error:
        raise AssertionError(f"{error}: {json.dumps(document['spec'])}\n{experiment.status_text()}") from None
    return time.monotonic() - began


def objects_by_spec(where: Namespace) -> Manifests:
    """Return the parts of its objects that the spec determines."""
    objects = [each for kind in KINDS for each in where.list(kind) if each["metadata"]["name"] not in NOT_OURS]
    return decided_by_spec(objects)


def test_an_edited_run_trains_and_its_objects_match_the_spec(where: Namespace, recovered: Recovered) -> None:
    rng = random.Random(SEED)
    document, experiment = gated_experiment(), ClusterExperiment(where, NAME)
    complete(experiment, document)
    for number in range(1, NUM_TRANSITIONS + 1):
        fields, document = legal_transition(rng, document)
        if number == NUM_TRANSITIONS:
            document["spec"]["suspend"] = False
        seconds = complete(experiment, document)
        recovered(f"edit {number} of seed {SEED}: {fields}", seconds, "the objects of the spec")
    assert (experiment.status["restarts"], experiment.status["recentFailures"]) == (0, 0), experiment.status_text()
    found = objects_by_spec(where)
    reach_the_goal(experiment)
    ledger = experiment.ledger()
    print(f"the ledger: {ledger}")
    assert not any(ledger["lost"].values()), ledger
    with namespace(f"{where.name}-fresh", wait=False) as elsewhere:
        complete(ClusterExperiment(elsewhere, NAME), document)
        expected = objects_by_spec(elsewhere)
        assert expected == found, difference(expected, found)
