"""Both ends of a bidirectional gRPC call of raw messages, for streams whose messages carry arrays.

A client's ``Conversation`` uses gRPC's threads. It serves clients that do other work meanwhile; for clients that only
wait, see ``rlsrl.rpc.in_thread``. A ``ConversationServer`` uses grpc.aio on a loop of uvloop, which serves many small
streams in one thread. Neither reads the messages' content.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import structlog
import uvloop
from grpc import aio

from rlsrl.rpc.channels import END_SECONDS, CallTarget, cancel_call, end_call, open_channel, token_metadata
from rlsrl.rpc.servers import bind, new_server
from rlsrl.rpc.tls import Tls

MAX_UNANSWERED = 64
"""Most unanswered messages of one client. The server reads no more of its messages until it has answered some."""
START_SECONDS = 30.0
"""How long a server may take to start."""
LEAVE_SECONDS = 1.0
"""How long clients may take to end their calls when a server closes. Then the server ends them."""

_log = structlog.get_logger(__name__)


class Conversation:
    """The client's end: one call over its own channel, from the first message to the end."""

    def __init__(
        self,
        target: CallTarget,
        method: str,
        *,
        first: bytes,
        on_message: Callable[[bytes], None],
        on_end: Callable[[Exception | None], None],
    ) -> None:
        """Connect, send the first message and begin to receive.

        Args:
            target: the server.
            method: ``/service/method``.
            first: the first message, sent as soon as the connection exists.
            on_message: called with each message, in the conversation's thread. An exception ends the conversation.
            on_end: called last, in the same thread: with the exception of ``on_message``, with gRPC's error, or with
                None after an orderly end.
        """
        self._on_message = on_message
        self._on_end = on_end
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._channel = open_channel(target.address, target.tls)
        begin = self._channel.stream_stream(method, request_serializer=None, response_deserializer=None)
        self._outgoing.put(first)
        self._call: Any = begin(iter(self._outgoing.get, None), metadata=token_metadata(target.token))
        self._thread = threading.Thread(target=self._receive, name=f"conversation-{target.address}", daemon=True)
        self._thread.start()

    def send(self, message: bytes) -> None:
        """Send a message, in order. After the conversation's end the message is discarded."""
        self._outgoing.put(message)

    def close(self, grace: float = 0.0) -> None:
        """End the call, and wait up to ``END_SECONDS`` for its end. Idempotent. Not for use in ``on_message``.

        With ``grace``, finish sending first: a server that reads all messages within ``grace`` seconds ends the call.
        """
        self._outgoing.put(None)
        self._thread.join(grace)
        cancel_call(self._call)
        self._thread.join(END_SECONDS)

    def _receive(self) -> None:
        error: Exception | None = None
        try:
            for message in self._call:
                self._on_message(message)
        except Exception as raised:  # noqa: BLE001 - the owner gets it through on_end
            error = raised
        finally:
            end_call(self._call)
            self._outgoing.put(None)  # ends gRPC's sending thread
            self._channel.close()
            self._on_end(error)


class ServerStream:
    """The server's end of one conversation. Only the event loop uses it; other threads use ``ConversationServer``."""

    def __init__(self, context: aio.ServicerContext[bytes, bytes]) -> None:
        self._context = context
        self._outgoing: deque[tuple[bytes, int]] = deque()
        """Messages to send, each with the number of client messages that it answers."""
        self._unanswered = 0
        self._has_left = False
        self._has_ended = False
        self._reason: str | None = None
        self._changed = asyncio.Event()
        self._window_opened = asyncio.Event()
        self._writer = asyncio.create_task(self._write())

    async def read(self) -> bytes | None:
        """Return the client's next message; None after its last one."""
        message: Any = await self._context.read()
        return message if isinstance(message, bytes) else None

    def send(self, message: bytes, *, answers: int = 0) -> None:
        """Send a message, in order. It answers ``answers`` messages of the client."""
        if not self._has_left:
            self._outgoing.append((message, answers))
            self._changed.set()

    def keep_alive(self, message: bytes) -> None:
        """Send a heartbeat, unless another message is waiting to be sent."""
        if not self._outgoing:
            self.send(message)

    async def wait_for_window(self) -> None:
        """Count one message that will be answered. Wait while the client has ``MAX_UNANSWERED`` unanswered messages."""
        self._unanswered += 1
        while self._unanswered >= MAX_UNANSWERED and not self._has_ended:
            self._window_opened.clear()
            await self._window_opened.wait()

    def end(self, reason: str) -> None:
        """End the call after its queued messages, with the status ABORTED. ``read`` then raises an AbortError."""
        if self._reason is None:
            self._reason = reason
            self._changed.set()

    async def leave(self) -> None:
        """Send the remaining messages and end the writer, after the client has ended its side or disconnected."""
        self._has_left = True
        self._changed.set()
        await self._writer

    async def _write(self) -> None:
        try:
            while self._outgoing or not self._has_left:
                while self._outgoing:
                    message, answers = self._outgoing.popleft()
                    await self._context.write(message)
                    self._unanswered -= answers
                    self._window_opened.set()
                if self._reason is not None:
                    await self._context.abort(grpc.StatusCode.ABORTED, self._reason)
                self._changed.clear()
                if not self._has_left:
                    await self._changed.wait()
        except aio.AbortError:
            return
        except aio.BaseError as error:
            _log.info("stream_broke", error=repr(error))
        finally:
            self._has_ended = True
            self._window_opened.set()


@dataclass(frozen=True, kw_only=True)
class ControlMessages:
    """Messages that a server sends of its own."""

    farewell: bytes
    """Sent to every client when the server closes. The client then ends its call."""
    heartbeat: bytes
    """Sent to every client for which no other message is waiting."""
    heartbeat_seconds: float
    """Interval of the heartbeats."""


class ConversationServer:
    """Serves one method, a stream in both directions, on an event loop in its own thread."""

    def __init__(
        self,
        address: str,
        *,
        token: str,
        tls: Tls | None,
        method: str,
        converse: Callable[[ServerStream], Awaitable[None]],
        control: ControlMessages | None = None,
        max_conversations: int | None = None,
        on_unauthenticated: Callable[[], None] = lambda: None,
    ) -> None:
        """Listen at the address and serve until ``close``.

        Args:
            address: ``unix-abstract:NAME`` or ``HOST:PORT``; port 0 means any free port.
            token: the token that calls must carry.
            tls: certificates, if clients must have one, too.
            method: ``/service/method``.
            converse: serves one client on the event loop. The call ends when it returns.
            control: messages that the server sends of its own. Without them it sends no heartbeats and aborts the calls
                when it closes.
            max_conversations: most concurrent calls; further ones get RESOURCE_EXHAUSTED at once.
            on_unauthenticated: called on the event loop for every call without the token.

        Raises:
            AddressTaken: another process listens there.
            ValueError: the address has neither form.
        """
        self._converse = converse
        self._control = control
        self._streams: set[ServerStream] = set()
        self._lock = threading.Lock()
        self._actions: list[Callable[[], None]] = []
        """Actions of other threads for the event loop. The loop has been woken if there are any."""
        self._started: Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

        async def serve() -> None:
            server = new_server(token, max_calls=max_conversations, on_unauthenticated=on_unauthenticated)
            server.add_generic_rpc_handlers((_handler(method, self._serve_one),))
            await self._run(server, address, tls)

        self._thread = threading.Thread(target=lambda: uvloop.run(serve()), name=f"server-{address}", daemon=True)
        self._thread.start()
        self.address, self._loop, self._stopping = self._started.result(START_SECONDS)
        """The address for clients, with the port that the server got."""

    def send(self, messages: Iterable[tuple[ServerStream, bytes]], *, answers: int = 0) -> None:
        """Send each message; it answers ``answers`` messages of its client. Any thread; no effect after ``close``."""
        for stream, message in messages:
            self.run_on_loop(partial(stream.send, message, answers=answers))

    def end(self, stream: ServerStream, reason: str) -> None:
        """End a stream, see ``ServerStream.end``. Any thread; no effect after ``close``."""
        self.run_on_loop(partial(stream.end, reason))

    def run_later(self, action: Callable[[], None]) -> None:
        """Run the action after everything that is ready now. Call this on the event loop."""
        self._loop.call_soon(action)

    def run_on_loop(self, action: Callable[[], None]) -> None:
        """Run the action on the event loop; at once if the caller is the event loop. No effect after ``close``.

        Actions that arrive before the loop runs wake the loop only once.
        """
        if threading.current_thread() is self._thread:
            action()
            return
        with self._lock:
            self._actions.append(action)
            if len(self._actions) > 1:
                return
        try:
            self._loop.call_soon_threadsafe(self._run_actions)
        except RuntimeError:  # the loop is closed
            self._actions.clear()

    def _run_actions(self) -> None:
        with self._lock:
            actions, self._actions = self._actions, []
        for action in actions:
            action()

    def close(self) -> None:
        """Stop listening, send the remaining messages and end all calls, in twice ``LEAVE_SECONDS``. Idempotent."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and so is the server
            self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()

    async def _run(self, server: aio.Server, address: str, tls: Tls | None) -> None:
        try:
            bound = bind(server, address, tls)
            await server.start()
        except BaseException as error:  # noqa: BLE001 - raised by the constructor
            self._started.set_exception(error)
            return
        stopping = asyncio.Event()
        self._started.set_result((bound, asyncio.get_running_loop(), stopping))
        await self._send_heartbeats(stopping)
        for stream in self._streams:
            if self._control is not None:
                stream.send(self._control.farewell)
            else:
                stream.end("closed")
        await server.stop(LEAVE_SECONDS)
        await _end_of_other_tasks()

    async def _send_heartbeats(self, stopping: asyncio.Event) -> None:
        """Send heartbeats until the server stops."""
        if self._control is None:
            await stopping.wait()
            return
        while not stopping.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), self._control.heartbeat_seconds)
            for stream in self._streams:
                stream.keep_alive(self._control.heartbeat)

    async def _serve_one(self, _: AsyncIterator[bytes], context: aio.ServicerContext[bytes, bytes]) -> None:
        stream = ServerStream(context)
        self._streams.add(stream)
        try:
            await self._converse(stream)
        finally:
            self._streams.discard(stream)
            await stream.leave()


async def _end_of_other_tasks() -> None:
    """Wait for the tasks that gRPC has begun for calls of a server that has stopped.

    They wait for the last event of their call. If the loop ended before it, gRPC would keep the loop for ever, with
    256 KiB of buffer.
    """
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    if tasks:
        await asyncio.wait(tasks, timeout=LEAVE_SECONDS)


def _handler(method: str, serve: Callable[..., Awaitable[None]]) -> grpc.GenericRpcHandler[Any, Any]:
    _, service, name = method.split("/")
    handlers: dict[str, Any] = {name: grpc.stream_stream_rpc_method_handler(serve)}
    return grpc.method_handlers_generic_handler(service, handlers)
