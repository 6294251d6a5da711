"""The chart renders the objects of its values; the operator reads its settings; the API server accepts all of them."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlsrl.api.roles import ROLES
from rlsrl.testing.cluster_api import Object
from rlsrl.testing.kubectl import namespace, run
from rlsrl_operator.manifests import first_revision, render, revision_object, token_secret, volume_claim
from rlsrl_operator.metrics import PORT
from rlsrl_operator.settings import OperatorSettings, read_settings
from rlsrl_operator.testing import context_of

pytestmark = pytest.mark.e2e

REPOSITORY = Path(__file__).parents[2]
CHART = REPOSITORY / "charts"
VERSION = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))["appVersion"]
MODULE_SECONDS = 300
"""Deadline for the download of the monitors' definitions."""
_SUFFIX = uuid.uuid4().hex[:8]
UI = "rendered-ui"
RELEASE, WHERE, OTHER = "rendered", f"chart-{_SUFFIX}", f"chart-{_SUFFIX}-other"
OPERATOR, KEY = f"{RELEASE}-operator", f"{RELEASE}-operator-key"
OPERATORS_LABELS = {
    "app.kubernetes.io/name": "rlsrl",
    "app.kubernetes.io/instance": RELEASE,
    "app.kubernetes.io/component": "operator",
}

PAGES_LABELS = {**OPERATORS_LABELS, "app.kubernetes.io/component": "ui"}

Name = tuple[str, str, str]
"""Kind, namespace (empty for cluster-wide objects) and name of an object."""
CRD = {("CustomResourceDefinition", "", "rlexperiments.rlsrl.dev")}
FOR_USERS = {("ClusterRole", "", f"{RELEASE}-{role}") for role in ("view", "edit", "admin")}
EVERYWHERE = {("ClusterRole", "", OPERATOR), ("ClusterRoleBinding", "", OPERATOR)}
ALWAYS = {(kind, WHERE, OPERATOR) for kind in ("ServiceAccount", "ConfigMap", "Deployment")}
ITS_KEY = {(kind, WHERE, KEY) for kind in ("Role", "RoleBinding")}
BY_DEFAULT: Set[Name] = CRD | FOR_USERS | EVERYWHERE | ALWAYS | ITS_KEY
READER = f"{WHERE}-{OPERATOR}-api-server"
API_SERVERS_ADDRESSES: Mapping[Name, Object] = {
    ("Role", "default", READER): {"rules": [{"resourceNames": ["kubernetes"], "verbs": ["get"]}]},
    ("RoleBinding", "default", READER): {
        "roleRef": {"name": READER},
        "subjects": [{"kind": "ServiceAccount", "name": OPERATOR, "namespace": WHERE}],
    },
}

DEFAULT_SETTINGS: Object = {
    "keySecret": {"namespace": WHERE, "name": KEY},
    "statusSeconds": 10,
    "images": {
        "actor": f"rlsrl/worker:{VERSION}-actor",
        "learner": f"rlsrl/worker:{VERSION}-learner",
        "pullPolicy": "IfNotPresent",
    },
    "resources": yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))["resources"],
    "roles": {"default": {}},
    "networkPolicies": {
        "enabled": True,
        "dns": {"namespaceSelector": {}, "podSelector": {}},
        "operator": {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": WHERE}},
            "podSelector": {"matchLabels": OPERATORS_LABELS},
        },
        "viewer": {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": WHERE}},
            "podSelector": {"matchLabels": PAGES_LABELS},
        },
    },
}
"""The operator's default settings."""
ALWAYS_SO: Object = {
    "metadata": {"labels": OPERATORS_LABELS},
    "spec": {
        "serviceAccountName": OPERATOR,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [
            {
                "ports": [{"name": "health", "containerPort": 8081}, {"name": "metrics", "containerPort": PORT}],
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                },
            }
        ],
    },
}
"""Fields of the operator's pod with any values."""

SOON_ELSEWHERE = [
    {"key": f"node.kubernetes.io/{state}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 30}
    for state in ("not-ready", "unreachable")
]
"""The operator's default tolerations for a lost node, before those of the values."""

POD: Object = {
    "resources": {
        "requests": {"cpu": 0.25, "memory": "1.5Gi"},
        "limits": {"memory": "2e9", "example.com/device": 1},
    },
    "nodeSelector": {"pool": "rl", "zone": "1", "node-role.kubernetes.io/worker": ""},
    "tolerations": [
        {"key": "dedicated", "operator": "Equal", "value": "rl", "effect": "NoSchedule"},
        {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300},
    ],
    "affinity": {
        "podAntiAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [
                {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"app": "other"}}}
            ]
        }
    },
    "priorityClassName": "high.priority",
    "extraEnv": [
        {"name": "HTTPS_PROXY", "value": "http://proxy.example:3128"},
        {"name": "LEVEL", "value": "1"},
        {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
    ],
    # As large as OpenShift's, and as they come: a float would be written with an exponent.
    "securityContext": {"runAsUser": 1000650000, "runAsGroup": 1, "fsGroup": 2147483647},
}
"""All settings of pods."""
SCRAPERS = [
    {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}, "podSelector": {}},
    {"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}},
]
EGRESS_RANGE = {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}
EGRESS_PODS = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "games"}}, "podSelector": {}}
DIGESTS = {name: f"sha256:{digit * 64}" for name, digit in (("operator", "0"), ("actor", "a"), ("learner", "f"))}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Values and their expected result."""

    values: Object
    template: Object = field(default_factory=dict)
    """Further fields of the operator's pod; None: no such field."""
    settings: Object = field(default_factory=dict)
    """Settings of the operator beside the defaults; None removes a default."""
    more: Mapping[Name, Object] = field(default_factory=dict)
    """Objects beside the default ones, with their fields."""
    less: Set[Name] = frozenset()
    """Default objects that are missing."""


CONTAINERS = (("resources", "resources"), ("extraEnv", "env"), ("image", "image"), ("command", "command"))
"""Values of a pod that are its container's, with their names there."""


def in_template(**given: Any) -> Object:
    """Return the fields of a pod template for a role's settings."""
    spec, container = dict(given), {}
    for name, theirs in CONTAINERS:
        if name in spec:
            container[theirs] = spec.pop(name)
    return {"spec": {**spec, "containers": [container]}}


def roles_in(*places: str) -> dict[Name, Object]:
    subjects = [{"kind": "ServiceAccount", "name": OPERATOR, "namespace": WHERE}]
    return {
        **{("Role", place, OPERATOR): {} for place in places},
        **{("RoleBinding", place, OPERATOR): {"subjects": subjects} for place in places},
    }


def pod_monitors(*, namespaces: Object, interval: str = "30s", **labels: str) -> dict[Name, Object]:
    """Return the monitors of the operator and of the workers in those namespaces."""
    of_operator = {
        "selector": {"matchLabels": OPERATORS_LABELS},
        "podMetricsEndpoints": [{"port": "metrics", "interval": interval}],
    }
    of_workers = {"namespaceSelector": namespaces, "podMetricsEndpoints": [{"interval": interval}]}
    return {
        ("PodMonitor", WHERE, OPERATOR): {"metadata": {"labels": labels}, "spec": of_operator},
        ("PodMonitor", WHERE, f"{RELEASE}-workers"): {"metadata": {"labels": labels}, "spec": of_workers},
    }


def alerts(**labels: str) -> dict[Name, Object]:
    return {
        ("PrometheusRule", WHERE, f"{RELEASE}-{path.stem}"): {
            "metadata": {"labels": labels},
            "spec": yaml.safe_load(path.read_text(encoding="utf-8")),
        }
        for path in (CHART / "alerts").iterdir()
    }


def dashboards(annotations: Object | None, **labels: str | None) -> dict[Name, Object]:
    return {
        ("ConfigMap", WHERE, f"{RELEASE}-dashboard-{path.stem}"): {
            "metadata": {"labels": labels, "annotations": annotations},
            "data": {f"rlsrl-{path.name}": path.read_text(encoding="utf-8")},
        }
        for path in (CHART / "dashboards").iterdir()
    }


PAGES_COMMAND = ["python", "-m", "rlsrl.ui", "--key-file=/etc/rlsrl/key"]
PAGES_RULES = [{"apiGroups": ["rlsrl.dev"], "resources": ["rlexperiments"], "verbs": ["get", "list"]}]
PAGES_ACCOUNT = {"kind": "ServiceAccount", "name": UI, "namespace": WHERE}
PAGE_EVERYWHERE: Mapping[Name, Object] = {
    ("ClusterRole", "", UI): {"rules": PAGES_RULES},
    ("ClusterRoleBinding", "", UI): {"roleRef": {"kind": "ClusterRole", "name": UI}, "subjects": [PAGES_ACCOUNT]},
}


def page(template: Object, *, ingress: list[Object] | None = None) -> Mapping[Name, Object]:
    """Return the page's objects but for its rights. ``template`` has further fields of its pod."""
    (container,) = template["spec"]["containers"]
    own = {**container, "securityContext": ALWAYS_SO["spec"]["containers"][0]["securityContext"]}
    template = {"spec": {**template["spec"], "serviceAccountName": UI, "containers": [own]}}
    return {
        ("ServiceAccount", WHERE, UI): {},
        ("Deployment", WHERE, UI): {"spec": {"replicas": 1, "template": template}},
        ("Service", WHERE, UI): {"spec": {"selector": PAGES_LABELS, "ports": [{"port": 80, "targetPort": "http"}]}},
        ("NetworkPolicy", WHERE, UI): {
            "spec": {"podSelector": {"matchLabels": PAGES_LABELS}, "policyTypes": ["Ingress"], "ingress": ingress}
        },
        ("Role", WHERE, KEY): {
            "rules": [{"resourceNames": [KEY, f"{UI}-key"], "verbs": ["get"]}, {"verbs": ["create"]}]
        },
    }


CASES: Mapping[str, Case] = {
    "defaults": Case(
        values={},
        template=in_template(
            image=f"rlsrl/operator:{VERSION}",
            securityContext={"runAsUser": 10001, "runAsGroup": 10001, "fsGroup": 10001},
            imagePullSecrets=None,
            nodeSelector=None,
            tolerations=SOON_ELSEWHERE,
            affinity=None,
            priorityClassName=None,
        ),
    ),
    "global": Case(values={"global": {"of": "a parent chart"}}),
    "crds.enabled": Case(values={"crds": {"enabled": False}}, less=CRD),
    "ui.enabled": Case(
        values={"ui": {"enabled": True}},
        settings={"viewingKeySecret": {"namespace": WHERE, "name": f"{UI}-key"}},
        more=page(in_template(image=f"rlsrl/operator:{VERSION}", command=PAGES_COMMAND)) | PAGE_EVERYWHERE,
    ),
    "ui, with all options, of some namespaces": Case(
        values={
            "namespaces": [OTHER],
            "ui": {"enabled": True, "hosts": ["lab.example"], "clients": SCRAPERS, "podLabels": {"team": "rl"}, **POD},
        },
        settings={"namespaces": [OTHER], "viewingKeySecret": {"namespace": WHERE, "name": f"{UI}-key"}},
        more=roles_in(OTHER)
        | page(
            in_template(
                command=[*PAGES_COMMAND, f"--namespace={OTHER}", "--name=lab.example"],
                **{**POD, "tolerations": [*SOON_ELSEWHERE, *POD["tolerations"]]},
            ),
            ingress=[{"from": SCRAPERS, "ports": [{"port": "http", "protocol": "TCP"}]}],
        )
        | {
            ("Role", OTHER, UI): {"rules": PAGES_RULES},
            ("RoleBinding", OTHER, UI): {"roleRef": {"kind": "Role", "name": UI}, "subjects": [PAGES_ACCOUNT]},
        },
        less=EVERYWHERE,
    ),
    "ui, without NetworkPolicies": Case(
        values={"ui": {"enabled": True}, "networkPolicy": {"enabled": False}},
        settings={
            "viewingKeySecret": {"namespace": WHERE, "name": f"{UI}-key"},
            "networkPolicies": {"enabled": False},
        },
        more={key: each for key, each in page(in_template()).items() if key[0] != "NetworkPolicy"} | PAGE_EVERYWHERE,
    ),
    "rbac.aggregate": Case(values={"rbac": {"aggregate": False}}, less=FOR_USERS),
    "podTemplates": Case(values={"podTemplates": "any"}, settings={"podTemplates": "any"}),
    "namespaces": Case(
        values={"namespaces": [OTHER]}, settings={"namespaces": [OTHER]}, more=roles_in(OTHER), less=EVERYWHERE
    ),
    "namespaces, its own too": Case(
        values={"namespaces": [WHERE, OTHER]},
        settings={"namespaces": [WHERE, OTHER]},
        more=roles_in(WHERE, OTHER),
        less=EVERYWHERE,
    ),
    "images.tag": Case(
        values={"images": {"tag": "v1.2_3"}},
        template=in_template(image="rlsrl/operator:v1.2_3"),
        settings={"images": {"actor": "rlsrl/worker:v1.2_3-actor", "learner": "rlsrl/worker:v1.2_3-learner"}},
    ),
    "images.registry": Case(
        values={"images": {"registry": "registry.example:5000/team"}},
        template=in_template(image=f"registry.example:5000/team/rlsrl/operator:{VERSION}"),
        settings={
            "images": {
                "actor": f"registry.example:5000/team/rlsrl/worker:{VERSION}-actor",
                "learner": f"registry.example:5000/team/rlsrl/worker:{VERSION}-learner",
            }
        },
    ),
    "images by role": Case(
        values={
            "images": {
                "tag": "not-this",
                "operator": {"repository": "own/the-operator", "tag": "a"},
                "actor": {"repository": "own/actor", "tag": "b"},
                "learner": {"repository": "learner", "tag": "c"},
            }
        },
        template=in_template(image="own/the-operator:a"),
        settings={"images": {"actor": "own/actor:b", "learner": "learner:c"}},
    ),
    "images by digest": Case(
        values={
            "images": {
                "registry": "localhost:5000",
                **{name: {"tag": "not-this", "digest": digest} for name, digest in DIGESTS.items()},
            }
        },
        template=in_template(image=f"localhost:5000/rlsrl/operator@{DIGESTS['operator']}"),
        settings={
            "images": {
                "actor": f"localhost:5000/rlsrl/worker@{DIGESTS['actor']}",
                "learner": f"localhost:5000/rlsrl/worker@{DIGESTS['learner']}",
            }
        },
    ),
    **{
        f"images.pullPolicy {policy}": Case(
            values={"images": {"pullPolicy": policy}},
            template={"spec": {"containers": [{"imagePullPolicy": policy}]}},
            settings={"images": {"pullPolicy": policy}},
        )
        for policy in ("Always", "IfNotPresent", "Never")
    },
    "images.pullSecrets": Case(
        values={"images": {"pullSecrets": ["a", "b.example"]}},
        template=in_template(imagePullSecrets=[{"name": "a"}, {"name": "b.example"}]),
        settings={"images": {"pullSecrets": ["a", "b.example"]}},
    ),
    "operator.statusSeconds": Case(values={"operator": {"statusSeconds": 2.5}}, settings={"statusSeconds": 2.5}),
    "operator.podLabels": Case(
        values={"operator": {"podLabels": {"team": "rl", "sidecar.example/inject": "false"}}},
        template={"metadata": {"labels": {"team": "rl", "sidecar.example/inject": "false"}}},
    ),
    "operator.resources, no limits": Case(
        values={"operator": {"resources": {"limits": None}}},
        template=in_template(resources={"limits": None, "requests": {"cpu": "50m", "memory": "128Mi"}}),
    ),
    "operator.securityContext, left to the cluster": Case(
        values={"operator": {"securityContext": dict.fromkeys(POD["securityContext"])}},
        template=in_template(securityContext=dict.fromkeys(POD["securityContext"])),
    ),
    **{
        f"operator.{name}": Case(values={"operator": {name: value}}, template=in_template(**{name: value}))
        for name, value in POD.items()
        if name != "tolerations"
    },
    "operator.tolerations": Case(
        values={"operator": {"tolerations": POD["tolerations"]}},
        template=in_template(tolerations=[*SOON_ELSEWHERE, *POD["tolerations"]]),
    ),
    **{
        f"roles.{role}": Case(values={"roles": {role: POD}}, settings={"roles": {role: POD}})
        for role in ("default", *(role.name for role in ROLES))
    },
    "roles, left to the cluster": Case(
        values={"roles": {"default": {"securityContext": dict.fromkeys(POD["securityContext"])}}},
        settings={"roles": {"default": {"securityContext": dict.fromkeys(POD["securityContext"])}}},
    ),
    "environments.egress, by address": Case(
        values={"environments": {"egress": [EGRESS_RANGE]}},
        settings={"environments": {"egress": [EGRESS_RANGE]}},
        more=API_SERVERS_ADDRESSES,
    ),
    "environments.egress, by labels": Case(
        values={"environments": {"egress": [EGRESS_PODS]}}, settings={"environments": {"egress": [EGRESS_PODS]}}
    ),
    "networkPolicy.enabled": Case(
        values={"networkPolicy": {"enabled": False}}, settings={"networkPolicies": {"enabled": False}}
    ),
    "networkPolicy.scrapers": Case(
        values={"networkPolicy": {"scrapers": SCRAPERS}}, settings={"networkPolicies": {"scrapers": SCRAPERS}}
    ),
    "networkPolicy.dns": Case(
        values={"networkPolicy": {"dns": {"podSelector": {"matchLabels": {"k8s-app": "kube-dns"}}}}},
        settings={"networkPolicies": {"dns": {"podSelector": {"matchLabels": {"k8s-app": "kube-dns"}}}}},
    ),
    "networkPolicy.dns, by address": Case(
        values={
            "networkPolicy": {
                "dns": {"namespaceSelector": None, "podSelector": None, "ipBlock": {"cidr": "169.254.20.10/32"}}
            }
        },
        settings={
            "networkPolicies": {
                "dns": {"namespaceSelector": None, "podSelector": None, "ipBlock": {"cidr": "169.254.20.10/32"}}
            }
        },
    ),
    "metrics.podMonitor": Case(
        values={"metrics": {"podMonitor": {"enabled": True}}}, more=pod_monitors(namespaces={"any": True})
    ),
    "metrics.podMonitor, chosen by labels, of some namespaces": Case(
        values={
            "namespaces": [OTHER],
            "metrics": {"podMonitor": {"enabled": True, "labels": {"release": "prom"}, "interval": "500ms"}},
        },
        settings={"namespaces": [OTHER]},
        more=roles_in(OTHER) | pod_monitors(namespaces={"matchNames": [OTHER]}, interval="500ms", release="prom"),
        less=EVERYWHERE,
    ),
    "metrics.prometheusRule": Case(values={"metrics": {"prometheusRule": {"enabled": True}}}, more=alerts()),
    "metrics.prometheusRule, chosen by labels": Case(
        values={"metrics": {"prometheusRule": {"enabled": True, "labels": {"release": "prom"}}}},
        more=alerts(release="prom"),
    ),
    "metrics.dashboards": Case(
        values={"metrics": {"dashboards": {"enabled": True}}}, more=dashboards(None, grafana_dashboard="1")
    ),
    "metrics.dashboards, in a folder": Case(
        values={
            "metrics": {
                "dashboards": {
                    "enabled": True,
                    "labels": {"grafana_dashboard": None, "look": "here"},
                    "annotations": {"grafana_folder": "rlsrl"},
                }
            }
        },
        more=dashboards({"grafana_folder": "rlsrl"}, look="here", grafana_dashboard=None),
    ),
}


def merged(base: Object, over: Object) -> Object:
    """Merge values as helm does: None removes a value."""
    found = dict(base)
    for name, value in over.items():
        if value is None and name in base:
            del found[name]
        else:
            both = isinstance(value, dict) and isinstance(base.get(name), dict)
            found[name] = merged(base[name], value) if both else value
    return found


def differences(found: Any, wanted: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of wrong or missing fields; additional fields are allowed."""
    match wanted:
        case dict() if isinstance(found, dict):
            for name, value in wanted.items():
                yield from differences(found.get(name), value, f"{path}.{name}")
        case list() if isinstance(found, list) and len(found) == len(wanted):
            for i in range(len(wanted)):
                yield from differences(found[i], wanted[i], f"{path}[{i}]")
        case _ if found != wanted:
            yield f"{path}: {found!r}, not {wanted!r}"


def rendered_of(values: Object) -> list[Object]:
    text = run("helm", "template", RELEASE, str(CHART), "-n", WHERE, "-f", "-", stdin=json.dumps(values))
    return [document for document in yaml.safe_load_all(text) if document]


def by_name(objects: Sequence[Object]) -> dict[Name, Object]:
    found = {(each["kind"], each["metadata"].get("namespace", ""), each["metadata"]["name"]): each for each in objects}
    assert len(found) == len(objects), "no name twice"
    return found


def of_an_experiment(document: Object, settings: OperatorSettings) -> list[Object]:
    """Return all objects that the operator would create for it."""
    context = replace(context_of(document, settings=settings), namespace=WHERE)
    rendered = render(context)
    claim = volume_claim(context)
    assert claim is not None
    return [
        token_secret(context, "0" * 64, "1" * 64),
        claim,
        revision_object(context, first_revision(context), b"key"),
        *rendered,
    ]


def dry_run(objects: Sequence[Object]) -> None:
    """Apply all objects as a dry run on the API server; an unknown field or a warning is an error."""
    options = ["--dry-run=server", "--validate=strict", "--warnings-as-errors"]
    # Existing objects have other owners: the dry run checks only the requested objects.
    lines = run(
        *("kubectl", "apply", "--server-side", "--force-conflicts", *options, "--filename", "-"),
        stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}),
    ).splitlines()
    assert len(lines) == len(objects)
    assert all(line.endswith("serverside-applied (server dry run)") for line in lines), lines


@pytest.fixture(scope="module")
def places(kubeconfig: str) -> Iterator[None]:
    """The release's namespace, and another one."""
    assert kubeconfig
    with namespace(WHERE, wait=False), namespace(OTHER, wait=False):
        yield


@pytest.fixture(scope="module")
def monitors(kubeconfig: str) -> Iterator[None]:
    """Install the definitions of PodMonitor and PrometheusRule, unless they exist."""
    assert kubeconfig
    paths = run(str(REPOSITORY / "hack" / "monitor-crds"), seconds=MODULE_SECONDS).split()
    there = run("kubectl", "get", "crd", "-o", "name").split()
    with ExitStack() as stack:
        for path in paths:
            name = f"crd/{yaml.safe_load(Path(path).read_text(encoding='utf-8'))['metadata']['name']}"
            if name.replace("crd/", "customresourcedefinition.apiextensions.k8s.io/") not in there:
                run("kubectl", "apply", "--server-side", "-f", path)
                stack.callback(run, "kubectl", "delete", name, "--wait=true")
                run("kubectl", "wait", "--for=condition=Established", name)
        yield


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    "values", [{}, merged(CASES["images.tag"].values, {"namespaces": ["a"], "roles": {"actor": POD}})]
)
def test_lint_finds_nothing(values: Object, strict: bool) -> None:
    options = ["--strict"] if strict else []
    assert "0 chart(s) failed" in run("helm", "lint", str(CHART), "-f", "-", *options, stdin=json.dumps(values))


@pytest.mark.usefixtures("places", "monitors")
@pytest.mark.parametrize("name", CASES)
def test_rendered_objects_match_the_values_and_the_server_accepts_them(
    name: str, cartpole: Object, tmp_path: Path
) -> None:
    case = CASES[name]
    objects = rendered_of(case.values)
    found = by_name(objects)
    assert set(found) == (BY_DEFAULT | set(case.more)) - case.less
    assert [text for key in case.more for text in differences(found[key], case.more[key], str(key))] == []
    labels = {**OPERATORS_LABELS, "app.kubernetes.io/managed-by": "Helm", "app.kubernetes.io/version": VERSION}
    pages_labels = {**labels, **PAGES_LABELS}
    wanted = {key: pages_labels if key[2] == UI else labels for key in found}
    assert {key for key in found if list(differences(found[key]["metadata"].get("labels"), wanted[key]))} <= CRD

    template = found["Deployment", WHERE, OPERATOR]["spec"]["template"]
    assert list(differences(template, ALWAYS_SO)) == []
    assert list(differences(template, case.template)) == []

    path = tmp_path / "settings.yaml"
    path.write_text(found["ConfigMap", WHERE, OPERATOR]["data"]["settings.yaml"], encoding="utf-8")
    settings = read_settings(path)
    expected = OperatorSettings.model_validate(merged(DEFAULT_SETTINGS, case.settings), by_alias=True, by_name=False)
    assert settings == expected

    cartpole["spec"]["evaluators"] = {"environments": 2}
    dry_run([*objects, *of_an_experiment(cartpole, settings)])
