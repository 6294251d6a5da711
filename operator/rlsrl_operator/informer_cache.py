"""The objects that one experiment is made of: how they were when they were looked at last, and how they become what
they should be.

What is remembered only saves calls: all of it may be lost. An object of which nobody told that it changed since we left
it is not asked for again for a while; then all of them are, whether or not there was news.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import replace
from datetime import datetime, timedelta

import structlog

from rlsrl_operator.cluster import Cluster, Refused, ResourceConflict
from rlsrl_operator.drift import Applied, Step, applied, digest, is_kept, is_ours, is_overruled, step, whole
from rlsrl_operator.manifests import ExperimentContext, Manifest
from rlsrl_operator.manifests.kueue import begins_in_queue, stepwise

_API_VERSIONS = {
    "Deployment": "apps/v1",
    "NetworkPolicy": "networking.k8s.io/v1",
    "ConfigMap": "v1",
    "StatefulSet": "apps/v1",
    "PersistentVolumeClaim": "v1",
    "Secret": "v1",
    "Service": "v1",
}
"""By kind."""
_PRUNED = ("Deployment", "NetworkPolicy", "ConfigMap")
"""What a generation may have that a later one has not."""
TRUSTED_SECONDS = 30.0
"""After how long an object is asked for though nobody told of it: lost news of it are made good then."""
Place = tuple[str, str]
"""Kind and name of an object."""
_log = structlog.stdlib.get_logger("objects")


class NotAdmitted(Exception):
    """A queue does not take an object's pods while something is left of those before."""


class NotOwned(Exception):
    """An object that is not ours has a name that we need."""


class InformerCache:
    """Those of one experiment, on one API server."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._applied: dict[Place, Applied] = {}
        """How they were left."""
        self._reported: dict[Place, str] = {}
        """The resourceVersion of each that a watch told last; empty for one that is gone."""
        self._generation = 0
        """The experiment's, at the last look."""
        self._trusted_until: datetime | None = None
        """Until when no news of an object mean that it is as we left it; None: they are asked for at the next look."""
        self._seen: dict[Place, Manifest] = {}
        """Those that this look has seen."""

    def tell(self, kind: str, name: str, version: str) -> bool:
        """That an object has this resourceVersion now, or is gone if that is empty. Returns whether that is news."""
        self._reported[kind, name] = version
        known = self._applied.get((kind, name))
        return known is None or known.version != version

    async def begin(self, context: ExperimentContext, now: datetime, *, is_new: bool) -> None:
        """Look at all of them anew if it is time to. Of a new experiment there is nothing that could be listed."""
        trusted = self._trusted_until is not None and now < self._trusted_until
        if trusted and context.generation == self._generation:
            self._seen = {}
            return
        self._trusted_until, self._generation = None, context.generation
        # A few lists cost both sides less than a question for each object.
        self._seen = {} if is_new else {
            (kind, each["metadata"]["name"]): each
            for kind in _API_VERSIONS
            for each in await self._of_kind(kind, context)
        }  # fmt: skip

    def end(self, now: datetime) -> None:
        """What this look found or made to be as it should is taken for that for a while, unless there is news of it."""
        self._seen = {}
        if self._trusted_until is None:
            self._trusted_until = now + timedelta(seconds=TRUSTED_SECONDS)

    def is_as_left(self, wanted: Manifest) -> bool:
        """Whether nobody told of a change since we made or saw it."""
        known = self._applied.get(_place(wanted))
        reported = self._reported.get(_place(wanted))
        return self._trusted_until is not None and known is not None and reported in (None, known.version)

    async def find(self, wanted: Manifest) -> Manifest | None:
        """The object of that name. One that is not ours has not our labels, and one of ours may have lost them."""
        found = self._seen.get(_place(wanted))
        if found is None:
            api_version, kind, metadata = wanted["apiVersion"], wanted["kind"], wanted["metadata"]
            found = await self._cluster.get(api_version, kind, metadata["namespace"], metadata["name"])
            if found is not None:
                self._seen[_place(wanted)] = found
        return found

    async def create(self, wanted: Manifest) -> Manifest:
        """Make it; raises ``ResourceConflict`` if there is one."""
        made = await self._cluster.create(wanted)
        self._left(wanted, made)
        return made

    async def keep(self, wanted: Manifest) -> Manifest | None:
        """An object whose data are decided once, by whoever makes it; returns it with them, None if it is as we left
        it.

        Raises:
            NotOwned, Refused, ResourceConflict: see ``apply``.
        """
        if self.is_as_left(wanted):
            return None
        is_known = _place(wanted) in self._applied or _place(wanted) in self._seen
        found = await self.find(wanted) if is_known else None
        if found is None:
            try:
                return await self.create(wanted)
            except ResourceConflict:
                if (found := await self.find(wanted)) is None:
                    raise
        made = {**wanted, "data": found.get("data", {})}
        if is_kept(made, found):
            # Not applied: after whichever interruption it belongs to whoever made it, and to nobody else.
            self._applied[_place(wanted)] = applied(made, found)
        else:
            await self._apply(made, found)
        return found

    async def claim(self, wanted: Manifest) -> None:
        """A volume's claim stays as it was made, and one that an experiment of the same name left is taken over.
        Whether it goes with the experiment may change: its owner says so."""
        if self.is_as_left(wanted) and self._applied[_place(wanted)].digest == digest(wanted):
            return
        found = await self.find(wanted)
        if found is None:
            await self.create(wanted)
            return
        if not is_ours(wanted, found, by_owner=False):
            raise NotOwned(in_the_way(wanted))
        if "deletionTimestamp" in found["metadata"]:
            return  # It goes once no pod uses it, and then comes anew.
        if (owners := wanted["metadata"].get("ownerReferences", [])) != found["metadata"].get("ownerReferences", []):
            metadata = {**found["metadata"], "labels": wanted["metadata"]["labels"], "ownerReferences": owners}
            found = await self._cluster.replace({**found, "metadata": metadata})
        self._applied[_place(wanted)] = applied(wanted, found)

    async def apply(self, wanted: Manifest) -> None:
        """Make it what it should be.

        Raises:
            NotOwned: an object that is not ours is in the way.
            NotAdmitted: a queue does not take its pods yet.
            Refused: the API server does not take it.
            ResourceConflict: somebody else was faster.
        """
        if self.is_as_left(wanted) and self._applied[_place(wanted)].digest == digest(wanted):
            return
        await self._apply(wanted, await self.find(wanted))

    async def _apply(self, wanted: Manifest, observed: Manifest | None) -> None:
        wanted = stepwise(wanted, observed)
        known = self._applied.get(_place(wanted))
        what = step(wanted, observed, known)
        if what is Step.CONFLICT:
            raise NotOwned(in_the_way(wanted))
        if what is Step.NOTHING:
            assert observed is not None and known is not None, "else it is applied"  # noqa: PT018 - an invariant of our own
            self._applied[_place(wanted)] = replace(known, version=observed["metadata"]["resourceVersion"])
            return
        try:
            written = await self._cluster.apply(wanted)
        except Refused as error:
            if observed is None:
                raise
            if begins_in_queue(wanted, observed):
                raise NotAdmitted(str(error)) from error
            written = await self._cluster.replace(whole(wanted, observed))
        if is_overruled(written):
            written = await self._cluster.replace(whole(wanted, written))
        self._left(wanted, written)

    def _left(self, wanted: Manifest, written: Manifest) -> None:
        self._applied[_place(wanted)] = applied(wanted, written)
        place = {"namespace": wanted["metadata"]["namespace"], "name": wanted["metadata"]["name"]}
        _log.info("applied", kind=wanted["kind"], **place)

    async def of_earlier(self, context: ExperimentContext) -> dict[str, Manifest]:
        """The experiment's ConfigMaps by name, those of earlier generations among them."""
        return {each["metadata"]["name"]: each for each in await self._of_kind("ConfigMap", context)}

    async def prune(self, context: ExperimentContext, wanted: AbstractSet[Place]) -> None:
        """Remove what earlier generations needed and this one does not."""
        for kind in _PRUNED:
            for found in await self._of_kind(kind, context):
                owners = {owner["uid"] for owner in found["metadata"].get("ownerReferences", ())}
                if context.uid in owners and (kind, found["metadata"]["name"]) not in wanted:
                    await self._cluster.delete(found)

    async def _of_kind(self, kind: str, context: ExperimentContext) -> list[Manifest]:
        return await self._cluster.list(_API_VERSIONS[kind], kind, context.namespace, context.own_labels)


def in_the_way(wanted: Manifest) -> str:
    """What to say of an object that is not ours."""
    return f"{wanted['kind']} {wanted['metadata']['name']} is there already, and not this experiment's"


def _place(wanted: Manifest) -> Place:
    return wanted["kind"], wanted["metadata"]["name"]
