"""Every way to be refused, on a real cluster: the operator calls the API server rarely, says why, and goes on later.

``tests/unit/rlsrl_operator/test_refusals.py`` has the same table with a stand-in for the API server.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from rlsrl.testing.cluster_api import Object
from rlsrl.testing.kubectl import ClusterExperiment, Namespace, namespace, run
from rlsrl.testing.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(900)]

MAX_CALLS = 10
MEASURED_SECONDS = 60.0
SETTLING_SECONDS = 35.0
"""Longer than the operator waits between two looks."""
NAME = "refused"
EXPERIMENT: Object = {
    "apiVersion": "rlsrl.dev/v1alpha1",
    "kind": "RLExperiment",
    "metadata": {"name": NAME},
    "spec": {
        "environment": {"id": "CartPole-v1"},
        "policy": {"network": {"mlp": {"hiddenSizes": [16]}}},
        "actors": {"environments": 8},
        "stop": {"trainSteps": 20},
    },
}


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Objects that refuse the experiment's, and how it is reported."""

    objects: tuple[Object, ...]
    reason: str = "ObjectRefused"
    condition: str = "Accepted"


def quota(**hard: str) -> tuple[Object, ...]:
    spec = {"hard": {name.replace("__", "/").replace("_", "."): value for name, value in hard.items()}}
    return ({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none"}, "spec": spec},)


def limit_range(**limits: object) -> tuple[Object, ...]:
    return ({"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "none"}, "spec": {"limits": [limits]}},)


def taken(api_version: str, kind: str, name: str, **contents: object) -> Refusal:
    about = {"apiVersion": api_version, "kind": kind, "metadata": {"name": name}}
    return Refusal(objects=({**about, **contents},), reason="NameConflict")


def workload(**more: object) -> Object:
    """Return the spec of a Deployment or StatefulSet without pods."""
    labels = {"app": "theirs"}
    container = {"name": "theirs", "image": "registry.example/none:1"}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [container]}}
    return {"replicas": 0, "selector": {"matchLabels": labels}, "template": template, **more}


PORTS = {"selector": {"app": "theirs"}, "ports": [{"port": 80}]}
CLAIM = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Mi"}}}
REFUSALS: Mapping[str, Refusal] = {
    "quota-volumes": Refusal(objects=quota(persistentvolumeclaims="0")),
    "quota-configmaps": Refusal(objects=quota(count__configmaps="0")),
    "quota-secrets": Refusal(objects=quota(count__secrets="0")),
    "quota-services": Refusal(objects=quota(services="0")),
    "quota-policies": Refusal(objects=quota(count__networkpolicies_networking_k8s_io="0")),
    "quota-statefulsets": Refusal(objects=quota(count__statefulsets_apps="0")),
    "quota-deployments": Refusal(objects=quota(count__deployments_apps="0")),
    "quota-pods": Refusal(objects=quota(pods="0"), condition="Ready", reason="FailedCreate"),
    "quota-some-pods": Refusal(objects=quota(pods="1"), condition="Ready", reason="FailedCreate"),
    "limits-volumes": Refusal(objects=limit_range(type="PersistentVolumeClaim", max={"storage": "1Ki"})),
    "limits-pods": Refusal(
        objects=limit_range(type="Pod", max={"memory": "1Mi"}), condition="Ready", reason="FailedCreate"
    ),
    "taken-service": taken("v1", "Service", f"{NAME}-coordinator", spec=PORTS),
    "taken-settings": taken("v1", "ConfigMap", f"{NAME}-settings"),
    "taken-volume": taken("v1", "PersistentVolumeClaim", f"{NAME}-data", spec=CLAIM),
    "taken-policy": taken(
        "networking.k8s.io/v1", "NetworkPolicy", f"{NAME}-trainer", spec={"podSelector": {"matchLabels": {"a": "b"}}}
    ),
    "taken-statefulset": taken("apps/v1", "StatefulSet", f"{NAME}-trainer", spec=workload(serviceName="theirs")),
    "taken-deployment": taken("apps/v1", "Deployment", f"{NAME}-actor", spec=workload()),
}
WEBHOOKS = ("policy-services", "policy-pods", "webhook-absent")
"""Cases whose objects are outside a namespace."""


def outside(case: str, where: Namespace) -> tuple[tuple[Object, ...], Refusal]:
    """Return an admission policy or a webhook that denies objects in that namespace, and how it is reported."""
    name = f"rlsrl-{where.name}"
    here = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": where.name}}}
    resource = "pods" if case == "policy-pods" else "services"
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": [resource]}
    reported = Refusal(objects=(), condition="Ready", reason="FailedCreate")
    reported = reported if resource == "pods" else Refusal(objects=())
    group = "admissionregistration.k8s.io/v1"
    if case == "webhook-absent":
        service = {"namespace": where.name, "name": "absent", "path": "/"}
        webhook = {
            "name": "absent.rlsrl.dev",
            "rules": [rule],
            "clientConfig": {"service": service},
            "admissionReviewVersions": ["v1"],
            "sideEffects": "None",
            "timeoutSeconds": 1,
            **here,
        }
        kind = {"apiVersion": group, "kind": "ValidatingWebhookConfiguration", "metadata": {"name": name}}
        return ({**kind, "webhooks": [webhook]},), reported
    policy = {"matchConstraints": {"resourceRules": [rule]}, "validations": [{"expression": "false"}]}
    binding = {"policyName": name, "validationActions": ["Deny"], "matchResources": here}
    made = (("ValidatingAdmissionPolicy", policy), ("ValidatingAdmissionPolicyBinding", binding))
    about = [{"apiVersion": group, "kind": kind, "metadata": {"name": name}, "spec": spec} for kind, spec in made]
    return tuple(about), reported


@contextmanager
def applied(objects: tuple[Object, ...]) -> Iterator[None]:
    """Create objects outside a namespace; delete them at the end."""
    documents = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
    run("kubectl", "apply", "-f", "-", stdin=documents)
    try:
        yield
    finally:
        run("kubectl", "delete", "-f", "-", "--ignore-not-found", stdin=documents)


def calls_of_the_operator(log: Path, began: str, ended: str) -> dict[str, Counter[str]]:
    """Return the operator's calls between two times, by namespace: verbs and resources, without watches."""
    found: dict[str, Counter[str]] = {}
    for line in log.read_text().splitlines():
        event = json.loads(line)
        about, at = event.get("objectRef", {}), event["requestReceivedTimestamp"]
        if "rlsrl-operator" not in event["user"]["username"] or event["verb"] == "watch" or not began <= at < ended:
            continue
        if event["stage"] == "ResponseComplete" and about.get("namespace"):
            resource = "/".join(filter(None, (about["resource"], about.get("subresource", ""))))
            found.setdefault(about["namespace"], Counter())[f"{event['verb']} {resource}"] += 1
    return found


def test_a_minute_of_each_refusal_costs_at_most_ten_calls_and_no_status_write(system: Namespace) -> None:
    log = os.environ.get("RLSRL_E2E_AUDIT_LOG", "")
    if not log:
        pytest.skip("RLSRL_E2E_AUDIT_LOG names no audit log: only the cluster's own backend has one")
    assert system.name
    with ExitStack() as stack:
        cases: dict[str, tuple[Namespace, Refusal, ExitStack]] = {}
        for case in (*REFUSALS, *WEBHOOKS):
            where = stack.enter_context(namespace(f"{case}-{uuid.uuid4().hex[:6]}", wait=False))
            cure = stack.enter_context(ExitStack())
            if case in REFUSALS:
                refusal = REFUSALS[case]
                where.apply(*refusal.objects)
            else:
                objects, refusal = outside(case, where)
                cure.enter_context(applied(objects))
            cases[case] = where, refusal, cure
        for case, (where, _, _) in cases.items():
            if case.startswith("quota"):
                in_force = lambda where=where: "hard" in (where.get("resourcequota", "none") or {}).get("status", {})
                until(in_force, f"{case} is in force")
            where.apply(EXPERIMENT)
        for case, (where, refusal, _) in cases.items():
            experiment = ClusterExperiment(where, NAME)
            reported = lambda experiment=experiment, refusal=refusal: (
                experiment.condition(refusal.condition).get("reason") == refusal.reason
            )
            until(reported, f"{case} is reported")

        time.sleep(SETTLING_SECONDS)
        began = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime())
        time.sleep(MEASURED_SECONDS)  # the test measures the calls in this time
        calls = calls_of_the_operator(Path(log), began, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime()))
        by_case = {case: calls.get(where.name, Counter()) for case, (where, _, _) in cases.items()}
        print(json.dumps({case: sum(each.values()) for case, each in by_case.items()}, indent=1))
        assert all(by_case.values()), "the operator looks at each experiment"
        assert not {case: each for case, each in by_case.items() if sum(each.values()) > MAX_CALLS}
        assert not {case: each for case, each in by_case.items() if each["update rlexperiments/status"]}

        for where, refusal, cure in cases.values():
            cure.close()
            for each in refusal.objects:
                where.delete(each["kind"].lower(), each["metadata"]["name"])
        for case, (where, refusal, _) in cases.items():
            experiment = ClusterExperiment(where, NAME)
            goes_on = lambda experiment=experiment, refusal=refusal: (
                experiment.condition(refusal.condition).get("reason") != refusal.reason
            )
            until(goes_on, f"{case} goes on after its cure")
