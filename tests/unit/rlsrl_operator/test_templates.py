"""Pod templates of experiments: merged into the role's pod, and never able to lift the security context."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml
from kubernetes.aio.client.models import V1Container, V1PodSpec, V1Volume, V1VolumeProjection

from rlsrl.api.roles import ROLES
from rlsrl.testing.documents import minimal
from rlsrl_operator.manifests import Manifest, render
from rlsrl_operator.manifests.permissions import disallowed
from rlsrl_operator.manifests.templates import SECTIONS, template_faults
from rlsrl_operator.settings import Environments, PodDefaults
from rlsrl_operator.testing import SETTINGS, context_of, faults_of_restricted


def with_template(template: dict[str, Any], section: str = "actors", **more: Any) -> dict[str, Any]:
    document = minimal()
    spec = document["spec"]
    return {**document, "spec": {**spec, section: {**spec.get(section, {}), "podTemplate": template, **more}}}


def pods_of(template: dict[str, Any], **settings: Any) -> Manifest:
    """Return an experiment with that template for its actors."""
    context = context_of(with_template(template), settings=SETTINGS.model_copy(update=settings))
    (found,) = (
        each for each in render(context) if each["metadata"]["name"].endswith("-actor") and "Deploy" in each["kind"]
    )
    return dict(found["spec"]["template"])


def pods_by_role(rendered: Sequence[Manifest]) -> dict[str, Any]:
    """Return the pod specs of the workloads among the objects."""
    return {
        each["metadata"]["labels"]["rlsrl.dev/role"]: each["spec"]["template"]["spec"]
        for each in rendered
        if "template" in each.get("spec", {})
    }


def worker(**says: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "worker", **says}]}}


AT = "spec.actors.podTemplate"
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


def volume(**says: Any) -> dict[str, Any]:
    return {"spec": {"volumes": [{"name": "mine", **says}]}}


REFUSED = [
    ({"spec": {"hostNetwork": True}}, f"{AT}.spec.hostNetwork is not an allowed field; allowed: affinity, "),
    ({"spec": {"nodeselector": {}}}, "(did you mean nodeSelector?)"),
    ({"spec": {"securityContext": {"runAsUser": 0}}}, f"{AT}.spec.securityContext is not"),
    ({"spec": {"serviceAccountName": "admin"}}, f"{AT}.spec.serviceAccountName is not"),
    ({"spec": {"initContainers": []}}, f"{AT}.spec.initContainers is not"),
    ({"spec": {"volumes": [{"name": "x", "hostPath": {"path": "/"}}]}}, f"{AT}.spec.volumes[0].hostPath is not"),
    (
        {"spec": {"containers": [{"name": "mine"}]}},
        f"{AT}.spec.containers[0].name: 'mine' is not a container of the pod",
    ),
    (worker(securityContext={"privileged": True}), f"{AT}.spec.containers[0].securityContext is not"),
    (worker(command=["sh"]), f"{AT}.spec.containers[0].command is not"),
    (
        worker(env=[{"name": "RLSRL_TOKEN_FILE", "value": "/x"}]),
        f"{AT}.spec.containers[0].env[0].name: RLSRL_TOKEN_FILE is",
    ),
    (
        {"metadata": {"labels": {"rlsrl.dev/role": "trainer"}}},
        f"{AT}.metadata.labels: rlsrl.dev/role is reserved",
    ),
    ({"metadata": {"name": "x"}}, f"{AT}.metadata.name is not"),
    *(
        ({"metadata": {"annotations": {name: "x"}}}, f"{AT}.metadata.annotations: {name} is not allowed")
        for name in (
            "container.apparmor.security.beta.kubernetes.io/worker",
            "k8s.v1.cni.cncf.io/networks",
            "iam.amazonaws.com/role",
            "kueue.x-k8s.io/queue-name",
        )
    ),
    ({"spec": {"priorityClassName": "system-node-critical"}}, f"{AT}.spec.priorityClassName: system-node-critical is"),
    ({"spec": {"priorityClassName": "system-cluster-critical"}}, f"{AT}.spec.priorityClassName: system-cluster-criti"),
    ({"spec": {"tolerations": [{"operator": "Exists"}]}}, f"{AT}.spec.tolerations[0].key: '' tolerates taints of"),
    (
        {"spec": {"tolerations": [{"key": "a"}, {"key": "node-role.kubernetes.io/control-plane"}]}},
        f"{AT}.spec.tolerations[1].key: 'node-role.kubernetes.io/control-plane' tolerates",
    ),
    (
        {"spec": {"tolerations": [{"key": "node.kubernetes.io/memory-pressure", "operator": "Exists"}]}},
        f"{AT}.spec.tolerations[0].key: 'node.kubernetes.io/memory-pressure' tolerates",
    ),
    (
        {"spec": {"affinity": {"podAntiAffinity": {REQUIRED: [{"namespaceSelector": {}}]}}}},
        f"{AT}.spec.affinity.podAntiAffinity.{REQUIRED}[0].namespaceSelector is not allowed",
    ),
    (
        {"spec": {"affinity": {"podAffinity": {PREFERRED: [{"podAffinityTerm": {"namespaces": ["b"]}}]}}}},
        f"{AT}.spec.affinity.podAffinity.{PREFERRED}[0].namespaces is not allowed",
    ),
    (volume(name="token", secret={"secretName": "other"}), f"{AT}.spec.volumes[0].name: token is reserved"),
    (volume(name="config", configMap={"name": "other"}), f"{AT}.spec.volumes[0].name: config is reserved"),
    ({"spec": {"volumes": {"hostPath": {}}}}, f"{AT}.spec.volumes: {{'hostPath': {{}}}} is not a list"),
    (
        volume(projected={"sources": [{"configMap": {}}, {"serviceAccountToken": {"path": "t"}}]}),
        f"{AT}.spec.volumes[0].projected.sources[1].serviceAccountToken is not an allowed field",
    ),
    *(
        (worker(volumeMounts=[{"name": "x", "mountPath": path}]), f"volumeMounts[0].mountPath: {path} is reserved")
        for path in ("/etc/rlsrl", "/etc/rlsrl/token", "/etc/../etc/rlsrl/config")
    ),
    (worker(volumeMounts=[{"name": "x", "subPathExpr": "$(A)"}]), "volumeMounts[0].subPathExpr is not"),
    (worker(volumeMounts=[{"name": "x", "mountPropagation": "HostToContainer"}]), "[0].mountPropagation is not"),
    (worker(resources={"claims": [{"name": "gpu"}]}), f"{AT}.spec.containers[0].resources.claims is not"),
    (worker(env=[{"name": "A", "valueFrom": {"fileKeyRef": {}}}]), "env[0].valueFrom.fileKeyRef is not"),
    ({"spec": 5}, f"{AT}.spec: 5 is not a map"),
    ({"kind": "Pod"}, f"{AT}.kind is not"),
]


@pytest.mark.parametrize(("template", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_a_field_that_is_not_allowed_is_named(template: dict[str, Any], said: str) -> None:
    (found,) = template_faults(context_of(with_template(template)).experiment)
    assert said in found


PAGE = Path(__file__).parents[3] / "docs" / "kubernetes" / "pod-templates.md"
FIELDS: Mapping[str, tuple[type, Callable[[str, Any], dict[str, Any]]]] = {
    # By section of the page: Kubernetes' model, and a template with a field of it.
    "`spec`": (V1PodSpec, lambda name, value: {"spec": {name: value}}),
    "`spec.containers`": (V1Container, lambda name, value: worker(**{name: value})),
    "`spec.volumes`": (V1Volume, lambda name, value: volume(**{name: value})),
    "`spec.volumes[].projected.sources`": (
        V1VolumeProjection,
        lambda name, value: volume(projected={"sources": [{name: value}]}),
    ),
}
VALUES: Mapping[str, Any] = {
    # Allowed values of fields whose value is checked, too.
    **{name: [] for name in ("volumes", "tolerations", "containers", "env", "envFrom", "volumeMounts")},
    "name": "worker",
    "priorityClassName": "ours",
}


def verdicts(section: str) -> dict[str, str]:
    """Return the page's verdicts by field."""
    text = PAGE.read_text(encoding="utf-8").partition(f"## {section}\n")[2].partition("\n## ")[0]
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return {name: cells[1].strip() for cells in rows for name in re.findall(r"`([^`]+)`", cells[0])}


@pytest.mark.parametrize("section", FIELDS)
def test_the_page_has_a_verdict_on_every_field_of_kubernetes(section: str) -> None:
    model, _ = FIELDS[section]
    assert set(verdicts(section)) == set(model.attribute_map.values())  # type: ignore[attr-defined]
    assert set(verdicts(section).values()) <= {"allowed", "administrator", "refused"}


@pytest.mark.parametrize(
    ("section", "name", "verdict"),
    [(section, name, verdict) for section in FIELDS for name, verdict in verdicts(section).items()],
)
def test_a_field_is_treated_as_the_page_says(section: str, name: str, verdict: str) -> None:
    template = FIELDS[section][1](name, VALUES.get(name, {}))
    context = context_of(with_template(template))
    faults = template_faults(context.experiment)
    assert bool(faults) is (verdict != "allowed"), faults
    assert all(f".{name} is not an allowed field" in each for each in faults)
    assert not disallowed(context.experiment, SETTINGS.model_copy(update={"pod_templates": "any"}))


def test_an_environment_gets_its_credentials_from_a_secret_as_the_page_says() -> None:
    text = PAGE.read_text(encoding="utf-8").partition("## Credentials of an environment\n")[2]
    shown = yaml.safe_load(text.partition("```yaml\n")[2].partition("```")[0])
    document = {**minimal(), "spec": {**shown["spec"], "stop": {"envSteps": 1}}}
    environments = Environments.model_validate({"egress": [{"cidr": "203.0.113.0/24"}], "apiServer": []})
    settings = SETTINGS.model_copy(update={"environments": environments})
    context = context_of(document, settings=settings)
    assert disallowed(context.experiment, settings) == []
    rendered = render(context)
    pods = pods_by_role(rendered)
    for role in ("actor", "trainer"):
        (container,) = pods[role]["containers"]
        reference = {"secretKeyRef": {"name": "simulator", "key": "token"}}
        assert {"name": "SIMULATOR_TOKEN", "valueFrom": reference} in container["env"]
        assert {"name": "simulator", "mountPath": "/var/run/simulator", "readOnly": True} in container["volumeMounts"]
        (volume,) = (each for each in pods[role]["volumes"] if each["name"] == "simulator")
        assert volume["secret"]["secretName"] == "simulator"
        assert list(faults_of_restricted(pods[role])) == []
    assert "simulator" not in str(pods["coordinator"])
    configs = [each for each in rendered if each["kind"] == "ConfigMap"]
    assert "SIMULATOR_TOKEN" not in str(configs), "the reference is in the pods alone"


def test_the_token_of_a_server_comes_from_a_secret_as_the_page_says() -> None:
    text = PAGE.read_text(encoding="utf-8").partition("is a file:\n")[2]
    shown = yaml.safe_load(text.partition("```yaml\n")[2].partition("```")[0])
    document = {**minimal(), "spec": {**shown["spec"], "stop": {"envSteps": 1}}}
    context = context_of(document)
    assert disallowed(context.experiment, SETTINGS) == []
    token_file = PurePosixPath(document["spec"]["environment"]["http"]["tokenFile"])
    rendered = render(context)
    pods = pods_by_role(rendered)
    for role in ("actor", "trainer"):
        (container,) = pods[role]["containers"]
        (mount,) = (each for each in container["volumeMounts"] if each["name"] == "simulator")
        (volume,) = (each for each in pods[role]["volumes"] if each["name"] == "simulator")
        (item,) = volume["secret"]["items"]
        assert PurePosixPath(mount["mountPath"]) / item["path"] == token_file
        assert list(faults_of_restricted(pods[role])) == []
    assert "simulator" not in str(pods["coordinator"])


def test_gpus_are_set_by_the_spec_alone() -> None:
    template = worker(resources={"limits": {"nvidia.com/gpu": "8"}})
    assert template_faults(context_of(with_template(template)).experiment) == []
    (said,) = template_faults(context_of(with_template(template, "trainers")).experiment)
    assert said.endswith("resources: nvidia.com/gpu is set by spec.trainers.gpusPerPod")


def test_every_role_but_the_coordinator_has_a_section() -> None:
    assert set(SECTIONS) == {role.name for role in ROLES} - {"coordinator"}


FULL: dict[str, Any] = {
    "metadata": {
        "labels": {"team": "a", "example.com/cost": "b"},
        "annotations": {"note": "b", "cluster-autoscaler.kubernetes.io/safe-to-evict": "false"},
    },
    "spec": {
        "nodeSelector": {"pool": "spot"},
        "tolerations": [{"key": "spot", "operator": "Exists"}],
        "affinity": {"podAffinity": {}},
        "priorityClassName": "ours",
        "volumes": [{"name": "maps", "configMap": {"name": "maps"}}, {"name": "tmp", "emptyDir": {"medium": "Memory"}}],
        "containers": [
            {
                "name": "worker",
                "image": "ours:1",
                "resources": {"limits": {"memory": "1Gi"}},
                "env": [{"name": "LEVEL", "value": "1"}],
                "volumeMounts": [{"name": "maps", "mountPath": "/maps"}],
            }
        ],
    },
}


def test_a_template_is_merged_into_the_roles_pod() -> None:
    defaults = PodDefaults(
        node_selector={"pool": "any", "zone": "z"}, resources={"requests": {"cpu": "1"}}, affinity={"nodeAffinity": {}}
    )
    bare, pod = pods_of({}), pods_of(FULL, roles={"actor": defaults})
    assert template_faults(context_of(with_template(FULL)).experiment) == []
    assert pod["metadata"]["labels"] == bare["metadata"]["labels"] | FULL["metadata"]["labels"]
    assert pod["metadata"]["annotations"]["note"] == "b"
    spec = pod["spec"]
    assert list(faults_of_restricted(spec)) == []
    assert spec["nodeSelector"] == {"pool": "spot", "zone": "z"}
    assert spec["affinity"] == {"podAffinity": {}}
    assert spec["tolerations"] == [*bare["spec"]["tolerations"], {"key": "spot", "operator": "Exists"}]
    assert [each["name"] for each in spec["volumes"]] == [*(each["name"] for each in bare["spec"]["volumes"]), "maps"]
    assert {"name": "tmp", "emptyDir": {"medium": "Memory"}} in spec["volumes"]
    (container,), (before,) = spec["containers"], bare["spec"]["containers"]
    assert container["image"] == "ours:1"
    assert container["resources"] == {"requests": {"cpu": "1"}, "limits": {"memory": "1Gi"}}
    assert container["env"] == [*before["env"], {"name": "LEVEL", "value": "1"}]
    assert container["volumeMounts"] == [*before["volumeMounts"], {"name": "maps", "mountPath": "/maps"}]
    assert {name: container[name] for name in before if name not in FULL["spec"]["containers"][0]} == {
        name: before[name] for name in before if name not in FULL["spec"]["containers"][0]
    }


def test_another_template_gives_another_digest() -> None:
    marks = {
        pods_of(each)["metadata"]["annotations"]["rlsrl.dev/template"]
        for each in ({}, FULL, {"metadata": FULL["metadata"]})
    }
    assert len(marks) == 3


def test_with_any_every_field_is_allowed() -> None:
    spec = pods_of({"spec": {"hostNetwork": True, "containers": [{"name": "beside", "image": "x"}]}})["spec"]
    assert spec["hostNetwork"] is True
    assert [each["name"] for each in spec["containers"]] == ["worker", "beside"]
