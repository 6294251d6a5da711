"""A conversation with a real server, in its owner's thread."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterator

import grpc
import pytest

from rlsrl.rpc.channels import CallTarget
from rlsrl.rpc.conversations import ConversationServer, ServerStream
from rlsrl.rpc.in_thread import InThreadConversation, WaitingLoop

METHOD, TOKEN = "/tests/Echo", "right"
DEADLINE = 60.0
LAST = b"last"
"""After it the server says nothing more, and has ended."""


@pytest.fixture
def open_calls() -> set[ServerStream]:
    """The server's open calls."""
    return set()


@pytest.fixture
def server(open_calls: set[ServerStream]) -> Iterator[ConversationServer]:
    async def echo(stream: ServerStream) -> None:
        open_calls.add(stream)
        try:
            while (message := await stream.read()) is not None:
                stream.send(message)
                if message == LAST:
                    return
        finally:
            open_calls.discard(stream)

    server = ConversationServer("127.0.0.1:0", token=TOKEN, tls=None, method=METHOD, converse=echo)
    yield server
    server.close()


class Client:
    """A conversation that records the received messages and its end."""

    def __init__(self, address: str, *, token: str = TOKEN, on_message: Callable[[bytes], None] | None = None) -> None:
        self.loop = WaitingLoop.of_this_thread()
        self.heard: list[bytes] = []
        self.ends: list[Exception | None] = []
        self.conversation = InThreadConversation(
            self.loop,
            CallTarget(address=address, token=token),
            METHOD,
            first=b"hello",
            on_message=on_message or self.heard.append,
            on_end=self.ends.append,
        )

    def turn_until(self, happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE
        while not happened():
            assert time.monotonic() < deadline, "it never happened"
            self.loop.run_for(0.01)

    def end(self) -> Exception | None:
        """Return how the conversation ended."""
        self.turn_until(lambda: bool(self.ends))
        (end,) = self.ends
        return end


def status(error: Exception | None) -> grpc.StatusCode:
    assert isinstance(error, grpc.RpcError)
    code: grpc.StatusCode = error.code()  # type: ignore[attr-defined]  # what calls raise has one
    return code


def test_a_thread_has_one_loop() -> None:
    assert WaitingLoop.of_this_thread() is WaitingLoop.of_this_thread()


def test_messages_arrive_in_order_and_are_answered_before_the_end(server: ConversationServer) -> None:
    client = Client(server.address)
    said = [b"%d" % number for number in range(1000)]
    for message in said[:500]:
        client.conversation.send(message)
    client.turn_until(lambda: len(client.heard) > 100)
    for message in said[500:]:
        client.conversation.send(message)
    client.conversation.close(grace=DEADLINE)
    assert client.end() is None
    assert client.heard == [b"hello", *said]


def test_nothing_happens_while_the_owner_does_not_turn_the_loop(server: ConversationServer) -> None:
    client = Client(server.address)
    client.turn_until(lambda: len(client.heard) == 1)
    client.conversation.send(b"one")
    time.sleep(0.05)
    assert client.heard == [b"hello"]
    client.turn_until(lambda: len(client.heard) == 2)
    client.conversation.close(grace=DEADLINE)
    assert client.end() is None


def test_a_turn_ends_at_its_timeout_or_when_stopped(server: ConversationServer) -> None:
    loop = WaitingLoop.of_this_thread()
    client = Client(server.address, on_message=lambda _: loop.stop())
    began = time.monotonic()
    loop.run_for(DEADLINE)
    assert time.monotonic() - began < DEADLINE / 2
    began = time.monotonic()
    loop.run_for(0.05)
    assert time.monotonic() - began >= 0.05
    client.conversation.close()
    assert client.end() is None


@pytest.mark.parametrize(("first", "later"), [(DEADLINE, 0.03), (0.1, 0.3)])
def test_a_stopped_turn_does_not_change_the_next_turns_timeout(first: float, later: float) -> None:
    """The first turn's timer still runs; it is due too late for the next turn, or too early."""
    loop = WaitingLoop.of_this_thread()

    async def stop() -> None:
        loop.stop()

    for _ in range(3):
        task = loop.create_task(stop())
        loop.run_for(first)
        assert task.done()
        began = time.monotonic()
        loop.run_for(later)
        took = time.monotonic() - began
        assert later <= took < DEADLINE / 2


def test_an_exception_of_the_owner_ends_the_conversation(server: ConversationServer) -> None:
    def refuse(message: bytes) -> None:
        raise ValueError(message)

    client = Client(server.address, on_message=refuse)
    error = client.end()
    assert isinstance(error, ValueError)
    assert error.args == (b"hello",)
    client.conversation.send(b"goes nowhere")
    client.conversation.close(grace=DEADLINE)
    client.conversation.close()
    client.loop.run_for(0.05)
    assert len(client.ends) == 1


def test_the_servers_end_of_the_call_ends_the_conversation(server: ConversationServer) -> None:
    client = Client(server.address)
    client.conversation.send(LAST)
    assert client.end() is None
    assert client.heard == [b"hello", LAST]


def test_the_servers_refusal_is_reported(server: ConversationServer) -> None:
    for _ in range(100):
        told = status(Client(server.address, token="wrong").end())
        if told is grpc.StatusCode.UNAUTHENTICATED:
            break
        assert told is grpc.StatusCode.INTERNAL, "the first message was on its way"
    else:
        pytest.fail("it never was")


def test_an_unreachable_server_is_reported_at_once() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        assert status(Client(f"127.0.0.1:{nobody.getsockname()[1]}").end()) is grpc.StatusCode.UNAVAILABLE


def test_sleeping_counts_only_while_the_loop_runs() -> None:
    loop = WaitingLoop.of_this_thread()
    until = loop.seconds_run() + 0.1
    task = loop.create_task(loop.sleep(0.1))
    loop.run_for(0.01)
    time.sleep(0.1)
    loop.run_for(0.01)
    assert not task.done() or loop.seconds_run() >= until
    loop.run_for(0.2)
    assert task.done()


def test_a_server_may_answer_until_the_grace_is_over() -> None:
    answers: list[asyncio.Event] = []

    async def answer_late(stream: ServerStream) -> None:
        while await stream.read() is not None:
            pass
        answers.append(asyncio.Event())
        await answers[-1].wait()
        stream.send(LAST)

    server = ConversationServer("127.0.0.1:0", token=TOKEN, tls=None, method=METHOD, converse=answer_late)
    client = Client(server.address)
    client.conversation.close(grace=DEADLINE)
    client.turn_until(lambda: bool(answers))
    server.run_on_loop(answers[0].set)
    assert client.end() is None
    assert client.heard == [LAST]

    impatient = Client(server.address)
    impatient.conversation.close(grace=0.1)
    assert impatient.end() is None
    assert impatient.heard == []
    server.close()


def test_a_conversation_may_be_closed_at_any_time(server: ConversationServer, open_calls: set[ServerStream]) -> None:
    unturned = Client(server.address)
    unturned.conversation.close()
    assert unturned.end() is None
    with socket.create_server(("127.0.0.1", 0)) as mute:  # accepts connections and sends nothing
        connecting = Client(f"127.0.0.1:{mute.getsockname()[1]}")
        connecting.loop.run_for(0.05)
        connecting.conversation.close()
        assert connecting.end() is None
    talking = Client(server.address)
    talking.turn_until(lambda: len(talking.heard) == 1)
    talking.conversation.send(b"on its way")
    talking.conversation.close()
    assert talking.end() is None
    assert unturned.heard == connecting.heard == []
    talking.turn_until(lambda: not open_calls)
