"""Remember the objects of one experiment between passes, so that most passes read only the experiment and its pods.

Watches report the resourceVersion of each object. While it is the version that the operator wrote or checked last, the
cache answers for the API server. All objects are listed every ``RELIST_SECONDS`` and for each generation, since a
watch may lose a report. Losing the cache costs calls only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from rlsrl_operator.cluster import Cluster
from rlsrl_operator.drift import Applied, Child, RefusedWrite, applied
from rlsrl_operator.manifests import ExperimentContext, Manifest
from rlsrl_operator.manifests.types import ObjectKey, digest, key_of

RELIST_SECONDS = 30.0
"""How long the cache relies on watches alone."""
MAX_CONFLICTS = 5
"""Conflicts in a row after which a write counts as refused: a webhook may deny with the status of a conflict."""
REFUSED_SECONDS = 30.0
"""How long a write that the API server refused is not tried again, unless the manifest changes."""
_API_VERSIONS = {
    "Deployment": "apps/v1",
    "NetworkPolicy": "networking.k8s.io/v1",
    "ConfigMap": "v1",
    "StatefulSet": "apps/v1",
    "PersistentVolumeClaim": "v1",
    "Secret": "v1",
    "Service": "v1",
}
_DELETED, _UNKNOWN = "", "unknown"
"""In place of a resourceVersion."""


@dataclass(frozen=True, kw_only=True)
class _Entry:
    applied: Applied
    found: Manifest
    """The object without status, data and managed fields, which are never compared."""


class InformerCache:
    """The objects of one experiment. Only for the event loop's thread."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._entries: dict[ObjectKey, _Entry] = {}
        self._reported: dict[ObjectKey, str] = {}
        """The newest resourceVersion that a watch or a list reported."""
        self._refused: dict[ObjectKey, RefusedWrite] = {}
        self._conflicts: dict[ObjectKey, int] = {}
        """How many writes in a row ended in a conflict."""
        self._generation = 0
        """The experiment's generation at the last list."""
        self._relist_at: datetime | None = None
        self._listed: dict[ObjectKey, Manifest] = {}
        """The objects of this pass's list, until ``end_pass``."""
        self.labelled: Mapping[ObjectKey, Manifest] = {}
        """Kind and metadata of the objects with the experiment's labels at the last list, those of earlier generations
        included."""

    def report(self, kind: str, name: str, version: str) -> bool:
        """Record a watch's report of a new resourceVersion, or of a deletion if it is empty.

        Returns whether the operator has not seen this version yet.
        """
        self._reported[kind, name] = version
        entry = self._entries.get((kind, name))
        return entry is None or entry.applied.version != version

    async def refresh(self, context: ExperimentContext, now: datetime, *, is_new: bool, is_blocked: bool) -> None:
        """List all objects if a list is due.

        A new experiment has no objects to list. While an experiment is blocked, the cache relies on watches alone; a
        list is due once the experiment is not blocked any more.
        """
        is_fresh = self._relist_at is not None and (is_blocked or now < self._relist_at)
        if is_fresh and context.generation == self._generation:
            return
        if not is_new:
            before = dict(self._reported)
            # A few lists cost both sides less than a GET for each object.
            self._listed = {key_of(each): each for kind in _API_VERSIONS for each in await self._list(kind, context)}
            self.labelled = {key: _identity(each) for key, each in self._listed.items()}
            for key in self._entries:
                # A watch may have reported a newer version while the lists were under way.
                if self._reported.get(key) == before.get(key):
                    found = self._listed.get(key)
                    self._reported[key] = _DELETED if found is None else found["metadata"]["resourceVersion"]
        self._relist_at, self._generation = now + timedelta(seconds=RELIST_SECONDS), context.generation

    def end_pass(self) -> None:
        """Drop what ``refresh`` listed: most of it is never asked for again, and takes the most memory."""
        self._listed = {}

    async def read(self, wanted: Manifest) -> Child:
        """Return what is known of the object that the manifest names, with a GET only if the cache cannot tell."""
        key = key_of(wanted)
        entry, reported, refused = self._entries.get(key), self._reported.get(key), self._refused.get(key)
        if entry is not None and reported in (None, entry.applied.version):
            return Child(found=entry.found, applied=entry.applied, is_unchanged=True, refused=refused)
        found = self._listed.get(key)
        if found is None:
            if wanted.get("immutable") and entry is None and not reported:
                return Child(refused=refused)
            # Lists select by label. Another owner's object has other labels, and ours may have lost theirs.
            found = await self._cluster.get(wanted["apiVersion"], key[0], wanted["metadata"]["namespace"], key[1])
        return Child(found=found, applied=None if entry is None else entry.applied, refused=refused)

    async def config_maps(self, context: ExperimentContext) -> dict[str, Manifest]:
        """Return the experiment's ConfigMaps by name, those of earlier generations included."""
        found = self._listed.values() or await self._list("ConfigMap", context)
        return {each["metadata"]["name"]: each for each in found if each["kind"] == "ConfigMap"}

    async def _list(self, kind: str, context: ExperimentContext) -> list[Manifest]:
        return await self._cluster.list(_API_VERSIONS[kind], kind, context.namespace, context.own_labels)

    def remember(self, wanted: Manifest, observed: Manifest) -> None:
        """Record an object as it is after a write or a check."""
        key = key_of(wanted)
        self._entries[key] = _Entry(applied=applied(wanted, observed), found=_without_contents(observed))
        self._refused.pop(key, None)
        self._conflicts.pop(key, None)

    def forget(self, manifest: Manifest) -> None:
        """Record that the operator has deleted an object."""
        self.labelled = {key: found for key, found in self.labelled.items() if key != key_of(manifest)}

    def conflict(self, manifest: Manifest) -> int:
        """Record that the API server has another version of an object than the cache: the next pass reads it.

        Returns how many writes in a row ended in a conflict.
        """
        key = key_of(manifest)
        self._reported[key] = _UNKNOWN
        self._conflicts[key] = self._conflicts.get(key, 0) + 1
        return self._conflicts[key]

    def refuse(self, wanted: Manifest, message: str, now: datetime) -> RefusedWrite:
        """Record that the API server refused a write."""
        retry_at = now + timedelta(seconds=REFUSED_SECONDS)
        refused = RefusedWrite(digest=digest(wanted), message=message, retry_at=retry_at)
        self._refused[key_of(wanted)] = refused
        return refused


def _without_contents(found: Manifest) -> Manifest:
    kept = {name: value for name, value in found.items() if name not in ("data", "status")}
    return {**kept, **_identity(found)}


def _identity(found: Manifest) -> Manifest:
    metadata = {name: value for name, value in found["metadata"].items() if name != "managedFields"}
    return {"apiVersion": found["apiVersion"], "kind": found["kind"], "metadata": metadata}
