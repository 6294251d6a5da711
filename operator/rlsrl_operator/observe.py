"""Read everything that a pass over one experiment needs, and nothing else. Only this module and ``execute`` call the
API server. What earlier passes read and wrote is in an informer cache (``ExperimentMemory``).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import Enum
from typing import Any

from rlsrl.api.load import SpecError, load_text
from rlsrl.api.pods import ROLE_LABEL, TOKEN_KEY
from rlsrl.api.reasons import READY
from rlsrl.api.role_names import COORDINATOR
from rlsrl.api.spec import API_VERSION, KIND, RLExperiment
from rlsrl.api.status import TERMINAL, ExperimentStatus
from rlsrl_operator import status as statuses
from rlsrl_operator.cluster import Cluster
from rlsrl_operator.coordinator_status import CoordinatorStatus
from rlsrl_operator.drift import Child
from rlsrl_operator.gang import parse_time
from rlsrl_operator.informer_cache import InformerCache
from rlsrl_operator.manifests import (
    ExperimentContext,
    Manifest,
    Revision,
    accepts_edit,
    derive_revision,
    is_anothers,
    read_revision,
    volume_claim,
)
from rlsrl_operator.manifests.kueue import queue_labels
from rlsrl_operator.manifests.types import ObjectKey, key_of
from rlsrl_operator.operator_key import own_token_secret, way_to_source
from rlsrl_operator.outside_objects import ServiceReader, SourceReader
from rlsrl_operator.roles import is_queued, roles_of, workload_of
from rlsrl_operator.settings import OperatorSettings

MAKING_SECONDS = 3.0
"""How long controllers may take to create pods before the pass reads why they do not."""


class RevisionProblem(Enum):
    """Why the revision of this generation cannot be used."""

    NOT_OWNED = "not owned"
    """An object of somebody else has its name."""
    OTHER_OPERATOR = "other operator"
    """An operator with another key wrote it, or the revision before it."""
    UNREADABLE = "unreadable"
    """The object is the experiment's, but not as the operator wrote it."""
    OUTDATED = "outdated"
    """It leaves out an edit that the administrator did not allow then, and allows now."""


@dataclass(frozen=True, kw_only=True)
class Blocker:
    """What keeps an experiment from going on until somebody changes the experiment or the cluster."""

    reason: str
    """The reason of the condition that reports it."""
    message: str
    at: ObjectKey | None = None
    """The object at which the writes end; None if no object is the reason."""


@dataclass(frozen=True, kw_only=True)
class Observed:
    """What one pass has read. The plan follows from it and from the time alone."""

    document: Manifest
    """The experiment."""
    status: ExperimentStatus
    """Its status as written."""
    context: ExperimentContext | None = None
    """The experiment's present generation; None if its spec is invalid."""
    spec_error: str = ""
    """Why it is invalid."""
    revision: Revision | None = None
    """The revision on record for this generation or, if its object is not among ``children``, the one to record. None:
    the first generation has pod templates or destinations that the administrator does not allow, no network rule
    follows from its server's Service, or the experiment from whose weights it starts does not exist."""
    revision_problem: RevisionProblem | None = None
    """Set instead of ``revision``."""
    children: Mapping[ObjectKey, Child] = field(default_factory=dict)
    """The revision's own object, the objects in it, the token, the way to the source and the volume claim, in the order
    in which they are written. Those behind an object that blocked the last pass are missing: they were not read."""
    labelled: Mapping[ObjectKey, Manifest] = field(default_factory=dict)
    """The metadata of objects with the experiment's labels, of earlier generations too, as they were listed last."""
    pods: Sequence[Manifest] = ()
    """The experiment's pods, of all attempts."""
    failed_create: str | None = None
    """Why a role lacks pods, if its controller is not allowed to create them: a quota, an admission policy."""
    queue_refusal: str | None = None
    """Why Kueue refused the trainers in this pass; set between two stages of the pass."""
    queue_refused_since: datetime | None = None
    """When the first of the refusals in a row came; None without ``queue_refusal``."""


@dataclass
class ExperimentMemory:
    """What is remembered of one experiment between passes. Losing it costs calls only."""

    children: InformerCache
    services: ServiceReader
    sources: SourceReader
    context: ExperimentContext | None = None
    revision: Revision | None = None
    """The revision of the present generation."""
    token: str = ""
    blocker: Blocker | None = None
    """What blocked the last pass."""
    queue_refused_since: datetime | None = None
    """When Kueue refused the trainers first; None if it did not refuse them in the last pass."""
    status_read_at: datetime | None = None
    status_returned_at: datetime | None = None

    async def has_changed_outside(self, now: datetime) -> bool:
        """Return whether an object that is not the experiment's is not as it was read last."""
        return await self.services.has_changed(now) or await self.sources.has_changed(now)


class Observer:
    """Reads the state of experiments."""

    def __init__(
        self, cluster: Cluster, coordinator_status: CoordinatorStatus, settings: OperatorSettings, key: bytes
    ) -> None:
        """``key`` verifies revisions; tokens derive from it."""
        self._cluster = cluster
        self._coordinator_status = coordinator_status
        self._settings = settings
        self._key = key

    async def observe(self, namespace: str, name: str, memory: ExperimentMemory, now: datetime) -> Observed | None:
        """Return what a pass needs, or None if the experiment is gone or terminating."""
        document = await self._cluster.get(API_VERSION, KIND, namespace, name)
        if document is None or "deletionTimestamp" in document["metadata"]:
            return None
        try:
            return await self._observe(document, memory, now)
        finally:
            memory.children.end_pass()

    async def _observe(self, document: Manifest, memory: ExperimentMemory, now: datetime) -> Observed:
        status = statuses.read(document)
        try:
            memory.context = context = self._context(document, status, memory.context)
        except SpecError as error:
            return Observed(document=document, status=status, spec_error=str(error))
        context = await self._with_outside(context, memory, now)
        is_new = context.generation == 1 and status.phase is None
        await memory.children.refresh(context, now, is_new=is_new, is_blocked=memory.blocker is not None)
        observed = Observed(document=document, status=status, context=context)
        observed = await self._with_revision(observed, context, memory)
        if observed.revision is None:
            return observed
        context = await self._with_outside(context, memory, now)
        running = replace(context, experiment=observed.revision.experiment)
        labelled = await self._cluster.list("v1", "Pod", context.namespace, context.own_labels)
        pods = [pod for pod in labelled if ROLE_LABEL in pod["metadata"]["labels"]]
        is_blocked = memory.blocker is not None and memory.blocker.at is not None
        return replace(
            observed,
            context=context,
            pods=pods,
            failed_create=None if is_blocked else await self._failed_create(running, status, pods, now),
            children={**observed.children, **await self._children(running, observed.revision, memory)},
            labelled=memory.children.labelled,
        )

    def _context(
        self, document: Manifest, status: ExperimentStatus, before: ExperimentContext | None
    ) -> ExperimentContext:
        """Parse the document, unless ``before`` is of the same generation, queue and retry."""
        metadata = document["metadata"]
        labels = queue_labels(metadata.get("labels", {}))
        first_attempt = status.first_attempt or 1
        identity = metadata["uid"], metadata["generation"], labels, first_attempt
        if before is not None:
            known = before.uid, before.generation, before.queue_labels, before.first_attempt
            if identity == known:
                return before
        written = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": metadata["name"], "labels": labels}}
        experiment: RLExperiment = load_text(json.dumps({**written, "spec": document["spec"]}))
        return ExperimentContext(
            experiment=experiment,
            namespace=metadata["namespace"],
            uid=metadata["uid"],
            generation=metadata["generation"],
            settings=self._settings,
            first_attempt=first_attempt,
            fresh_attempt=status.fresh_attempt,
        )

    async def _with_outside(
        self, context: ExperimentContext, memory: ExperimentMemory, now: datetime
    ) -> ExperimentContext:
        """Add what the experiment needs to know of other objects, as written and as recorded."""
        recorded = context if memory.revision is None else replace(context, experiment=memory.revision.experiment)
        both = (context, recorded)
        services = await memory.services.read({each.service for each in both if each.service is not None}, now)
        sources = await memory.sources.read({each.source for each in both if each.source is not None}, now)
        if (services, sources) != (context.services, context.sources):
            memory.context = context = replace(context, services=services, sources=sources)
        return context

    async def _with_revision(
        self, observed: Observed, context: ExperimentContext, memory: ExperimentMemory
    ) -> Observed:
        """Add the revision of this generation, or why there is none."""
        # Not marked as immutable, so that it is read before it is created: a new attempt may follow from it.
        place = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": context.metadata(context.revision_name)}
        child = await memory.children.read(place)
        observed = replace(observed, children={key_of(place): child})
        if child.found is not None:
            if not child.is_unchanged or memory.revision is None:
                memory.revision = read_revision(context, child.found, self._key)
            if memory.revision is None:
                return replace(observed, revision_problem=_problem(context, child.found))
            if await self._is_outdated(memory.revision, context, memory):
                memory.children = InformerCache(self._cluster)  # so that the next pass lists the other objects, too
                return replace(observed, revision_problem=RevisionProblem.OUTDATED)
            return replace(observed, revision=memory.revision)
        before = await self._earlier_revision(context, memory)
        if isinstance(before, RevisionProblem):
            return replace(observed, revision_problem=before)
        memory.revision = derive_revision(before, context)
        return replace(observed, revision=memory.revision)

    async def _is_outdated(self, revision: Revision, context: ExperimentContext, memory: ExperimentMemory) -> bool:
        """Return whether the revision leaves out an edit that is accepted now, and can be derived anew."""
        if revision.experiment.spec == context.experiment.spec or not accepts_edit(revision, context):
            return False
        return isinstance(await self._earlier_revision(context, memory), Revision)

    async def _earlier_revision(
        self, context: ExperimentContext, memory: ExperimentMemory
    ) -> Revision | RevisionProblem | None:
        """Return the newest revision of an earlier generation or try, or None if none is on record or readable."""
        if context.generation == 1 and context.first_attempt == 1:
            return None
        found = await memory.children.config_maps(context)
        present = context.generation, context.first_attempt
        ordered = {context.revision_order(name): each for name, each in found.items()}
        if not (orders := [order for order in ordered if order is not None and order < present]):
            return None
        earlier = ordered[max(orders)]
        if (revision := read_revision(context, earlier, self._key)) is None and is_anothers(context, earlier):
            return RevisionProblem.OTHER_OPERATOR
        return revision

    async def _children(
        self, context: ExperimentContext, revision: Revision, memory: ExperimentMemory
    ) -> dict[ObjectKey, Child]:
        secret, claim = own_token_secret(context, self._key), volume_claim(context)
        way = way_to_source(context, self._key)
        children: dict[ObjectKey, Child] = {}
        blocked_at = None if memory.blocker is None else memory.blocker.at
        if blocked_at == ("ConfigMap", context.revision_name):
            return children
        for each in (secret, *(each for each in (way, claim) if each is not None), *revision.manifests):
            children[key_of(each)] = await memory.children.read(each)
            if key_of(each) == blocked_at:
                break
        found = children[key_of(secret)]
        if not found.is_unchanged or not memory.token:
            data = (found.found or secret).get("data", {})
            memory.token = base64.b64decode(data.get(TOKEN_KEY, "")).decode(errors="replace")
        return children

    async def _failed_create(
        self, context: ExperimentContext, status: ExperimentStatus, pods: Sequence[Manifest], now: datetime
    ) -> str | None:
        ready = statuses.condition(status, READY)
        if ready is None or ready.status == "True" or status.phase in (*TERMINAL, "Suspended"):
            return None
        if now < parse_time(ready.last_transition_time) + timedelta(seconds=MAKING_SECONDS):
            return None
        for role in roles_of(context.configs):
            there = [pod["metadata"] for pod in pods if pod["metadata"]["labels"][ROLE_LABEL] == role.name]
            is_whole = len(there) >= role.num_pods(context.experiment.spec)
            if is_whole or any("deletionTimestamp" in each for each in there):
                continue
            if status.phase == "Queued" and not is_queued(role):
                continue
            kind, name = workload_of(role, context.experiment.spec), context.name_of(role.name)
            workload = await self._cluster.get("apps/v1", kind, context.namespace, name)
            if workload is None:
                continue
            reason = statuses.replica_failure(workload) or await self._cluster.last_event(
                workload, "FailedCreate", since=ready.last_transition_time
            )
            if reason is not None:
                return f"{kind} {name}: {reason}"
        return None

    async def status_document(
        self, context: ExperimentContext, memory: ExperimentMemory, status: ExperimentStatus, now: datetime
    ) -> Mapping[str, Any] | None:
        """Return the coordinator's ``/status``, or None if the last one is not ``status_seconds`` old.

        The first document with numbers comes sooner. Documents without them are not returned more often than others.
        """
        seconds, last = self._settings.status_seconds, memory.status_read_at
        if last is not None and not _is_due(last, statuses.seconds_to_next_look(status, last, seconds), now):
            return None
        memory.status_read_at = now
        host = f"{context.name_of(COORDINATOR)}.{context.namespace}.svc"
        reported = await self._coordinator_status.fetch(host, memory.token)
        if reported is None:
            return None
        is_first = not statuses.has_numbers(status) and statuses.has_numbers(
            statuses.with_numbers(status, reported, generation=context.generation, now=now)
        )
        if not is_first and not _is_due(memory.status_returned_at, seconds, now):
            return None
        memory.status_returned_at = now
        return reported


def _is_due(last: datetime | None, seconds: float, now: datetime) -> bool:
    return last is None or (now - last).total_seconds() >= seconds


def _problem(context: ExperimentContext, found: Manifest) -> RevisionProblem:
    if context.uid not in {owner["uid"] for owner in found["metadata"].get("ownerReferences", ())}:
        return RevisionProblem.NOT_OWNED
    return RevisionProblem.OTHER_OPERATOR if is_anothers(context, found) else RevisionProblem.UNREADABLE
