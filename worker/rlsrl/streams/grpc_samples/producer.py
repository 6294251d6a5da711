"""The producer: one connection at a time, made and repaired inside ``acquire`` and ``flush``."""

from __future__ import annotations

import math
import select
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import grpc
import structlog
from numpy.typing import NDArray
from typing_extensions import override

from rlsrl.data.slots import SlotLayout
from rlsrl.data.version import Version
from rlsrl.rpc.back_off import BackOff
from rlsrl.rpc.channels import CallTarget, is_final
from rlsrl.rpc.codec import Malformed
from rlsrl.rpc.conversations import Conversation
from rlsrl.rpc.settings import validate_address
from rlsrl.rpc.tls import Tls
from rlsrl.runtime.coordination import describe
from rlsrl.streams.grpc_samples import wire
from rlsrl.streams.grpc_samples.wire import SampleMessage, SampleMessageKind
from rlsrl.streams.handshake import Welcome
from rlsrl.streams.producer_core import ConnectingProducer, ProducerOptions
from rlsrl.streams.protocols import HandshakeRefused, StreamError

LEAVE_SECONDS = 1.0
"""How long a closing producer waits until its posts have reached the consumer. Then it cancels the call."""

ADMISSION_SECONDS = 10.0
"""How long a consumer may take to answer a hello. Then the producer connects again."""

_log = structlog.get_logger(__name__)


class _Ended(NamedTuple):
    """Follows the last message of a call."""

    error: Exception | None


class _Connection:
    """One call to a consumer, and the memory of its slots: a ``ConsumerConnection`` once it is admitted."""

    def __init__(self, target: CallTarget, *, hello: bytes, layout: SlotLayout, wake: Callable[[], None]) -> None:
        self.incoming: deque[SampleMessage | _Ended] = deque()
        """Messages that have arrived, for the owner's thread."""
        self.show_life_within = 0.0
        """Seconds between two signs of life."""
        self._layout = layout
        self._memory: list[bytearray] = []
        self._slots: list[dict[str, NDArray[Any]]] = []

        def deliver(message: SampleMessage | _Ended) -> None:
            self.incoming.append(message)
            wake()

        self._conversation = Conversation(
            target,
            wire.METHOD,
            first=hello,
            on_message=lambda raw: deliver(wire.read(raw)),
            on_end=lambda error: deliver(_Ended(error)),
        )
        self.close = self._conversation.close

    def begin(self, num_slots: int, show_life_within: float) -> None:
        """Allocate the slots of an admitted connection."""
        self.show_life_within = show_life_within
        self._memory = [bytearray(self._layout.nbytes) for _ in range(num_slots)]
        self._slots = [self._layout.view(memory) for memory in self._memory]

    def arrays(self, place: int) -> dict[str, NDArray[Any]]:
        return self._slots[place]

    def post(self, place: int, credit: int, sequence: int, num_transitions: int, total: int) -> None:
        self._conversation.send(wire.post(self._memory[place], place, credit, sequence, num_transitions, total))

    def show_life(self, touches: int) -> None:
        self._conversation.send(wire.note(SampleMessageKind.ALIVE, touches))


class GrpcSampleProducer(ConnectingProducer):
    """Fills slots for a consumer on any machine. ``post`` copies the slot's content."""

    def __init__(
        self,
        address: str,
        options: ProducerOptions,
        *,
        find: Callable[[str], str | None] | None = None,
        tls: Tls | None = None,
    ) -> None:
        """Prepare to connect to the consumer at ``unix-abstract:NAME`` or ``HOST:PORT``.

        With ``find``, the address may be any name: before each attempt ``find`` returns the name's current address, or
        None without one. ``tls`` is for consumers that require certificates.

        Raises:
            ConfigurationError: a slot does not fit into a message of 64 MiB.
            ValueError: the address has neither form.
        """
        wire.check_fits(options.layout)
        super().__init__(address if find is not None else validate_address(address), options, BackOff())
        self._find = find or str
        self._tls = tls
        self._connection: _Connection | None = None
        self._gives_up_at = math.inf
        """When the consumer has taken too long to answer the hello."""
        self._touches_sent = 0
        self._shows_life_at = -math.inf
        self._poll = select.poll()
        self._poll.register(self._wake, select.POLLIN)

    @override
    def touch(self) -> None:
        """Show life: read the clock, and send a small message a few times within the peer time-out."""
        self._touches += 1
        connection = self._connection
        if connection is not None and self._state.is_admitted and (now := self._now()) >= self._shows_life_at:
            self._shows_life_at = now + connection.show_life_within
            self._touches_sent = self._touches
            connection.show_life(self._touches)

    @property
    def touches(self) -> int:
        """Number of the last touch that was sent to the consumer."""
        return self._touches_sent

    @override
    def fileno(self) -> int:
        return self._wake.fileno()

    @property
    @override
    def retries_at(self) -> float:
        if self._connection is None:
            return self._retries_at
        return math.inf if self._state.is_admitted else self._gives_up_at

    @override
    def _dispose(self) -> None:
        self._hang_up()

    @override
    def _hang_up(self) -> None:
        # The consumer takes the credits back when the call ends.
        connection = self._connection
        self._disconnect()
        if connection is not None:
            connection.close(LEAVE_SECONDS)

    @override
    def _sleep(self, seconds: float) -> None:
        self._poll.poll(math.ceil(seconds * 1000))

    @override
    def _advance(self) -> None:
        if self._connection is None and self._now() >= self._retries_at:
            self._connect()
        self._wake.clear()
        if self._closed:
            self._wake.set()
        while (connection := self._connection) is not None and connection.incoming:
            self._read(connection, connection.incoming.popleft())
        if connection is not None and not self._state.is_admitted and self._now() >= self._gives_up_at:
            _log.info("consumer_silent", address=self._address, seconds=ADMISSION_SECONDS)
            self._disconnect()
            connection.close()

    def _connect(self) -> None:
        self._begin_attempt()
        if (address := self._find(self._address)) is None:
            return
        hello = wire.handshake(SampleMessageKind.HELLO, self._state.hello().to_json(self._token))
        self._gives_up_at = self._now() + ADMISSION_SECONDS
        target = CallTarget(address=address, token=self._token, tls=self._tls)
        self._connection = _Connection(target, hello=hello, layout=self._layout, wake=self._wake.set)

    def _read(self, connection: _Connection, message: SampleMessage | _Ended) -> None:
        if isinstance(message, _Ended):
            self._disconnect()
            self._check_end(message.error)
            return
        try:
            self._handle(connection, message)
        except BaseException:
            self._disconnect()
            connection.close()
            raise

    def _handle(self, connection: _Connection, message: SampleMessage) -> None:
        first, second, attempt, step, _ = message.words
        if message.kind is SampleMessageKind.CREDIT:
            self._state.credited(first, second, Version(attempt, step))
        elif message.kind is SampleMessageKind.ACK:
            self._state.acknowledged(first)
        elif message.kind in (SampleMessageKind.WELCOME, SampleMessageKind.REFUSED) and not self._state.is_admitted:
            welcome = Welcome.from_json(wire.read_handshake(message), stream=self._address)
            self._back_off.reset()
            self._shows_life_at = -math.inf
            connection.begin(welcome.num_slots, first / 1000)
            self._state.connected(welcome, connection)
        else:
            raise StreamError(f"sample stream {self._address}: the consumer sent a {message.kind.name}")

    def _check_end(self, error: Exception | None) -> None:
        """Raise an error that another attempt cannot change; log one that it can."""
        if isinstance(error, grpc.RpcError):
            if is_final(error):
                raise HandshakeRefused(
                    f"sample stream {self._address}: the consumer refused this producer: {describe(error)}"
                ) from error
            _log.info("consumer_gone", address=self._address, reason=describe(error))
        elif isinstance(error, Malformed):
            raise StreamError(f"sample stream {self._address}: {error}") from error
        elif error is not None:
            raise StreamError(f"sample stream {self._address} failed: {error!r}") from error
