"""The client: one connection to one server at a time, and to the next server when that one dies.

The client has no thread. While its owner waits for answers, the owner's thread runs an event loop, on which the
connections receive. A task on that loop keeps the client connected. It waits for four events: a connection is welcomed,
a connection ends, a server is silent for too long, or it is time to try the home server again.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import grpc
import structlog
from typing_extensions import override

from rlsrl.data.inference import InferenceLayout, RolloutRequest, RolloutResult
from rlsrl.rpc.back_off import BackOff
from rlsrl.rpc.channels import END_SECONDS, CallTarget, is_final
from rlsrl.rpc.codec import Malformed
from rlsrl.rpc.in_thread import InThreadConversation, WaitingLoop
from rlsrl.rpc.settings import validate_address
from rlsrl.rpc.tls import Tls
from rlsrl.runtime.coordination import describe
from rlsrl.streams.grpc_inference import wire
from rlsrl.streams.grpc_inference.wire import InferenceMessage, InferenceMessageKind, LaneMessages
from rlsrl.streams.inference import Answer, InferenceClient, InferenceFailed
from rlsrl.streams.protocols import HandshakeRefused, StreamClosed, StreamError

RETURN_SECONDS = 5.0
"""How often a client that is connected to another server tries its home server again."""
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class InferenceClientOptions:
    """The settings of an inference client."""

    token: str = field(repr=False)
    """The experiment's token."""
    layout: InferenceLayout
    """Of requests and results."""
    home: int = 0
    """This client's number, for example the actor's index. Its home server is this number modulo the servers."""
    peer_timeout: float = 10.0
    """Seconds without any message after which the client leaves a server."""
    return_seconds: float = RETURN_SECONDS
    find: Callable[[str], str | None] | None = None
    """With ``find``, the addresses may be any names: before each attempt ``find`` returns a name's current address, or
    None without one."""
    tls: Tls | None = None
    """Certificates, for servers that require them."""


@dataclass(kw_only=True, slots=True, eq=False)
class _UnansweredRequest:
    message: bytes
    num_lanes: int


class GrpcInferenceClient(InferenceClient):
    """Sends requests to one of several servers. It connects while its owner waits.

    It tries the servers in turn, its home server first. So clients with different numbers spread over the servers. A
    client whose server dies continues at another server and returns when its home server is back.
    """

    def __init__(self, addresses: Sequence[str], options: InferenceClientOptions) -> None:
        """Use the servers at ``unix-abstract:NAME`` or ``HOST:PORT``, in the same order for every client.

        Raises:
            ValueError: there is no address, or one has neither form.
        """
        if not addresses:
            raise ValueError("an inference client needs the address of at least one server")
        first = options.home % len(addresses)
        names = (*addresses[first:], *addresses[:first])
        self._addresses = names if options.find is not None else tuple(map(validate_address, names))
        self._find = options.find or str
        self._options = options
        self._hello = wire.hello(f"client {options.home}", options.layout)
        self._messages = LaneMessages(options.layout)
        self._loop = WaitingLoop.of_this_thread()
        # Only waiting time counts: while the loop stands still, the client cannot notice that a server is alive.
        self._now = self._loop.seconds_run
        self._unanswered: dict[int, _UnansweredRequest] = {}
        self._unsent: list[int] = []
        self._answers: list[Answer] = []
        self._next_number = 0
        self._connection: _Connection | None = None
        """The connection that gets the requests."""
        self._candidate: _Connection | None = None
        """A connection that is not welcomed yet."""
        self._leaving: list[_Connection] = []
        self._failure: StreamError | None = None
        self._next_address = 0
        self._back_off = BackOff()
        self._retry_at = -math.inf
        self._changed = asyncio.Event()
        self._keeper = self._loop.create_task(self._run())

    @override
    def submit(self, request: RolloutRequest) -> int:
        """Queue a request; see ``InferenceClient.submit``. The arrays are copied, so they may change afterwards.

        Raises:
            StreamClosed, HandshakeRefused: as ``InferenceClient.submit``.
            Malformed, MessageTooLong: the request is not of the layout.
        """
        self._check()
        number = self._next_number
        message = self._messages.request(number, request)
        self._unanswered[number] = _UnansweredRequest(message=message, num_lanes=request.num_lanes)
        self._unsent.append(number)
        self._next_number += 1
        return number

    @override
    def wait(self, timeout: float) -> Sequence[Answer]:
        self._check()
        if self._connection is not None:
            for number in self._unsent:
                self._connection.send(self._unanswered[number].message)
            self._unsent.clear()
        self._loop.run_for(0.0 if self._answers else timeout)
        self._check()
        answers, self._answers = self._answers, []
        return answers

    @override
    def close(self) -> None:
        self._fail(StreamClosed("this inference client was closed"))
        until = self._now() + END_SECONDS
        while not self._keeper.done() and self._now() < until:
            self._loop.run_for(END_SECONDS)

    @override
    def wake(self) -> None:
        self._loop.wake()

    @property
    def address(self) -> str | None:
        """The server that gets the requests now, or None without a connection."""
        return self._connection.address if self._connection is not None else None

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    # Called by connections.

    def _received(self, connection: _Connection, message: InferenceMessage) -> None:
        """Handle a server's message.

        Raises:
            Malformed: a server does not send such a message.
            StreamError: the server refuses this client for good.
        """
        connection.heard(self._now() + self._options.peer_timeout)
        if message.kind in (InferenceMessageKind.RESULT, InferenceMessageKind.FAILURE):
            connection.has_answered = True
            self._keep_answer(message)
        elif message.kind is InferenceMessageKind.WELCOME:
            self._welcomed(connection)
        elif message.kind is InferenceMessageKind.REFUSED:
            text = message.text.decode(errors="replace")
            raise HandshakeRefused(f"inference server {connection.address} refused this client: {text}")
        elif message.kind is InferenceMessageKind.LEAVING:
            connection.close(END_SECONDS)
        elif message.kind is not InferenceMessageKind.ALIVE:
            raise Malformed(f"a {message.kind.name} from an inference server")

    def _keep_answer(self, message: InferenceMessage) -> None:
        """Keep an answer for the owner. The second answer to a request that was sent twice is dropped."""
        request = self._unanswered.get(message.number)
        if request is None:
            return
        result: RolloutResult | InferenceFailed
        if message.kind is InferenceMessageKind.RESULT:
            result = self._messages.read_result(message, request.num_lanes)
        else:
            result = InferenceFailed(message.text.decode(errors="replace"))
        del self._unanswered[message.number]
        self._answers.append(Answer(message.number, result))
        self._loop.stop()

    def _welcomed(self, connection: _Connection) -> None:
        """Send every unanswered request, and all later requests, to this server."""
        if connection is not self._candidate:
            return
        former, self._connection, self._candidate = self._connection, connection, None
        self._unsent.clear()
        for request in self._unanswered.values():
            connection.send(request.message)
        if former is not None:
            former.close(END_SECONDS)
            self._leaving.append(former)
        self._changed.set()
        _log.info("inference_server", address=connection.address)

    def _ended(self, error: StreamError | None) -> None:
        """A connection has ended, with an error if another attempt is useless."""
        self._changed.set()
        if error is not None:
            self._fail(error)

    def _fail(self, error: StreamError) -> None:
        """End the client with its first failure, or with ``close``."""
        if self._failure is None:
            self._failure = error
        self._unanswered.clear()
        self._unsent.clear()
        self._answers.clear()
        self._changed.set()
        self._loop.stop()

    # The task that keeps the client connected.

    async def _run(self) -> None:
        try:
            await self._stay_connected()
        except Exception as error:  # noqa: BLE001 - the owner raises it: the task has no other reader
            self._fail(_with_cause(StreamError(f"an inference client failed: {error!r}"), error))
        remaining = [*self._connections()]
        for connection in remaining:
            connection.close()
        for connection in remaining:
            await connection.wait_for_end()
        self._loop.stop()

    async def _stay_connected(self) -> None:
        """Keep a connection, to the home server if possible, until the first failure or ``close``."""
        while self._failure is None:
            now = self._now()
            self._remove_ended(now)
            self._cancel_silent(now)
            if self._candidate is None and self._is_away and now >= self._retry_at:
                self._try_next(now)
            self._changed.clear()
            duty = self._next_duty
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(duty - now if duty < math.inf else None):
                    await self._changed.wait()

    @property
    def _is_away(self) -> bool:
        """Whether the client is not connected to its home server."""
        return self._connection is None or self._connection.address != self._addresses[0]

    @property
    def _next_duty(self) -> float:
        """When the task must act without an event."""
        duties = [connection.silent_at for connection in self._connections()]
        if self._candidate is None and self._is_away:
            duties.append(self._retry_at)
        return min(duties, default=math.inf)

    def _connections(self) -> Iterator[_Connection]:
        """Every connection that has not ended."""
        if self._candidate is not None:
            yield self._candidate
        if self._connection is not None:
            yield self._connection
        yield from self._leaving

    def _remove_ended(self, now: float) -> None:
        """Remove ended connections. After a server that answered, try the next at once, else after the back-off."""
        self._leaving = [connection for connection in self._leaving if not connection.has_ended]
        if self._candidate is not None and self._candidate.has_ended:
            self._candidate = None
            if self._connection is None:
                self._plan_next_attempt(now)
        if self._connection is not None and self._connection.has_ended:
            _log.warning("inference_server_gone", address=self._connection.address)
            self._plan_next_attempt(now, at_once=self._connection.has_answered)
            self._connection = None

    def _plan_next_attempt(self, now: float, *, at_once: bool = False) -> None:
        """Set the next server and the time of the attempt."""
        self._next_address += 1
        if at_once:
            self._back_off.reset()
        self._retry_at = now if at_once else now + self._back_off.next_delay()

    def _cancel_silent(self, now: float) -> None:
        for connection in self._connections():
            if now >= connection.silent_at:
                connection.close()

    def _try_next(self, now: float) -> None:
        """Connect to the next server, or to the home server if there is a connection elsewhere."""
        if self._connection is not None:
            self._next_address = 0
            self._retry_at = now + self._options.return_seconds
        address = self._addresses[self._next_address % len(self._addresses)]
        if (target := self._find(address)) is None:
            if self._connection is None:
                self._plan_next_attempt(now)
            return
        self._candidate = _Connection(
            self._loop,
            address,
            CallTarget(address=target, token=self._options.token, tls=self._options.tls),
            hello=self._hello,
            silent_at=now + self._options.peer_timeout,
            on_message=self._received,
            on_end=self._ended,
        )


class _Connection:
    """One call to one server."""

    def __init__(
        self,
        loop: WaitingLoop,
        address: str,
        target: CallTarget,
        *,
        hello: bytes,
        silent_at: float,
        on_message: Callable[[_Connection, InferenceMessage], None],
        on_end: Callable[[StreamError | None], None],
    ) -> None:
        """Connect to ``target``, the current place of ``address``, and send the hello.

        ``on_end`` is called last. It gets an error if another attempt at this server is useless.
        """
        self.address = address
        self.silent_at = silent_at
        """When the server counts as dead, unless a message arrives before; infinite once ``close`` was called."""
        self.has_answered = False
        self.has_ended = False
        self._on_end = on_end
        self._conversation = InThreadConversation(
            loop,
            target,
            wire.METHOD,
            first=hello,
            on_message=lambda message: on_message(self, wire.read(message)),
            on_end=self._ended,
        )
        self.send = self._conversation.send
        self.wait_for_end = self._conversation.wait_for_end

    def heard(self, silent_at: float) -> None:
        """Set the next ``silent_at`` after a message of the server."""
        if self.silent_at < math.inf:
            self.silent_at = silent_at

    def close(self, grace: float = 0.0) -> None:
        """End the call. From now on ``grace``, in seconds, bounds it: the peer time-out does not apply any more."""
        self.silent_at = math.inf
        self._conversation.close(grace)

    def _ended(self, error: Exception | None) -> None:
        self.has_ended = True
        final: StreamError | None = None
        if isinstance(error, Malformed):
            _log.warning("inference_answer_malformed", address=self.address, reason=str(error))
        elif isinstance(error, grpc.RpcError):
            if is_final(error):
                final = HandshakeRefused(f"inference server {self.address}: {describe(error)}")
        elif isinstance(error, StreamError):
            final = error
        elif error is not None:
            final = _with_cause(StreamError(f"an inference client failed: {error!r}"), error)
        self._on_end(final)


def _with_cause(error: StreamError, cause: Exception) -> StreamError:
    error.__cause__ = cause
    return error
