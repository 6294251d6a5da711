"""The coordinator's service: a thin gRPC shell around the roster, the status document and the learning curve.

Everything here runs in one event loop. A Join stream has two tasks: the handler reads, a writer sends what is queued,
so that a worker that stopped reading holds up nobody else.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any

import grpc
import structlog
from google.protobuf.message import DecodeError
from grpc import aio
from typing_extensions import override

from rlsrl.api.role_names import TRAINER
from rlsrl.api.roles import STREAMS
from rlsrl.data.version import Version
from rlsrl.rpc.v1 import coordinator_pb2 as pb
from rlsrl.rpc.v1.coordinator_pb2_grpc import CoordinatorServicer
from rlsrl.runtime.clock import Clock
from rlsrl.runtime.coordination import Command, WorkerState
from rlsrl.runtime.identity import is_dead
from rlsrl.runtime.ledger import MAX_RECORD_BYTES, LedgerError, PageRecord
from rlsrl.runtime.metrics import Metrics
from rlsrl.workers.documents import StoredDocument
from rlsrl.workers.leadership import Superseded
from rlsrl.workers.learning_curve import CurveRow, LearningCurve
from rlsrl.workers.leases import Claim, Lease, LeaseRefusal, Leases, Wait
from rlsrl.workers.ledger_copies import LedgerCopies
from rlsrl.workers.status import ExperimentInfo, Member, MemberReport, build_status

HELLO_SECONDS = 10.0
"""How long a new stream may be silent."""
LOOK_SECONDS = 0.5
"""Time between two looks for leases that ran out and holders that died."""
STALL_SECONDS = 2.0
"""A look that comes this late shows that the coordinator itself was away: silence until then is not the workers'."""
KEEP_SECONDS = 5.0
"""Time between two writes of the copies of ledger pages; they are also written when a worker is gone."""
SETTINGS = "settings"
"""No role has that name."""
MAX_QUEUED = 256
"""Messages to one worker that wait to be sent; a worker that reads so slowly gets no more commands."""

JoinContext = aio.ServicerContext[pb.WorkerMessage, pb.CoordinatorMessage]


RoleSettings = Mapping[str, Mapping[str, Any]]
"""Values of the live settings of each role that has some, by role (see ``rlsrl.api.live``)."""


class MalformedMessage(ValueError):
    """A peer's message is not what the protocol allows; the text says why."""


@dataclass(frozen=True, kw_only=True)
class MemberState:
    """The worker that was last at a (role, index), and what it said."""

    claim: Claim
    """Its lease, as it would claim it again."""
    pid: int
    host: str
    endpoints: dict[str, str]
    report: MemberReport
    heard_at: float


class CoordinatorService(CoordinatorServicer):
    """Serves Join, Status and Send. ``watch`` must run beside it, and all in the same event loop."""

    def __init__(
        self,
        *,
        experiment: ExperimentInfo,
        roster: Leases,
        document: StoredDocument,
        copies: LedgerCopies,
        copies_document: StoredDocument,
        curve: LearningCurve,
        settings: RoleSettings,
        metrics: Metrics,
        clock: Clock,
        log: structlog.stdlib.BoundLogger,
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self._experiment = experiment
        self._roster = roster
        self._roster_writer = _DocumentWriter(document, roster.to_json)
        self._copies = copies
        self._copies_writer = _DocumentWriter(copies_document, copies.to_json)
        self._curve = curve
        self._clock = clock
        self._log = log
        self._seen: dict[tuple[str, int], MemberState] = {}
        self._connections: dict[str, _Connection] = {}
        self._listening_since = self._looked_at = self._kept_at = clock.monotonic()
        self._freed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._superseded: Superseded | None = None
        self.num_heartbeats = 0
        """Heartbeats taken."""
        self.num_rows = 0
        """Learning-curve rows kept."""

    async def adopt(self, settings: RoleSettings, capacity: Mapping[str, int]) -> None:
        """Tell workers the new values of live settings, those who are here now and those who join later; roles have
        that many workers from now on.
        """
        changed = {role for role in {*settings, *self._settings} if settings.get(role) != self._settings.get(role)}
        self._settings = settings
        self._roster.resize(capacity)
        freed, self._freed = self._freed, asyncio.Event()
        freed.set()
        for connection in self._connections.values():
            if connection.claim.role in changed:
                connection.tell_settings()
        self._log.info("settings", roles=sorted(changed), capacity=dict(capacity))

    async def describe(self) -> dict[str, Any]:
        """The status document."""
        members = [self._member(index, seen) for (_, index), seen in self._seen.items()]
        return build_status(self._experiment, members, self._copies, self._clock.monotonic())

    @override
    async def Join(  # type: ignore[override]
        self,
        request_iterator: AsyncIterator[pb.WorkerMessage],
        context: JoinContext,
    ) -> None:
        """Serve one worker from its hello to the end of its stream."""
        try:
            hello = await _read_hello(context)
            claim = claim_of(hello)
        except MalformedMessage as error:
            await self._refuse(context, str(error))
            return
        admitted = await self._admit(claim, context)
        if isinstance(admitted, LeaseRefusal):
            await self._refuse(context, admitted.reason, role=claim.role)
            return
        seen = self._greet(hello, claim, admitted)
        connection = _Connection(context, seen, tuple(hello.follows), self._peers, self._settings_message, self._log)
        try:
            await self._serve(connection)
        finally:
            if self._connections.get(claim.instance) is connection:
                del self._connections[claim.instance]
            await connection.close()

    @override
    async def Status(
        self,
        request: pb.StatusRequest,
        context: aio.ServicerContext[pb.StatusRequest, pb.StatusReply],
    ) -> pb.StatusReply:
        """The status document as JSON."""
        return pb.StatusReply(json=json.dumps(await self.describe()))

    @override
    async def Send(
        self, request: pb.CommandRequest, context: aio.ServicerContext[pb.CommandRequest, pb.CommandReply]
    ) -> pb.CommandReply:
        """Queue a command for the workers it is meant for."""
        command = Command.from_proto(request.command)
        if command is None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the request holds no known kind of command")
        message = pb.CoordinatorMessage(command=request.command)
        passed = [
            connection.offer(message)
            for connection in self._connections.values()
            if connection.claim.role == request.role
            and (not request.HasField("index") or connection.claim.index == request.index)
        ]
        self._log.info("command", kind=command.kind, to_role=request.role, num_workers=sum(passed))
        return pb.CommandReply(num_workers=sum(passed))

    async def watch(self) -> None:
        """Look again and again, for ever.

        Raises:
            Superseded: another coordinator has taken over from this one.
        """
        while True:
            if self._superseded is not None:
                raise self._superseded
            self.look()
            await asyncio.sleep(LOOK_SECONDS)

    def look(self) -> None:
        """Free the indices of workers that are silent or dead."""
        now = self._clock.monotonic()
        if now - self._looked_at > STALL_SECONDS:
            self._listening_since = now
        self._looked_at = now
        for lease in self._roster.expire(now, self._listening_since):
            self._free(lease, "lease_ran_out")
        for lease in self._roster.holders:
            if lease.instance not in self._connections and is_dead(lease.process):
                self._roster.release(lease.instance)
                self._free(lease, "worker_died")
        if now - self._kept_at > KEEP_SECONDS:
            self._kept_at = now
            self._begin(self._copies_writer.write())
        self._measure(now)

    def _measure(self, now: float) -> None:
        holders = self._roster.holders
        for role in self._roster.roles:
            ages = [now - lease.heard_at for lease in holders if lease.role == role]
            self._metrics.workers.labels(worker_role=role).set(len(ages))
            self._metrics.workers_wanted.labels(worker_role=role).set(self._roster.capacity[role])
            self._metrics.heartbeat_age_seconds.labels(worker_role=role).set(max(ages, default=0.0))

    def _free(self, lease: Lease, event: str, **details: object) -> None:
        """Tell whoever waits for an index or goes by its address; note on disk that nobody holds this one, and what is
        known of the ledger page that its holder may take along.
        """
        self._log.info(event, worker=f"{lease.role}-{lease.index}", incarnation=lease.incarnation, **details)
        self._announce(lease.role)
        freed, self._freed = self._freed, asyncio.Event()
        freed.set()
        self._begin(self._roster_writer.write())
        self._begin(self._copies_writer.write())

    async def keep(self) -> None:
        """Make what is kept durable before the end, as far as that can be."""
        await asyncio.wait({self._begin(document.write()) for document in (self._roster_writer, self._copies_writer)})

    async def _admit(self, claim: Claim, context: JoinContext) -> Lease | LeaseRefusal:
        """A lease that is on disk; waits for as long as the worker does if there is none to be had."""
        while True:
            freed = self._freed
            decision = self._roster.lease(claim, self._clock.monotonic())
            if isinstance(decision, LeaseRefusal):
                return decision
            if isinstance(decision, Wait):
                self._log.info("join_waits", reason=decision.reason)
                await freed.wait()
                continue
            try:
                await asyncio.shield(self._begin(self._roster_writer.write()))
            except (OSError, Superseded) as error:
                self._roster.release(claim.instance)
                await context.abort(grpc.StatusCode.UNAVAILABLE, f"the roster cannot be written: {error}")
            # The lease may have run out, or gone to a later attempt, while the disk was slow.
            if (lease := self._roster.holder(claim.instance)) is not None and lease.incarnation == decision.incarnation:
                return lease

    def _greet(self, hello: pb.Hello, claim: Claim, lease: Lease) -> MemberState:
        before = self._seen.get((lease.role, lease.index))
        known = before is not None and before.claim.instance == lease.instance
        report = before.report if before is not None and known else MemberReport()
        seen = MemberState(
            claim=replace(claim, index=lease.index, incarnation=lease.incarnation),
            pid=hello.pid,
            host=hello.host,
            endpoints=dict(hello.endpoints),
            report=report,
            heard_at=lease.heard_at,
        )
        self._seen[lease.role, lease.index] = seen
        if not known:
            self._metrics.joins.labels(worker_role=lease.role).inc()
        self._log.info(
            "rejoined" if known else "joined",
            worker=f"{lease.role}-{lease.index}",
            incarnation=lease.incarnation,
            attempt=lease.attempt,
            pid=hello.pid,
        )
        return seen

    async def _serve(self, connection: _Connection) -> None:
        """Welcome, then every message until goodbye or the stream's end."""
        claim = connection.claim
        assert claim.index is not None and claim.incarnation is not None, "claims of seen workers are whole"  # noqa: PT018
        self._connections[claim.instance] = connection
        kept = self._copies.get(claim.role, claim.index)
        await connection.put(
            pb.CoordinatorMessage(
                welcome=pb.Welcome(
                    index=claim.index,
                    incarnation=claim.incarnation,
                    heartbeat_seconds=self._experiment.heartbeat_seconds,
                    ledger_page=b"" if kept is None else kept.encode(),
                    settings=self._settings_message(claim.role).settings,
                )
            )
        )
        connection.tell_peers(*connection.follows)
        self._announce(claim.role)
        try:
            while (message := await _read(connection.context)) is not None:
                kind = message.WhichOneof("kind")
                if kind == "goodbye":
                    self._part(claim, message.goodbye)
                    return
                if kind != "heartbeat":
                    raise MalformedMessage(f"after its hello a worker sends heartbeats or goodbye, not {kind}")
                if (refusal := await self._take(connection, message.heartbeat)) is not None:
                    await connection.put(pb.CoordinatorMessage(refused=pb.Refused(reason=refusal.reason)))
                    return
        except MalformedMessage as error:
            self._log.warning("malformed", worker=connection.worker, reason=str(error))
            await connection.put(pb.CoordinatorMessage(refused=pb.Refused(reason=str(error))))

    async def _take(self, connection: _Connection, heartbeat: pb.Heartbeat) -> LeaseRefusal | None:
        """Note a sign of life and keep its rows; a refusal if the index has gone to somebody else meanwhile."""
        claim, now = connection.claim, self._clock.monotonic()
        self.num_heartbeats += 1
        if not self._roster.heartbeat(claim.instance, now):
            admitted = await self._admit(claim, connection.context)
            if isinstance(admitted, LeaseRefusal):
                return admitted
            self._log.info("lease_renewed", worker=connection.worker, incarnation=claim.incarnation)
            self._announce(claim.role)
        assert claim.index is not None, "claims of seen workers are whole"
        seen = self._seen[claim.role, claim.index]
        self._seen[claim.role, claim.index] = replace(seen, report=report_of(heartbeat), heard_at=now)
        if heartbeat.ledger_page:
            self._copies.put(page_of(heartbeat, claim))
        if heartbeat.records:
            await self._keep(connection, rows_of(heartbeat, claim))
        return None

    async def _keep(self, connection: _Connection, rows: list[CurveRow]) -> None:
        try:
            self.num_rows += self._curve.append(rows)
        except OSError as error:
            self._log.exception("rows_not_written")
            # The worker keeps them, and sends them again on its next stream.
            await connection.context.abort(grpc.StatusCode.UNAVAILABLE, f"the rows cannot be written: {error}")
        acknowledgement = pb.RecordsAck(sequence=rows[-1].sequence)
        await connection.put(pb.CoordinatorMessage(records_ack=acknowledgement))

    def _part(self, claim: Claim, goodbye: pb.Goodbye) -> None:
        if goodbye.done and (claim.role, claim.index) == (TRAINER, 0):
            self._experiment = replace(self._experiment, done=True)
        if (lease := self._roster.release(claim.instance)) is not None:
            self._free(lease, "left", reason=goodbye.reason, done=goodbye.done)

    async def _refuse(self, context: JoinContext, reason: str, role: str = "") -> None:
        self._log.warning("refused", reason=reason)
        # A label's values must be few, whatever a peer calls itself.
        known = role if role in self._roster.roles else "unknown"
        self._metrics.joins_refused.labels(worker_role=known).inc()
        await context.write(pb.CoordinatorMessage(refused=pb.Refused(reason=reason)))

    def _member(self, index: int, seen: MemberState) -> Member:
        claim = seen.claim
        lease = self._roster.holder(claim.instance)
        return Member(
            role=claim.role,
            index=index,
            incarnation=claim.incarnation or 0,
            attempt=claim.attempt,
            pid=seen.pid,
            host=seen.host,
            endpoints=seen.endpoints,
            report=seen.report,
            heard_at=seen.heard_at,
            present=lease is not None,
        )

    def _announce(self, role: str) -> None:
        """Somebody of that role came or went: tell those who go by its addresses."""
        for connection in self._connections.values():
            if role in connection.follows:
                connection.tell_peers(role)

    def _peers(self, role: str) -> pb.CoordinatorMessage:
        addresses = {
            index: seen.endpoints[STREAMS]
            for (of_role, index), seen in self._seen.items()
            if of_role == role and STREAMS in seen.endpoints and self._roster.holder(seen.claim.instance) is not None
        }
        return pb.CoordinatorMessage(peers=pb.Peers(role=role, addresses=addresses))

    def _settings_message(self, role: str) -> pb.CoordinatorMessage:
        return pb.CoordinatorMessage(settings=pb.Settings(json=json.dumps(self._settings.get(role, {}))))

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something to its end even if whoever asked for it is gone by then."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._end)
        return task

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        self._log.error("record_not_written", error=repr(error))
        if isinstance(error, Superseded):
            self._superseded = error


class _DocumentWriter:
    """Something that outlives the coordinator: written again when it has changed."""

    def __init__(self, record: StoredDocument, value: Callable[[], Any]) -> None:
        """``value`` gives the JSON value as it is at the time."""
        self._record = record
        self._value = value
        self._written = b""
        self._writing = asyncio.Lock()

    async def write(self) -> None:
        """Make it as it is now durable; one write serves all who wait for it. Raises OSError if that cannot be."""
        async with self._writing:
            document = json.dumps(self._value(), indent=1).encode()
            if document != self._written:
                await asyncio.to_thread(self._record.write, document)
                self._written = document


class _Connection:
    """One Join stream's outgoing half: a queue, and the task that sends from it."""

    def __init__(
        self,
        context: JoinContext,
        seen: MemberState,
        follows: tuple[str, ...],
        peers: Callable[[str], pb.CoordinatorMessage],
        settings: Callable[[str], pb.CoordinatorMessage],
        log: structlog.stdlib.BoundLogger,
    ) -> None:
        self.context = context
        self.claim = seen.claim
        self.follows = follows
        """Roles whose addresses the worker is told."""
        self._stale: dict[str, Callable[[], pb.CoordinatorMessage]] = {}
        """What the worker does not know the newest of, and how to say it: however often it changes, it waits once."""
        self._peers = peers
        self._settings = settings
        self.worker = f"{seen.claim.role}-{seen.claim.index}"
        self._log = log
        self._closed = False
        self._queue: asyncio.Queue[pb.CoordinatorMessage | None] = asyncio.Queue(MAX_QUEUED)
        """Messages to be sent; None only wakes the writer."""
        self._writer = asyncio.create_task(self._write())

    async def put(self, message: pb.CoordinatorMessage) -> None:
        """Queue a message; waits while the queue is full, for as long as the stream lives."""
        await self._queue.put(message)

    def offer(self, message: pb.CoordinatorMessage) -> bool:
        """Queue a message if there is room; whether there was."""
        try:
            self._queue.put_nowait(message)
        except asyncio.QueueFull:
            self._log.warning("command_not_passed", worker=self.worker)
            return False
        return True

    def tell_peers(self, *roles: str) -> None:
        """Send where the members of these roles are by then, after what is queued."""
        self._stale.update({role: functools.partial(self._peers, role) for role in roles})
        self._wake()

    def tell_settings(self) -> None:
        """Send the values of the worker's live settings by then, after what is queued."""
        self._stale[SETTINGS] = functools.partial(self._settings, self.claim.role)
        self._wake()

    async def close(self) -> None:
        """Send what is queued and end the writer. On a broken stream the writer ends by itself."""
        self._closed = True
        self._wake()
        await self._writer

    def _wake(self) -> None:
        if self._queue.empty():
            self._queue.put_nowait(None)

    async def _write(self) -> None:
        try:
            while not (self._closed and self._queue.empty()):
                if (message := await self._queue.get()) is not None:
                    await self.context.write(message)
                while self._stale and self._queue.empty():
                    _, newest = self._stale.popitem()
                    await self.context.write(newest())
        except aio.BaseError as error:
            self._log.info("stream_broke", worker=self.worker, error=repr(error))


async def _read(context: JoinContext) -> pb.WorkerMessage | None:
    """The next message; None at the stream's end."""
    try:
        message = await context.read()
    except DecodeError as error:
        raise MalformedMessage("the message is no WorkerMessage") from error
    return message if isinstance(message, pb.WorkerMessage) else None


async def _read_hello(context: JoinContext) -> pb.Hello:
    """The first message of a stream.

    Raises:
        MalformedMessage: it is no hello.
    """
    reading = asyncio.ensure_future(_read(context))
    await asyncio.wait({reading}, timeout=HELLO_SECONDS)
    if not reading.done():
        try:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"no hello within {HELLO_SECONDS} s")
        finally:
            await reading
    message = reading.result()
    if message is None or message.WhichOneof("kind") != "hello":
        raise MalformedMessage("a stream begins with a hello")
    return message.hello


def claim_of(hello: pb.Hello) -> Claim:
    """What a hello asks for.

    Raises:
        MalformedMessage: a part is missing or out of range.
    """
    try:
        instance = str(uuid.UUID(hello.instance))
    except ValueError as error:
        raise MalformedMessage(f"hello: instance {hello.instance!r} is no UUID") from error
    if hello.HasField("incarnation") and not hello.HasField("index"):
        raise MalformedMessage("hello: an incarnation without its index")
    if min(hello.index, hello.incarnation, hello.attempt, hello.pid) < 0:
        raise MalformedMessage("hello: index, incarnation, attempt and pid are not negative")
    return Claim(
        role=hello.role,
        instance=instance,
        index=hello.index if hello.HasField("index") else None,
        incarnation=hello.incarnation if hello.HasField("incarnation") else None,
        attempt=hello.attempt,
        process=hello.process,
    )


def report_of(heartbeat: pb.Heartbeat) -> MemberReport:
    """What a heartbeat says of its worker."""
    version = heartbeat.version
    return MemberReport(
        state=WorkerState.from_proto(heartbeat.state) or WorkerState.CONFIGURING,
        waiting_for=heartbeat.waiting_for,
        stats=dict(heartbeat.stats),
        version=Version(version.attempt, version.step) if heartbeat.HasField("version") else None,
        records_dropped=heartbeat.records_dropped,
        activity={what: share for what, share in heartbeat.activity.items() if 0.0 <= share <= 1.0},
    )


def page_of(heartbeat: pb.Heartbeat, claim: Claim) -> PageRecord:
    """The ledger page that a heartbeat from the worker with that claim carries.

    Raises:
        MalformedMessage: it is none.
    """
    if len(heartbeat.ledger_page) > MAX_RECORD_BYTES:
        raise MalformedMessage(f"heartbeat: a ledger page of over {MAX_RECORD_BYTES} bytes")
    try:
        return PageRecord.decode(heartbeat.ledger_page, role=claim.role, index=claim.index or 0)
    except LedgerError as error:
        raise MalformedMessage(f"heartbeat: {error}") from error


def rows_of(heartbeat: pb.Heartbeat, claim: Claim) -> list[CurveRow]:
    """The rows of a heartbeat from the worker with that claim.

    Raises:
        MalformedMessage: sequences do not rise, or a step is negative.
    """
    sequences = [-1, *(record.sequence for record in heartbeat.records)]
    if any(later <= earlier for earlier, later in itertools.pairwise(sequences)):
        raise MalformedMessage("heartbeat: the records' sequences rise from 0")
    if any(record.step < 0 for record in heartbeat.records):
        raise MalformedMessage("heartbeat: a record's step is not negative")
    return [
        CurveRow(
            step=record.step,
            wall=record.wall_time,
            scalars=dict(record.scalars),
            role=claim.role,
            index=claim.index or 0,
            attempt=claim.attempt,
            instance=claim.instance,
            sequence=record.sequence,
        )
        for record in heartbeat.records
    ]
