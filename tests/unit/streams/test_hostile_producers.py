"""The shared-memory consumer refuses and counts invalid messages of any socket, and keeps serving."""

from __future__ import annotations

import mmap
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rlsrl.data.slots import ProducerId
from rlsrl.data.version import Version
from rlsrl.rpc import local
from rlsrl.streams.handshake import Hello
from rlsrl.streams.protocols import HandshakeRefused, StreamError, StreamTimeout
from rlsrl.streams.shared_memory import consumer as consumer_module
from rlsrl.streams.shared_memory.segment import segment_nbytes
from rlsrl.streams.shared_memory.wire import ACK, CREDIT, MESSAGE, POST
from rlsrl.testing.clock import ManualClock
from rlsrl.testing.leaks import open_descriptors
from rlsrl.testing.stream_bench import (
    NUM_LANES,
    TOKEN,
    TRANSITIONS,
    ObservableConsumer,
    SharedMemoryTransport,
    StreamBench,
    fill,
    small_layout,
    value_of,
)

HELLO = Hello(producer=ProducerId(0, 0), layout=small_layout())


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def bench(tmp_path: Path, clock: ManualClock) -> Iterator[StreamBench]:
    bench = StreamBench(SharedMemoryTransport(), tmp_path, clock=clock)
    yield bench
    bench.close()


@pytest.fixture
def consumer(bench: StreamBench) -> ObservableConsumer:
    return bench.consumer()


class Stranger:
    """A socket to the consumer without any protocol."""

    def __init__(self, bench: StreamBench, consumer: ObservableConsumer) -> None:
        self.bench, self.consumer = bench, consumer
        self.socket = local.connect(bench.address, timeout=5)
        self.total = 0

    def send(self, payload: bytes) -> None:
        self.socket.send(payload)
        self.serve()

    def serve(self) -> None:
        for _ in range(4):
            self.bench.serve(self.consumer)

    def introduce(self, **changes: Any) -> dict[str, Any]:
        local.send_json(self.socket, HELLO.to_json(TOKEN) | changes)
        self.serve()
        message, self.fds = local.recv_json(self.socket, max_fds=1)
        return message

    def post(self, place: int, order: int, sequence: int, num_transitions: int) -> None:
        self.total += num_transitions
        self.send(MESSAGE.pack(POST, place, order, sequence, num_transitions, self.total))

    def credit(self) -> tuple[int, int]:
        """Return (slot, order) of the next credit."""
        what, place, order, _, _, _ = MESSAGE.unpack(self.socket.recv(1000))
        assert what == CREDIT
        return place, order

    def is_cut_off(self) -> bool:
        self.socket.settimeout(5)
        with suppress(ConnectionResetError):
            while self.socket.recv(100_000):
                continue
        return True


@pytest.fixture
def stranger(bench: StreamBench, consumer: ObservableConsumer) -> Iterator[Callable[[], Stranger]]:
    strangers: list[Stranger] = []

    def come() -> Stranger:
        strangers.append(Stranger(bench, consumer))
        return strangers[-1]

    yield come
    for each in strangers:
        each.socket.close()
        for fd in getattr(each, "fds", []):
            os.close(fd)
    # The consumer still serves a correct producer afterwards.
    consumer.grant(8 * NUM_LANES, Version(1, 0))
    honest = bench.producer(77)
    honest.post(fill(bench.acquire(consumer, honest), 5))
    assert [value_of(slot) for slot in bench.take(consumer, 1)] == [5]


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "malformed"),
        (b"[1, 2]", "JSON object"),
        (b"\xff\xfe\x00", "malformed"),
        (b"[" * 60_000, "nested"),
        (b'{"protocol": ' + b"1" * 60_000 + b"}", "malformed"),
        (b"x" * (local.MAX_MESSAGE + 1), str(local.MAX_MESSAGE)),
    ],
    ids=["http", "list", "not utf-8", "deep", "huge integer", "oversized"],
)
def test_a_malformed_hello_is_refused(
    stranger: Callable[[], Stranger], consumer: ObservableConsumer, payload: bytes, text: str
) -> None:
    visitor = stranger()
    visitor.send(payload)
    message, _ = local.recv_json(visitor.socket)
    assert text in message["refused"]
    assert visitor.is_cut_off()
    assert consumer.counters["refused_malformed"] == 1
    assert consumer.producers == ()


def test_descriptors_sent_to_the_consumer_are_not_kept(
    stranger: Callable[[], Stranger], consumer: ObservableConsumer
) -> None:
    visitor = stranger()
    visitor.serve()
    before = open_descriptors()
    ends = os.pipe()
    socket.send_fds(visitor.socket, [b"{}"], ends)
    for fd in ends:
        os.close(fd)
    visitor.serve()
    assert visitor.is_cut_off()
    assert open_descriptors() == before - 1
    assert consumer.counters["refused_malformed"] == 1


def test_a_protocol_mismatch_is_named_to_the_producer(
    stranger: Callable[[], Stranger], consumer: ObservableConsumer
) -> None:
    assert "protocol 3 at the consumer, 1 at the producer" in stranger().introduce(protocol=1)["refused"]
    assert consumer.counters["refused_protocol"] == 1


def test_a_silent_connection_delays_no_producer_and_is_dismissed(
    stranger: Callable[[], Stranger], bench: StreamBench, consumer: ObservableConsumer, clock: ManualClock
) -> None:
    visitor = stranger()
    visitor.serve()
    honest = bench.producer(1)
    consumer.grant(NUM_LANES, Version(1, 0))
    bench.acquire(consumer, honest)
    clock.advance(consumer_module.HANDSHAKE_TIMEOUT_SECONDS)
    visitor.serve()
    assert visitor.is_cut_off()
    assert consumer.counters["dismissed"] == 1


def test_many_silent_connections_do_not_keep_others_out(
    stranger: Callable[[], Stranger], bench: StreamBench, consumer: ObservableConsumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer_module, "MAX_NEWCOMERS", 4)
    crowd = [stranger() for _ in range(10)]
    for visitor in crowd:
        visitor.serve()
    assert consumer.counters["dismissed"] == 6
    assert all(visitor.is_cut_off() for visitor in crowd[:6])


def test_producers_beyond_the_limit_are_refused(
    stranger: Callable[[], Stranger], consumer: ObservableConsumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer_module, "MAX_PRODUCERS", 2)
    assert "refused" not in stranger().introduce(index=0)
    last = stranger()
    assert "refused" not in last.introduce(index=1)
    assert "at most 2 producers" in stranger().introduce(index=2)["refused"]
    assert consumer.counters["refused_capacity"] == 1
    last.socket.close()
    last.serve()


def test_a_producer_without_memory_is_refused(
    stranger: Callable[[], Stranger], consumer: ObservableConsumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(name: str, nbytes: int) -> int:
        raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr("rlsrl.streams.shared_memory.segment.create_memory", no_memory)
        assert "Cannot allocate memory" in stranger().introduce()["refused"]
    assert consumer.counters["refused_capacity"] == 1
    assert consumer.producers == ()


@pytest.mark.parametrize(
    ("payload", "kind"),
    [
        (b"short", "message"),
        (b"x" * 100_000, "message"),
        (MESSAGE.pack(ACK, 0, 0, 0, 0, 0), "message"),
        (MESSAGE.pack(-1, 0, 0, 0, 0, 0), "message"),
        (MESSAGE.pack(POST, 0, 5, 0, 1, 1), "credit"),
        (MESSAGE.pack(POST, 1, 0, 0, 1, 1), "credit"),
        (MESSAGE.pack(POST, 1 << 62, 0, 0, 1, 1), "credit"),
        (MESSAGE.pack(POST, -1, 0, 0, 1, 1), "credit"),
        (MESSAGE.pack(POST, 0, 0, -1, 1, 1), "sequence"),
        (MESSAGE.pack(POST, 0, 0, 0, TRANSITIONS + 1, TRANSITIONS + 1), "transitions"),
        (MESSAGE.pack(POST, 0, 0, 0, -1, 0), "transitions"),
        (MESSAGE.pack(POST, 0, 0, 0, 2, 1), "total"),
        (MESSAGE.pack(POST, 0, 0, 0, 1, 1 << 62), "total"),
    ],
)
def test_a_violation_ends_the_connection(
    stranger: Callable[[], Stranger], bench: StreamBench, consumer: ObservableConsumer, payload: bytes, kind: str
) -> None:
    consumer.grant(NUM_LANES, Version(1, 0))
    visitor = stranger()
    visitor.introduce()
    assert visitor.credit() == (0, 0)
    visitor.send(payload)
    assert consumer.counters[f"violation_{kind}"] == 1
    assert visitor.is_cut_off()
    assert consumer.producers == ()
    assert consumer.outstanding == ()
    assert bench.received == []
    assert bench.balance().in_buffer == 0


def test_a_sequence_that_goes_back_ends_the_connection_and_what_came_before_counts(
    stranger: Callable[[], Stranger], bench: StreamBench, consumer: ObservableConsumer
) -> None:
    consumer.grant(2 * NUM_LANES, Version(1, 0))
    visitor = stranger()
    visitor.introduce()
    visitor.post(0, 0, 5, TRANSITIONS)
    visitor.post(1, 1, 5, TRANSITIONS)
    assert consumer.counters["violation_sequence"] == 1
    assert [(slot.sequence, slot.credit) for slot in bench.take(consumer, 1)] == [(5, 0)]
    assert bench.trainer_ledger().marked_sequence(ProducerId(0, 0)) == 5


def test_a_credit_is_used_once(
    stranger: Callable[[], Stranger], bench: StreamBench, consumer: ObservableConsumer
) -> None:
    consumer.grant(NUM_LANES, Version(1, 0))
    visitor = stranger()
    visitor.introduce()
    visitor.post(0, 0, 0, 1)
    visitor.post(0, 0, 1, 1)
    assert consumer.counters["violation_credit"] == 1
    assert len(bench.take(consumer, 1)) == 1


def test_a_flood_ends_with_its_first_message(stranger: Callable[[], Stranger], consumer: ObservableConsumer) -> None:
    visitor = stranger()
    visitor.introduce()
    visitor.socket.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            visitor.socket.send(b"x" * 1000)
    visitor.serve()
    assert consumer.counters["violation_message"] == 1


def test_a_producer_that_never_reads_is_disconnected(
    stranger: Callable[[], Stranger], bench: StreamBench, consumer: ObservableConsumer
) -> None:
    visitor = stranger()
    visitor.introduce()
    sequence = 0
    while consumer.producers:
        consumer.grant(NUM_LANES, Version(1, 0))
        with suppress(OSError):
            visitor.post(sequence % 2, sequence, sequence, 1)
        visitor.serve()
        for slot in bench.received:
            consumer.release(slot)
        bench.received.clear()
        sequence += 1
    assert sequence > 10
    assert consumer.counters == Counter(connected=1, gone=1)


def test_posts_of_a_producer_that_died_with_unread_messages_arrive(
    stranger: Callable[[], Stranger], bench: StreamBench, consumer: ObservableConsumer
) -> None:
    """The kernel then reports a reset before it returns the messages sent before."""
    consumer.grant(2 * NUM_LANES, Version(1, 0))
    visitor = stranger()
    visitor.introduce()
    for place in range(2):
        visitor.socket.send(MESSAGE.pack(POST, place, place, place, 1, place + 1))
    visitor.socket.close()
    assert [slot.sequence for slot in bench.take(consumer, 2)] == [0, 1]


def test_posts_are_taken_before_a_successor_replaces_the_producer(
    stranger: Callable[[], Stranger], bench: StreamBench, consumer: ObservableConsumer
) -> None:
    consumer.grant(NUM_LANES, Version(1, 0))
    older, newer = stranger(), stranger()
    older.introduce()
    newer.serve()
    local.send_json(
        newer.socket, HELLO.to_json(TOKEN) | {"incarnation": 1, "account": [4, -1, 4], "left": [[0, 0, 4, False]]}
    )
    older.socket.send(MESSAGE.pack(POST, 0, 0, 0, 4, 4))
    newer.serve()
    assert consumer.producers == (ProducerId(0, 1),)
    assert [slot.num_transitions for slot in bench.take(consumer, 1)] == [4]
    assert bench.trainer_page().record.counters["lost.producer_died"] == 0


def test_a_producer_cannot_shrink_the_memory(stranger: Callable[[], Stranger]) -> None:
    visitor = stranger()
    visitor.introduce()
    (fd,) = visitor.fds
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 1 << 30)


def test_garbage_in_shared_memory_changes_only_its_slot(
    stranger: Callable[[], Stranger], bench: StreamBench, consumer: ObservableConsumer
) -> None:
    consumer.grant(NUM_LANES, Version(1, 0))
    visitor = stranger()
    visitor.introduce()
    with mmap.mmap(visitor.fds[0], 0) as memory:
        memory[:] = b"\xff" * len(memory)
    visitor.post(0, 0, 0, 3)
    (slot,) = bench.take(consumer, 1)
    assert (slot.sequence, slot.num_transitions, slot.credit) == (0, 3, 0)


class FakeConsumer:
    """Listens at a consumer's address and answers with any bytes."""

    def __init__(self, bench: StreamBench) -> None:
        self.listener = local.listen(bench.address)
        self.listener.setblocking(True)

    def answer(self, payload: bytes, fds: tuple[int, ...] = ()) -> None:
        connection, _ = self.listener.accept()
        with connection:
            connection.recv(local.MAX_MESSAGE)
            socket.send_fds(connection, [payload], list(fds))


@pytest.mark.parametrize(
    ("payload", "error", "text"),
    [
        (b'{"protocol": 1}', HandshakeRefused, "protocol 3 at the producer, 1 at the consumer"),
        (b'{"refused": "because"}', HandshakeRefused, "because"),
        (b"nonsense", StreamError, "Expecting value"),
        (b'{"protocol": 3, "mark": 0}', StreamError, "is invalid"),
        (b'{"protocol": 3, "mark": 0, "num_slots": 2, "claims": []}', StreamError, "no memory"),
        (b'{"protocol": 3, "mark": 0, "num_slots": 2, "claims": [7]}', StreamError, "no memory"),
        (b"[" * 60_000, StreamError, "nested"),
        (b"x" * (local.MAX_MESSAGE + 1), StreamError, str(local.MAX_MESSAGE)),
    ],
)
def test_an_invalid_answer_raises_and_the_producer_tries_again(
    bench: StreamBench, clock: ManualClock, payload: bytes, error: type[Exception], text: str
) -> None:
    fake, producer = FakeConsumer(bench), bench.producer()
    with pytest.raises(StreamTimeout):
        producer.acquire(0.0)
    fake.answer(payload)
    with pytest.raises(error, match=text):
        producer.acquire(0.0)
    fake.listener.close()
    consumer = bench.consumer()
    clock.advance(1.0)
    consumer.grant(NUM_LANES, Version(1, 0))
    assert bench.acquire(consumer, producer).credit == 0


def test_invalid_answers_leak_no_descriptor(bench: StreamBench, clock: ManualClock) -> None:
    fake, producer = FakeConsumer(bench), bench.producer()
    layout = small_layout()
    memory = local.create_memory("test", segment_nbytes(layout, 2))

    def round_trip(answer: bytes, error: type[StreamError], text: str) -> None:
        clock.advance(1.0)
        with pytest.raises(StreamTimeout):
            producer.acquire(0.0)
        fake.answer(answer, (memory,))
        with pytest.raises(error, match=text):
            producer.acquire(0.0)

    def round_trips() -> None:
        impossible = b'{"protocol": 3, "mark": 0, "num_slots": 2, "claims": [7]}'
        round_trip(impossible, StreamError, "1 credits for the 0 slots held")
        round_trip(b'{"refused": "because"}', HandshakeRefused, "because")

    round_trips()
    before = open_descriptors()
    for _ in range(20):
        round_trips()
    assert open_descriptors() == before
    os.close(memory)
    fake.listener.close()


def test_refusals_leak_no_descriptor(bench: StreamBench, clock: ManualClock) -> None:
    consumer, producer = bench.consumer(), bench.producer(token="wrong")

    def be_refused() -> None:
        clock.advance(1.0)
        with pytest.raises(HandshakeRefused):
            bench.acquire(consumer, producer)

    be_refused()
    before = open_descriptors()
    for _ in range(20):
        be_refused()
    assert open_descriptors() == before


def test_a_consumer_whose_backlog_is_full_is_tried_again(bench: StreamBench, clock: ManualClock) -> None:
    listener = local.listen(bench.address, backlog=0)
    waiting = [local.connect(bench.address, timeout=1)]
    producer = bench.producer()
    with pytest.raises(StreamTimeout, match="not connected"):
        producer.acquire(0.0)
    for each in [*waiting, listener]:
        each.close()
    consumer = bench.consumer()
    consumer.grant(NUM_LANES, Version(1, 0))
    clock.advance(1.0)
    assert bench.acquire(consumer, producer).credit == 0


def test_two_consumers_cannot_serve_one_name(bench: StreamBench, consumer: ObservableConsumer) -> None:
    with pytest.raises(OSError, match="in use"):
        bench.consumer()


@pytest.mark.parametrize("change", [{"slots_per_producer": 0}, {"slots_per_producer": 65}, {"peer_timeout": 0.0}])
def test_invalid_options_are_named_and_leave_the_name_free(bench: StreamBench, change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        bench.consumer(**change)
    bench.consumer()
