"""What to do about one object: nothing, make it, apply it, or leave it to its owner. Pure."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from enum import Enum

from rlsrl_operator.manifests.context import MANAGER
from rlsrl_operator.manifests.types import Manifest

_WITH_GENERATION = frozenset({"Deployment", "StatefulSet", "NetworkPolicy"})
"""Kinds whose ``generation`` moves when what was asked of them changes; of others the resourceVersion says so."""
_CONTENTS = ("f:spec", "f:data", "f:immutable", "f:type")


class Step(Enum):
    """What to do."""

    NOTHING = "nothing"
    APPLY = "apply"
    CONFLICT = "conflict"
    """An object of that name is there, and not ours."""


@dataclass(frozen=True, kw_only=True)
class Applied:
    """How an object was after it was last applied."""

    digest: str
    """Of what was asked for."""
    seen: str
    """Of what was there then."""
    version: str
    """Its resourceVersion then."""


def step(wanted: Manifest, observed: Manifest | None, applied: Applied | None) -> Step:
    """What brings about ``wanted``. ``applied`` is what is known of the last time; None after a restart."""
    if observed is None:
        return Step.APPLY
    if not is_ours(wanted, observed):
        return Step.CONFLICT
    if applied is None or applied.digest != digest(wanted) or applied.seen != sight(wanted, observed):
        return Step.APPLY
    return Step.NOTHING


def is_kept(wanted: Manifest, observed: Manifest) -> bool:
    """Whether an object whose contents cannot be changed has the metadata that it should have, too."""
    asked, there = wanted["metadata"], observed["metadata"]
    return (
        bool(wanted.get("immutable") and observed.get("immutable"))
        and asked["labels"].items() <= there.get("labels", {}).items()
        and asked["ownerReferences"] == there.get("ownerReferences")
    )


def is_ours(wanted: Manifest, observed: Manifest, *, by_owner: bool = True) -> bool:
    """Whether the object has our owner; of one that may outlive its experiment, whether we made it for that name."""
    owners = {owner["uid"] for owner in wanted["metadata"].get("ownerReferences", ())}
    if owners and by_owner:
        return owners <= {owner["uid"] for owner in observed["metadata"].get("ownerReferences", ())}
    kept = ("app.kubernetes.io/managed-by", "app.kubernetes.io/instance")
    ours, theirs = wanted["metadata"]["labels"], observed["metadata"].get("labels", {})
    return all(ours[name] == theirs.get(name) for name in kept)


def applied(wanted: Manifest, observed: Manifest) -> Applied:
    """What to remember of an object that has just been applied."""
    version = observed["metadata"]["resourceVersion"]
    return Applied(digest=digest(wanted), seen=sight(wanted, observed), version=version)


def digest(value: object) -> str:
    """Equal for equal JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def sight(wanted: Manifest, observed: Manifest) -> str:
    """Changes when somebody changed what we say of the object. Metadata moves no generation, so it counts apart."""
    metadata = observed["metadata"]
    asked = wanted["metadata"]
    mark = metadata.get("generation") if wanted["kind"] in _WITH_GENERATION else metadata["resourceVersion"]
    labels = {name: metadata.get("labels", {}).get(name) for name in asked.get("labels", {})}
    annotations = {name: metadata.get("annotations", {}).get(name) for name in asked.get("annotations", {})}
    return digest([metadata["uid"], mark, labels, annotations, metadata.get("ownerReferences")])


def is_overruled(observed: Manifest) -> bool:
    """Whether somebody else has written into what is ours: an apply leaves such additions where they are."""
    return any(
        entry.get("manager") != MANAGER
        and "subresource" not in entry
        and any(part in entry.get("fieldsV1", {}) for part in _CONTENTS)
        for entry in observed["metadata"].get("managedFields", ())
    )


def whole(wanted: Manifest, observed: Manifest) -> Manifest:
    """The object to PUT: contents as wanted and nobody else's; metadata, and what a server chose, as observed."""
    metadata = {name: value for name, value in observed["metadata"].items() if name != "managedFields"}
    metadata["labels"] = {**metadata.get("labels", {}), **wanted["metadata"]["labels"]}
    made = {**wanted, "metadata": metadata}
    if wanted["kind"] == "Service":
        chosen = {name: observed["spec"][name] for name in ("clusterIP", "clusterIPs") if name in observed["spec"]}
        made["spec"] = {**wanted["spec"], **chosen}
    return made
