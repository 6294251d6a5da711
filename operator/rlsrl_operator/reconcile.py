"""Reconcile experiments: one pass observes, plans and executes.

Each pass starts from what the API server shows, so a pass that was interrupted anywhere is completed by the next one.

A steady experiment gets a full pass when a watch reports a change or its server's Service has changed, and every
``STEADY_SECONDS``. In between a pass only copies the coordinator's numbers into its status.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

import structlog
from typing_extensions import override

from rlsrl.api.spec import KIND
from rlsrl.api.status import ExperimentStatus
from rlsrl_operator import status as statuses
from rlsrl_operator.cluster import Cluster, Refused, ResourceConflict
from rlsrl_operator.coordinator_status import CoordinatorStatus
from rlsrl_operator.execute import Executed, Executor
from rlsrl_operator.informer_cache import InformerCache
from rlsrl_operator.manifests import ExperimentContext, Manifest
from rlsrl_operator.observe import Blocker, ExperimentMemory, Observed, Observer
from rlsrl_operator.outside_objects import service_reader, source_reader
from rlsrl_operator.plan import RETRY_SECONDS, TROUBLE_SECONDS, plan
from rlsrl_operator.settings import OperatorSettings

STEADY_SECONDS = 300.0
"""How long a steady experiment goes without a full pass if no watch reports anything: a report may be lost."""
_log = structlog.stdlib.get_logger("reconcile")


@dataclass(frozen=True, order=True)
class ExperimentKey:
    """The name of one experiment."""

    namespace: str
    name: str

    @override
    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, kw_only=True)
class SteadyState:
    """An experiment of which only the numbers change."""

    document: Manifest
    """The experiment as it was written last."""
    status: ExperimentStatus
    """Its status."""
    training: ExperimentContext | None
    """The experiment, if it is running. A suspended experiment, which is steady too, has no numbers."""
    until: datetime
    """When the next full pass is due."""


@dataclass
class _Entry:
    """What is remembered of an experiment between passes."""

    memory: ExperimentMemory
    num_reports: int = 0
    """How many watches reported a version that the operator had not seen."""
    steady: SteadyState | None = None
    own_versions: tuple[str, ...] = ()
    """The resourceVersions that the last pass gave to the experiment. A watch reports them, and they cause no pass."""
    num_conflicts: int = 0
    """How many passes in a row ended in a conflict."""


class Reconciler:
    """Reconciles experiments; never one experiment twice at a time."""

    def __init__(
        self,
        cluster: Cluster,
        settings: OperatorSettings,
        coordinator_status: CoordinatorStatus,
        *,
        key: bytes,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        on_status: Callable[[ExperimentKey, ExperimentStatus | None], None] = lambda _, __: None,
    ) -> None:
        """``on_status`` is called with an experiment's status after each pass; None when the experiment is gone."""
        self._settings = settings
        self._observer = Observer(cluster, coordinator_status, settings, key)
        self._executor = Executor(cluster)
        self._now = now
        self._on_status = on_status
        self._entries = defaultdict[ExperimentKey, _Entry](
            lambda: _Entry(
                ExperimentMemory(
                    children=InformerCache(cluster), services=service_reader(cluster), sources=source_reader(cluster)
                )
            )
        )
        self._key = key

    def wake(self, key: ExperimentKey, *, kind: str, name: str, version: str = "") -> bool:
        """Take a watch's report: the experiment or an object of it has that resourceVersion, or is gone if empty.

        Returns whether the report calls for a pass: the operator's own writes do not.
        """
        entry = self._entries[key]
        if kind == KIND:
            is_news = not version or version not in entry.own_versions
        else:
            is_news = kind == "Pod" or entry.memory.children.report(kind, name, version)
        if is_news:
            entry.num_reports, entry.steady = entry.num_reports + 1, None
        return is_news

    async def reconcile(self, key: ExperimentKey) -> float | None:
        """Bring the experiment closer to its spec; returns the seconds until the next pass."""
        entry = self._entries[key]
        num_reports = entry.num_reports
        steady, entry.steady = entry.steady, None
        now = self._now()
        try:
            if steady is None or now >= steady.until or await entry.memory.has_changed_outside(now):
                return await self._reconcile_once(key, entry, num_reports, now)
            return await self._report_progress(key, entry, steady, num_reports, now)
        except ResourceConflict as conflict:
            _log.info("conflict", key=str(key), message=str(conflict))
            entry.num_conflicts += 1
            return min(TROUBLE_SECONDS, RETRY_SECONDS * 2.0 ** min(entry.num_conflicts - 1, 10))
        except Refused as refusal:
            context = entry.memory.context
            at = None if context is None else ("ConfigMap", context.revision_name)
            self._block(key, entry, Blocker(reason="StatusRefused", message=str(refusal), at=at))
            return TROUBLE_SECONDS

    async def _reconcile_once(self, key: ExperimentKey, entry: _Entry, num_reports: int, now: datetime) -> float | None:
        observed = await self._observer.observe(key.namespace, key.name, entry.memory, now)
        if observed is None:
            # The garbage collector deletes the experiment's objects by their owner references.
            self._entries.pop(key, None)
            self._on_status(key, None)
            return None
        decided = plan(observed, key=self._key, now=now)
        done = await self._executor.execute(decided, observed.document, entry.memory.children, now)
        is_queue_refused = done.queue_refusal is not None
        entry.memory.queue_refused_since = (entry.memory.queue_refused_since or now) if is_queue_refused else None
        if done.refused or is_queue_refused:
            # Second stage: the same observation and the refusal lead to the status that reports it.
            observed = _with_outcome(observed, done, entry.memory.queue_refused_since)
            decided = plan(observed, key=self._key, now=now)
        self._block(key, entry, decided.blocker)
        status = decided.status
        if status is not None:
            # The numbers are read after all other writes, so that a coordinator that does not answer delays none.
            status = await self._with_numbers(entry, status, decided.training, done.document, now) or status
            await self._write_status(key, entry, status, done, now)
        entry.num_conflicts = 0
        if status is not None and decided.is_steady and entry.num_reports == num_reports:
            until = now + timedelta(seconds=STEADY_SECONDS)
            entry.steady = SteadyState(document=done.document, status=status, training=decided.training, until=until)
        return decided.requeue_after

    def _block(self, key: ExperimentKey, entry: _Entry, blocker: Blocker | None) -> None:
        """Remember what blocks the experiment, and log it once."""
        before, entry.memory.blocker = entry.memory.blocker, blocker
        if blocker is not None and blocker != before:
            _log.warning("blocked", key=str(key), reason=blocker.reason, message=blocker.message)
        elif blocker is None and before is not None:
            _log.info("unblocked", key=str(key))

    async def _report_progress(
        self, key: ExperimentKey, entry: _Entry, steady: SteadyState, num_reports: int, now: datetime
    ) -> float:
        """Copy the coordinator's numbers into the status of a steady experiment."""
        document = steady.document
        status = await self._with_numbers(entry, steady.status, steady.training, document, now)
        if status is not None:
            done = Executed(document=document)
            await self._write_status(key, entry, status, done, now)
            steady = replace(steady, document=done.document, status=status)
        if entry.num_reports == num_reports:
            entry.steady = steady
        return statuses.seconds_to_next_look(steady.status, now, self._settings.status_seconds)

    async def _with_numbers(
        self,
        entry: _Entry,
        status: ExperimentStatus,
        training: ExperimentContext | None,
        document: Manifest,
        now: datetime,
    ) -> ExperimentStatus | None:
        """Return the status with the run's numbers, or None if there are no new ones."""
        if training is None:
            return None
        reported = await self._observer.status_document(training, entry.memory, status, now)
        if reported is None:
            return None
        return statuses.with_numbers(status, reported, generation=document["metadata"]["generation"], now=now)

    async def _write_status(
        self, key: ExperimentKey, entry: _Entry, status: ExperimentStatus, done: Executed, now: datetime
    ) -> None:
        await self._executor.write_status(status, done, now)
        entry.own_versions = tuple(done.versions) or entry.own_versions
        self._on_status(key, status)


def _with_outcome(observed: Observed, done: Executed, queue_refused_since: datetime | None) -> Observed:
    """Return the observation with what executing the plan has shown."""
    refused = {key: replace(observed.children[key], refused=refused) for key, refused in done.refused.items()}
    return replace(
        observed,
        document=done.document,
        status=statuses.read(done.document),
        children={**observed.children, **refused},
        queue_refusal=done.queue_refusal,
        queue_refused_since=queue_refused_since,
    )
