"""Collects what a worker sends to the coordinator: its newest report, its unacknowledged rows and videos, what it
prints, and its goodbye.

A ``HeartbeatQueue`` lives as long as the worker. Each Join stream takes its messages from a ``JoinMessages``, which
gRPC's own sending thread iterates. A report overwrites the one before; rows stay until they are acknowledged. Printed
text and videos wait for their acknowledgement only while the worker stays: a worker that leaves sends them once.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry
from typing_extensions import override

from rlsrl.data.version import Version
from rlsrl.rpc.v1 import coordinator_pb2 as pb
from rlsrl.runtime.activity import WORKING, Activity, Stage
from rlsrl.runtime.coordination import WorkerState
from rlsrl.runtime.interval_metrics import IntervalMetrics
from rlsrl.runtime.printed_text import PrintedText

MAX_RECORDS = 8192
"""Rows kept while the coordinator is away. Beyond that the oldest is dropped and counted."""
MAX_RECORDS_PER_HEARTBEAT = 256
"""Limit of the rows in one message."""
MAX_VIDEOS = 4
"""Videos kept while the coordinator is away. A heartbeat takes one."""
MAX_MP4_BYTES = 4 * 1024 * 1024
"""Most bytes of a video's mp4 file."""
MAX_GIF_BYTES = 2 * 1024 * 1024
"""Most bytes of a video's GIF."""


class HeartbeatQueue:
    """Collects the messages to send. Thread-safe; no method waits."""

    def __init__(
        self,
        hello: pb.Hello,
        *,
        printed: PrintedText | None = None,
        registry: CollectorRegistry | None = None,
        wall_clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare streams that begin with ``hello``.

        ``printed`` collects what the worker prints, if the coordinator keeps it. ``registry`` has the worker's metrics.
        ``wall_clock`` returns the rows' Unix seconds.
        """
        self.printed = printed if printed is not None else PrintedText()
        """What the worker prints, for the coordinator."""
        self.metrics = IntervalMetrics(registry if registry is not None else CollectorRegistry(), now=monotonic)
        """The worker's metrics, for trackers."""
        self._wall_clock = wall_clock
        self.changed = threading.Condition()
        """Guards this object and its streams. Notified when a stream has a new message to send."""
        self._hello = hello
        self._report = pb.Heartbeat(state=pb.WORKER_STATE_CONFIGURING)
        self._runs = False
        self._doing = WORKING
        self._activity = Activity(now=monotonic)
        self._stats: dict[str, float] = {}
        self._texts: dict[str, str] = {}
        self._ledger_page: Callable[[], bytes] = bytes
        self._records: deque[pb.Record] = deque()
        self._next_sequence = 0
        self._videos: deque[pb.Video] = deque()
        self._next_video = 0
        self._goodbye: pb.Goodbye | None = None

    @property
    def unacknowledged(self) -> int:
        """Number of rows that the coordinator has not acknowledged."""
        with self.changed:
            return len(self._records)

    def report(
        self,
        *,
        state: WorkerState | None = None,
        stats: Mapping[str, float] | None = None,
        version: Version | None = None,
        texts: Mapping[str, str] | None = None,
    ) -> None:
        """Set parts of the next heartbeat. None leaves a part unchanged; ``stats`` and ``texts`` update by key."""
        with self.changed:
            if state is not None:
                self._report.state = state.to_proto()
                self._runs = state is WorkerState.RUNNING
                self._activity.turn_to(self._doing if self._runs else None)
            if version is not None:
                self._report.version.attempt, self._report.version.step = version
            self._stats.update(stats or {})
            self._texts.update(texts or {})

    def turn_to(self, doing: str) -> None:
        """Note the reason for which the worker waits from now on, or ``WORKING``."""
        with self.changed:
            self._doing = doing
            if self._runs:
                self._activity.turn_to(doing)

    def spent(self, seconds: Mapping[Stage, float]) -> None:
        """Attribute seconds of the work until now to its stages."""
        with self.changed:
            self._activity.spent(seconds)

    def send_ledger_page(self, page: Callable[[], bytes]) -> None:
        """Send the ledger page that ``page()`` returns with each heartbeat from now on. It must not block or raise."""
        with self.changed:
            self._ledger_page = page

    def record(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add a row. Beyond ``MAX_RECORDS`` the oldest is dropped and counted."""
        with self.changed:
            self._records.append(
                pb.Record(sequence=self._next_sequence, step=step, wall_time=self._wall_clock(), scalars=scalars)
            )
            self._next_sequence += 1
            if len(self._records) > MAX_RECORDS:
                self._records.popleft()
                self._report.records_dropped += 1

    def acknowledge(self, sequence: int) -> None:
        """Drop the rows up to this one: the coordinator has stored them."""
        with self.changed:
            while self._records and self._records[0].sequence <= sequence:
                self._records.popleft()
            self.changed.notify_all()

    def send_video(self, video: pb.Video) -> bool:
        """Number the video and keep it until it is acknowledged. Return False, without it, if ``MAX_VIDEOS`` wait."""
        with self.changed:
            if not self.has_room_for_video:
                return False
            video.sequence, video.wall_time = self._next_video, self._wall_clock()
            self._next_video += 1
            self._videos.append(video)
            return True

    @property
    def has_room_for_video(self) -> bool:
        """Whether fewer than ``MAX_VIDEOS`` wait."""
        return len(self._videos) < MAX_VIDEOS

    def next_video(self, after: int) -> tuple[pb.Video | None, int]:
        """Return the first video after sequence ``after``, or None, and how many further ones wait."""
        with self.changed:
            waiting = [video for video in self._videos if video.sequence > after]
            return (waiting[0], len(waiting) - 1) if waiting else (None, 0)

    def acknowledge_video(self, sequence: int) -> None:
        """Drop the videos up to this one: the coordinator has stored them, or given them up."""
        with self.changed:
            while self._videos and self._videos[0].sequence <= sequence:
                self._videos.popleft()

    def claim(self, index: int, incarnation: int) -> None:
        """Let later streams claim this lease again."""
        with self.changed:
            self._hello.index, self._hello.incarnation = index, incarnation

    def say_goodbye(self, goodbye: pb.Goodbye) -> None:
        """Let the stream end with a last report, all rows and, once those are acknowledged, the goodbye.

        Only the first goodbye counts.
        """
        with self.changed:
            if self._goodbye is None:
                self._report.state = pb.WORKER_STATE_EXITING
                self._runs = False
                self._goodbye = goodbye
            self.changed.notify_all()

    @property
    def goodbye(self) -> pb.Goodbye | None:
        """The goodbye, or None while the worker stays. Read it under ``changed``."""
        return self._goodbye

    def hello(self) -> pb.Hello:
        """Return a copy of the hello."""
        with self.changed:
            hello = pb.Hello()
            hello.CopyFrom(self._hello)
            return hello

    def heartbeat(self, after: int) -> tuple[pb.Heartbeat, int]:
        """Return the newest report with rows after sequence ``after``, and how many further rows wait."""
        with self.changed:
            waiting = [record for record in self._records if record.sequence > after]
            heartbeat = pb.Heartbeat(
                stats=self._stats,
                texts={name: text for name, text in self._texts.items() if text},
                records=waiting[:MAX_RECORDS_PER_HEARTBEAT],
                activity=self._activity.shares(),
                ledger_page=self._ledger_page(),
                waiting_for="" if self._doing == WORKING else self._doing,
            )
            heartbeat.MergeFrom(self._report)
            return heartbeat, len(waiting) - len(heartbeat.records)


class JoinMessages(Iterator[pb.WorkerMessage]):
    """The messages of one Join stream, in order: hello; after the welcome a heartbeat every ``heartbeat_seconds``;
    goodbye.

    ``next`` waits until a message is due; ``welcome``, ``close`` and the queue's ``say_goodbye`` and ``acknowledge``
    wake it.
    """

    def __init__(self, queue: HeartbeatQueue) -> None:
        self._queue = queue
        self._changed = queue.changed
        self._hello_sent = False
        self._heartbeat_seconds: float | None = None
        self._due_at = 0.0
        self._sent = -1
        self._log_sent = -1
        self._video_sent = -1
        self._last_report_sent = False
        self._closed = False
        self._said_goodbye = False

    @property
    def welcomed(self) -> bool:
        """Whether the coordinator answered the hello with a welcome."""
        return self._heartbeat_seconds is not None

    @property
    def said_goodbye(self) -> bool:
        """Whether all rows are acknowledged and gRPC has the goodbye."""
        return self._said_goodbye

    def welcome(self, heartbeat_seconds: float) -> None:
        """Begin to send heartbeats."""
        with self._changed:
            self._heartbeat_seconds = heartbeat_seconds
            self._changed.notify_all()

    def close(self) -> None:
        """Send nothing more: the stream has ended. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @override
    def __next__(self) -> pb.WorkerMessage:
        message = self._wait()
        if message.WhichOneof("kind") == "heartbeat":
            # Not under the lock, for which the worker's own thread would wait: reading all metrics takes a millisecond.
            message.heartbeat.metrics.update(self._queue.metrics.due())
        return message

    def _wait(self) -> pb.WorkerMessage:
        with self._changed:
            if not self._hello_sent:
                self._hello_sent = True
                return pb.WorkerMessage(hello=self._queue.hello())
            while not (self._closed or self._said_goodbye):
                if (message := self._due()) is not None:
                    return message
                self._changed.wait(None if not self.welcomed else max(0.0, self._due_at - time.monotonic()))
            raise StopIteration

    def _due(self) -> pb.WorkerMessage | None:
        if self._heartbeat_seconds is None:
            return None
        if self._queue.goodbye is not None and self._last_report_sent:
            if self._queue.unacknowledged == 0:
                self._said_goodbye = True
                return pb.WorkerMessage(goodbye=self._queue.goodbye)
        elif self._queue.goodbye is not None or time.monotonic() >= self._due_at:
            return pb.WorkerMessage(heartbeat=self._heartbeat(self._heartbeat_seconds))
        return None

    def _heartbeat(self, heartbeat_seconds: float) -> pb.Heartbeat:
        heartbeat, num_left = self._queue.heartbeat(self._sent)
        if heartbeat.records:
            self._sent = heartbeat.records[-1].sequence
        is_last = self._queue.goodbye is not None
        heartbeat.log_parts.extend(self._queue.printed.parts(after=self._log_sent, is_last=is_last))
        if heartbeat.log_parts:
            self._log_sent = heartbeat.log_parts[-1].sequence
        video, num_videos_left = self._queue.next_video(self._video_sent)
        if video is not None:
            heartbeat.video.CopyFrom(video)
            self._video_sent = video.sequence
        num_left += num_videos_left if is_last else 0
        self._last_report_sent = is_last and num_left == 0
        self._due_at = time.monotonic() + (0.0 if num_left else heartbeat_seconds)
        return heartbeat
