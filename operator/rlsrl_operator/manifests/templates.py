"""Merge an experiment's ``podTemplate`` into the pod template of a role, within the administrator's rules. Pure.

The operator creates pods with its own rights for users who may have fewer. So a list names the allowed fields, all of
which leave the security context as it is.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic.alias_generators import to_camel

from rlsrl.api.pods import CONTAINER
from rlsrl.api.role_names import TRAINER
from rlsrl.api.roles import ROLES
from rlsrl.api.spec import RLExperiment
from rlsrl_operator.manifests.types import Manifest
from rlsrl_operator.settings import OperatorSettings

SECTIONS: Mapping[str, str] = {role.name: role.section for role in ROLES if role.section is not None}
"""By role: the section of the spec that holds its ``pod_template``."""
_TEMPLATE = ("metadata", "spec")
_METADATA = ("labels", "annotations")
_SPEC = (
    "affinity",
    "containers",
    "imagePullSecrets",
    "nodeSelector",
    "priorityClassName",
    "runtimeClassName",
    "schedulerName",
    "tolerations",
    "topologySpreadConstraints",
    "volumes",
)
_CONTAINER = ("name", "image", "resources", "env", "envFrom", "volumeMounts")
_VOLUMES = (
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "name",
    "persistentVolumeClaim",
    "projected",
    "secret",
)
"""The kinds of the Pod Security profile ``restricted``: none reaches into the node."""
_OUR_PREFIXES = ("rlsrl.dev/", "app.kubernetes.io/")
_OUR_VARIABLES = "RLSRL_"
_KEYS = {"volumeMounts": "mountPath"}
"""The key of a list's entries, if it is not ``name``."""
_WHOLE = frozenset({"affinity"})
"""Fields that are replaced as a whole: a mixture of two values would mean neither."""


def template_of_role(experiment: RLExperiment, role: str) -> Mapping[str, Any]:
    """Return the role's ``podTemplate``; an empty one for the coordinator, which has none."""
    section = getattr(experiment.spec, SECTIONS[role]) if role in SECTIONS else None
    template: Mapping[str, Any] = {} if section is None else section.pod_template
    return template


def template_faults(experiment: RLExperiment) -> list[str]:
    """Return the faults of the experiment's pod templates: field, allowed names, the nearest name."""
    found: list[str] = []
    for role, section in SECTIONS.items():
        template, at = template_of_role(experiment, role), f"spec.{to_camel(section)}.podTemplate"
        found += _faults(template, at)
        if role == TRAINER:
            found += _devices(template, at, experiment.spec.trainers.gpu_resource)
    return found


def disallowed(experiment: RLExperiment, settings: OperatorSettings) -> list[str]:
    """Return the faults of the experiment's pod templates under the administrator's rules."""
    return [] if settings.pod_templates == "any" else template_faults(experiment)


def merged_template(made: Manifest, template: Mapping[str, Any]) -> Manifest:
    """Return a pod template merged with an experiment's: maps by key, lists by name, other entries appended."""
    return {
        "metadata": _merged(_map(template.get("metadata")), made["metadata"]),
        "spec": _merged(made["spec"], _map(template.get("spec"))),
    }


def _faults(template: Mapping[str, Any], at: str) -> Iterator[str]:
    yield from _unknown(template, _TEMPLATE, at)
    metadata = template.get("metadata")
    yield from _unknown(metadata, _METADATA, f"{at}.metadata")
    for kind in _METADATA:
        for name in _map(_map(metadata).get(kind)):
            if name.startswith(_OUR_PREFIXES):
                yield f"{at}.metadata.{kind}: {name} is reserved for the operator"
    spec = template.get("spec")
    yield from _unknown(spec, _SPEC, f"{at}.spec")
    for index, container in enumerate(_list(_map(spec).get("containers"))):
        place = f"{at}.spec.containers[{index}]"
        yield from _unknown(container, _CONTAINER, place)
        if (which := _map(container).get("name")) != CONTAINER:
            yield f"{place}.name: {which!r} is not a container of the pod; allowed: {CONTAINER}"
        for variable in _list(_map(container).get("env")):
            if str(chosen := _map(variable).get("name")).startswith(_OUR_VARIABLES):
                yield f"{place}.env: {chosen} is reserved for the operator"
    for index, volume in enumerate(_list(_map(spec).get("volumes"))):
        yield from _unknown(volume, _VOLUMES, f"{at}.spec.volumes[{index}]")


def _devices(template: Mapping[str, Any], at: str, resource: str) -> Iterator[str]:
    """Yield the faults of GPU resources: the spec sets them together with the ranks in a pod."""
    for index, container in enumerate(_list(_map(template.get("spec")).get("containers"))):
        resources = _map(_map(container).get("resources"))
        if any(resource in _map(resources.get(kind)) for kind in ("limits", "requests")):
            yield f"{at}.spec.containers[{index}].resources: {resource} is set by spec.trainers.gpusPerPod"


def _unknown(value: Any, allowed: tuple[str, ...], at: str) -> Iterator[str]:
    if value is not None and not isinstance(value, dict):
        yield f"{at}: {value!r} is not a map"
    for name in _map(value):
        if name not in allowed:
            near = difflib.get_close_matches(name, allowed, n=1)
            meant = f" (did you mean {near[0]}?)" if near else ""
            yield f"{at}.{name} is not an allowed field; allowed: {', '.join(allowed)}{meant}"


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
