"""Invalid messages on gRPC inference streams: to a server and to a client."""

from __future__ import annotations

import asyncio
import json
import queue
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from rlsrl.data.inference import RolloutRequest, RolloutResult
from rlsrl.data.version import Version
from rlsrl.rpc.channels import open_channel, token_metadata
from rlsrl.rpc.codec import Malformed, encode
from rlsrl.rpc.conversations import MAX_UNANSWERED, ConversationServer, ServerStream
from rlsrl.rpc.settings import MAX_MESSAGE_BYTES
from rlsrl.streams.grpc_inference import wire
from rlsrl.streams.grpc_inference.server import GrpcInferenceServer
from rlsrl.streams.grpc_inference.wire import InferenceMessageKind, LaneMessages
from rlsrl.streams.protocols import HandshakeRefused
from rlsrl.testing.inference_bench import (
    DEADLINE,
    EVERYTHING,
    TOKEN,
    InferenceBench,
    UnixInferenceTransport,
    answer,
    answer_of,
    request,
    result,
    small_layout,
    until,
)

LAYOUT = small_layout()
MESSAGES = LaneMessages(LAYOUT)


@pytest.fixture
def bench() -> Iterator[InferenceBench]:
    bench = InferenceBench(UnixInferenceTransport())
    yield bench
    bench.close()


class Stranger:
    """A client that sends any bytes."""

    def __init__(self, address: str, token: str = TOKEN) -> None:
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._channel = open_channel(address)
        begin: Any = self._channel.stream_stream(wire.METHOD)
        self._call = begin(iter(self._outgoing.get, None), metadata=token_metadata(token), timeout=DEADLINE)

    def send(self, *messages: bytes | None) -> None:
        for message in messages:
            self._outgoing.put(message)

    def hears(self) -> wire.InferenceMessage:
        """Return the next message that is not ALIVE."""
        return next(message for message in map(wire.read, self._call) if message.kind is not InferenceMessageKind.ALIVE)

    def close(self) -> None:
        self._call.cancel()
        self._outgoing.put(None)
        self._channel.close()


@pytest.fixture
def stranger(bench: InferenceBench) -> Iterator[Callable[..., Stranger]]:
    strangers: list[Stranger] = []

    def come(*messages: bytes | None, **arguments: Any) -> Stranger:
        strangers.append(Stranger(bench.address, **arguments))
        strangers[-1].send(*messages)
        return strangers[-1]

    yield come
    for each in strangers:
        each.close()


def test_answers_do_not_wait_for_afterwards(bench: InferenceBench) -> None:
    server, client = bench.server(), bench.client()
    answered = threading.Event()
    heard: list[bool] = []

    def answer_all() -> None:
        while (batch := server.next_batch(EVERYTHING, timeout=0)) is not None:
            answer(batch)

    def rest() -> None:
        heard.append(answered.wait(DEADLINE))

    server.call_on_arrival(answer_all, rest)
    future = client.submit(request(5))
    assert answer_of(future.result(DEADLINE)) == 5, "though the server's thread is still at the rest"
    answered.set()
    until(lambda: bool(heard))
    assert heard == [True]


def assert_serves_others(bench: InferenceBench, server: GrpcInferenceServer) -> None:
    client = bench.client()
    future = client.submit(request(5))
    batch = server.next_batch(EVERYTHING, DEADLINE)
    assert batch is not None
    assert answer(batch) == [5]
    assert answer_of(future.result(DEADLINE)) == 5


def hello(**changes: Any) -> bytes:
    value = {"protocol": wire.PROTOCOL, "name": "stranger", "layout": LAYOUT.to_json()} | changes
    return wire.note(InferenceMessageKind.HELLO, json.dumps(value).encode())


def header(kind: int, num_lanes: int = 2) -> bytes:
    return struct.pack("<BxxxIQqq", kind, num_lanes, 0, 0, 0)


@pytest.mark.parametrize(
    ("message", "kind", "text"),
    [
        (b"", "malformed", "shorter"),
        (b"GET / HTTP/1.1\r\n\r\n" + bytes(64), "malformed", "begins with"),
        (encode(b"x"), "malformed", "header of 1 bytes"),
        (encode(header(99)), "malformed", "message kind 99 is unknown"),
        (wire.note(InferenceMessageKind.ALIVE), "malformed", "protocol"),
        (wire.note(InferenceMessageKind.HELLO, b"[1"), "malformed", "malformed"),
        (wire.note(InferenceMessageKind.HELLO, b"[]"), "malformed", "malformed"),
        (wire.note(InferenceMessageKind.HELLO, b"[" * 60_000), "malformed", "malformed"),
        (hello(protocol=99), "protocol", "protocol 1 at the server, 99 at the client"),
        (hello(layout={}), "malformed", "observation"),
        (
            hello(layout=LAYOUT.to_json() | {"observation": [["x", {"shape": [-1], "dtype": "O"}]]}),
            "malformed",
            "dtype",
        ),
        (hello(layout=LAYOUT.to_json() | {"distribution_size": 7}), "layout", "-> 7 distribution parameters) at the c"),
    ],
    ids=range(12),
)
def test_invalid_hellos_are_refused_and_counted(
    bench: InferenceBench, stranger: Callable[..., Stranger], message: bytes, kind: str, text: str
) -> None:
    server = bench.server()
    heard = stranger(message).hears()
    assert heard.kind is InferenceMessageKind.REFUSED
    assert text in heard.text.decode()
    assert bench.refused == {kind: 1}
    assert_serves_others(bench, server)


@pytest.mark.parametrize(
    "message",
    [
        b"",
        wire.note(InferenceMessageKind.HELLO),
        wire.note(InferenceMessageKind.RESULT),
        encode(header(InferenceMessageKind.REQUEST)),
        encode(header(InferenceMessageKind.REQUEST, num_lanes=0)),
        encode(header(InferenceMessageKind.REQUEST, num_lanes=2**32 - 1)),
        encode(header(InferenceMessageKind.REQUEST), [np.zeros((3, 4), np.float32)]),
        MESSAGES.request(0, request(1))[:-1],
    ],
)
def test_malformed_requests_are_refused_and_counted(
    bench: InferenceBench, stranger: Callable[..., Stranger], message: bytes
) -> None:
    server = bench.server()
    client = stranger(hello(), message)
    assert client.hears().kind is InferenceMessageKind.WELCOME
    assert client.hears().kind is InferenceMessageKind.REFUSED
    assert bench.refused == {"malformed": 1}
    assert_serves_others(bench, server)


def test_a_message_over_the_limit_is_refused_before_it_is_read(bench: InferenceBench) -> None:
    server = bench.server()
    channel = grpc.insecure_channel(bench.address, options=[("grpc.max_send_message_length", -1)])
    call = channel.stream_stream(wire.METHOD)(
        iter([hello(), bytes(MAX_MESSAGE_BYTES + 1)]), metadata=token_metadata(TOKEN), timeout=DEADLINE
    )
    with pytest.raises(grpc.RpcError):
        list(call)
    assert call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    channel.close()
    assert_serves_others(bench, server)


def test_a_call_without_the_token_is_refused(bench: InferenceBench) -> None:
    server = bench.server()
    client = bench.client(token="another")
    # The client may be refused before it sends a request.
    with pytest.raises(HandshakeRefused, match="not this experiment's"):
        client.submit(request(1)).result(DEADLINE)
    assert_serves_others(bench, server)


def test_a_server_that_leaves_may_answer_after_the_peer_timeout(bench: InferenceBench) -> None:
    """From its LEAVING on, only the grace bounds the connection."""
    finish, calls = asyncio.Event(), []

    async def leave(stream: ServerStream) -> None:
        calls.append(stream)
        await stream.read()
        stream.send(wire.note(InferenceMessageKind.WELCOME))
        asked = wire.read(await stream.read() or b"")
        stream.send(wire.note(InferenceMessageKind.LEAVING))
        assert await stream.read() is None
        await finish.wait()
        stream.send(MESSAGES.result(asked.number, result(7)))

    server = ConversationServer(bench.address, token=TOKEN, tls=None, method=wire.METHOD, converse=leave)
    client = bench.own_client(peer_timeout=0.2)
    client.submit(request(7))
    assert client.wait(0.5) == []
    server.run_on_loop(finish.set)
    ((_, answered),) = client.wait(DEADLINE)
    assert isinstance(answered, RolloutResult)
    assert answer_of(answered) == 7
    assert len(calls) == 1
    client.close()
    server.close()


def test_an_invalid_request_raises_in_submit(bench: InferenceBench) -> None:
    server, client = bench.server(), bench.client()
    for wrong in (
        RolloutRequest(observation={"observation": np.zeros((2, 4), np.float32)}),
        RolloutRequest(observation={"observation": np.zeros((2, 3))}),
        RolloutRequest(observation={"observation": np.zeros((0, 3), np.float32)}),
    ):
        with pytest.raises(Malformed):
            client.submit(wrong)
    assert_serves_others(bench, server)


def test_the_server_reads_no_more_from_a_client_with_too_many_unanswered_requests(
    bench: InferenceBench, stranger: Callable[..., Stranger]
) -> None:
    server = bench.server()
    stranger(hello(), *[MESSAGES.request(number, request(number)) for number in range(2 * MAX_UNANSWERED + 5)])
    until(lambda: server.num_waiting == MAX_UNANSWERED)
    client = bench.client()
    future = client.submit(request(1000))
    until(lambda: server.num_waiting == MAX_UNANSWERED + 1)
    for expected in ([*range(MAX_UNANSWERED), 1000], [*range(MAX_UNANSWERED, 2 * MAX_UNANSWERED)]):
        until(lambda: server.num_waiting >= MAX_UNANSWERED)
        batch = server.next_batch(EVERYTHING, DEADLINE)
        assert batch is not None
        assert answer(batch) == expected
    assert answer_of(future.result(DEADLINE)) == 1000
    until(lambda: server.num_waiting == 5)


@pytest.mark.parametrize("num_lanes", [1, 2, 65])
def test_requests_and_results_are_unchanged_by_encoding(num_lanes: int) -> None:
    asked = request(3, num_lanes=num_lanes, min_version=Version(4, 5))
    message = wire.read(MESSAGES.request(9, asked))
    read = MESSAGES.read_request(message)
    assert (message.number, read.num_lanes, read.min_version) == (9, num_lanes, Version(4, 5))
    assert np.array_equal(read.observation["observation"], asked.observation["observation"])
    message = wire.read(MESSAGES.result(9, result(3, num_lanes=num_lanes, version=Version(6, 7))))
    answered = MESSAGES.read_result(message, num_lanes)
    assert (message.number, answered.version, answer_of(answered)) == (9, Version(6, 7), 3)
    with pytest.raises(Malformed, match="for a request of 99"):
        MESSAGES.read_result(message, 99)
