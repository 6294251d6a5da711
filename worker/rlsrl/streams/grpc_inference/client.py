"""The end that asks: a stream to one server at a time, and to the next one when that dies. Its owner's thread does all.

While the owner waits for answers it turns an event loop, on which connections receive, and a task, the keeper, sleeps
until a connection begins, ends, is silent for too long, or the way home is to be tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import grpc
import structlog

from rlsrl.data.inference import InferenceLayout, RolloutRequest, RolloutResult
from rlsrl.rpc.channels import Metadata, token_metadata
from rlsrl.rpc.codec import Malformed
from rlsrl.rpc.conversations import END_SECONDS, FIRST_BACK_OFF_SECONDS, LAST_BACK_OFF_SECONDS, is_final
from rlsrl.rpc.in_thread import InThreadConversation, WaitingLoop
from rlsrl.rpc.settings import validate_address
from rlsrl.rpc.tls import Tls
from rlsrl.runtime.coordination import describe
from rlsrl.streams.grpc_inference import wire
from rlsrl.streams.grpc_inference.wire import InferenceMessage, InferenceMessageKind, LaneMessages
from rlsrl.streams.inference import Answer, InferenceFailed
from rlsrl.streams.protocols import HandshakeRefused, StreamClosed, StreamError

RETURN_SECONDS = 5.0
"""How often a client that found refuge at another server tries its own again."""
_log = structlog.get_logger(__name__)


@dataclass(kw_only=True, slots=True, eq=False)
class _Asked:
    """A request that is not answered."""

    message: bytes
    num_lanes: int


class GrpcInferenceClient:
    """Asks one of several servers; implements ``InferenceClient``. Connects while its owner waits.

    The servers are tried in turn, beginning with its own: number ``home`` modulo their number. So clients with numbers
    of their own spread over the servers, and go on at another when theirs dies, until it is back.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        token: str,
        layout: InferenceLayout,
        home: int = 0,
        peer_timeout: float = 10.0,
        return_seconds: float = RETURN_SECONDS,
        find: Callable[[str], str | None] | None = None,
        tls: Tls | None = None,
    ) -> None:
        """Ask those servers: ``unix-abstract:NAME`` or ``HOST:PORT`` each.

        Args:
            addresses: of all servers, in the same order for every client.
            token: the experiment's.
            layout: of requests and results.
            home: this client's number, for example the actor's index.
            peer_timeout: seconds without any sign of life after which a server is given up.
            return_seconds: how often a client that is not at its own server tries that again.
            find: with it the addresses may be any names: before each connection it is asked where one is then, None
                while it is nowhere.
            tls: certificates, where servers want them.

        Raises:
            ValueError: no addresses, or one of neither form.
        """
        if not addresses:
            raise ValueError("an inference client needs at least one server's address")
        first = home % len(addresses)
        names = (*addresses[first:], *addresses[:first])
        self._addresses = names if find is not None else tuple(map(validate_address, names))
        self._find = find or str
        self._hello = wire.hello(f"client {home}", layout)
        self._metadata = token_metadata(token)
        self._tls = tls
        self._messages = LaneMessages(layout)
        self._peer_timeout = peer_timeout
        self._return_seconds = return_seconds
        self._loop = WaitingLoop.of_this_thread()
        self._now = self._loop.turned
        """The time that is spent waiting: of a server that nobody listens to nobody can say that it is silent."""
        self._asked: dict[int, _Asked] = {}
        self._held: list[int] = []
        """Asked and not sent."""
        self._answers: list[Answer] = []
        """That nobody has yet."""
        self._next_number = 0
        self._connection: _Connection | None = None
        """To which requests go."""
        self._attempt: _Connection | None = None
        """Not welcomed yet."""
        self._leaving: list[_Connection] = []
        self._failure: StreamError | None = None
        self._next_address = 0
        self._back_off = FIRST_BACK_OFF_SECONDS
        self._retry_at = -math.inf
        self._changed = asyncio.Event()
        self._keeper = self._loop.begin(self._run())

    def submit(self, request: RolloutRequest) -> int:
        """See ``InferenceClient.submit``. The arrays are copied at once and may change afterwards.

        Raises:
            StreamClosed, HandshakeRefused: see there.
            Malformed, MessageTooLong: the request is not of the layout.
        """
        self._check()
        number = self._next_number
        self._asked[number] = _Asked(message=self._messages.request(number, request), num_lanes=request.num_lanes)
        self._held.append(number)
        self._next_number += 1
        return number

    def wait(self, timeout: float) -> Sequence[Answer]:
        """See ``InferenceClient.wait``."""
        self._check()
        if self._connection is not None:
            for number in self._held:
                self._connection.send(self._asked[number].message)
            self._held.clear()
        self._loop.turn(0.0 if self._answers else timeout)
        self._check()
        answers, self._answers = self._answers, []
        return answers

    def close(self) -> None:
        """See ``InferenceClient.close``."""
        self._fail(StreamClosed("this inference client was closed"))
        until = self._now() + END_SECONDS
        while not self._keeper.done() and self._now() < until:
            self._loop.turn(END_SECONDS)

    @property
    def address(self) -> str | None:
        """The server that is asked now; None while there is none."""
        return self._connection.address if self._connection is not None else None

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    # What connections tell.

    def _received(self, connection: _Connection, message: InferenceMessage) -> None:
        """Act on a message of a server.

        Raises:
            Malformed: it is not one that a server sends.
            StreamError: the server refuses this client for good.
        """
        connection.last_heard = self._now()
        if message.kind in (InferenceMessageKind.RESULT, InferenceMessageKind.FAILURE):
            connection.has_answered = True
            self._settle(message)
        elif message.kind is InferenceMessageKind.WELCOME:
            self._welcomed(connection)
        elif message.kind is InferenceMessageKind.REFUSED:
            text = message.text.decode(errors="replace")
            raise HandshakeRefused(f"inference server {connection.address} refused this client: {text}")
        elif message.kind is InferenceMessageKind.LEAVING:
            connection.end()
        elif message.kind is not InferenceMessageKind.ALIVE:
            raise Malformed(f"a {message.kind.name} came from an inference server")

    def _settle(self, message: InferenceMessage) -> None:
        """Keep an answer for who waits for it: once, though it may have been asked for twice and come twice."""
        asked = self._asked.get(message.number)
        if asked is None:
            return
        answered: RolloutResult | InferenceFailed
        if message.kind is InferenceMessageKind.RESULT:
            answered = self._messages.read_result(message, asked.num_lanes)
        else:
            answered = InferenceFailed(message.text.decode(errors="replace"))
        del self._asked[message.number]
        self._answers.append(Answer(message.number, answered))
        self._loop.stop()

    def _welcomed(self, connection: _Connection) -> None:
        """Requests go to this server from now on, and whatever is not answered yet goes there again."""
        if connection is not self._attempt:
            return
        former, self._connection, self._attempt = self._connection, connection, None
        self._held.clear()
        for asked in self._asked.values():
            connection.send(asked.message)
        if former is not None:
            former.end()
            self._leaving.append(former)
        self._changed.set()
        _log.info("inference_server", address=connection.address)

    def _ended(self, error: StreamError | None) -> None:
        """A connection is over; with an error if trying again is of no use."""
        self._changed.set()
        if error is not None:
            self._fail(error)

    def _fail(self, error: StreamError) -> None:
        """Nothing will be answered any more: at the first failure, or at the end."""
        if self._failure is None:
            self._failure = error
        self._asked.clear()
        self._held.clear()
        self._answers.clear()
        self._changed.set()
        self._loop.stop()

    # The keeper.

    async def _run(self) -> None:
        try:
            await self._keep()
        except Exception as error:  # noqa: BLE001 - raised to the owner, who waits for what this one should do
            self._fail(_caused(StreamError(f"an inference client failed: {error!r}"), error))
        remaining = [*self._all()]
        for connection in remaining:
            connection.cancel()
        for connection in remaining:
            await connection.over()
        self._loop.stop()

    async def _keep(self) -> None:
        """Have a connection at all times, as near to home as can be; until the first failure, or ``close``."""
        while self._failure is None:
            now = self._now()
            self._bury(now)
            self._give_up_silent(now)
            if self._attempt is None and self._is_astray and now >= self._retry_at:
                self._try_next(now)
            self._changed.clear()
            duty = self._next_duty
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(duty - now if duty < math.inf else None):
                    await self._changed.wait()

    @property
    def _is_astray(self) -> bool:
        return self._connection is None or self._connection.address != self._addresses[0]

    @property
    def _next_duty(self) -> float:
        """When something is to be done that nobody will wake us for."""
        duties = [each.last_heard + self._peer_timeout for each in self._all()]
        if self._attempt is None and self._is_astray:
            duties.append(self._retry_at)
        return min(duties, default=math.inf)

    def _all(self) -> Iterator[_Connection]:
        """Every connection that has not ended."""
        if self._attempt is not None:
            yield self._attempt
        if self._connection is not None:
            yield self._connection
        yield from self._leaving

    def _bury(self, now: float) -> None:
        """Deal with connections that have ended: after one that was of no use the next is tried after the back-off."""
        self._leaving = [each for each in self._leaving if not each.has_ended]
        if self._attempt is not None and self._attempt.has_ended:
            self._attempt = None
            if self._connection is None:
                self._try_after(now, self._back_off)
        if self._connection is not None and self._connection.has_ended:
            _log.warning("inference_server_gone", address=self._connection.address)
            self._try_after(now, 0.0 if self._connection.has_answered else self._back_off)
            self._connection = None

    def _try_after(self, now: float, delay: float) -> None:
        self._next_address += 1
        self._retry_at = now + delay
        self._back_off = min(2 * self._back_off, LAST_BACK_OFF_SECONDS) if delay else FIRST_BACK_OFF_SECONDS

    def _give_up_silent(self, now: float) -> None:
        for connection in self._all():
            if now >= connection.last_heard + self._peer_timeout:
                connection.cancel()
                connection.last_heard = math.inf

    def _try_next(self, now: float) -> None:
        """Connect to the next server; with a connection elsewhere, to our own."""
        if self._connection is not None:
            self._next_address = 0
            self._retry_at = now + self._return_seconds
        address = self._addresses[self._next_address % len(self._addresses)]
        if (target := self._find(address)) is None:
            if self._connection is None:
                self._try_after(now, self._back_off)
            return
        self._attempt = _Connection(
            self._loop,
            address,
            target,
            metadata=self._metadata,
            tls=self._tls,
            hello=self._hello,
            now=now,
            on_message=self._received,
            on_end=self._ended,
        )


class _Connection:
    """A conversation with one server, and what is known of it."""

    def __init__(
        self,
        loop: WaitingLoop,
        address: str,
        target: str,
        *,
        metadata: Metadata,
        tls: Tls | None,
        hello: bytes,
        now: float,
        on_message: Callable[[_Connection, InferenceMessage], None],
        on_end: Callable[[StreamError | None], None],
    ) -> None:
        """Connect to ``target``, where ``address`` is now, and say hello.

        ``on_end`` is called last, and given an error if asking this server again is of no use.
        """
        self.address = address
        self.last_heard = now
        """When the server last gave a sign of life."""
        self.has_answered = False
        self.has_ended = False
        self._on_end = on_end
        self._conversation = InThreadConversation(
            loop,
            target,
            wire.METHOD,
            metadata=metadata,
            tls=tls,
            first=hello,
            on_message=lambda message: on_message(self, wire.read(message)),
            on_end=self._ended,
        )
        self.send = self._conversation.send
        self.end = self._conversation.end
        self.cancel = self._conversation.cancel
        self.over = self._conversation.over

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
            final = _caused(StreamError(f"an inference client failed: {error!r}"), error)
        self._on_end(final)


def _caused(error: StreamError, cause: Exception) -> StreamError:
    error.__cause__ = cause
    return error
