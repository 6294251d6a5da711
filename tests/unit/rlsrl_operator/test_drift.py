"""Planning again after an apply changes nothing, and changes by others are found."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsrl.api.status import ExperimentStatus
from rlsrl.testing.documents import minimal, variation
from rlsrl_operator.drift import Action, action_for, applied, has_foreign_fields, is_ours, replacement
from rlsrl_operator.lifecycle import for_phase
from rlsrl_operator.manifests import Manifest, render
from rlsrl_operator.manifests.context import MANAGER
from rlsrl_operator.testing import context_of, pod

COUNTED = ("Deployment", "StatefulSet", "NetworkPolicy")
"""Kinds with a ``generation``."""
DEFAULTS: dict[str, dict[str, Any]] = {
    "Deployment": {"progressDeadlineSeconds": 600},
    "StatefulSet": {"persistentVolumeClaimRetentionPolicy": {"whenDeleted": "Retain", "whenScaled": "Retain"}},
    "Service": {"clusterIP": "10.0.0.7", "clusterIPs": ["10.0.0.7"], "sessionAffinity": "None"},
}


def objects(seed: int) -> list[Manifest]:
    status, now = ExperimentStatus(phase="Running", attempt=2), datetime(2026, 1, 1, tzinfo=UTC)
    return [for_phase(each, status, [pod()], now) for each in render(context_of(variation(random.Random(seed))))]


def of_kind(kind: str) -> Manifest:
    document = minimal()
    return next(each for each in render(context_of(document)) if each["kind"] == kind)


KINDS = ("Service", *COUNTED)


def served(wanted: Manifest) -> Manifest:
    """Return the object as a server returns it: with uid, defaults, status and annotations of others."""
    made = copy.deepcopy(wanted)
    made["metadata"] |= {
        "uid": "5e2c1f5e-0000-4000-8000-000000000001",
        "resourceVersion": "41",
        "creationTimestamp": "2026-01-01T00:00:00Z",
        "managedFields": [
            {"manager": MANAGER, "operation": "Apply", "fieldsV1": {"f:spec": {}}},
            {"manager": "kube-controller-manager", "subresource": "status", "fieldsV1": {"f:status": {}}},
            {"manager": "kube-controller-manager", "fieldsV1": {"f:metadata": {"f:annotations": {}}}},
        ],
        **({"generation": 1} if wanted["kind"] in COUNTED else {}),
    }
    made["metadata"].setdefault("annotations", {})["deployment.kubernetes.io/revision"] = "1"
    if (defaults := DEFAULTS.get(wanted["kind"])) is not None:
        made["spec"] |= defaults
    made["status"] = {}
    return made


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_planning_again_after_applying_changes_nothing(seed: int) -> None:
    for first, again in zip(objects(seed), objects(seed), strict=True):
        assert action_for(first, None, None) is Action.APPLY
        there = served(first)
        memory = applied(first, there)
        assert action_for(again, there, memory) is Action.KEEP
        assert not has_foreign_fields(there)


@pytest.mark.parametrize("kind", COUNTED)
def test_a_change_of_the_status_alone_needs_no_write(kind: str) -> None:
    wanted = of_kind(kind)
    there = served(wanted)
    memory = applied(wanted, there)
    there["metadata"]["resourceVersion"] = "99"
    there["metadata"]["annotations"]["deployment.kubernetes.io/revision"] = "2"
    there["status"] = {"readyReplicas": 1}
    assert action_for(wanted, there, memory) is Action.KEEP


def content_changed(there: Manifest) -> None:
    """Change spec or data: the server counts any such change."""
    there["metadata"]["resourceVersion"] = "42"
    if there["kind"] in COUNTED:
        there["metadata"]["generation"] = 2


def label_removed(there: Manifest) -> None:
    del there["metadata"]["labels"]["rlsrl.dev/experiment"]


def label_changed(there: Manifest) -> None:
    there["metadata"]["labels"]["rlsrl.dev/experiment"] = "other"


def labels_removed(there: Manifest) -> None:
    del there["metadata"]["labels"]


def annotation_changed(there: Manifest) -> None:
    there["metadata"]["annotations"]["note"] = "theirs"


def annotation_removed(there: Manifest) -> None:
    del there["metadata"]["annotations"]["note"]


def owner_added(there: Manifest) -> None:
    there["metadata"]["ownerReferences"].append({"kind": "Pod", "name": "x", "uid": "another"})


def owner_weakened(there: Manifest) -> None:
    there["metadata"]["ownerReferences"][0]["controller"] = False


def recreated(there: Manifest) -> None:
    there["metadata"]["uid"] = "another"


def owner_replaced(there: Manifest) -> None:
    there["metadata"]["ownerReferences"][0]["uid"] = "another"


def owners_removed(there: Manifest) -> None:
    del there["metadata"]["ownerReferences"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (content_changed, Action.APPLY),
        (label_removed, Action.APPLY),
        (label_changed, Action.APPLY),
        (labels_removed, Action.APPLY),
        (annotation_changed, Action.APPLY),
        (annotation_removed, Action.APPLY),
        (owner_added, Action.APPLY),
        (owner_weakened, Action.APPLY),
        (recreated, Action.APPLY),
        (owner_replaced, Action.NOT_OWNED),
        (owners_removed, Action.NOT_OWNED),
    ],
)
def test_changes_by_others_are_corrected_or_reported(
    kind: str, change: Callable[[Manifest], None], expected: Action
) -> None:
    wanted = of_kind(kind)
    wanted["metadata"]["annotations"] = {"note": "ours"}
    there = served(wanted)
    memory = applied(wanted, there)
    assert action_for(wanted, there, memory) is Action.KEEP
    change(there)
    assert action_for(wanted, there, memory) is expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_manifest_and_a_forgotten_object_are_applied(kind: str) -> None:
    wanted = of_kind(kind)
    there = served(wanted)
    memory = applied(wanted, there)
    changed = copy.deepcopy(wanted)
    changed["spec"]["added"] = 1
    assert action_for(changed, there, memory) is Action.APPLY
    assert action_for(wanted, there, None) is Action.APPLY, "after a restart of the operator"
    assert action_for(wanted, None, memory) is Action.APPLY, "it was deleted"


def test_an_object_without_owner_is_recognized_by_its_labels() -> None:
    about = context_of(minimal())
    kept = {"kind": "PersistentVolumeClaim", "metadata": about.metadata("a-data", owned=False)}
    there = copy.deepcopy(kept)
    assert is_ours(kept, there)
    later = {"kind": kept["kind"], "metadata": context_of(minimal(), uid="another").metadata("a-data", owned=False)}
    assert is_ours(later, there), "the next experiment of that name goes on with its volume"
    there["metadata"]["labels"]["app.kubernetes.io/managed-by"] = "Helm"
    assert not is_ours(kept, there)
    del there["metadata"]["labels"]
    assert not is_ours(kept, there)


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"manager": "kubectl-edit", "fieldsV1": {"f:spec": {}}}, True),
        ({"manager": "kubectl-edit", "fieldsV1": {"f:data": {}}}, True),
        ({"manager": "kubectl-edit", "fieldsV1": {"f:metadata": {}}}, False),
        ({"manager": "kubectl", "subresource": "scale", "fieldsV1": {"f:spec": {}}}, False),
        ({"manager": "kube-controller-manager", "subresource": "status", "fieldsV1": {"f:status": {}}}, False),
        ({"manager": MANAGER, "fieldsV1": {"f:spec": {}}}, False),
    ],
)
def test_additions_of_other_managers_are_found(entry: Manifest, expected: bool) -> None:
    there = served(of_kind("Deployment"))
    there["metadata"]["managedFields"].append(entry)
    assert has_foreign_fields(there) is expected


def test_a_replacement_keeps_the_servers_choices_and_others_metadata() -> None:
    wanted = of_kind("Service")
    there = served(wanted)
    there["spec"]["externalIPs"] = ["192.0.2.1"]
    there["metadata"]["labels"] |= {"theirs": "1", "rlsrl.dev/role": "wrong"}
    put = replacement(wanted, there)
    assert put["spec"] == {**wanted["spec"], "clusterIP": "10.0.0.7", "clusterIPs": ["10.0.0.7"]}
    assert put["metadata"]["labels"] == {**wanted["metadata"]["labels"], "theirs": "1"}
    assert put["metadata"]["resourceVersion"] == "41"
    assert put["metadata"]["uid"] == there["metadata"]["uid"]
    assert "managedFields" not in put["metadata"]
    assert wanted == of_kind("Service"), "the wanted manifest does not change"
