"""A bidirectional gRPC call of raw messages, as both ends hold it: for streams whose messages carry arrays.

A client's ``Conversation`` runs on grpc's threads, for who has something else to do meanwhile (who has not: see
``rlsrl.rpc.in_thread``); a ``ConversationServer`` on grpc.aio, which carries many small streams on one thread. Neither
looks into the messages. No call is ever dropped half read: each is ended, cancelled or aborted, and read to its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from concurrent.futures import Future
from functools import partial
from typing import Any, cast

import grpc
import structlog
from grpc import aio

from rlsrl.rpc.channels import Metadata, cancel_call, end_call, open_channel
from rlsrl.rpc.servers import bind, new_server
from rlsrl.rpc.tls import Tls

FIRST_BACK_OFF_SECONDS = 0.1
LAST_BACK_OFF_SECONDS = 1.0
"""A client that no server answers tries again after the first, then after twice as long each time up to the last."""
MAX_UNANSWERED = 64
"""Messages of one client that are held unanswered; it is not read from while there are so many."""
START_SECONDS = 30.0
"""How long a server may take to come up."""
LEAVE_SECONDS = 1.0
"""How long clients may take to leave a server that closes; then their streams are cut."""
END_SECONDS = 5.0
"""How long a cancelled call may take to end: it only has to come back from gRPC's core."""

_FINAL = frozenset({grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED})
"""Answers that trying again cannot change."""

_log = structlog.get_logger(__name__)


def is_final(error: BaseException | None) -> bool:
    """Whether a conversation ended with an answer of the server that asking again cannot change."""
    # What gRPC raises from a call is both.
    return isinstance(error, grpc.RpcError) and cast("grpc.Call", error).code() in _FINAL


class Conversation:
    """The client's end: one call over a channel of its own, from its first message until it is over."""

    def __init__(
        self,
        address: str,
        method: str,
        *,
        metadata: Metadata,
        tls: Tls | None,
        first: bytes,
        on_message: Callable[[bytes], None],
        on_end: Callable[[Exception | None], None],
    ) -> None:
        """Connect and send the first message; nothing is received before ``start``.

        Args:
            address: ``unix-abstract:NAME`` or ``HOST:PORT``.
            method: ``/service/method``.
            metadata: the token.
            tls: certificates, where the server wants them.
            first: what to send as soon as there is a connection.
            on_message: given each message; what it raises ends the conversation.
            on_end: called last: with what ``on_message`` raised, with gRPC's error, or with None after an orderly end.
                Both are called in the conversation's own thread.
        """
        self._on_message = on_message
        self._on_end = on_end
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._channel = open_channel(address, tls)
        begin = self._channel.stream_stream(method, request_serializer=None, response_deserializer=None)
        self._outgoing.put(first)
        self._call: Any = begin(iter(self._outgoing.get, None), metadata=metadata)
        self._thread = threading.Thread(target=self._receive, name=f"conversation-{address}", daemon=True)

    def start(self) -> None:
        """Begin to receive. Once."""
        self._thread.start()

    def send(self, message: bytes) -> None:
        """Send a message after those before it; in a conversation that is over it goes nowhere."""
        self._outgoing.put(message)

    def end(self) -> None:
        """Send nothing more: the server ends the call after it has read what was sent. Idempotent."""
        self._outgoing.put(None)

    def cancel(self) -> None:
        """End the call now."""
        cancel_call(self._call)

    def join(self, timeout: float = END_SECONDS) -> bool:
        """Wait for the end of a conversation that was ended or cancelled; whether it came."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _receive(self) -> None:
        error: Exception | None = None
        try:
            for message in self._call:
                self._on_message(message)
        except Exception as raised:  # noqa: BLE001 - told to the owner, who judges
            error = raised
        finally:
            end_call(self._call)
            self._outgoing.put(None)  # releases grpc's sending thread
            self._channel.close()
            self._on_end(error)


class ServerStream:
    """The server's end of one conversation. The event loop's alone, but for ``ConversationServer.send`` and ``end``."""

    def __init__(self, context: aio.ServicerContext[bytes, bytes]) -> None:
        self._context = context
        self._outgoing: deque[tuple[bytes, int]] = deque()
        """Messages, and how many messages of the client each answers."""
        self._unanswered = 0
        self._has_left = False
        self._is_over = False
        self._reason: str | None = None
        self._changed = asyncio.Event()
        self._window_opened = asyncio.Event()
        self._writer = asyncio.create_task(self._write())

    async def read(self) -> bytes | None:
        """The next message; None at the end of the client's."""
        message: Any = await self._context.read()
        return message if isinstance(message, bytes) else None

    def send(self, message: bytes, *, answers: int = 0) -> None:
        """Send a message, the answer to so many of the client's, after those before it."""
        if not self._has_left:
            self._outgoing.append((message, answers))
            self._changed.set()

    def keep_alive(self, message: bytes) -> None:
        """Give a sign of life, unless something is on its way anyhow."""
        if not self._outgoing:
            self.send(message)

    async def wait_for_window(self) -> None:
        """A message that is to be answered was taken on; wait while the client is owed as many answers as it may be."""
        self._unanswered += 1
        while self._unanswered >= MAX_UNANSWERED and not self._is_over:
            self._window_opened.clear()
            await self._window_opened.wait()

    def end(self, reason: str) -> None:
        """End the call after what was said, with the status ABORTED: whoever reads it is woken by an AbortError."""
        if self._reason is None:
            self._reason = reason
            self._changed.set()

    async def leave(self) -> None:
        """The client has ended or is gone: send what was said and end the writer."""
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
            self._is_over = True
            self._window_opened.set()


class ConversationServer:
    """Serves one method, a stream both ways, on an event loop in a thread of its own."""

    def __init__(
        self,
        address: str,
        *,
        token: str,
        tls: Tls | None,
        method: str,
        converse: Callable[[ServerStream], Awaitable[None]],
        farewell: bytes | None = None,
        heartbeat: tuple[bytes, float] | None = None,
        max_conversations: int | None = None,
        on_unauthenticated: Callable[[], None] = lambda: None,
    ) -> None:
        """Listen at the address and serve until ``close``.

        Args:
            address: ``unix-abstract:NAME`` or ``HOST:PORT``; port 0 takes a free one.
            token: what clients have to show.
            tls: certificates, where clients have to have one too.
            method: ``/service/method``.
            converse: serves one client, on the event loop; the call ends when it returns.
            farewell: sent to every client when this end closes, who then ends its call; without it calls are aborted.
            heartbeat: a message for each client to whom nothing else is on its way, and every how many seconds.
            max_conversations: more are turned away with RESOURCE_EXHAUSTED, at once.
            on_unauthenticated: called on the event loop for every call without the token.

        Raises:
            AddressTaken: somebody else listens there.
            ValueError: the address has neither form.
        """
        self._converse = converse
        self._farewell = farewell
        self._heartbeat = heartbeat
        self._streams: set[ServerStream] = set()
        self._lock = threading.Lock()
        self._mail: list[Callable[[], None]] = []
        """What other threads want done on the event loop, which was woken for it if there is any."""
        self._started: Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

        async def serve() -> None:
            server = new_server(token, max_calls=max_conversations, on_unauthenticated=on_unauthenticated)
            server.add_generic_rpc_handlers((_handler(method, self._serve_one),))
            await self._run(server, address, tls)

        self._thread = threading.Thread(target=lambda: asyncio.run(serve()), name=f"server-{address}", daemon=True)
        self._thread.start()
        self.address, self._loop, self._stopping = self._started.result(START_SECONDS)
        """Where clients find it; with the port that was taken."""

    @property
    def num_conversations(self) -> int:
        """Calls that are open."""
        return len(self._streams)

    def send(self, messages: Iterable[tuple[ServerStream, bytes]], *, answers: int = 0) -> None:
        """Say each message, which answers so many of its client's. From any thread; after ``close`` nothing happens."""
        for stream, message in messages:
            self.post(partial(stream.send, message, answers=answers))

    def end(self, stream: ServerStream, reason: str) -> None:
        """See ``ServerStream.end``. From any thread; after ``close`` nothing happens."""
        self.post(partial(stream.end, reason))

    def soon(self, action: Callable[[], None]) -> None:
        """On the event loop: have it done once what is ready now was dealt with."""
        self._loop.call_soon(action)

    def post(self, action: Callable[[], None]) -> None:
        """Have it done on the event loop, which is woken once for all that gathers until it turns; at once from there.
        After ``close`` nothing happens."""
        if threading.current_thread() is self._thread:
            action()
            return
        with self._lock:
            self._mail.append(action)
            if len(self._mail) > 1:
                return
        try:
            self._loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # the loop is closed: nobody is left to be told
            self._mail.clear()

    def _deliver(self) -> None:
        with self._lock:
            mail, self._mail = self._mail, []
        for action in mail:
            action()

    def close(self) -> None:
        """Stop listening, send what was said and part from every client; takes up to ``LEAVE_SECONDS``. Idempotent."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: so is the server
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
        await self._beat(stopping)
        for stream in self._streams:
            if self._farewell is not None:
                stream.send(self._farewell)
            else:
                stream.end("closed")
        await server.stop(LEAVE_SECONDS)

    async def _beat(self, stopping: asyncio.Event) -> None:
        """Tell clients now and then that somebody is there; until told to stop."""
        if self._heartbeat is None:
            await stopping.wait()
            return
        message, seconds = self._heartbeat
        while not stopping.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), seconds)
            for stream in self._streams:
                stream.keep_alive(message)

    async def _serve_one(self, _: AsyncIterator[bytes], context: aio.ServicerContext[bytes, bytes]) -> None:
        stream = ServerStream(context)
        self._streams.add(stream)
        try:
            await self._converse(stream)
        finally:
            self._streams.discard(stream)
            await stream.leave()


def _handler(method: str, serve: Callable[..., Awaitable[None]]) -> grpc.GenericRpcHandler[Any, Any]:
    _, service, name = method.split("/")
    handlers: dict[str, Any] = {name: grpc.stream_stream_rpc_method_handler(serve)}
    return grpc.method_handlers_generic_handler(service, handlers)
