"""helm refuses invalid values before it installs anything, and names the value and the reason."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from rlsrl.testing.cluster_api import Object
from rlsrl.testing.kubectl import KubectlFailed, run

pytestmark = pytest.mark.e2e

CHART = Path(__file__).parents[2] / "charts"
UNKNOWN = "additional properties '{}' not allowed"

REFUSED: Mapping[str, tuple[Object, str, str]] = {
    # Each case: values, the path in helm's message (fields and indices), the reason in the message.
    "a misspelt section": ({"image": {}}, "", UNKNOWN.format("image")),
    "a section taken away": ({"rbac": None}, "", "missing property 'rbac'"),
    "a truth taken away": ({"crds": {"enabled": None}}, "/crds", "missing property 'enabled'"),
    "an image taken away": ({"images": {"actor": None}}, "/images", "missing property 'actor'"),
    "a section of another kind": ({"crds": True}, "/crds", "got boolean, want object"),
    "a word for a truth": ({"crds": {"enabled": "false"}}, "/crds/enabled", "got string, want boolean"),
    "a misspelt value": ({"images": {"pullPolici": "Always"}}, "/images", UNKNOWN.format("pullPolici")),
    "no such choice": ({"images": {"pullPolicy": "Sometimes"}}, "/images/pullPolicy", "must be one of 'Always', 'IfN"),
    "a registry with a scheme": ({"images": {"registry": "https://a.example"}}, "/images/registry", "does not match"),
    "a registry with a slash": ({"images": {"registry": "a.example/"}}, "/images/registry", "does not match"),
    "a number for a tag": ({"images": {"tag": 1.0}}, "/images/tag", "got number, want string"),
    "a tag with a digest": ({"images": {"tag": f"a@sha256:{'0' * 64}"}}, "/images/tag", "does not match"),
    "a role's tag with a space": ({"images": {"actor": {"tag": "a b"}}}, "/images/actor/tag", "does not match"),
    "a repository with a tag": (
        {"images": {"learner": {"repository": "a/b:c"}}},
        "/images/learner/repository",
        "does not match",
    ),
    "no repository": ({"images": {"operator": {"repository": ""}}}, "/images/operator/repository", "does not match"),
    "a repository taken away": (
        {"images": {"operator": {"repository": None}}},
        "/images/operator",
        "missing property 'repository'",
    ),
    "a digest cut short": (
        {"images": {"actor": {"digest": f"sha256:{'0' * 63}"}}},
        "/images/actor/digest",
        "does not match",
    ),
    "a digest without its kind": (
        {"images": {"actor": {"digest": "0" * 64}}},
        "/images/actor/digest",
        "does not match",
    ),
    "an image that is not ours": ({"images": {"trainer": {}}}, "/images", UNKNOWN.format("trainer")),
    "one pull secret, no list": ({"images": {"pullSecrets": "a"}}, "/images/pullSecrets", "got string, want array"),
    "an empty pull secret": ({"images": {"pullSecrets": ["a", ""]}}, "/images/pullSecrets/1", "does not match"),
    "a pull secret as in a pod": (
        {"images": {"pullSecrets": [{"name": "a"}]}},
        "/images/pullSecrets/0",
        "got object, want string",
    ),
    "a pull secret twice": (
        {"images": {"pullSecrets": ["a", "a"]}},
        "/images/pullSecrets",
        "items at 0 and 1 are equal",
    ),
    "one namespace, no list": ({"namespaces": "a"}, "/namespaces", "got string, want array"),
    "an empty namespace": ({"namespaces": [""]}, "/namespaces/0", "does not match"),
    "a namespace that can be none": ({"namespaces": ["a", "B_c"]}, "/namespaces/1", "does not match"),
    "a namespace too long": ({"namespaces": ["a" * 64]}, "/namespaces/0", "does not match"),
    "a namespace twice": ({"namespaces": ["a", "b", "a"]}, "/namespaces", "items at 0 and 2 are equal"),
    "too often": ({"operator": {"statusSeconds": 0.5}}, "/operator/statusSeconds", "minimum: got 0.5, want 1"),
    "too seldom": ({"operator": {"statusSeconds": 3601}}, "/operator/statusSeconds", "maximum: got 3,601, want 3,600"),
    "a duration": ({"operator": {"statusSeconds": "10s"}}, "/operator/statusSeconds", "got string, want number"),
    "more operators": ({"operator": {"replicas": 2}}, "/operator", UNKNOWN.format("replicas")),
    "a resource beside": ({"operator": {"resources": {"cpu": 1}}}, "/operator/resources", UNKNOWN.format("cpu")),
    "no quantity": (
        {"operator": {"resources": {"limits": {"memory": "512MB"}}}},
        "/operator/resources/limits/memory",
        "does not match",
    ),
    "less than nothing": (
        {"operator": {"resources": {"requests": {"cpu": -1}}}},
        "/operator/resources/requests/cpu",
        "minimum: got -1, want 0",
    ),
    "a label that is no text": (
        {"operator": {"nodeSelector": {"gpu": True}}},
        "/operator/nodeSelector/gpu",
        "got boolean, want string",
    ),
    "a label of the chart's own": (
        {"operator": {"podLabels": {"app.kubernetes.io/name": "a"}}},
        "/operator/podLabels/app.kubernetes.io~1name",
        "false schema",
    ),
    "a label that can be none": ({"operator": {"podLabels": {"a": "b/c"}}}, "/operator/podLabels/a", "does not match"),
    "a label's name that can be none": (
        {"operator": {"podLabels": {"a b": "c"}}},
        "/operator/podLabels",
        UNKNOWN.format("a b"),
    ),
    "an unknown effect": (
        {"operator": {"tolerations": [{"effect": "NoSchedul"}]}},
        "/operator/tolerations/0/effect",
        "must be one of 'NoSchedule'",
    ),
    "variables as a map": ({"operator": {"extraEnv": {"A": "1"}}}, "/operator/extraEnv", "got object, want array"),
    "a variable's number": (
        {"operator": {"extraEnv": [{"name": "A", "value": 1}]}},
        "/operator/extraEnv/0/value",
        "got number, want string",
    ),
    "a variable without a name": (
        {"operator": {"extraEnv": [{"value": "1"}]}},
        "/operator/extraEnv/0",
        "missing property 'name'",
    ),
    "a priority that can be none": (
        {"operator": {"priorityClassName": "High"}},
        "/operator/priorityClassName",
        "does not match",
    ),
    "affinity one level up": (
        {"operator": {"affinity": {"requiredDuringSchedulingIgnoredDuringExecution": []}}},
        "/operator/affinity",
        UNKNOWN.format("requiredDuringSchedulingIgnoredDuringExecution"),
    ),
    "root": (
        {"operator": {"securityContext": {"runAsUser": 0}}},
        "/operator/securityContext/runAsUser",
        "minimum: got 0, want 1",
    ),
    "more than restricted": (
        {"operator": {"securityContext": {"privileged": True}}},
        "/operator/securityContext",
        UNKNOWN.format("privileged"),
    ),
    "no such role": ({"roles": {"trainers": {}}}, "/roles", UNKNOWN.format("trainers")),
    "a field that roles' pods do not have": (
        {"roles": {"actor": {"podLabels": {}}}},
        "/roles/actor",
        UNKNOWN.format("podLabels"),
    ),
    "within a role": (
        {"roles": {"evaluator": {"tolerations": [{"tolerationSeconds": "60"}]}}},
        "/roles/evaluator/tolerations/0/tolerationSeconds",
        "got string, want integer",
    ),
    "a group's name": (
        {"roles": {"trainer": {"securityContext": {"fsGroup": "users"}}}},
        "/roles/trainer/securityContext/fsGroup",
        "got string, want null or integer",
    ),
    "a page's address instead of its host": (
        {"ui": {"enabled": True, "hosts": ["https://lab.example"]}},
        "/ui/hosts/0",
        "does not match",
    ),
    "no peer": (
        {"networkPolicy": {"dns": {"namespaceSelector": None, "podSelector": None}}},
        "/networkPolicy/dns",
        "minProperties: got 0, want 1",
    ),
    "a peer of both kinds": (
        {"networkPolicy": {"dns": {"ipBlock": {"cidr": "10.0.0.10/32"}}}},
        "/networkPolicy/dns",
        "maxProperties: got 3, want 1",
    ),
    "an unknown kind of peer": (
        {"networkPolicy": {"scrapers": [{"namespace": {}}]}},
        "/networkPolicy/scrapers/0",
        UNKNOWN.format("namespace"),
    ),
    # Else it would be found with the first experiment, by the API server.
    "a selector's labels one level up": (
        {"networkPolicy": {"scrapers": [{"podSelector": {"app": "prometheus"}}]}},
        "/networkPolicy/scrapers/0/podSelector",
        UNKNOWN.format("app"),
    ),
    "addresses that are none": (
        {"networkPolicy": {"scrapers": [{"ipBlock": {"cidr": "10.0.0.1"}}]}},
        "/networkPolicy/scrapers/0/ipBlock/cidr",
        "does not match",
    ),
    "a destination without contents": (
        {"environments": {"egress": [{}]}},
        "/environments/egress/0",
        "minProperties: got 0, want 1",
    ),
    "a destination of both kinds": (
        {"environments": {"egress": [{"cidr": "10.0.0.0/8", "podSelector": {}}]}},
        "/environments/egress/0/podSelector",
        "false schema",
    ),
    "an exception of no range": (
        {"environments": {"egress": [{"podSelector": {}, "except": ["10.0.0.0/8"]}]}},
        "/environments/egress/0/except",
        "false schema",
    ),
    "a destination in a network policy's words": (
        {"environments": {"egress": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}},
        "/environments/egress/0",
        UNKNOWN.format("ipBlock"),
    ),
    "a selector by expressions": (
        {"environments": {"egress": [{"podSelector": {"matchExpressions": []}}]}},
        "/environments/egress/0/podSelector",
        UNKNOWN.format("matchExpressions"),
    ),
    "an interval without a unit": (
        {"metrics": {"podMonitor": {"interval": "30"}}},
        "/metrics/podMonitor/interval",
        "does not match",
    ),
    "a monitor's label of the chart's own": (
        {"metrics": {"prometheusRule": {"labels": {"helm.sh/chart": "a"}}}},
        "/metrics/prometheusRule/labels/helm.sh~1chart",
        "false schema",
    ),
    "a number for an annotation": (
        {"metrics": {"dashboards": {"annotations": {"grafana_folder": 1}}}},
        "/metrics/dashboards/annotations/grafana_folder",
        "got number, want string",
    ),
    "one scraper, no list": (
        {"networkPolicy": {"scrapers": {"podSelector": {}}}},
        "/networkPolicy/scrapers",
        "got object, want array",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_values_are_refused_with_their_path(name: str) -> None:
    values, path, reason = REFUSED[name]
    with pytest.raises(KubectlFailed) as refused:
        run("helm", "template", "a", str(CHART), "-f", "-", stdin=json.dumps(values))
    message = str(refused.value)
    assert "values don't meet the specifications of the schema(s)" in message
    reasons = [line for line in message.splitlines() if line.lstrip(" -").startswith(f"at '{path}': ")]
    assert any(reason in line for line in reasons), message
