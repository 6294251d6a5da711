"""Pod templates of experiments: merged into the role's pod, and never able to lift the security context."""

from __future__ import annotations

from typing import Any

import pytest

from rlsrl.api.roles import ROLES
from rlsrl.testing.documents import minimal
from rlsrl_operator.manifests import Manifest, render
from rlsrl_operator.manifests.templates import SECTIONS, template_faults
from rlsrl_operator.settings import PodDefaults
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


def worker(**says: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "worker", **says}]}}


AT = "spec.actors.podTemplate"
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
    (worker(env=[{"name": "RLSRL_TOKEN_FILE", "value": "/x"}]), f"{AT}.spec.containers[0].env: RLSRL_TOKEN_FILE is"),
    (
        {"metadata": {"labels": {"rlsrl.dev/role": "trainer"}}},
        f"{AT}.metadata.labels: rlsrl.dev/role is reserved",
    ),
    ({"metadata": {"name": "x"}}, f"{AT}.metadata.name is not"),
    ({"spec": 5}, f"{AT}.spec: 5 is not a map"),
    ({"kind": "Pod"}, f"{AT}.kind is not"),
]


@pytest.mark.parametrize(("template", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_a_field_that_is_not_allowed_is_named(template: dict[str, Any], said: str) -> None:
    (found,) = template_faults(context_of(with_template(template)).experiment)
    assert said in found


def test_gpus_are_set_by_the_spec_alone() -> None:
    template = worker(resources={"limits": {"nvidia.com/gpu": "8"}})
    assert template_faults(context_of(with_template(template)).experiment) == []
    (said,) = template_faults(context_of(with_template(template, "trainers")).experiment)
    assert said.endswith("resources: nvidia.com/gpu is set by spec.trainers.gpusPerPod")


def test_every_role_but_the_coordinator_has_a_section() -> None:
    assert set(SECTIONS) == {role.name for role in ROLES} - {"coordinator"}


FULL: dict[str, Any] = {
    "metadata": {"labels": {"team": "a"}, "annotations": {"note": "b"}},
    "spec": {
        "nodeSelector": {"pool": "spot"},
        "tolerations": [{"key": "spot", "operator": "Exists"}],
        "affinity": {"podAffinity": {}},
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
    assert pod["metadata"]["labels"] == bare["metadata"]["labels"] | {"team": "a"}
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
