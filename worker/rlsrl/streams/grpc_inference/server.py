"""The end that answers: one thread runs grpc's event loop, the owner's threads take batches and answer them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from typing import Any, cast

import grpc
import structlog
from grpc import aio

from rlsrl.data.inference import InferenceLayout
from rlsrl.rpc.codec import Malformed
from rlsrl.rpc.servers import bind, new_server
from rlsrl.streams.grpc_inference import wire
from rlsrl.streams.grpc_inference.wire import Kind, LaneMessages, Refusal
from rlsrl.streams.inference import Answers, InferenceBatch, PendingRequest, RequestQueue

HEARTBEAT_SECONDS = 1.0
"""How often each client hears that the event loop turns."""
MAX_UNANSWERED = 64
"""Requests of one client that are held; it is not read from while it has so many."""
START_SECONDS = 30.0
"""How long the server may take to come up."""
LEAVE_SECONDS = 1.0
"""How long clients may take to leave a server that closes; then their streams are cut."""

Context = aio.ServicerContext[bytes, bytes]
_log = structlog.get_logger(__name__)


class GrpcInferenceServer:
    """Serves clients over gRPC; implements ``InferenceServer``."""

    def __init__(self, address: str, *, token: str, layout: InferenceLayout, on_refused: Callable[[str], None]) -> None:
        """Serve ``unix-abstract:NAME`` or ``HOST:PORT``; port 0 takes a free one.

        Args:
            address: where to listen.
            token: what clients have to show.
            layout: what requests and results look like; clients of another layout are refused.
            on_refused: called, from the server's thread, with the kind of what was refused: ``layout``, ``protocol`` or
                ``malformed``. What shows no token, and messages over 64 MiB, gRPC refuses before they get here.

        Raises:
            AddressTaken: somebody else listens there.
            ValueError: the address has neither form.
        """
        self._layout = layout
        self._on_refused = on_refused
        self._messages = LaneMessages(layout)
        self._queue = RequestQueue()
        self._sessions: set[_Session] = set()
        self._closing = threading.Lock()
        self._started: Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(address, token)), name="inference-server", daemon=True
        )
        self._thread.start()
        self.address, self._loop, self._stopping = self._started.result(START_SECONDS)
        """Where clients find it; with the port that was taken."""

    def next_batch(self, max_size: int, timeout: float) -> InferenceBatch | None:
        """See ``InferenceServer.next_batch``."""
        return self._queue.next_batch(max_size, timeout, self._deliver)

    def close(self) -> None:
        """See ``InferenceServer.close``. Answers given before are sent; takes up to ``LEAVE_SECONDS``."""
        self._queue.close()
        with contextlib.suppress(RuntimeError):  # the loop is closed: so is the server
            self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a batch to be taken."""
        return len(self._queue)

    @property
    def num_clients(self) -> int:
        """Clients that are connected."""
        return len(self._sessions)

    def _deliver(self, pending: Sequence[PendingRequest], answers: Answers) -> None:
        """Encode in the caller's thread; one wake-up of the event loop for the whole batch."""
        if isinstance(answers, Exception):
            text = f"{type(answers).__name__}: {answers}"[:1000].encode()
            messages = [wire.note(Kind.FAILURE, text, number=each.number) for each in pending]
        else:
            pairs = zip(pending, answers, strict=True)
            messages = [self._messages.result(each.number, result) for each, result in pairs]
        clients = [cast("_Session", each.client) for each in pending]
        with contextlib.suppress(RuntimeError):  # the loop is closed: the clients ask elsewhere
            self._loop.call_soon_threadsafe(self._send, clients, messages)

    def _send(self, clients: Sequence[_Session], messages: Sequence[bytes]) -> None:
        for session, message in zip(clients, messages, strict=True):
            session.answer(message)

    async def _serve(self, address: str, token: str) -> None:
        try:
            server = new_server(token)
            server.add_generic_rpc_handlers((_handler(self._converse),))
            bound = bind(server, address)
            await server.start()
        except BaseException as error:  # noqa: BLE001 - raised by the constructor
            self._started.set_exception(error)
            return
        stopping = asyncio.Event()
        beating = asyncio.create_task(self._beat(stopping))
        self._started.set_result((bound, asyncio.get_running_loop(), stopping))
        await beating
        for session in self._sessions:
            session.say(wire.note(Kind.LEAVING))
        await server.stop(LEAVE_SECONDS)

    async def _beat(self, stopping: asyncio.Event) -> None:
        """Tell clients now and then that somebody is there; until told to stop."""
        while not stopping.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), HEARTBEAT_SECONDS)
            for session in self._sessions:
                session.keep_alive()

    async def _converse(self, _: AsyncIterator[bytes], context: Context) -> None:
        """Serve one client from its hello to the end of its stream."""
        first = await _read(context)
        if first is None:
            return
        try:
            hello = wire.judge_hello(first, self._layout)
        except Refusal as refusal:
            await context.write(self._refusal(refusal.kind, str(refusal)))
            return
        session = _Session(context, hello.name)
        session.say(wire.note(Kind.WELCOME))
        self._sessions.add(session)
        try:
            await self._read_requests(session)
        except Malformed as error:
            session.say(self._refusal("malformed", str(error), client=hello.name))
        finally:
            self._sessions.discard(session)
            self._queue.drop(session)
            await session.close()

    async def _read_requests(self, session: _Session) -> None:
        while (message := await _read(session.context)) is not None:
            header = wire.read(message)
            self._queue.put(session, header.number, self._messages.read_request(header))
            await session.room()

    def _refusal(self, kind: str, text: str, client: str = "") -> bytes:
        _log.warning("client_refused", kind=kind, client=client, reason=text)
        self._on_refused(kind)
        return wire.note(Kind.REFUSED, text.encode())


class _Session:
    """One client's stream: what is on its way to the client, and the task that sends it. The event loop's alone."""

    def __init__(self, context: Context, name: str) -> None:
        self.context = context
        self._name = name
        self._outgoing: deque[tuple[bytes, int]] = deque()
        """Messages, and how many requests each answers."""
        self._unanswered = 0
        self._closed = False
        self._changed = asyncio.Event()
        self._roomy = asyncio.Event()
        self._writer = asyncio.create_task(self._write())

    def say(self, message: bytes) -> None:
        """Send a message after those before it."""
        self._put(message, answers=0)

    def keep_alive(self) -> None:
        """Give a sign of life, unless something is on its way anyhow."""
        if not self._outgoing:
            self._put(_ALIVE, answers=0)

    def answer(self, message: bytes) -> None:
        """Send a request's answer; nothing happens when the client is gone."""
        if not self._closed:
            self._put(message, answers=1)

    async def room(self) -> None:
        """A request was taken on; wait while the client is owed as many answers as it may be."""
        self._unanswered += 1
        while self._unanswered >= MAX_UNANSWERED:
            self._roomy.clear()
            await self._roomy.wait()

    async def close(self) -> None:
        """Send what is on its way and end the task. On a broken stream it ends by itself."""
        self._closed = True
        self._changed.set()
        await self._writer

    def _put(self, message: bytes, *, answers: int) -> None:
        self._outgoing.append((message, answers))
        self._changed.set()

    async def _write(self) -> None:
        try:
            while self._outgoing or not self._closed:
                while self._outgoing:
                    message, answers = self._outgoing.popleft()
                    await self.context.write(message)
                    self._unanswered -= answers
                    self._roomy.set()
                self._changed.clear()
                if not self._closed:
                    await self._changed.wait()
        except aio.BaseError as error:
            _log.info("stream_broke", client=self._name, error=repr(error))


_ALIVE = wire.note(Kind.ALIVE)


async def _read(context: Context) -> bytes | None:
    """The next message; None at the stream's end."""
    message: Any = await context.read()
    return message if isinstance(message, bytes) else None


def _handler(converse: Callable[[AsyncIterator[bytes], Context], Any]) -> grpc.GenericRpcHandler[Any, Any]:
    _, service, method = wire.METHOD.split("/")
    handlers: dict[str, Any] = {method: grpc.stream_stream_rpc_method_handler(converse)}
    return grpc.method_handlers_generic_handler(service, handlers)
