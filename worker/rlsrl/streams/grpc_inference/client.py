"""The end that asks: a stream to one server at a time, kept by a thread that finds the next one when it dies.

The owner's thread hands messages to grpc's sending thread; the connection's receiving thread settles the futures. A
third, the keeper, sleeps until a connection begins, ends, is silent for too long, or the way home is to be tried again.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import grpc
import structlog

from rlsrl.data.inference import InferenceLayout, RolloutRequest, RolloutResult
from rlsrl.rpc.channels import Metadata, token_metadata
from rlsrl.rpc.codec import Malformed
from rlsrl.rpc.conversations import FIRST_BACK_OFF_SECONDS, LAST_BACK_OFF_SECONDS, Conversation, is_final
from rlsrl.rpc.settings import validate_address
from rlsrl.rpc.tls import Tls
from rlsrl.runtime.clock import Clock, SystemClock
from rlsrl.runtime.coordination import describe
from rlsrl.streams.grpc_inference import wire
from rlsrl.streams.grpc_inference.wire import Kind, LaneMessages, Message
from rlsrl.streams.inference import InferenceFailed
from rlsrl.streams.protocols import HandshakeRefused, StreamClosed, StreamError

RETURN_SECONDS = 5.0
"""How often a client that found refuge at another server tries its own again."""
_log = structlog.get_logger(__name__)


@dataclass(kw_only=True, slots=True, eq=False)
class _Asked:
    """A request that is not answered."""

    message: bytes
    num_lanes: int
    future: Future[RolloutResult]


class GrpcInferenceClient:
    """Asks one of several servers; implements ``InferenceClient``. Connects by itself from the constructor on.

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
        clock: Clock | None = None,
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
            clock: the machine's unless given.

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
        self._now = (clock or SystemClock()).monotonic
        self._changed = threading.Condition()
        # Guarded by _changed:
        self._asked: dict[int, _Asked] = {}
        self._held: list[int] = []
        """Asked and not flushed."""
        self._next_number = 0
        self._connection: _Connection | None = None
        """To which requests go."""
        self._attempt: _Connection | None = None
        """Not welcomed yet."""
        self._failure: StreamError | None = None
        # The keeper's:
        self._leaving: list[_Connection] = []
        self._next_address = 0
        self._back_off = FIRST_BACK_OFF_SECONDS
        self._retry_at = -math.inf
        self._keeper = threading.Thread(target=self._run, name="inference-keeper", daemon=True)
        self._keeper.start()

    def submit(self, request: RolloutRequest) -> Future[RolloutResult]:
        """See ``InferenceClient.submit``. The arrays are copied at once and may change afterwards.

        Raises:
            StreamClosed, HandshakeRefused: see there.
            Malformed, MessageTooLong: the request is not of the layout.
        """
        number = self._next_number
        message = self._messages.request(number, request)
        asked = _Asked(message=message, num_lanes=request.num_lanes, future=Future())
        asked.future.set_running_or_notify_cancel()  # whoever asked cannot take it back
        with self._changed:
            if self._failure is not None:
                raise self._failure
            self._next_number += 1
            self._asked[number] = asked
            self._held.append(number)
        return asked.future

    def flush(self) -> None:
        """See ``InferenceClient.flush``."""
        with self._changed:
            if self._failure is not None:
                raise self._failure
            if self._connection is not None:
                for number in self._held:
                    self._connection.send(self._asked[number].message)
            self._held.clear()

    def close(self) -> None:
        """See ``InferenceClient.close``."""
        self._fail(StreamClosed("this inference client was closed"))
        self._keeper.join()

    @property
    def address(self) -> str | None:
        """The server that is asked now; None while there is none."""
        connection = self._connection
        return connection.address if connection is not None else None

    # What connections tell, each in its own thread.

    def _received(self, connection: _Connection, message: Message) -> None:
        """Act on a message of a server.

        Raises:
            Malformed: it is not one that a server sends.
            StreamError: the server refuses this client for good.
        """
        connection.last_heard = self._now()
        if message.kind in (Kind.RESULT, Kind.FAILURE):
            connection.has_answered = True
            self._settle(message)
        elif message.kind is Kind.WELCOME:
            self._welcomed(connection)
        elif message.kind is Kind.REFUSED:
            text = message.text.decode(errors="replace")
            raise HandshakeRefused(f"inference server {connection.address} refused this client: {text}")
        elif message.kind is Kind.LEAVING:
            connection.end()
        elif message.kind is not Kind.ALIVE:
            raise Malformed(f"a {message.kind.name} came from an inference server")

    def _settle(self, message: Message) -> None:
        """Hand an answer to who waits for it: once, though it may have been asked for twice and come twice."""
        with self._changed:
            asked = self._asked.get(message.number)
        if asked is None:
            return
        answered = message.kind is Kind.RESULT
        result = self._messages.read_result(message, asked.num_lanes) if answered else None
        with self._changed:
            if self._asked.pop(message.number, None) is None:
                return
        if result is not None:
            asked.future.set_result(result)
        else:
            asked.future.set_exception(InferenceFailed(message.text.decode(errors="replace")))

    def _welcomed(self, connection: _Connection) -> None:
        """Requests go to this server from now on, and whatever is not answered yet goes there again."""
        with self._changed:
            if connection is not self._attempt:
                return
            former, self._connection, self._attempt = self._connection, connection, None
            self._held.clear()
            for asked in self._asked.values():
                connection.send(asked.message)
            if former is not None:
                former.end()
                self._leaving.append(former)
            self._changed.notify_all()
        _log.info("inference_server", address=connection.address)

    def _ended(self, connection: _Connection, error: StreamError | None) -> None:
        """A connection is over; with an error if trying again is of no use."""
        with self._changed:
            connection.has_ended = True
            self._changed.notify_all()
        if error is not None:
            self._fail(error)

    def _fail(self, error: StreamError) -> None:
        """Nothing will be answered any more: at the first failure, or at the end."""
        with self._changed:
            if self._failure is None:
                self._failure = error
            asked, self._asked = self._asked, {}
            self._held.clear()
            self._changed.notify_all()
        for each in asked.values():
            each.future.set_exception(error)

    # The keeper.

    def _run(self) -> None:
        try:
            self._keep()
        except Exception as error:  # noqa: BLE001 - raised in the threads that wait for what this one should do
            self._fail(_caused(StreamError(f"an inference client failed: {error!r}"), error))
        with self._changed:
            remaining = list(self._all())
        for connection in remaining:
            connection.cancel()
        for connection in remaining:
            connection.join()

    def _keep(self) -> None:
        """Have a connection at all times, as near to home as can be; until the first failure, or ``close``."""
        with self._changed:
            while self._failure is None:
                now = self._now()
                self._bury(now)
                self._give_up_silent(now)
                if self._attempt is None and self._is_astray and now >= self._retry_at:
                    self._try_next(now)
                duty = self._next_duty
                self._changed.wait(max(0.0, duty - now) if duty < math.inf else None)

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
        address: str,
        target: str,
        *,
        metadata: Metadata,
        tls: Tls | None,
        hello: bytes,
        now: float,
        on_message: Callable[[_Connection, Message], None],
        on_end: Callable[[_Connection, StreamError | None], None],
    ) -> None:
        """Connect to ``target``, where ``address`` is now, and say hello.

        Both callbacks come from the connection's own thread, ``on_end`` last.
        ``on_end`` is given an error if asking this server again is of no use.
        """
        self.address = address
        self.last_heard = now
        """When the server last gave a sign of life."""
        self.has_answered = False
        self.has_ended = False
        self._on_end = on_end
        self._conversation = Conversation(
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
        self.join = self._conversation.join
        self._conversation.start()

    def _ended(self, error: Exception | None) -> None:
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
        self._on_end(self, final)


def _caused(error: StreamError, cause: Exception) -> StreamError:
    error.__cause__ = cause
    return error
