"""The messages that a Join stream sends, and when. No gRPC is involved."""

import threading
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from rlsrl.data.version import Version
from rlsrl.rpc.v1 import coordinator_pb2 as pb
from rlsrl.runtime.activity import WORKING
from rlsrl.runtime.coordination import WorkerState
from rlsrl.runtime.heartbeat_queue import (
    MAX_RECORDS,
    MAX_RECORDS_PER_HEARTBEAT,
    MAX_VIDEOS,
    HeartbeatQueue,
    JoinMessages,
)
from rlsrl.runtime.metrics import Metrics
from rlsrl.testing.clock import ManualClock

LONG = 3600.0


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def queue(clock: ManualClock) -> HeartbeatQueue:
    return HeartbeatQueue(pb.Hello(role="trainer", instance="i"), wall_clock=lambda: 12.5, monotonic=clock.monotonic)


def welcomed(queue: HeartbeatQueue) -> JoinMessages:
    stream = JoinMessages(queue)
    assert next(stream).WhichOneof("kind") == "hello"
    stream.welcome(LONG)
    return stream


def sequences(message: pb.WorkerMessage) -> list[int]:
    return [record.sequence for record in message.heartbeat.records]


def test_the_first_heartbeat_follows_the_welcome_at_once_with_the_newest_report(queue: HeartbeatQueue) -> None:
    queue.report(state=WorkerState.RUNNING, stats={"a": 1.0})
    queue.turn_to("batch")
    queue.report(stats={"b": 2.0}, version=Version(2, 7))
    queue.record(7, {"loss": 0.5})
    heartbeat = next(welcomed(queue)).heartbeat
    assert heartbeat.state == pb.WORKER_STATE_RUNNING
    assert heartbeat.waiting_for == "batch"
    assert dict(heartbeat.stats) == {"a": 1.0, "b": 2.0}
    assert (heartbeat.version.attempt, heartbeat.version.step) == (2, 7)
    assert [(r.sequence, r.step, r.wall_time, dict(r.scalars)) for r in heartbeat.records] == [
        (0, 7, 12.5, {"loss": 0.5})
    ]


def test_a_text_stays_until_it_is_replaced_by_an_empty_one(queue: HeartbeatQueue) -> None:
    queue.report(texts={"a": "1", "b": "2"})
    queue.report(texts={"a": ""}, stats={"c": 1.0})
    for _ in range(2):
        assert dict(queue.heartbeat(-1)[0].texts) == {"b": "2"}


def test_a_heartbeat_has_the_shares_of_the_last_seconds(queue: HeartbeatQueue, clock: ManualClock) -> None:
    def activity() -> dict[str, float]:
        return dict(queue.heartbeat(-1)[0].activity)

    clock.advance(5.0)
    assert activity() == {}, "the time before the worker runs does not count"
    queue.report(state=WorkerState.RUNNING)
    clock.advance(1.0)
    queue.turn_to("credit")
    clock.advance(3.0)
    assert activity() == {"working": 0.25, "credit": 0.75}, "a wait that lasts is counted, too"
    queue.report(state=WorkerState.PAUSED)
    queue.turn_to(WORKING)
    clock.advance(100.0)
    assert activity() == {}, "nothing within the last seconds"


def test_a_heartbeat_names_the_wait_but_not_the_work(queue: HeartbeatQueue) -> None:
    def waiting_for() -> str:
        return queue.heartbeat(-1)[0].waiting_for

    queue.report(state=WorkerState.RUNNING)
    assert waiting_for() == ""
    queue.turn_to("credit")
    assert waiting_for() == "credit"
    queue.turn_to(WORKING)
    assert waiting_for() == ""


def test_each_heartbeat_carries_the_present_ledger_page(queue: HeartbeatQueue) -> None:
    assert next(welcomed(queue)).heartbeat.ledger_page == b""
    page = [b"old"]
    queue.send_ledger_page(lambda: page[0])
    stream = welcomed(queue)
    assert next(stream).heartbeat.ledger_page == b"old"
    page[0] = b"new"
    queue.say_goodbye(pb.Goodbye(reason="over"))
    assert next(stream).heartbeat.ledger_page == b"new", "the last one too"
    assert next(stream).WhichOneof("kind") == "goodbye"


def test_a_later_stream_claims_the_lease_of_the_first(queue: HeartbeatQueue) -> None:
    queue.claim(3, 4)
    hello = next(JoinMessages(queue)).hello
    assert (hello.index, hello.incarnation) == (3, 4)


def test_records_are_sent_again_on_the_next_stream_until_they_are_acknowledged(queue: HeartbeatQueue) -> None:
    for step in range(3):
        queue.record(step, {})
    assert sequences(next(welcomed(queue))) == [0, 1, 2]
    queue.acknowledge(1)
    assert sequences(next(welcomed(queue))) == [2]
    queue.acknowledge(2)
    assert sequences(next(welcomed(queue))) == []
    assert queue.unacknowledged == 0


def test_a_backlog_is_sent_in_batches_without_waiting_for_the_next_heartbeat(queue: HeartbeatQueue) -> None:
    total = 2 * MAX_RECORDS_PER_HEARTBEAT + 1
    for step in range(total):
        queue.record(step, {})
    stream = welcomed(queue)
    pieces = [sequences(next(stream)) for _ in range(3)]
    assert [len(piece) for piece in pieces] == [MAX_RECORDS_PER_HEARTBEAT, MAX_RECORDS_PER_HEARTBEAT, 1]
    assert [sequence for piece in pieces for sequence in piece] == list(range(total))


def test_a_full_queue_drops_the_oldest_records_and_logs_it(queue: HeartbeatQueue) -> None:
    for step in range(MAX_RECORDS + 2):
        queue.record(step, {})
    heartbeat = next(welcomed(queue)).heartbeat
    assert heartbeat.records[0].sequence == 2
    assert heartbeat.records_dropped == 2
    assert queue.unacknowledged == MAX_RECORDS


def test_goodbye_comes_after_the_last_report_and_the_last_acknowledgement(queue: HeartbeatQueue) -> None:
    stream = welcomed(queue)
    next(stream)
    queue.record(1, {})
    queue.say_goodbye(pb.Goodbye(reason="over", done=True))
    queue.say_goodbye(pb.Goodbye(reason="second thoughts"))
    last = next(stream)
    assert last.heartbeat.state == pb.WORKER_STATE_EXITING
    assert sequences(last) == [0]
    with pulling(stream) as (pulled, thread):
        assert not pulled
        assert not stream.said_goodbye
        queue.acknowledge(0)
        thread.join(10)
    assert [(m.goodbye.reason, m.goodbye.done) for m in pulled] == [("over", True)]
    assert stream.said_goodbye
    assert list(stream) == []


def log_of(message: pb.WorkerMessage) -> list[tuple[int, bytes]]:
    return [(part.sequence, part.text) for part in message.heartbeat.log_parts]


def test_the_log_is_sent_once_on_each_stream_until_it_is_acknowledged() -> None:
    queue = HeartbeatQueue(pb.Hello(role="actor", instance="i"))
    queue.printed.add("one\n")
    stream = JoinMessages(queue)
    next(stream)
    stream.welcome(0.0)
    assert log_of(next(stream)) == [(0, b"one\n")]
    queue.printed.add("two\n")
    assert log_of(next(stream)) == [], "the first part is on its way"
    assert log_of(next(welcomed(queue))) == [(0, b"one\n")], "on the next stream again"
    queue.printed.acknowledge(0)
    assert log_of(next(stream)) == [(1, b"two\n")]


def test_goodbye_comes_after_the_last_text_but_waits_for_no_acknowledgement_of_it(queue: HeartbeatQueue) -> None:
    queue.printed.add("one\n")
    stream = welcomed(queue)
    assert log_of(next(stream)) == [(0, b"one\n")]
    queue.printed.add("last words\n")
    queue.say_goodbye(pb.Goodbye(reason="over"))
    assert log_of(next(stream)) == [(1, b"last words\n")]
    assert next(stream).WhichOneof("kind") == "goodbye"


def video(step: int) -> pb.Video:
    return pb.Video(version=pb.Version(attempt=1, step=step), mp4=b"film")


def steps_of(*messages: pb.WorkerMessage) -> list[int | None]:
    """Return the step of each heartbeat's video."""
    return [each.heartbeat.video.version.step if each.heartbeat.HasField("video") else None for each in messages]


def test_a_heartbeat_takes_one_video_once_on_each_stream_until_it_is_acknowledged(queue: HeartbeatQueue) -> None:
    stream = JoinMessages(queue)
    next(stream)
    stream.welcome(0.0)
    assert queue.send_video(video(10))
    assert queue.send_video(video(20))
    first, second, third = (next(stream) for _ in range(3))
    assert steps_of(first, second, third) == [10, 20, None]
    assert [each.heartbeat.video.sequence for each in (first, second)] == [0, 1]
    assert first.heartbeat.video.wall_time == 12.5
    queue.acknowledge_video(0)
    later = welcomed(queue)
    assert steps_of(next(later)) == [20], "on the next stream again"


def test_few_videos_wait(queue: HeartbeatQueue) -> None:
    assert all(queue.send_video(video(step)) for step in range(MAX_VIDEOS))
    assert not queue.has_room_for_video
    assert not queue.send_video(video(100))
    queue.acknowledge_video(0)
    assert queue.has_room_for_video
    assert queue.send_video(video(101))
    stream = welcomed(queue)
    queue.say_goodbye(pb.Goodbye(reason="over"))
    assert steps_of(*(next(stream) for _ in range(MAX_VIDEOS))) == [*range(1, MAX_VIDEOS), 101]


def test_goodbye_comes_after_the_videos_but_waits_for_no_acknowledgement_of_them(queue: HeartbeatQueue) -> None:
    stream = welcomed(queue)
    next(stream)
    for step in (10, 20):
        queue.send_video(video(step))
    queue.say_goodbye(pb.Goodbye(reason="over"))
    assert steps_of(next(stream), next(stream)) == [10, 20]
    assert next(stream).WhichOneof("kind") == "goodbye"


def test_a_heartbeat_carries_the_metrics_of_an_interval_that_has_ended(clock: ManualClock) -> None:
    metrics = Metrics(CollectorRegistry())
    hello = pb.Hello(role="actor", instance="i")
    queue = HeartbeatQueue(hello, registry=metrics.registry, monotonic=clock.monotonic)
    stream = JoinMessages(queue)
    next(stream)
    stream.welcome(0.0)
    clock.advance(100.0)
    assert not next(stream).heartbeat.metrics, "the coordinator wants none"
    queue.metrics.repeat(60.0)
    metrics.env_steps.inc(120)
    clock.advance(60.0)
    assert next(stream).heartbeat.metrics["env_steps_per_second"] == 2.0
    assert not next(stream).heartbeat.metrics


def test_the_worker_can_report_while_a_heartbeat_reads_its_metrics(clock: ManualClock) -> None:
    reading, go_on = threading.Event(), threading.Event()
    registry = CollectorRegistry()
    queue = HeartbeatQueue(pb.Hello(role="actor", instance="i"), registry=registry, monotonic=clock.monotonic)
    stream = welcomed(queue)
    queue.metrics.repeat(60.0)
    registry.register(SlowMetrics(reading, go_on))
    clock.advance(60.0)
    with pulling(stream) as (pulled, thread):
        assert reading.wait(10)
        reporting = threading.Thread(target=queue.turn_to, args=("credit",))
        reporting.start()
        reporting.join(10)
        was_stuck = reporting.is_alive()
        go_on.set()
        stream.close()
        thread.join(10)
    assert not was_stuck
    assert len(pulled) == 1


class SlowMetrics:
    """Metrics whose reading takes until another thread sets an event."""

    def __init__(self, reading: threading.Event, go_on: threading.Event) -> None:
        self._reading, self._go_on = reading, go_on

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> list[Metric]:
        self._reading.set()
        assert self._go_on.wait(30)
        return []


def test_closing_wakes_a_thread_that_waits_for_the_next_message(queue: HeartbeatQueue) -> None:
    stream = JoinMessages(queue)
    next(stream)
    with pulling(stream) as (pulled, thread):
        stream.close()
        thread.join(10)
        assert not thread.is_alive()
    assert not pulled


class pulling:  # noqa: N801 - reads as a statement
    """A thread that waits for one message of the stream."""

    def __init__(self, stream: Iterator[pb.WorkerMessage]) -> None:
        self._pulled: list[pb.WorkerMessage] = []
        self._thread = threading.Thread(target=self._pull, args=(stream,))

    def _pull(self, stream: Iterator[pb.WorkerMessage]) -> None:
        self._pulled.extend(message for message, _ in zip(stream, range(1), strict=False))

    def __enter__(self) -> tuple[list[pb.WorkerMessage], threading.Thread]:
        self._thread.start()
        return self._pulled, self._thread

    def __exit__(self, *_: object) -> None:
        self._thread.join(10)
        assert not self._thread.is_alive()
