"""Reads and checks the messages of a worker's Join stream: protobuf in, records of the coordinator out."""

from __future__ import annotations

import asyncio
import itertools
import math
import uuid
from collections.abc import Sequence

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

from rlsrl.api.role_names import EVALUATOR
from rlsrl.data.version import Version
from rlsrl.rpc.v1 import coordinator_pb2 as pb
from rlsrl.runtime.call_board import CALL_NAMES, EnvironmentCall
from rlsrl.runtime.coordination import OWN_PREFIX, PROGRAM, WorkerState
from rlsrl.runtime.errors import shortened
from rlsrl.runtime.heartbeat_queue import MAX_GIF_BYTES, MAX_MP4_BYTES
from rlsrl.runtime.interval_metrics import MAX_INTERVAL_METRICS, MAX_NAME_LENGTH
from rlsrl.runtime.ledger import MAX_RECORD_BYTES, LedgerError, PageRecord
from rlsrl.workers.event_file import GIF_HEADER
from rlsrl.workers.kept_videos import SentVideo
from rlsrl.workers.learning_curve import CurveRow
from rlsrl.workers.leases import Claim
from rlsrl.workers.status import MemberReport

MAX_LOG_BYTES = 1024 * 1024
"""Most bytes of log that a heartbeat may bring. A worker's two parts are at most half as long."""
HELLO_SECONDS = 10.0
"""Seconds that a new stream may take to send its hello."""

JoinContext = aio.ServicerContext[pb.WorkerMessage, pb.CoordinatorMessage]


class MalformedMessage(ValueError):
    """A worker's message breaks the protocol; the text says how."""


async def read(context: JoinContext) -> pb.WorkerMessage | None:
    """Return the next message, or None at the end of the stream.

    Raises:
        MalformedMessage: the bytes are not a WorkerMessage.
    """
    try:
        message = await context.read()
    except DecodeError as error:
        raise MalformedMessage("the bytes are not a WorkerMessage") from error
    return message if isinstance(message, pb.WorkerMessage) else None


async def read_hello(context: JoinContext) -> pb.Hello:
    """Return the hello that begins a stream. Aborts the call if none comes within ``HELLO_SECONDS``.

    Raises:
        MalformedMessage: the first message is not a hello.
    """
    reading = asyncio.ensure_future(read(context))
    await asyncio.wait({reading}, timeout=HELLO_SECONDS)
    if not reading.done():
        try:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"no hello within {HELLO_SECONDS} s")
        finally:
            await reading
    message = reading.result()
    if message is None or message.WhichOneof("kind") != "hello":
        raise MalformedMessage("the first message of a stream must be a hello")
    return message.hello


def claim_of(hello: pb.Hello) -> Claim:
    """Return the claim in a hello.

    Raises:
        MalformedMessage: a field is missing or out of range.
    """
    instance = _uuid(hello.instance)
    if hello.HasField("incarnation") and not hello.HasField("index"):
        raise MalformedMessage("hello: an incarnation without its index")
    if min(hello.index, hello.incarnation, hello.attempt, hello.pid) < 0:
        raise MalformedMessage("hello: index, incarnation, attempt and pid must not be negative")
    return Claim(
        role=hello.role,
        instance=instance,
        index=hello.index if hello.HasField("index") else None,
        incarnation=hello.incarnation if hello.HasField("incarnation") else None,
        attempt=hello.attempt,
        process=hello.process,
    )


def report_of(heartbeat: pb.Heartbeat) -> MemberReport:
    """Return the worker's report in a heartbeat. Shares of activity outside 0 to 1 are left out."""
    version = heartbeat.version
    return MemberReport(
        state=WorkerState.from_proto(heartbeat.state) or WorkerState.CONFIGURING,
        waiting_for=heartbeat.waiting_for,
        stats=dict(heartbeat.stats),
        texts={name: shortened(text) for name, text in heartbeat.texts.items()},
        version=Version(version.attempt, version.step) if heartbeat.HasField("version") else None,
        records_dropped=heartbeat.records_dropped,
        activity={stage: share for stage, share in heartbeat.activity.items() if 0.0 <= share <= 1.0},
    )


def calls_of(report: pb.CallReport) -> tuple[EnvironmentCall, ...]:
    """Return the environment calls in a report. Calls with values out of range are left out."""
    return tuple(
        EnvironmentCall(
            first_rank=call.first_rank, num_environments=call.num_environments, name=name, seconds=call.seconds
        )
        for call in report.calls
        for name in CALL_NAMES
        if name == call.name and call.first_rank >= 0 and call.num_environments >= 1 and 0 <= call.seconds < math.inf
    )


def metrics_of(heartbeat: pb.Heartbeat) -> dict[str, float]:
    """Return the worker's metrics in a heartbeat. What a worker of this version does not send is left out."""
    found = (
        (name, value)
        for name, value in heartbeat.metrics.items()
        if math.isfinite(value) and len(name) <= MAX_NAME_LENGTH
    )
    return dict(itertools.islice(found, MAX_INTERVAL_METRICS))


def page_of(heartbeat: pb.Heartbeat, claim: Claim) -> PageRecord:
    """Return the ledger page in a heartbeat of the worker with that claim.

    Raises:
        MalformedMessage: the bytes are not a ledger page.
    """
    if len(heartbeat.ledger_page) > MAX_RECORD_BYTES:
        raise MalformedMessage(f"heartbeat: a ledger page of more than {MAX_RECORD_BYTES} bytes")
    try:
        return PageRecord.decode(heartbeat.ledger_page, role=claim.role, index=claim.index or 0)
    except LedgerError as error:
        raise MalformedMessage(f"heartbeat: {error}") from error


def log_parts_of(heartbeat: pb.Heartbeat) -> list[pb.LogPart]:
    """Return the parts of the worker's log in a heartbeat.

    Raises:
        MalformedMessage: sequence numbers do not rise, or the parts are too long.
    """
    parts = list(heartbeat.log_parts)
    _check_sequences("parts of the log", [part.sequence for part in parts])
    if sum(len(part.text) for part in parts) > MAX_LOG_BYTES:
        raise MalformedMessage(f"heartbeat: a log of more than {MAX_LOG_BYTES} bytes")
    return parts


def video_of(heartbeat: pb.Heartbeat, claim: Claim) -> SentVideo:
    """Return the video in a heartbeat of the worker with that claim.

    Raises:
        MalformedMessage: the worker is no evaluator, or the video is too large or none.
    """
    video, version = heartbeat.video, heartbeat.video.version
    if claim.role != EVALUATOR:
        raise MalformedMessage(f"heartbeat: a video of a worker of the role {shortened(claim.role)!r}")
    if len(video.mp4) > MAX_MP4_BYTES or len(video.gif) > MAX_GIF_BYTES:
        limits = f"{MAX_MP4_BYTES} bytes of mp4, {MAX_GIF_BYTES} of GIF"
        raise MalformedMessage(f"heartbeat: a video of {len(video.mp4)} and {len(video.gif)} bytes; allowed: {limits}")
    is_gif = not video.gif or (video.gif[:4] == b"GIF8" and len(video.gif) > GIF_HEADER.size)
    if video.mp4[4:8] != b"ftyp" or not is_gif:
        raise MalformedMessage("heartbeat: a video that is no mp4 file, or has no GIF")
    if min(version.attempt, version.step, video.sequence) < 0:
        raise MalformedMessage("heartbeat: version and sequence of a video must not be negative")
    return SentVideo(
        index=claim.index or 0,
        instance=claim.instance,
        sequence=video.sequence,
        version=Version(version.attempt, version.step),
        is_fixed=video.is_fixed,
        wall=video.wall_time,
        mp4=video.mp4,
        gif=video.gif,
    )


def program_rows_of(message: pb.ProgramRows) -> list[CurveRow]:
    """Return the rows of a program that follows the run.

    Raises:
        MalformedMessage: as ``rows_of``; the instance is not a UUID, or a name lacks the prefix or is too long.
    """
    names = [name for record in message.records for name in record.scalars]
    if wrong := [name for name in names if not name.startswith(OWN_PREFIX) or len(name) > MAX_NAME_LENGTH]:
        allowed = f"begin with {OWN_PREFIX} and have at most {MAX_NAME_LENGTH} characters"
        raise MalformedMessage(f"the name {shortened(wrong[0])!r} is not allowed: names {allowed}")
    return rows_of(message.records, Claim(role=PROGRAM, instance=_uuid(message.instance)))


def rows_of(records: Sequence[pb.Record], claim: Claim) -> list[CurveRow]:
    """Return the rows of the learning curve that the worker with that claim has sent in one message.

    Raises:
        MalformedMessage: sequence numbers do not rise, or a step is negative.
    """
    _check_sequences("records", [record.sequence for record in records])
    if any(record.step < 0 for record in records):
        raise MalformedMessage("the step of a record must not be negative")
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
        for record in records
    ]


def _uuid(instance: str) -> str:
    try:
        return str(uuid.UUID(instance))
    except ValueError as error:
        raise MalformedMessage(f"instance {shortened(instance)!r} is not a UUID") from error


def _check_sequences(what: str, sequences: list[int]) -> None:
    if any(later <= earlier for earlier, later in itertools.pairwise([-1, *sequences])):
        raise MalformedMessage(f"the sequence numbers of {what} must rise from 0")
