"""The end that fills slots: one connection at a time, made and mended in the calls that wait."""

from __future__ import annotations

import math
import select
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import grpc
import structlog
from numpy.typing import NDArray

from rlsrl.data.slots import ProducerId, SlotLayout
from rlsrl.data.version import Version
from rlsrl.rpc.channels import token_metadata
from rlsrl.rpc.codec import Malformed
from rlsrl.rpc.conversations import FIRST_BACK_OFF_SECONDS, LAST_BACK_OFF_SECONDS, Conversation, is_final
from rlsrl.rpc.settings import validate_address
from rlsrl.rpc.tls import Tls
from rlsrl.runtime.clock import Clock
from rlsrl.runtime.coordination import describe
from rlsrl.runtime.ledger import ProducerProgress
from rlsrl.streams.connecting import ConnectingProducer
from rlsrl.streams.grpc_samples import wire
from rlsrl.streams.grpc_samples.wire import SampleMessage, SampleMessageKind
from rlsrl.streams.handshake import Welcome
from rlsrl.streams.protocols import HandshakeRefused, ProducerLedger, StreamError

LEAVE_SECONDS = 1.0
"""How long what was posted may take to reach the consumer when the producer closes; then the connection is cut."""

ADMISSION_SECONDS = 10.0
"""How long a consumer may take to admit a producer; then it is asked again, over another connection."""

_log = structlog.get_logger(__name__)


class _Ended(NamedTuple):
    """Instead of a message: the conversation is over."""

    error: Exception | None


class _Connection:
    """A conversation with a consumer, and the slots that are filled for it."""

    def __init__(
        self,
        address: str,
        *,
        token: str,
        tls: Tls | None,
        hello: bytes,
        layout: SlotLayout,
        wake: Callable[[], None],
    ) -> None:
        self.incoming: deque[SampleMessage | _Ended] = deque()
        """What has come, for the owner's thread."""
        self.show_life_within = 0.0
        self._layout = layout
        self._memory: list[bytearray] = []
        self._slots: list[dict[str, NDArray[Any]]] = []

        def bring(message: SampleMessage | _Ended) -> None:
            self.incoming.append(message)
            wake()

        self._conversation = Conversation(
            address,
            wire.METHOD,
            metadata=token_metadata(token),
            tls=tls,
            first=hello,
            on_message=lambda raw: bring(wire.read(raw)),
            on_end=lambda error: bring(_Ended(error)),
        )
        self._conversation.start()

    def begin(self, num_slots: int, show_life_within: float) -> None:
        """The consumer has admitted us."""
        self.show_life_within = show_life_within
        self._memory = [bytearray(self._layout.nbytes) for _ in range(num_slots)]
        self._slots = [self._layout.view(memory) for memory in self._memory]

    def arrays(self, place: int) -> dict[str, NDArray[Any]]:
        return self._slots[place]

    def post(self, place: int, credit: int, sequence: int, num_transitions: int, total: int) -> None:
        self._conversation.send(wire.post(self._memory[place], place, credit, sequence, num_transitions, total))

    def show_life(self, touches: int) -> None:
        self._conversation.send(wire.note(SampleMessageKind.ALIVE, touches))

    def leave(self) -> None:
        """Part after what was posted has arrived; from a consumer that does not answer, without that."""
        self._conversation.end()
        if not self._conversation.join(LEAVE_SECONDS):
            self.cut()

    def cut(self) -> None:
        """Part now."""
        self._conversation.cancel()
        self._conversation.join()


class GrpcSampleProducer(ConnectingProducer):
    """Fills slots for a consumer anywhere; implements ``SampleProducer``. ``post`` copies the content."""

    def __init__(
        self,
        address: str,
        *,
        token: str,
        layout: SlotLayout,
        producer_id: ProducerId,
        ledger: ProducerLedger,
        progress: ProducerProgress = ProducerProgress(),
        on_settled: Callable[[], None] = lambda: None,
        sequences: Iterator[int] | None = None,
        find: Callable[[str], str | None] | None = None,
        tls: Tls | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Prepare to connect to the consumer at ``unix-abstract:NAME`` or ``HOST:PORT``.

        With ``find`` the consumer's address may be any name: before each connection it is asked where that is then,
        None while it is nowhere. ``tls`` is for consumers that want certificates. The other arguments are those of
        ``ConnectingProducer``.

        Raises:
            ConfigurationError: a slot does not fit into a message of 64 MiB.
            ValueError: the address has neither form.
        """
        wire.check_fits(layout)
        super().__init__(
            address if find is not None else validate_address(address),
            token=token,
            layout=layout,
            producer_id=producer_id,
            ledger=ledger,
            progress=progress,
            on_settled=on_settled,
            sequences=sequences,
            clock=clock,
            back_off_seconds=(FIRST_BACK_OFF_SECONDS, LAST_BACK_OFF_SECONDS),
        )
        self._find = find or str
        self._tls = tls
        self._connection: _Connection | None = None
        self._gives_up_at = math.inf
        """When a connection that is not admitted yet has taken too long."""
        self._touches_sent = 0
        self._shows_life_at = -math.inf
        self._poll = select.poll()
        self._poll.register(self._wake, select.POLLIN)

    def touch(self) -> None:
        """See ``SampleProducer.touch``: a look at the clock, and a small message a few times in the peer time-out."""
        self._touches += 1
        connection = self._connection
        if connection is not None and self._is_admitted and (now := self._now()) >= self._shows_life_at:
            self._shows_life_at = now + connection.show_life_within
            self._touches_sent = self._touches
            connection.show_life(self._touches)

    @property
    def touches(self) -> int:
        """The number of the touch that the consumer was last told of."""
        return self._touches_sent

    def fileno(self) -> int:
        """See ``ConnectingProducer.fileno``."""
        return self._wake.fileno()

    @property
    def retries_at(self) -> float:
        """See ``ConnectingProducer.retries_at``."""
        if self._connection is None:
            return self._retries_at
        return math.inf if self._is_admitted else self._gives_up_at

    @property
    def _is_connected(self) -> bool:
        return self._connection is not None

    def _dispose(self) -> None:
        """The end of the connection gives its credits back. What was posted is sent first, which takes up to
        ``LEAVE_SECONDS`` where the consumer does not answer."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.leave()
        self._state.disconnected()

    def _sleep(self, seconds: float) -> None:
        self._poll.poll(math.ceil(seconds * 1000))

    def _advance(self) -> None:
        if self._connection is None and self._now() >= self._retries_at:
            self._connect()
        self._wake.clear()
        if self._closed:
            self._wake.set()
        while (connection := self._connection) is not None and connection.incoming:
            self._read(connection, connection.incoming.popleft())
        if connection is not None and not self._is_admitted and self._now() >= self._gives_up_at:
            _log.info("consumer_silent", address=self._address, seconds=ADMISSION_SECONDS)
            self._disconnect()
            connection.cut()

    def _connect(self) -> None:
        self._back_away()
        if (address := self._find(self._address)) is None:
            return
        hello = wire.handshake(SampleMessageKind.HELLO, self._state.hello().to_json(self._token))
        self._gives_up_at = self._now() + ADMISSION_SECONDS
        self._connection = _Connection(
            address, token=self._token, tls=self._tls, hello=hello, layout=self._layout, wake=self._wake.set
        )

    def _read(self, connection: _Connection, message: SampleMessage | _Ended) -> None:
        if isinstance(message, _Ended):
            self._disconnect()
            self._judge_end(message.error)
            return
        try:
            self._act_on(connection, message)
        except BaseException:
            self._disconnect()
            connection.cut()
            raise

    def _act_on(self, connection: _Connection, message: SampleMessage) -> None:
        first, second, attempt, step, _ = message.words
        if message.kind is SampleMessageKind.CREDIT:
            self._state.credited(first, second, Version(attempt, step))
        elif message.kind is SampleMessageKind.ACK:
            self._state.acknowledged(first)
        elif message.kind in (SampleMessageKind.WELCOME, SampleMessageKind.REFUSED) and not self._is_admitted:
            welcome = Welcome.from_json(wire.read_handshake(message), stream=self._address)
            self._come_back()
            self._is_admitted = True
            self._shows_life_at = -math.inf
            connection.begin(welcome.num_slots, first / 1000)
            self._state.connected(welcome, connection)
        else:
            raise StreamError(f"sample stream {self._address}: the consumer sent a {message.kind.name}")

    def _judge_end(self, error: Exception | None) -> None:
        """Raise what trying again cannot change; say what it can."""
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

    def _disconnect(self) -> None:
        self._connection = None
        self._is_admitted = False
        self._state.disconnected()
