"""The coordinator's gRPC service: admits workers, takes their heartbeats and sends them settings and peers.

Everything runs in one event loop. Each Join stream has two tasks: the handler reads, and ``WorkerStream`` sends, so
that a worker that does not read delays no other. The decisions are in ``leases`` and ``status``.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from typing import Any

import grpc
import structlog
from grpc import aio
from typing_extensions import override

from rlsrl.api.role_names import TRAINER
from rlsrl.rpc.v1 import coordinator_pb2 as pb
from rlsrl.rpc.v1.coordinator_pb2_grpc import CoordinatorServicer
from rlsrl.runtime.clock import Clock
from rlsrl.runtime.identity import is_dead
from rlsrl.runtime.ledger import PageRecord
from rlsrl.runtime.metrics import Metrics
from rlsrl.workers.coordinator_state import CoordinatorState
from rlsrl.workers.kept_logs import KeptLogs, LogName
from rlsrl.workers.kept_videos import KeptVideos
from rlsrl.workers.leadership import Superseded
from rlsrl.workers.learning_curve import LearningCurve
from rlsrl.workers.leases import Claim, Lease, LeaseRefusal, Leases, Wait
from rlsrl.workers.members import Members
from rlsrl.workers.row_service import RowWriter
from rlsrl.workers.run_progress import RunProgress
from rlsrl.workers.status import ExperimentInfo
from rlsrl.workers.worker_messages import (
    JoinContext,
    MalformedMessage,
    calls_of,
    claim_of,
    log_parts_of,
    metrics_of,
    page_of,
    read,
    read_hello,
    report_of,
    rows_of,
    video_of,
)
from rlsrl.workers.worker_metrics import WorkerMetrics, WorkerMetricsRow
from rlsrl.workers.worker_stream import WorkerStream

SWEEP_SECONDS = 0.5
"""Seconds between two sweeps, which free the indices of silent and dead workers."""
STALL_SECONDS = 2.0
"""A sweep that comes this late shows that the coordinator itself was stopped. Workers' silence until then counts for
nothing."""

EXIT_NOTICE_SECONDS = 3.0
"""How long after its own SIGTERM a coordinator expects workers to report that they exit, too. Kubernetes signals the
pods of a deleted experiment within about a second, and heartbeats are a second apart."""
EXIT_SECONDS = 10.0
"""How long a coordinator with a SIGTERM serves workers that exit."""
DRAIN_CHECK_SECONDS = 0.1
"""Seconds between two looks at the workers that exit."""
MAX_METRICS_ROWS = 64
"""Rows of workers' metrics that wait for the coordinator's main thread, which takes them every second."""
WRITE_COPIES_SECONDS = 5.0
"""Seconds between two writes of the copies of ledger pages. They are also written when a worker is gone."""

RoleSettings = Mapping[str, Mapping[str, Any]]
"""Values of live settings, by role (see ``rlsrl.api.live``)."""
Pauses = Callable[[str, int], bool]
"""Says whether the worker of a role with an index is paused."""


class CoordinatorService(CoordinatorServicer):
    """Serves Join, Status and ReportCalls. ``run_sweeps`` must run beside it, in the same event loop."""

    def __init__(
        self,
        *,
        experiment: ExperimentInfo,
        state: CoordinatorState,
        curve: LearningCurve,
        logs: KeptLogs,
        videos: KeptVideos,
        settings: RoleSettings,
        pauses: Pauses,
        metrics: Metrics,
        clock: Clock,
        log: structlog.stdlib.BoundLogger,
    ) -> None:
        self._experiment = experiment
        self._state = state
        self._leases = state.leases
        self._curve = curve
        self._logs = logs
        self._videos = videos
        self._settings = settings
        self._pauses = pauses
        self._metrics = metrics
        self._clock = clock
        self._log = log
        self._members = Members(state.leases)
        self._streams: dict[str, WorkerStream] = {}
        """By instance."""
        self._listening_since = self._swept_at = self._copies_written_at = clock.monotonic()
        self._progress = RunProgress(self._members, metrics=metrics, log=log, now=self._listening_since)
        self._index_freed = asyncio.Event()
        """Replaced by a new event each time that it is set."""
        self.num_heartbeats = 0
        """Heartbeats received."""
        self.rows = RowWriter(curve, log)
        self._worker_metrics = WorkerMetrics(seconds=experiment.metrics_seconds, now=self._listening_since)
        self.metrics_rows: deque[WorkerMetricsRow] = deque(maxlen=MAX_METRICS_ROWS)
        """Rows for further trackers. Another thread takes them out."""

    async def adopt(self, settings: RoleSettings, capacity: Mapping[str, int], pauses: Pauses) -> None:
        """Send new values of live settings to the present workers, and to later ones when they join.

        Args:
            settings: the new values.
            capacity: the new number of workers of each role.
            pauses: says which workers are paused from now on.
        """
        changed = {role for role in {*settings, *self._settings} if settings.get(role) != self._settings.get(role)}
        before = {stream: self._is_paused(stream.claim) for stream in self._streams.values()}
        self._settings, self._pauses = settings, pauses
        self._leases.resize(capacity)
        self._state.copies.resize(capacity)
        self._wake_waiting_workers()
        for stream, was_paused in before.items():
            if stream.claim.role in changed or self._is_paused(stream.claim) != was_paused:
                stream.send_settings()
        paused = sorted(stream.worker for stream in before if self._is_paused(stream.claim))
        self._log.info("settings", roles=sorted(changed), capacity=dict(capacity), paused=paused)

    async def status(self) -> dict[str, Any]:
        """Return the status document."""
        now, capacity = self._clock.monotonic(), self._leases.capacity
        return self._progress.status(self._experiment, self._state.copies, now, capacity=capacity)

    @override
    async def Join(  # type: ignore[override]  # read and write are called, not iterated
        self,
        request_iterator: AsyncIterator[pb.WorkerMessage],
        context: JoinContext,
    ) -> None:
        """Serve one worker from its hello to the end of its stream."""
        try:
            hello = await read_hello(context)
            claim = claim_of(hello)
        except MalformedMessage as error:
            await self._refuse(context, str(error))
            return
        lease = await self._admit(claim, context)
        if isinstance(lease, LeaseRefusal):
            await self._refuse(context, lease.reason, role=claim.role)
            return
        self._register(hello, claim, lease)
        stream = WorkerStream(
            context,
            replace(claim, index=lease.index, incarnation=lease.incarnation),
            tuple(hello.follows),
            peers=self._peers_message,
            settings=self._settings_message,
            log=self._log,
        )
        try:
            settings = self._settings_message(stream.claim).settings
            page = self._state.copies.get(lease.role, lease.index)
            await self._serve(stream, _welcome(lease, page, settings, self._experiment))
        finally:
            if self._streams.get(claim.instance) is stream:
                del self._streams[claim.instance]
            await stream.close()

    @override
    async def Status(
        self, request: pb.StatusRequest, context: aio.ServicerContext[pb.StatusRequest, pb.StatusReply]
    ) -> pb.StatusReply:
        """Return the status document as JSON."""
        return pb.StatusReply(json=json.dumps(await self.status()))

    @override
    async def ReportCalls(
        self, request: pb.CallReport, context: aio.ServicerContext[pb.CallReport, pb.CallReply]
    ) -> pb.CallReply:
        """Take a call watch's report. A process that never had a lease has no calls."""
        if (lease := self._leases.of_process(request.process)) is not None:
            self._progress.long_calls.put(lease, calls_of(request), self._clock.monotonic(), limit=request.limit)
        return pb.CallReply()

    async def run_sweeps(self) -> None:
        """Sweep every ``SWEEP_SECONDS``, until cancelled.

        Raises:
            Superseded: another coordinator has taken over from this one.
        """
        while True:
            self._state.check()
            self.sweep()
            await asyncio.sleep(SWEEP_SECONDS)

    def sweep(self) -> None:
        """Free the indices of silent and dead workers, begin due writes and set the metrics."""
        now = self._clock.monotonic()
        if now - self._swept_at > STALL_SECONDS:
            self._listening_since = now
            self._progress.rest(now)
        self._swept_at = now
        for lease in self._leases.expire(now, self._listening_since):
            self._on_lease_ended(lease, "lease_ran_out")
        for lease in self._leases.holders:
            if lease.instance not in self._streams and is_dead(lease.process):
                self._leases.release(lease.instance)
                self._progress.long_calls.forget(lease)
                self._on_lease_ended(lease, "worker_died")
        for stream in self._streams.values():
            if stream.unwritten:
                self.rows.write(stream)
        if now - self._copies_written_at > WRITE_COPIES_SECONDS:
            self._copies_written_at = now
            self._state.write_copies()
        self._progress.judge_if_due(self._experiment, now, capacity=self._leases.capacity)
        self._show_worker_metrics(now)
        _show_workers(self._leases, self._metrics, now)

    async def drain(self) -> None:
        """Return once no connected worker exits any more: exiting workers store their last versions and rows here.

        If workers are connected, it takes at least ``EXIT_NOTICE_SECONDS``, and never longer than ``EXIT_SECONDS``.
        """
        await _until_none_exits(self._streams, self._members)

    async def flush(self) -> None:
        """Write the state before the end. A failing disk does not delay the end."""
        await self._state.flush()

    def _show_worker_metrics(self, now: float) -> None:
        """Pass the workers' metrics to the trackers, if a row is due. A tracker that does not take it loses it."""
        scalars = self._worker_metrics.due(now, self._leases.capacity)
        if not scalars:
            return
        row = WorkerMetricsRow(step=self._curve.newest_step, wall=self._clock.time(), scalars=scalars)
        if not self._curve.show(row):
            self._metrics.worker_metrics_lost.labels(tracker="tensorboard").inc()
        self.metrics_rows.append(row)

    def _on_lease_ended(self, lease: Lease, event: str, **details: object) -> None:
        """Send the role's new addresses, wake workers that wait for an index and write the documents.

        The copies are written too, because a pod takes its ledger page along.
        """
        self._log.info(event, worker=f"{lease.role}-{lease.index}", incarnation=lease.incarnation, **details)
        self._send_peers(lease.role)
        self._wake_waiting_workers()
        self._state.write_leases()
        self._state.write_copies()

    def _wake_waiting_workers(self) -> None:
        freed, self._index_freed = self._index_freed, asyncio.Event()
        freed.set()

    async def _admit(self, claim: Claim, context: JoinContext) -> Lease | LeaseRefusal:
        """Return a durable lease. While there is no free index this waits for as long as the worker does."""
        while True:
            freed = self._index_freed
            decision = self._leases.lease(claim, self._clock.monotonic())
            if isinstance(decision, LeaseRefusal):
                return decision
            if isinstance(decision, Wait):
                self._log.info("join_waits", reason=decision.reason)
                await freed.wait()
                continue
            try:
                await asyncio.shield(self._state.write_leases())
            except (OSError, Superseded) as error:
                self._leases.release(claim.instance)
                await context.abort(grpc.StatusCode.UNAVAILABLE, f"the roster cannot be written: {error}")
            # During a slow write the lease may have run out or gone to a later attempt.
            lease = self._leases.holder(claim.instance)
            if lease is not None and lease.incarnation == decision.incarnation:
                return lease

    def _register(self, hello: pb.Hello, claim: Claim, lease: Lease) -> None:
        rejoins = self._members.holds_index(claim, lease)
        if not rejoins:
            self._progress.long_calls.forget(lease)
            self._metrics.joins.labels(worker_role=lease.role).inc()
        self._log.info(
            "rejoined" if rejoins else "joined",
            worker=f"{lease.role}-{lease.index}",
            incarnation=lease.incarnation,
            attempt=lease.attempt,
            pid=hello.pid,
        )
        self._members.register(hello, claim, lease)

    async def _serve(self, stream: WorkerStream, welcome: pb.CoordinatorMessage) -> None:
        """Send the welcome, then handle messages until the goodbye or the end of the stream."""
        claim = stream.claim
        self._streams[claim.instance] = stream
        await stream.send(welcome)
        stream.send_peers(*stream.follows)
        self._send_peers(claim.role)
        try:
            while (message := await read(stream.context)) is not None:
                kind = message.WhichOneof("kind")
                if kind == "goodbye":
                    self._on_goodbye(claim, message.goodbye)
                    return
                if kind != "heartbeat":
                    raise MalformedMessage(f"after its hello a worker sends heartbeats or a goodbye, not {kind}")
                if (refusal := await self._on_heartbeat(stream, message.heartbeat)) is not None:
                    await stream.send(pb.CoordinatorMessage(refused=pb.Refused(reason=refusal.reason)))
                    return
        except MalformedMessage as error:
            self._log.warning("malformed", worker=stream.worker, reason=str(error))
            await stream.send(pb.CoordinatorMessage(refused=pb.Refused(reason=str(error))))

    async def _on_heartbeat(self, stream: WorkerStream, heartbeat: pb.Heartbeat) -> LeaseRefusal | None:
        """Renew the lease and store what the heartbeat brings. Refuse if another process got the index meanwhile."""
        claim, now = stream.claim, self._clock.monotonic()
        self.num_heartbeats += 1
        if not self._leases.heartbeat(claim.instance, now):
            admitted = await self._admit(claim, stream.context)
            if isinstance(admitted, LeaseRefusal):
                return admitted
            self._log.info("lease_renewed", worker=stream.worker, incarnation=claim.incarnation)
            self._send_peers(claim.role)
        report = report_of(heartbeat)
        self._members.update(claim, report, now)
        page = page_of(heartbeat, claim) if heartbeat.ledger_page else None
        if page is not None:
            self._state.copies.put(page)
        self._progress.note(claim, report, page, now)
        if heartbeat.metrics:
            self._worker_metrics.put(claim.role, _index_of(claim), metrics_of(heartbeat))
        await _keep_log(self._logs, stream, log_parts_of(heartbeat))
        if heartbeat.records:
            stream.unwritten.extend(rows_of(heartbeat.records, claim))
            self.rows.write(stream)
        await _keep_video(self._videos, stream, heartbeat, now)
        return None

    def _on_goodbye(self, claim: Claim, goodbye: pb.Goodbye) -> None:
        if goodbye.done and (claim.role, claim.index) == (TRAINER, 0):
            self._experiment = replace(self._experiment, done=True)
        if (lease := self._leases.release(claim.instance)) is not None:
            self._progress.long_calls.forget(lease)
            self._on_lease_ended(lease, "left", reason=goodbye.reason, done=goodbye.done)

    async def _refuse(self, context: JoinContext, reason: str, role: str = "") -> None:
        self._log.warning("refused", reason=reason)
        # A label needs few values, whatever role a peer claims to have.
        known = role if role in self._leases.roles else "unknown"
        self._metrics.joins_refused.labels(worker_role=known).inc()
        await context.write(pb.CoordinatorMessage(refused=pb.Refused(reason=reason)))

    def _send_peers(self, role: str) -> None:
        """Send the role's present addresses to the workers that follow it."""
        for stream in self._streams.values():
            if role in stream.follows:
                stream.send_peers(role)

    def _peers_message(self, role: str) -> pb.CoordinatorMessage:
        return pb.CoordinatorMessage(peers=pb.Peers(role=role, addresses=self._members.addresses(role)))

    def _settings_message(self, claim: Claim) -> pb.CoordinatorMessage:
        settings = json.dumps(self._settings.get(claim.role, {}))
        return pb.CoordinatorMessage(settings=pb.Settings(json=settings, paused=self._is_paused(claim)))

    def _is_paused(self, claim: Claim) -> bool:
        return self._pauses(claim.role, _index_of(claim))


async def _keep_log(logs: KeptLogs, stream: WorkerStream, parts: list[pb.LogPart]) -> None:
    """Append the parts, if there are any, to the log of the worker's lease: no worker can write the log of another."""
    if not parts:
        return
    claim = stream.claim
    logs.append(LogName(claim.role, _index_of(claim)), claim.instance, parts)
    await stream.send(pb.CoordinatorMessage(log_ack=pb.LogAck(sequence=parts[-1].sequence)))


async def _keep_video(videos: KeptVideos, stream: WorkerStream, heartbeat: pb.Heartbeat, now: float) -> None:
    """Keep the video, if there is one, under the index of the worker's lease."""
    if not heartbeat.HasField("video"):
        return
    await videos.take(video_of(heartbeat, stream.claim), now)
    await stream.send(pb.CoordinatorMessage(video_ack=pb.VideoAck(sequence=heartbeat.video.sequence)))


def _index_of(claim: Claim) -> int:
    assert claim.index is not None, "the claim of a member has an index"
    return claim.index


def _welcome(
    lease: Lease, page: PageRecord | None, settings: pb.Settings, experiment: ExperimentInfo
) -> pb.CoordinatorMessage:
    """Return the answer to an admitted worker. ``page`` is the copy of the index's ledger page, if there is one."""
    return pb.CoordinatorMessage(
        welcome=pb.Welcome(
            index=lease.index,
            incarnation=lease.incarnation,
            heartbeat_seconds=experiment.heartbeat_seconds,
            metrics_seconds=experiment.metrics_seconds,
            ledger_page=b"" if page is None else page.encode(),
            settings=settings,
        )
    )


def _show_workers(leases: Leases, metrics: Metrics, now: float) -> None:
    """Set the metrics of each role's workers: held and wanted indices, and the age of the oldest heartbeat."""
    for role in leases.roles:
        ages = [now - lease.heard_at for lease in leases.holders if lease.role == role]
        metrics.workers.labels(worker_role=role).set(len(ages))
        metrics.workers_wanted.labels(worker_role=role).set(leases.capacity[role])
        metrics.heartbeat_age_seconds.labels(worker_role=role).set(max(ages, default=0.0))


async def _until_none_exits(streams: Mapping[str, WorkerStream], members: Members) -> None:
    """Return once no worker of a stream exits; see ``CoordinatorService.drain``."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    while streams and (waited := loop.time() - began) < EXIT_SECONDS:
        if waited >= EXIT_NOTICE_SECONDS and not members.any_exiting(streams):
            return
        await asyncio.sleep(DRAIN_CHECK_SECONDS)
