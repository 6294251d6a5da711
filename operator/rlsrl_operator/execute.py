"""Perform a plan: every write of the operator to the API server about an experiment."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

import structlog

from rlsrl.api.status import ExperimentStatus
from rlsrl_operator import status as statuses
from rlsrl_operator.cluster import Cluster, Refused, ResourceConflict
from rlsrl_operator.drift import Action, RefusedWrite, Write, has_foreign_fields, replacement
from rlsrl_operator.informer_cache import MAX_CONFLICTS, InformerCache
from rlsrl_operator.manifests import Manifest
from rlsrl_operator.manifests.kueue import begins_in_queue
from rlsrl_operator.manifests.types import ObjectKey, key_of
from rlsrl_operator.plan import Plan

_log = structlog.stdlib.get_logger("execute")


@dataclass(kw_only=True)
class Executed:
    """What became of a plan."""

    document: Manifest
    """The experiment's document, with the status that was written last: ahead by ``execute``, then by
    ``write_status``."""
    versions: list[str] = field(default_factory=list)
    """The resourceVersions of the document that these status writes made."""
    refused: dict[ObjectKey, RefusedWrite] = field(default_factory=dict)
    """The write that the API server refused, which ended the execution."""
    queue_refusal: str | None = None
    """Why Kueue does not admit the trainers yet."""


class Executor:
    """Performs plans on one API server."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def execute(self, decided: Plan, document: Manifest, cache: InformerCache, now: datetime) -> Executed:
        """Perform a plan except for ``Plan.status``, in the order of its fields.

        The first write that the API server refuses ends the execution. Each pod's deletion is logged with its reason.
        The caller passes ``Plan.status`` to ``write_status`` at the end of the pass.

        Raises:
            ResourceConflict: an object has changed since it was read.
            Refused: the API server refuses the status that is written ahead.
        """
        done = Executed(document=document)
        if decided.written_ahead is not None:
            await self.write_status(decided.written_ahead, done, now)
        for write in decided.writes:
            try:
                await self._write(write, cache)
            except ResourceConflict as error:
                if cache.conflict(write.wanted) < MAX_CONFLICTS:
                    raise
                done.refused[key_of(write.wanted)] = cache.refuse(write.wanted, str(error), now)
                return done
            except Refused as error:
                if begins_in_queue(write.wanted, write.observed):
                    done.queue_refusal = str(error)
                    continue
                done.refused[key_of(write.wanted)] = cache.refuse(write.wanted, str(error), now)
                return done
        for deletion in decided.pod_deletions:
            _log.info("deleting_pod", reason=deletion.reason, **_place(deletion.pod))
            await self._cluster.delete(deletion.pod, grace_seconds=deletion.grace_seconds)
        for annotation in decided.pod_annotations:
            await self._cluster.annotate(annotation.pod, dict(annotation.annotations))
        for found in decided.deletions:
            await self._cluster.delete(found)
            cache.forget(found)
        return done

    async def write_status(self, status: ExperimentStatus, done: Executed, now: datetime) -> None:
        """Write the status, and then the Events about its changes. Nothing is written of an unchanged status.

        Raises:
            ResourceConflict: the experiment has changed since it was read.
            Refused: the API server refuses the status.
        """
        before, changed = statuses.read(done.document), statuses.write(status)
        if changed == statuses.write(before):
            return
        written = await self._cluster.replace_status({**done.document, "status": changed})
        version = written["metadata"]["resourceVersion"]
        metadata = {**done.document["metadata"], "resourceVersion": version}
        done.document = {**done.document, "metadata": metadata, "status": changed}
        done.versions.append(version)
        for event in statuses.events(done.document, before, status, now):
            try:
                await self._cluster.create(event)
            except ResourceConflict:
                pass  # The event exists: an earlier pass posted it.
            except Refused as error:
                _log.warning("event_refused", reason=event["reason"], error=str(error))

    async def _write(self, write: Write, cache: InformerCache) -> None:
        match write.action:
            case Action.CREATE:
                written = await self._cluster.create(write.wanted)
            case Action.APPLY:
                written = await self._apply(write)
            case Action.REPLACE:
                assert write.observed is not None, "a replacement is a whole object"
                written = await self._cluster.replace(write.observed)
            case Action.KEEP:
                assert write.observed is not None, "only what was read is kept"
                cache.remember(write.wanted, write.observed)
                return
            case Action.NOT_OWNED:
                raise AssertionError("a plan never writes an object of somebody else")
        cache.remember(write.wanted, written)
        _log.info("applied", action=write.action.value, kind=write.wanted["kind"], **_place(write.wanted))

    async def _apply(self, write: Write) -> Manifest:
        """Apply by server-side apply; PUT the whole object if that is refused or leaves additions of others."""
        wanted, observed = write.wanted, write.observed
        try:
            written = await self._cluster.apply(wanted)
        except Refused:
            if observed is None or begins_in_queue(wanted, observed):
                raise
            written = await self._cluster.replace(replacement(wanted, observed))
        return await self._cluster.replace(replacement(wanted, written)) if has_foreign_fields(written) else written


def _place(manifest: Manifest) -> dict[str, str]:
    return {name: manifest["metadata"][name] for name in ("name", "namespace")}
