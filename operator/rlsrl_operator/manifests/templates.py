"""Merge an experiment's ``podTemplate`` into the pod template of a role, within the administrator's rules. Pure.

The operator creates pods with its own rights for users who may have fewer. So a list names the allowed fields: none
reaches the node, the API server or other namespaces.
"""

from __future__ import annotations

import difflib
import posixpath
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic.alias_generators import to_camel

from rlsrl.api.pods import CONTAINER
from rlsrl.api.role_names import TRAINER
from rlsrl.api.roles import ROLES
from rlsrl.api.spec import RLExperiment
from rlsrl_operator.manifests.types import Manifest

SECTIONS: Mapping[str, str] = {role.name: role.section for role in ROLES if role.section is not None}
"""By role: the section of the spec that holds its ``pod_template``."""
_OUR_PREFIXES = ("rlsrl.dev/", "app.kubernetes.io/")
_OUR_VARIABLES = "RLSRL_"
_OUR_VOLUMES = frozenset({"config", "token", "tls", "parameters-source"})
_OUR_FOLDER = "/etc/rlsrl/"
_ACTED_UPON = (
    *("kubernetes.io", "k8s.io", "x-k8s.io", "io.kubernetes.cri-o"),
    *("cncf.io", "multus-cni.io", "iam.amazonaws.com"),
)
"""Domains of labels and annotations that lift security profiles, add networks or grant roles of a cloud."""
_HARMLESS = ("cluster-autoscaler.kubernetes.io/",)
_SYSTEM_PRIORITY = "system-"
_SYSTEM_TAINTS = ("node-role.kubernetes.io/", "node.kubernetes.io/")
_KEYS = {"volumeMounts": "mountPath"}
"""The key of a list's entries, if it is not ``name``."""
_WHOLE = frozenset({"affinity"})
"""Fields that are replaced as a whole: a mixture of two values would mean neither."""


def template_of_role(experiment: RLExperiment, role: str) -> Mapping[str, Any]:
    """Return the role's ``podTemplate``; an empty one for the coordinator, which has none."""
    section = getattr(experiment.spec, SECTIONS[role]) if role in SECTIONS else None
    template: Mapping[str, Any] = {} if section is None else section.pod_template
    return template


def resources_in(template: Mapping[str, Any]) -> set[str]:
    """Return the resources, such as ``memory``, whose requests or limits a template sets for the worker's container."""
    containers = [_map(each) for each in _list(_map(template.get("spec")).get("containers"))]
    amounts = [_map(each.get("resources")) for each in containers if each.get("name") == CONTAINER]
    return {name for each in amounts for kind in ("requests", "limits") for name in _map(each.get(kind))}


def template_faults(experiment: RLExperiment) -> list[str]:
    """Return the faults of the experiment's pod templates: field, allowed names, the nearest name."""
    found: list[str] = []
    for role, section in SECTIONS.items():
        template, at = template_of_role(experiment, role), f"spec.{to_camel(section)}.podTemplate"
        found += _TEMPLATE(template, at)
        if role == TRAINER:
            found += _devices(template, at, experiment.spec.trainers.gpu_resource)
    return found


def merged_template(made: Manifest, template: Mapping[str, Any]) -> Manifest:
    """Return a pod template merged with an experiment's: maps by key, lists by name, other entries appended."""
    return {
        "metadata": _merged(_map(template.get("metadata")), made["metadata"]),
        "spec": _merged(made["spec"], _map(template.get("spec"))),
    }


_Check = Callable[[Any, str], Iterator[str]]
"""Yields the faults of a value at that path."""


def _anything(_: Any, __: str) -> Iterator[str]:
    return iter(())


def _record(**fields: _Check) -> _Check:
    """Return the check of a map that has only these fields."""

    def check(value: Any, at: str) -> Iterator[str]:
        if value is not None and not isinstance(value, dict):
            yield f"{at}: {value!r} is not a map"
        for name, inner in _map(value).items():
            if name in fields:
                yield from fields[name](inner, f"{at}.{name}")
            else:
                near = difflib.get_close_matches(name, fields, n=1)
                meant = f" (did you mean {near[0]}?)" if near else ""
                yield f"{at}.{name} is not an allowed field; allowed: {', '.join(fields)}{meant}"

    return check


def _all_of(*checks: _Check) -> _Check:
    def check(value: Any, at: str) -> Iterator[str]:
        for each in checks:
            yield from each(value, at)

    return check


def _list_of(entry: _Check) -> _Check:
    def check(value: Any, at: str) -> Iterator[str]:
        if value is not None and not isinstance(value, list):
            yield f"{at}: {value!r} is not a list"
        for index, each in enumerate(_list(value)):
            yield from entry(each, f"{at}[{index}]")

    return check


def _names_of_metadata(value: Any, at: str) -> Iterator[str]:
    for name in _map(value):
        domain = str(name).rpartition("/")[0]
        if str(name).startswith(_OUR_PREFIXES):
            yield f"{at}: {name} is reserved for the operator"
        elif f".{domain}".endswith(tuple(f".{each}" for each in _ACTED_UPON)) and not name.startswith(_HARMLESS):
            yield f"{at}: {name} is not allowed: names of {domain} change what the cluster lets a pod do"


def _name_of_container(value: Any, at: str) -> Iterator[str]:
    if (which := _map(value).get("name")) != CONTAINER:
        yield f"{at}.name: {which!r} is not a container of the pod; allowed: {CONTAINER}"


def _name_of_variable(value: Any, at: str) -> Iterator[str]:
    if str(chosen := _map(value).get("name")).startswith(_OUR_VARIABLES):
        yield f"{at}.name: {chosen} is reserved for the operator"


def _name_of_volume(value: Any, at: str) -> Iterator[str]:
    if (chosen := _map(value).get("name")) in _OUR_VOLUMES:
        yield f"{at}.name: {chosen} is reserved for the operator"


def _mount_path(value: Any, at: str) -> Iterator[str]:
    if f"{posixpath.normpath(str(value))}/".startswith(_OUR_FOLDER):
        yield f"{at}: {value} is reserved for the operator"


def _priority(value: Any, at: str) -> Iterator[str]:
    if str(value).startswith(_SYSTEM_PRIORITY):
        yield f"{at}: {value} is for pods that a node or the cluster needs; allowed: classes of the administrator"


def _taint(value: Any, at: str) -> Iterator[str]:
    key = _map(value).get("key") or ""
    if not key or str(key).startswith(_SYSTEM_TAINTS):
        yield f"{at}.key: {key!r} tolerates taints of control planes or of sick nodes; allowed: another taint's key"


def _own_namespace(value: Any, at: str) -> Iterator[str]:
    """Yield the pod affinity terms over other namespaces: an anti-affinity keeps their pods away from nodes."""
    for kind in ("podAffinity", "podAntiAffinity"):
        for name, terms in _map(_map(value).get(kind)).items():
            for index, each in enumerate(_list(terms)):
                term = _map(each).get("podAffinityTerm", each)
                for field in ("namespaces", "namespaceSelector"):
                    if field in _map(term):
                        yield f"{at}.{kind}.{name}[{index}].{field} is not allowed: terms are about this namespace"


_VOLUME = _record(
    name=_anything,
    configMap=_anything,
    downwardAPI=_anything,
    emptyDir=_anything,
    ephemeral=_anything,
    persistentVolumeClaim=_anything,
    projected=_record(
        defaultMode=_anything,
        sources=_list_of(_record(configMap=_anything, downwardAPI=_anything, secret=_anything)),
    ),
    secret=_anything,
)
_VARIABLE = _record(
    name=_anything,
    value=_anything,
    valueFrom=_record(
        configMapKeyRef=_anything, fieldRef=_anything, resourceFieldRef=_anything, secretKeyRef=_anything
    ),
)
_CONTAINER = _record(
    name=_anything,
    image=_anything,
    resources=_record(limits=_anything, requests=_anything),
    env=_list_of(_all_of(_VARIABLE, _name_of_variable)),
    envFrom=_list_of(_record(prefix=_anything, configMapRef=_anything, secretRef=_anything)),
    volumeMounts=_list_of(_record(name=_anything, mountPath=_mount_path, readOnly=_anything, subPath=_anything)),
)
_TEMPLATE = _record(
    metadata=_record(labels=_names_of_metadata, annotations=_names_of_metadata),
    spec=_record(
        affinity=_own_namespace,
        containers=_list_of(_all_of(_CONTAINER, _name_of_container)),
        imagePullSecrets=_anything,
        nodeSelector=_anything,
        priorityClassName=_priority,
        runtimeClassName=_anything,
        schedulerName=_anything,
        tolerations=_list_of(_taint),
        topologySpreadConstraints=_anything,
        volumes=_list_of(_all_of(_VOLUME, _name_of_volume)),
    ),
)
"""The fields that a pod template may have. docs/kubernetes/pod-templates.md has the reason for each other field."""


def _devices(template: Mapping[str, Any], at: str, resource: str) -> Iterator[str]:
    """Yield the faults of GPU resources: the spec sets them together with the ranks in a pod."""
    for index, container in enumerate(_list(_map(template.get("spec")).get("containers"))):
        resources = _map(_map(container).get("resources"))
        if any(resource in _map(resources.get(kind)) for kind in ("limits", "requests")):
            yield f"{at}.spec.containers[{index}].resources: {resource} is set by spec.trainers.gpusPerPod"


def _map(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _merged(below: Any, above: Any, what: str = "") -> Any:
    if isinstance(below, dict) and isinstance(above, dict) and what not in _WHOLE:
        both = {name: _merged(below[name], value, name) for name, value in above.items() if name in below}
        return {**below, **above, **both}
    if isinstance(below, list) and isinstance(above, list):
        return _merged_lists(below, above, _KEYS.get(what, "name"))
    return above


def _merged_lists(below: list[Any], above: list[Any], key: str) -> list[Any]:
    named = {each[key]: each for each in above if isinstance(each, dict) and key in each}
    known = {each.get(key) for each in below if isinstance(each, dict)}
    merged = [_merged(each, named.get(each.get(key), each)) if isinstance(each, dict) else each for each in below]
    return merged + [each for each in above if not (isinstance(each, dict) and each.get(key) in known & named.keys())]
