"""gRPC sample streams only: unauthenticated calls, invalid messages, large slots, read-only arrays, many calls."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from rlsrl.data.slots import ProducerId
from rlsrl.data.version import Version
from rlsrl.rpc.channels import end_call, open_channel, token_metadata
from rlsrl.rpc.codec import encode
from rlsrl.rpc.conversations import MAX_UNANSWERED, ConversationServer, ServerStream
from rlsrl.rpc.settings import MAX_MESSAGE_BYTES
from rlsrl.streams.grpc_samples import wire
from rlsrl.streams.grpc_samples.consumer import GrpcSampleConsumer
from rlsrl.streams.grpc_samples.producer import ADMISSION_SECONDS, GrpcSampleProducer
from rlsrl.streams.grpc_samples.wire import MAX_SLOT_BYTES, SampleMessageKind
from rlsrl.streams.handshake import Hello
from rlsrl.streams.protocols import StreamError, StreamTimeout
from rlsrl.testing.clock import ManualClock
from rlsrl.testing.stream_bench import (
    DEADLINE,
    NUM_LANES,
    TOKEN,
    TRANSITIONS,
    ObservableConsumer,
    StreamBench,
    UnixTransport,
    fill,
    small_layout,
    value_of,
)
from rlsrl.testing.waiting import until

V1 = Version(1, 1)
LAYOUT = small_layout()
CLIENT_ID = ProducerId(7, 0)


class RawClient:
    """A client that sends any bytes."""

    def __init__(self, address: str, *, token: str = TOKEN) -> None:
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._channel = open_channel(address)
        begin = self._channel.stream_stream(wire.METHOD, request_serializer=None, response_deserializer=None)
        self._call: Any = begin(iter(self._outgoing.get, None), metadata=token_metadata(token))

    def send(self, message: bytes) -> None:
        self._outgoing.put(message)

    def be_admitted(self, bench: StreamBench, consumer: ObservableConsumer) -> None:
        """Send a valid hello and wait for admission."""
        self.send(wire.handshake(SampleMessageKind.HELLO, Hello(producer=CLIENT_ID, layout=LAYOUT).to_json(TOKEN)))
        bench.until(consumer, lambda: CLIENT_ID in consumer.producers)

    def end(self) -> grpc.StatusCode:
        """Read every message; return the status with which the call ended."""
        try:
            for _ in self._call:
                pass
        except grpc.RpcError:
            pass
        code: grpc.StatusCode = self._call.code()
        return code

    def close(self) -> None:
        self._outgoing.put(None)
        end_call(self._call)
        self._channel.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[StreamBench]:
    bench = StreamBench(UnixTransport(), tmp_path)
    yield bench
    bench.close()


@pytest.fixture
def consumer(bench: StreamBench) -> GrpcSampleConsumer:
    consumer = bench.consumer()
    assert isinstance(consumer, GrpcSampleConsumer)
    return consumer


@pytest.fixture
def client(bench: StreamBench, consumer: ObservableConsumer) -> Iterator[RawClient]:
    client = RawClient(bench.address)
    yield client
    client.close()


def assert_lives_on(bench: StreamBench, consumer: ObservableConsumer) -> None:
    """Assert that a correct producer is served and that the ledgers balance."""
    consumer.grant(NUM_LANES, V1)
    producer = bench.producer(1)
    producer.post(fill(bench.acquire(consumer, producer), 3))
    assert [value_of(slot) for slot in bench.take(consumer, 1)] == [3]
    assert bench.balance().in_buffer == TRANSITIONS


def hello(**changes: Any) -> bytes:
    """Return a hello with some fields changed."""
    return wire.handshake(SampleMessageKind.HELLO, Hello(producer=CLIENT_ID, layout=LAYOUT).to_json(TOKEN) | changes)


def post(*words: int, body: bytes | None = None) -> bytes:
    """Return a post with these integers, and with the body of one slot unless ``body`` is given."""
    memory = bytearray(LAYOUT.nbytes) if body is None else bytearray(body)
    place, order, sequence, num_transitions = words
    return wire.post(memory, place, order, sequence, num_transitions, total=(sequence + 1) * num_transitions)


@pytest.mark.parametrize(
    ("message", "counted"),
    [
        pytest.param(b"", "malformed", id="nothing"),
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", "malformed", id="another protocol"),
        pytest.param(b"rls1" + bytes([255]) * 12, "malformed", id="lengths beyond the message"),
        pytest.param(encode(b"\x01"), "malformed", id="a short header"),
        pytest.param(encode(bytes([200, *bytes(39)])), "malformed", id="an unknown kind"),
        pytest.param(wire.note(SampleMessageKind.HELLO), "malformed", id="a hello without JSON"),
        pytest.param(encode(bytes([1, *bytes(39)]) + b"[" * 30_000), "malformed", id="deep JSON"),
        pytest.param(encode(bytes([1, *bytes(39)]) + b"[]"), "malformed", id="JSON of another form"),
        pytest.param(wire.note(SampleMessageKind.WELCOME), "malformed", id="a consumer's message"),
        pytest.param(post(0, 0, 0, 1), "malformed", id="a post before any hello"),
        pytest.param(hello(protocol=99), "protocol", id="another version of the protocol"),
        pytest.param(hello(token="another"), "token", id="another token within"),
        pytest.param(hello(index=-1), "malformed", id="an impossible index"),
        pytest.param(hello(layout=small_layout(observation=5).to_json()), "layout", id="another layout"),
        pytest.param(hello(layout=small_layout(num_lanes=1 << 17).to_json()), "layout", id="too many lanes"),
    ],
)
def test_an_invalid_first_message_is_refused(
    bench: StreamBench, consumer: ObservableConsumer, client: RawClient, message: bytes, counted: str
) -> None:
    client.send(message)
    bench.until(consumer, lambda: consumer.counters.get(f"refused_{counted}", 0) == 1)
    assert client.end() is grpc.StatusCode.ABORTED
    assert_lives_on(bench, consumer)


@pytest.mark.parametrize(
    ("message", "counted"),
    [
        pytest.param(b"?", "message", id="nonsense"),
        pytest.param(hello(), "message", id="a second hello"),
        pytest.param(wire.note(SampleMessageKind.ACK, 3), "message", id="a consumer's message"),
        pytest.param(post(0, 0, 0, 1), "credit", id="a slot without a credit"),
        pytest.param(post(99, 0, 0, 1), "credit", id="an unknown slot"),
        pytest.param(post(-1, 0, 0, 1), "credit", id="a negative slot"),
        pytest.param(post(0, 0, -5, 1), "sequence", id="a negative sequence"),
        pytest.param(post(0, 0, 0, 1 << 40), "transitions", id="more transitions than the slot has"),
        pytest.param(post(0, 0, 0, 1, body=b"short"), "message", id="half a slot"),
        pytest.param(post(0, 0, 0, 1, body=bytes(2 * LAYOUT.nbytes)), "message", id="two slots in one"),
    ],
)
def test_a_violation_ends_the_connection_and_nothing_else(
    bench: StreamBench, consumer: ObservableConsumer, client: RawClient, message: bytes, counted: str
) -> None:
    client.be_admitted(bench, consumer)
    client.send(message)
    bench.until(consumer, lambda: consumer.counters.get(f"violation_{counted}", 0) == 1)
    assert client.end() is grpc.StatusCode.ABORTED
    assert not consumer.producers
    assert_lives_on(bench, consumer)


def assert_is_refused(bench: StreamBench) -> None:
    """Assert that a call without the token is refused."""
    stranger = RawClient(bench.address, token="another")
    assert stranger.end() is grpc.StatusCode.UNAUTHENTICATED
    stranger.close()


def test_a_call_without_the_token_is_refused_and_counted(bench: StreamBench, consumer: ObservableConsumer) -> None:
    assert_is_refused(bench)
    assert consumer.counters["refused_token"] == 1
    assert_lives_on(bench, consumer)


def test_a_message_over_the_limit_is_refused_before_it_is_held(
    bench: StreamBench, consumer: ObservableConsumer
) -> None:
    unlimited = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(bench.address, options=unlimited) as channel:
        begin = channel.stream_stream(wire.METHOD, request_serializer=None, response_deserializer=None)
        call: Any = begin(iter([bytes(MAX_MESSAGE_BYTES + 1)]), metadata=token_metadata(TOKEN))
        with pytest.raises(grpc.RpcError):
            next(call)
        assert call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    bench.until(consumer, lambda: consumer.counters.get("dismissed", 0) == 1)
    assert_lives_on(bench, consumer)


def test_slots_up_to_the_limit_cross_and_larger_ones_are_refused_by_name(bench: StreamBench) -> None:
    layout = small_layout(num_steps=4096)
    too_many = next(lanes for lanes in count(1) if layout.with_lanes(lanes).nbytes > MAX_SLOT_BYTES)
    largest = layout.with_lanes(too_many - 1)
    consumer = bench.consumer(layout_digest=largest.step_digest)
    consumer.grant(largest.num_lanes, V1)
    producer = bench.producer(layout=largest)
    producer.post(fill(bench.acquire(consumer, producer), 1))
    assert [value_of(slot) for slot in bench.take(consumer, 1)] == [1]
    with pytest.raises(
        ValueError, match=r"4096 steps x .* lanes has 64\.\d MiB.*at most 64 MiB.*rolloutLength.*replicas"
    ):
        bench.producer(3, layout=largest.with_lanes(largest.num_lanes + 1))


def test_received_arrays_are_read_only(bench: StreamBench, consumer: ObservableConsumer) -> None:
    consumer.grant(NUM_LANES, V1)
    producer = bench.producer()
    producer.post(fill(bench.acquire(consumer, producer), 1))
    (slot,) = bench.take(consumer, 1)
    for array in slot.arrays.values():
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0
        assert array.ctypes.data % array.itemsize == 0


def test_memory_may_be_filled_again_while_the_consumer_still_reads(
    bench: StreamBench, consumer: ObservableConsumer
) -> None:
    """A post is a copy: later writes of the producer do not change it."""
    consumer.grant(NUM_LANES, V1)
    producer = bench.producer()
    slot = fill(bench.acquire(consumer, producer), 1)
    producer.post(slot)
    fill(slot, 2)
    assert [value_of(slot) for slot in bench.take(consumer, 1)] == [1]


def test_a_message_goes_out_only_a_few_times_in_the_peer_time_out(tmp_path: Path) -> None:
    clock = ManualClock()
    bench = StreamBench(UnixTransport(), tmp_path, clock=clock)
    consumer, producer = bench.consumer(peer_timeout=8.0), bench.producer()
    consumer.grant(NUM_LANES, V1)
    bench.acquire(consumer, producer)
    assert isinstance(producer, GrpcSampleProducer)
    seen = set()
    for _ in range(80):
        clock.advance(0.1)
        producer.touch()
        seen.add(producer.touches)
    bench.close()
    assert len(seen) == 8


def test_an_unexpected_message_of_the_consumer_raises(bench: StreamBench) -> None:
    """The address belongs to a server of another kind."""

    async def answer(stream: ServerStream) -> None:
        await stream.read()
        stream.send(wire.note(SampleMessageKind.POST))
        await stream.read()

    server = ConversationServer(bench.address, token=TOKEN, tls=None, method=wire.METHOD, converse=answer)
    with pytest.raises(StreamError, match="sent a POST"):
        bench.producer().acquire(DEADLINE)
    server.close()


def test_a_consumer_that_never_admits_is_asked_again_over_another_connection(tmp_path: Path) -> None:
    clock = ManualClock()
    bench = StreamBench(UnixTransport(), tmp_path, clock=clock)
    begun: list[ServerStream] = []
    ended: list[ServerStream] = []

    async def listen(stream: ServerStream) -> None:
        begun.append(stream)
        try:
            while await stream.read() is not None:
                pass
        finally:
            ended.append(stream)

    server = ConversationServer(bench.address, token=TOKEN, tls=None, method=wire.METHOD, converse=listen)
    producer = bench.producer()
    assert isinstance(producer, GrpcSampleProducer)

    def ask() -> None:
        with pytest.raises(StreamTimeout):
            producer.acquire(0)

    ask()
    until(lambda: len(begun) == 1, "a connection")
    assert producer.retries_at == clock.monotonic() + ADMISSION_SECONDS
    clock.advance(ADMISSION_SECONDS)
    ask()
    ask()
    until(lambda: len(begun) == 2, "another one")
    until(lambda: ended == begun[:1], "the end of the first connection")
    server.close()
    bench.close()


def test_connections_beyond_the_limit_are_refused(
    bench: StreamBench, consumer: ObservableConsumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlsrl.streams.grpc_samples.consumer.MAX_CONNECTIONS", 2)
    consumer.close()
    crowded = bench.consumer()
    crowd = [RawClient(bench.address) for _ in range(3)]
    codes: queue.SimpleQueue[grpc.StatusCode] = queue.SimpleQueue()
    waiting = [threading.Thread(target=lambda client=client: codes.put(client.end())) for client in crowd]
    for thread in waiting:
        thread.start()
    assert codes.get(timeout=DEADLINE) is grpc.StatusCode.RESOURCE_EXHAUSTED
    for client in crowd:
        client.close()
    for thread in waiting:
        thread.join(DEADLINE)
    assert_lives_on(bench, crowded)


def test_a_connection_without_a_hello_is_ended(
    bench: StreamBench, consumer: ObservableConsumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlsrl.streams.grpc_samples.consumer.HANDSHAKE_TIMEOUT_SECONDS", 0.05)
    silent = RawClient(bench.address)
    assert silent.end() is grpc.StatusCode.ABORTED
    silent.close()
    bench.until(consumer, lambda: consumer.counters.get("dismissed", 0) == 1)
    assert_lives_on(bench, consumer)


def test_the_consumer_holds_a_bounded_number_of_messages(
    bench: StreamBench, consumer: GrpcSampleConsumer, client: RawClient
) -> None:
    """Without ``receive`` only a few messages are read; then all of them count as one violation."""
    client.be_admitted(bench, consumer)
    for _ in range(1000):
        client.send(post(0, 0, 0, 1))
    deadline = time.monotonic() + DEADLINE
    while len(consumer._inbox) < MAX_UNANSWERED:
        assert time.monotonic() < deadline
        assert_is_refused(bench)
    assert_is_refused(bench)  # the event loop has run, so it could have read more
    assert len(consumer._inbox) == MAX_UNANSWERED
    bench.until(consumer, lambda: consumer.counters.get("violation_credit", 0) == 1)
    assert client.end() is grpc.StatusCode.ABORTED
    assert_lives_on(bench, consumer)


def test_arrays_are_bit_for_bit_what_was_written(bench: StreamBench, consumer: ObservableConsumer) -> None:
    consumer.grant(NUM_LANES, V1)
    producer = bench.producer()
    slot, rng = bench.acquire(consumer, producer), np.random.default_rng(0)
    for array in slot.arrays.values():
        array[...] = rng.integers(0, 2, array.shape)
    slot.num_transitions = int(slot.arrays["mask"].sum())
    written = {name: array.copy() for name, array in slot.arrays.items()}
    producer.post(slot)
    (arrived,) = bench.take(consumer, 1)
    for name, array in written.items():
        np.testing.assert_array_equal(arrived.arrays[name], array)
    assert written.keys() == arrived.arrays.keys()
