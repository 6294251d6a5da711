"""Compares the objects of experiments, without the parts that depend on chance or time."""

from __future__ import annotations

import copy
import difflib
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rlsrl.api.live import settings_of
from rlsrl.api.pods import EXPERIMENT_LABEL, ROLE_LABEL, UID_LABEL, is_ready
from rlsrl.api.reasons import FACTS
from rlsrl.api.roles import role_named

Object = dict[str, Any]
Manifests = Mapping[str, Any]
"""Normalized objects by kind and name, or by kind, role and number."""
_TEMPLATE_ANNOTATION = "rlsrl.dev/template"
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z")
_POD = re.compile(r"-[0-9a-f]{8,10}-[a-z0-9]{5}\b")
"""The random end of the name of a Deployment's pod."""
_CONFIG = re.compile(r"-UID8-([0-9a-f]{10})$")
_RANDOM_METADATA = ("uid", "resourceVersion", "creationTimestamp", "generateName")
_FOREIGN_LABELS = ("pod-template-hash", "controller-revision-hash", "statefulset.kubernetes.io/pod-name")
_OPERATOR_KEYS = ("signature", "operator", "settings.json")
"""Keys of a record about the operator that made it."""
_COUNTED = ("rlsrl.dev/attempt", "deployment.kubernetes.io/revision")
"""Annotations that count events."""
_COUNTS = ("replicas", "readyReplicas")


def normalized(objects: Iterable[Object], *, settings: bool = True) -> Manifests:
    """Return objects without uids, times and random names.

    Digests of contents with a uid become digests of the contents without it. Of Secrets only the keys remain, of pods
    the requested fields. With ``settings=False`` the configs of roles lose their live settings, which stay those of the
    config's creation.
    """
    cleaned = [_CLEAN.get(each["kind"], _plain)(each) for each in objects]
    text = json.dumps(cleaned, sort_keys=True)
    for namespace in {each["metadata"]["namespace"] for each in cleaned}:
        text = text.replace(namespace, "NAMESPACE")
    for uid in {uid for each in cleaned if (uid := _uid_of(each))}:
        text = text.replace(uid, "UID").replace(uid[:8], "UID8")
    text = _POD.sub("-POD", _TIME.sub("TIME", text))
    for each in json.loads(text):
        if each["kind"] == "ConfigMap" and (found := _CONFIG.search(each["metadata"]["name"])) is not None:
            text = text.replace(found[1], _digest(_without_settings(each)))
    for each in json.loads(text):
        if each["kind"] in ("Deployment", "StatefulSet"):
            template = each["spec"]["template"]
            text = text.replace(template["metadata"]["annotations"][_TEMPLATE_ANNOTATION], _digest(template["spec"]))
    normal: dict[str, Any] = {}
    for each in sorted(json.loads(text), key=_sort_key):
        name = f"{each['kind']} {each['metadata'].get('name') or each['metadata']['labels'][ROLE_LABEL]}"
        normal[name if name not in normal else f"{name} {len(normal)}"] = _parsed(each, settings=settings)
    return normal


def decided_by_spec(objects: Iterable[Object]) -> Manifests:
    """Return the parts that the spec alone determines, by number: without counts of edits, ages of objects, and
    conditions that report what happened.
    """
    undated = map(_without_history, normalized(objects, settings=False).values())
    return {str(number): each for number, each in enumerate(sorted(undated, key=_sort_key))}


def _without_history(found: Object) -> Object:
    made = copy.deepcopy(found)
    metadata = made["metadata"]
    for counted in ("generation", "managedFields"):
        metadata.pop(counted, None)
    template = made.get("spec", {}).get("template", {}).get("metadata", {})
    for part in (metadata, template):
        kept = {name: text for name, text in part.pop("annotations", {}).items() if name not in _COUNTED}
        part.update({"annotations": kept} if kept else {})
    if made["kind"] == "RLExperiment":
        status = made["status"]
        present = [each for each in status["conditions"] if each["type"] not in FACTS]
        conditions = [(each["type"], each["status"], each["reason"]) for each in present]
        made["status"] = {"phase": status["phase"], "actors": status["actors"], "conditions": conditions}
    if "-record-" in metadata.get("name", ""):
        metadata["name"] = "record"
        made["data"] = {"experiment.json": made["data"]["experiment.json"]}
    return made


def difference(expected: Manifests, found: Manifests) -> str:
    """Return a readable diff; empty without a difference."""
    lines: list[str] = []
    for name in sorted({*expected, *found}):
        was, now = _lines(expected.get(name)), _lines(found.get(name))
        lines += difflib.unified_diff(was, now, f"{name}, expected", f"{name}, found", n=2, lineterm="")
    return "\n".join(lines)


def _sort_key(each: Object) -> str:
    return json.dumps(each, sort_keys=True)


def _lines(value: Any) -> list[str]:
    return [] if value is None else json.dumps(value, indent=1, sort_keys=True).splitlines()


def _parsed(found: Object, *, settings: bool) -> Object:
    """Parse the JSON texts of a ConfigMap, for a readable diff."""
    if found["kind"] != "ConfigMap":
        return found
    if not settings and "-UID8-digest-" in found["metadata"]["name"]:
        return {**found, "data": _without_settings(found)}
    return {**found, "data": {name: json.loads(text) for name, text in found["data"].items()}}


def _without_settings(found: Object) -> Object:
    """Return a role's config in its ConfigMap without its live settings."""
    role = found["metadata"]["labels"][ROLE_LABEL]
    text = found["data"][f"{role}.json"]
    return _subtract(json.loads(text), settings_of(role_named(role).config.from_json(text)))


def _plain(found: Object) -> Object:
    metadata = {name: value for name, value in found["metadata"].items() if name not in _RANDOM_METADATA}
    if (fields := metadata.get("managedFields")) is not None:
        undated = [{name: value for name, value in each.items() if name != "time"} for each in fields]
        metadata["managedFields"] = sorted(undated, key=json.dumps)
    return {**found, "metadata": metadata}


def _workload(found: Object) -> Object:
    status = found.get("status", {})
    return {**_plain(found), "status": {name: status.get(name, 0) for name in _COUNTS}}


def _allotted(found: Object) -> Object:
    """Return a Service or claim without its addresses, volume and status, which the cluster allots.

    A claim that is deleted with its StatefulSet is owned by it, and has its uid.
    """
    spec = {name: value for name, value in found["spec"].items() if name not in ("clusterIPs", "volumeName")}
    if spec.get("clusterIP", "None") != "None":
        spec["clusterIP"] = "IP"
    made = _plain(found)
    if owners := made["metadata"].get("ownerReferences"):
        made["metadata"]["ownerReferences"] = [
            {**owner, "uid": "UID"} if owner["kind"] == "StatefulSet" else owner for owner in owners
        ]
    return {**made, "spec": spec, "status": {}}


def _secret(found: Object) -> Object:
    return {**_plain(found), "data": sorted(found.get("data", {}))}


def _config_map(found: Object) -> Object:
    omitted = _OPERATOR_KEYS if "-record-" in found["metadata"]["name"] else ()
    return {**_plain(found), "data": {name: text for name, text in found["data"].items() if name not in omitted}}


def _pod(found: Object) -> Object:
    metadata = found["metadata"]
    labels = {name: value for name, value in metadata["labels"].items() if name not in _FOREIGN_LABELS}
    owners = [each["kind"] for each in metadata.get("ownerReferences", ())]
    spec = {name: value for name, value in found["spec"].items() if name not in ("nodeName", "hostname")}
    return {
        "kind": "Pod",
        "metadata": {
            "namespace": metadata["namespace"],
            "labels": labels,
            "annotations": metadata.get("annotations", {}),
            "owners": owners,
        },
        "spec": spec,
        "ready": is_ready(found),
        "ending": "deletionTimestamp" in metadata,
    }


_CLEAN: Mapping[str, Callable[[Object], Object]] = {
    "ConfigMap": _config_map,
    "Deployment": _workload,
    "PersistentVolumeClaim": _allotted,
    "Pod": _pod,
    "Secret": _secret,
    "Service": _allotted,
    "StatefulSet": _workload,
}


def _uid_of(cleaned: Object) -> str | None:
    labels = cleaned["metadata"].get("labels", {})
    return str(labels[UID_LABEL]) if EXPERIMENT_LABEL in labels and UID_LABEL in labels else None


def _subtract(values: Mapping[str, Any], settings: Mapping[str, Any]) -> Object:
    return {
        name: _subtract(value, settings[name]) if isinstance(settings.get(name), dict) else value
        for name, value in values.items()
        if name not in settings or isinstance(settings[name], dict)
    }


def _digest(value: object) -> str:
    return "digest-" + hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:10]
