"""A release's objects change with its values, are restored by a rollback, and are deleted by an uninstall.

Two objects remain: the operator's key, because the tokens of experiments that outlive the release derive from it, and
the CRD. The fixture `system` deletes the CRD after an uninstall.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from rlsrl.testing.cluster_api import Object
from rlsrl.testing.kubectl import TAG, Namespace, namespace, run
from rlsrl.testing.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

CHART = Path(__file__).parents[2] / "charts"
RELEASE = f"life-{uuid.uuid4().hex[:8]}"
WHERE, OTHER = f"{RELEASE}-a", f"{RELEASE}-b"
OPERATOR = f"{RELEASE}-operator"
NOWHERE = {"no-node": "has-this"}
NAMESPACED: Object = {"crds": {"enabled": False}, "images": {"tag": TAG}, "namespaces": [WHERE]}
RECORDS = ("events", "events.events.k8s.io")
"""Kinds that record events and expire."""

Name = tuple[str, str, str]
"""Kind, namespace (empty for cluster-wide objects) and name of an object."""
KEY = ("Secret", WHERE, f"{OPERATOR}-key")
EVERYWHERE = {("ClusterRole", "", OPERATOR), ("ClusterRoleBinding", "", OPERATOR)}


def roles_in(*places: str) -> set[Name]:
    return {(kind, place, OPERATOR) for kind in ("Role", "RoleBinding") for place in places}


def traces() -> set[Name]:
    """Return all objects of all kinds in the two namespaces, and all others that mention the release.

    Other tests use the same cluster. Every object of the release or its operator is in these namespaces, or names them
    or the release: the operator has no rights elsewhere, and Helm labels its objects.
    """
    kinds = set(run("kubectl", "api-resources", "--verbs=list", "-o", "name").split()) - set(RECORDS)
    found = json.loads(run("kubectl", "get", ",".join(sorted(kinds)), "--all-namespaces", "-o", "json"))
    return {
        (each["kind"], each["metadata"].get("namespace", ""), each["metadata"]["name"])
        for each in found["items"]
        if RELEASE in json.dumps(each)
    }


def await_traces(expected: set[Name]) -> None:
    """Wait for the cluster's garbage collection; the error shows the difference."""
    with suppress(TimeoutError):
        until(lambda: traces() == expected, "nothing else is left")
    assert traces() == expected


def helm(command: str, *arguments: str, values: Object | None = None, wait: bool = True) -> str:
    given = [] if values is None else [str(CHART), "--values", "-"]
    waits = ["--wait", "--timeout", "2m"] if wait else []
    return run(
        *("helm", command, RELEASE, *given, *arguments, *waits, "--namespace", WHERE),
        stdin=None if values is None else json.dumps(values),
    )


def pod(where: Namespace) -> Object:
    """Return the operator's pod, once it is the only one."""
    pods = until(lambda: found if len(found := where.list("pods")) == 1 else None, "one pod")
    return pods[0]


def settings(where: Namespace) -> Object:
    found = where.get("configmap", OPERATOR)
    assert found is not None
    settings: Object = yaml.safe_load(found["data"]["settings.yaml"])
    return settings


def may_look_after(place: str) -> bool:
    """Return whether the API server allows the operator to do it."""
    who = f"system:serviceaccount:{WHERE}:{OPERATOR}"
    # `can-i` ends with an error where the answer is no.
    review: Object = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {
            "user": who,
            "resourceAttributes": {"group": "apps", "resource": "deployments", "verb": "patch", "namespace": place},
        },
    }
    answer = json.loads(run("kubectl", "create", "-f", "-", "-o", "json", stdin=json.dumps(review)))
    return bool(answer["status"]["allowed"])


@pytest.fixture
def where(definition: None) -> Iterator[Namespace]:
    """Yield the release's namespace, beside another one."""
    with namespace(WHERE, wait=False) as made, namespace(OTHER, wait=False):
        made.kubectl("wait", "--for=create", "serviceaccount/default", "configmap/kube-root-ca.crt")
        Namespace(OTHER).kubectl("wait", "--for=create", "serviceaccount/default", "configmap/kube-root-ca.crt")
        yield made


def test_a_release_leaves_nothing_but_the_operators_key(where: Namespace) -> None:
    before = traces()

    notes = helm("install", values=NAMESPACED)
    assert f"manages RLExperiments in the namespaces {WHERE}." in notes
    assert f"{OPERATOR}-key" in notes, "the notes name the remaining Secret"
    first, installed = pod(where), traces()
    key = where.get("secret", f"{OPERATOR}-key")
    assert key is not None, "an operator that is ready has its key"
    assert installed >= before | roles_in(WHERE)
    assert installed.isdisjoint(EVERYWHERE | roles_in(OTHER))
    assert (may_look_after(WHERE), may_look_after(OTHER)) == (True, False)

    helm("upgrade", values=NAMESPACED)
    assert pod(where)["metadata"]["uid"] == first["metadata"]["uid"], "an upgrade without changes restarts no pod"

    helm("upgrade", values={**NAMESPACED, "namespaces": [WHERE, OTHER], "operator": {"statusSeconds": 2}})
    assert pod(where)["metadata"]["uid"] != first["metadata"]["uid"], "settings are read at the start"
    assert (settings(where)["namespaces"], settings(where)["statusSeconds"]) == ([WHERE, OTHER], 2)
    assert traces() >= roles_in(WHERE, OTHER)
    assert (may_look_after(WHERE), may_look_after(OTHER), may_look_after("default")) == (True, True, False)

    # All namespaces; but nowhere does such an operator start, and get in the way of the others on this cluster.
    helm("upgrade", values={**NAMESPACED, "namespaces": [], "operator": {"nodeSelector": NOWHERE}}, wait=False)
    assert traces() >= EVERYWHERE
    assert traces().isdisjoint(roles_in(WHERE, OTHER))
    assert may_look_after("default")

    # An image that is not there.
    missing: Object = {**NAMESPACED, "images": {"tag": "missing", "pullPolicy": "Never"}}
    helm("upgrade", values=missing, wait=False)
    until(lambda: "ErrImageNeverPull" in json.dumps(pod(where)["status"]), "the pod has ErrImageNeverPull", timeout=60)

    helm("rollback", "1")
    assert pod(where)["spec"]["containers"][0]["image"].endswith(f":{TAG}")
    assert settings(where)["namespaces"] == [WHERE]
    assert traces().isdisjoint(EVERYWHERE | roles_in(OTHER))
    assert (may_look_after(WHERE), may_look_after(OTHER)) == (True, False)

    helm("uninstall")
    await_traces(before | {KEY})

    # And a release of the same name goes on with it.
    helm("install", values=NAMESPACED)
    again = where.get("secret", f"{OPERATOR}-key")
    assert again is not None
    assert (again["metadata"]["uid"], again["data"]) == (key["metadata"]["uid"], key["data"])
    helm("uninstall")
    await_traces(before | {KEY})
