"""The operator has exactly the permissions that it used in all tests before this one."""

from __future__ import annotations

import json
import os
from http import HTTPStatus
from pathlib import Path

import pytest

from rlsrl.testing.cluster_api import Object
from rlsrl.testing.kubectl import Namespace, run

pytestmark = pytest.mark.e2e

OPERATOR = "system:serviceaccount:rlsrl-system:rlsrl-operator"
EVERYBODYS = ("selfsubjectreviews", "selfsubjectaccessreviews")
Permission = tuple[str, str, str]
"""Group, resource with its subresource, verb."""


def granted(kind: str, name: str, *where: str) -> set[Permission]:
    role: Object = json.loads(run("kubectl", "get", kind, name, "-o", "json", *where))
    return {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def used(log: Path) -> set[Permission]:
    found = set()
    for line in log.read_text().splitlines():
        event = json.loads(line)
        about = event.get("objectRef")
        if event["user"]["username"] != OPERATOR or about is None or event["stage"] != "ResponseComplete":
            continue
        resource = "/".join(filter(None, (about["resource"], about.get("subresource", ""))))
        if resource not in EVERYBODYS:
            group, status = about.get("apiGroup", ""), event.get("responseStatus", {}).get("code")
            # What is applied and was not there is created: that wants both permissions.
            verbs = {event["verb"], *(["create"] if status == HTTPStatus.CREATED else [])}
            found |= {(group, resource, verb) for verb in verbs}
    return found


def test_permissions_are_exactly_those_that_are_used(system: Namespace) -> None:
    log = os.environ.get("RLSRL_E2E_AUDIT_LOG", "")
    if not log:
        pytest.skip("RLSRL_E2E_AUDIT_LOG names no audit log: only the cluster's own backend has one")
    may = granted("clusterrole", "rlsrl-operator") | granted("role", "rlsrl-operator-key", "-n", system.name)
    did = used(Path(log))
    assert "*" not in {part for permission in may for part in permission}
    assert not (strays := sorted(did - may)), f"used without a rule: {strays}"
    assert not (spare := sorted(may - did)), f"rules that nothing used: {spare}"
