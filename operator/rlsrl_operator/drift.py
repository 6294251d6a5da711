"""Compare one object of an experiment with the manifest that it should match. Pure.

The plan asks ``write_for`` about each manifest. The answer depends on what observe knows of the object: ``Child``.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import Enum

from rlsrl_operator.manifests.context import MANAGER
from rlsrl_operator.manifests.kueue import next_size
from rlsrl_operator.manifests.types import Manifest, digest

_WITH_GENERATION = frozenset({"Deployment", "StatefulSet", "NetworkPolicy"})
"""Kinds whose ``generation`` changes with their spec. Of other kinds only the resourceVersion shows a change."""
_CONTENTS = ("f:spec", "f:data", "f:immutable", "f:type")


class Action(Enum):
    """What to do about one object."""

    CREATE = "create"
    """POST. A conflict means that the object exists and must be read first."""
    APPLY = "apply"
    """Server-side apply."""
    REPLACE = "replace"
    """PUT the whole object."""
    KEEP = "keep"
    """The object is as it should be: the informer cache remembers its version."""
    NOT_OWNED = "not owned"
    """The object belongs to somebody else and stays as it is."""


@dataclass(frozen=True, kw_only=True)
class Applied:
    """An object after the operator's last write or check."""

    digest: str
    """Digest of the manifest that was applied."""
    seen: str
    """Digest of the parts that the operator owns, see ``owned_digest``."""
    version: str
    """The resourceVersion."""


@dataclass(frozen=True, kw_only=True)
class RefusedWrite:
    """A write that the API server refused."""

    digest: str
    """Digest of the manifest that was refused."""
    message: str
    """The API server's message."""
    retry_at: datetime
    """Until then the same manifest is not sent again."""


@dataclass(frozen=True, kw_only=True)
class Child:
    """What observe knows of one object."""

    found: Manifest | None = None
    """The object, or None if it is absent. Immutable objects of which nothing is known are not read, but created."""
    applied: Applied | None = None
    """The last write or check; None after a restart of the operator."""
    is_unchanged: bool = False
    """Whether the object still has the resourceVersion of ``applied``."""
    refused: RefusedWrite | None = None
    """The last write, if the API server refused it."""


@dataclass(frozen=True, kw_only=True)
class Write:
    """One action on one object."""

    action: Action
    wanted: Manifest
    observed: Manifest | None = None
    """The object before the write, if it was read."""


def write_for(wanted: Manifest, child: Child) -> Write | None:
    """Return the write that makes the object match the manifest, or None if it matches."""
    is_as_applied = child.applied is not None and child.applied.digest == digest(wanted)
    if child.is_unchanged and (wanted.get("immutable") or is_as_applied):
        return None  # The data of an immutable object are decided by its creator.
    if wanted["kind"] == "PersistentVolumeClaim":
        return _write_for_claim(wanted, child.found)
    if wanted.get("immutable"):
        return _write_for_immutable(wanted, child)
    wanted = next_size(wanted, child.found)
    return Write(action=action_for(wanted, child.found, child.applied), wanted=wanted, observed=child.found)


def _write_for_claim(wanted: Manifest, found: Manifest | None) -> Write | None:
    """A claim keeps its spec, and an experiment takes over the claim of an earlier experiment of the same name. Only
    the owner changes: it says whether the claim is deleted with the experiment.
    """
    if found is None:
        return Write(action=Action.CREATE, wanted=wanted)
    if not is_ours(wanted, found, by_owner=False):
        return Write(action=Action.NOT_OWNED, wanted=wanted, observed=found)
    if "deletionTimestamp" in found["metadata"]:
        return None  # A new claim is created once the last pod has released this one.
    if (owners := wanted["metadata"].get("ownerReferences", [])) == found["metadata"].get("ownerReferences", []):
        return Write(action=Action.KEEP, wanted=wanted, observed=found)
    metadata = {**found["metadata"], "labels": wanted["metadata"]["labels"], "ownerReferences": owners}
    return Write(action=Action.REPLACE, wanted=wanted, observed={**found, "metadata": metadata})


def _write_for_immutable(wanted: Manifest, child: Child) -> Write:
    if child.found is None:
        return Write(action=Action.CREATE, wanted=wanted)
    wanted = {**wanted, "data": child.found.get("data", {})}
    if is_kept(wanted, child.found):
        # No apply: the object belongs to its creator alone, also after an interruption.
        return Write(action=Action.KEEP, wanted=wanted, observed=child.found)
    return Write(action=action_for(wanted, child.found, child.applied), wanted=wanted, observed=child.found)


def action_for(wanted: Manifest, observed: Manifest | None, applied: Applied | None) -> Action:
    """Return the action for an object that is changed by server-side apply."""
    if observed is None:
        return Action.APPLY
    if not is_ours(wanted, observed):
        return Action.NOT_OWNED
    if applied is None or applied.digest != digest(wanted) or applied.seen != owned_digest(wanted, observed):
        return Action.APPLY
    return Action.KEEP


def is_kept(wanted: Manifest, observed: Manifest) -> bool:
    """Return whether an immutable object has the labels and owners that it should have."""
    expected, actual = wanted["metadata"], observed["metadata"]
    return (
        bool(wanted.get("immutable") and observed.get("immutable"))
        and expected["labels"].items() <= actual.get("labels", {}).items()
        and expected["ownerReferences"] == actual.get("ownerReferences")
    )


def is_ours(wanted: Manifest, observed: Manifest, *, by_owner: bool = True) -> bool:
    """Return whether the experiment owns the object. An object without owner is recognized by its labels."""
    owners = {owner["uid"] for owner in wanted["metadata"].get("ownerReferences", ())}
    if owners and by_owner:
        return owners <= {owner["uid"] for owner in observed["metadata"].get("ownerReferences", ())}
    names = ("app.kubernetes.io/managed-by", "app.kubernetes.io/instance")
    ours, theirs = wanted["metadata"]["labels"], observed["metadata"].get("labels", {})
    return all(ours[name] == theirs.get(name) for name in names)


def applied(wanted: Manifest, observed: Manifest) -> Applied:
    """Return what to remember of an object that has just been written or checked."""
    version = observed["metadata"]["resourceVersion"]
    return Applied(digest=digest(wanted), seen=owned_digest(wanted, observed), version=version)


def owned_digest(wanted: Manifest, observed: Manifest) -> str:
    """Return a digest of the parts of an object that the operator owns.

    A change of metadata does not change ``generation``, so labels, annotations and owners are part of the digest.
    """
    metadata = observed["metadata"]
    expected = wanted["metadata"]
    mark = metadata.get("generation") if wanted["kind"] in _WITH_GENERATION else metadata["resourceVersion"]
    labels = {name: metadata.get("labels", {}).get(name) for name in expected.get("labels", {})}
    annotations = {name: metadata.get("annotations", {}).get(name) for name in expected.get("annotations", {})}
    return digest([metadata["uid"], mark, labels, annotations, metadata.get("ownerReferences")])


def has_foreign_fields(observed: Manifest) -> bool:
    """Return whether another field manager has written into spec or data: an apply leaves its additions in place."""
    return any(
        entry.get("manager") != MANAGER
        and "subresource" not in entry
        and any(part in entry.get("fieldsV1", {}) for part in _CONTENTS)
        for entry in observed["metadata"].get("managedFields", ())
    )


def replacement(wanted: Manifest, observed: Manifest) -> Manifest:
    """Return the object to PUT: spec and data as wanted, metadata and the server's choices as observed."""
    metadata = {name: value for name, value in observed["metadata"].items() if name != "managedFields"}
    metadata["labels"] = {**metadata.get("labels", {}), **wanted["metadata"]["labels"]}
    made = {**wanted, "metadata": metadata}
    if wanted["kind"] == "Service":
        chosen = {name: observed["spec"][name] for name in ("clusterIP", "clusterIPs") if name in observed["spec"]}
        made["spec"] = {**wanted["spec"], **chosen}
    return made
