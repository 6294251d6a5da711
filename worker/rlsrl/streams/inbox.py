"""A consumer to whom other threads bring its messages: what transports share whose connections live elsewhere.

Messages wait in an inbox until ``receive`` is called; everything is decided there, under one lock, so a transport only
moves messages. Nothing runs by itself: connections, deaths and time-outs are dealt with in the thread that calls
``receive``, so call it again and again.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

from numpy.typing import NDArray

from rlsrl.data.slots import ProducerId, Slot, SlotLayout
from rlsrl.data.version import Version
from rlsrl.runtime.clock import Clock, SystemClock
from rlsrl.streams.consumer_core import ConsumerCore, ProtocolViolation
from rlsrl.streams.credits import Credit
from rlsrl.streams.handshake import PeerRefused, Welcome
from rlsrl.streams.protocols import ConsumerLedger


class Post(NamedTuple):
    """A filled slot's message."""

    place: int
    order: int
    sequence: int
    num_transitions: int
    total: int
    """The producer's count at this slot."""
    body: memoryview | None = None
    """Its content, where that travels with the message."""


class InvalidMessage(NamedTuple):
    """A message that cannot be understood, and why."""

    text: str


ProducerMessage = Mapping[str, Any] | Post | InvalidMessage | None
"""To the consumer: a hello, a post, what makes no sense, or None for the end."""

ConsumerMessage = Welcome | PeerRefused | Credit | int
"""To the producer: an answer to its hello, a credit, or the sequence that is acknowledged."""


class ProducerConnection(ABC):
    """A connection, as its consumer sees it. The consumer's lock guards it."""

    def __init__(self) -> None:
        self.number: int | None = None
        """The connection's number; None before it is admitted."""
        self.ended = False
        """Whether either end is done with it: what still comes over it goes nowhere."""
        self.slots: list[dict[str, NDArray[Any]]] = []
        """Each slot's arrays."""

    @abstractmethod
    def allocate(self, layout: SlotLayout, num_slots: int) -> Self:
        """Make room for that many slots; returns the connection."""

    @abstractmethod
    def fill(self, post: Post) -> None:
        """See to it that the slot's arrays hold what was posted.

        Raises:
            ValueError: it does not fit.
        """

    @abstractmethod
    def emptied(self, place: int) -> None:
        """The slot's arrays are in other hands: a transport that got them with the message forgets them."""

    @property
    @abstractmethod
    def progress(self) -> int:
        """The producer's word of progress: changes as long as it shows life."""

    @abstractmethod
    def tell(self, answer: ConsumerMessage) -> None:
        """Send that to the producer. Never waits."""

    @abstractmethod
    def hang_up(self, reason: str) -> None:
        """End the connection after what was told. Never waits."""


class InboxConsumer:
    """Implements ``SampleConsumer`` over connections that transports ``deliver`` messages of."""

    def __init__(
        self,
        *,
        token: str,
        layout_digest: str,
        ledger: ConsumerLedger,
        slots_per_producer: int,
        peer_timeout: float,
        expected_producers: int,
        startup_timeout: float,
        clock: Clock | None,
        changed: threading.Condition,
    ) -> None:
        """See ``SharedMemoryConsumer``.

        Args:
            changed: guards everything; notified of whatever may let somebody get further.
        """
        self._changed = changed
        self._now = (clock or SystemClock()).monotonic
        self._core: ConsumerCore[ProducerConnection] = ConsumerCore(
            token=token,
            layout_digest=layout_digest,
            ledger=ledger,
            slots_per_producer=slots_per_producer,
            peer_timeout=peer_timeout,
            expected_producers=expected_producers,
            startup_timeout=startup_timeout,
            now=self._now(),
        )
        self._connections: dict[int, ProducerConnection] = {}
        self._inbox: deque[tuple[ProducerConnection, ProducerMessage]] = deque()
        self._closed = False

    def grant(self, num_lanes: int, min_version: Version) -> None:
        """See ``SampleConsumer.grant``. Any thread; never waits."""
        with self._changed:
            self._core.grant(num_lanes, min_version)
            self._issue()

    def receive(self, max_items: int, timeout: float) -> Sequence[Slot]:
        """See ``SampleConsumer.receive``. Woken by any message, by ``close``, or by the timeout.

        What was acknowledged before ``close`` is still handed out after it.
        """
        deadline = self._now() + timeout
        with self._changed:
            while not self._closed:
                self._serve()
                if self._core.has_arrivals or (now := self._now()) >= deadline:
                    break
                self._changed.wait(max(0.0, min(deadline, self._core.next_duty) - now))
            return self._core.hand_out(max_items)

    def release(self, slot: Slot) -> None:
        """See ``SampleConsumer.release``."""
        with self._changed:
            self._core.release(slot)
            self._issue()

    @property
    def outstanding(self) -> tuple[int, ...]:
        """See ``SampleConsumer.outstanding``."""
        with self._changed:
            return self._core.outstanding

    @property
    def producers(self) -> tuple[ProducerId, ...]:
        """See ``SampleConsumer.producers``."""
        with self._changed:
            return self._core.producers

    @property
    def counters(self) -> Mapping[str, int]:
        """See ``SharedMemoryConsumer.counters``."""
        with self._changed:
            return dict(self._core.counters)

    def close(self) -> None:
        """See ``SampleConsumer.close``."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            for connection, _ in self._inbox:
                connection.ended = True
            for number in [*self._connections]:
                self._drop(number, "closed")
            self._changed.notify_all()

    def deliver(self, connection: ProducerConnection, message: ProducerMessage) -> None:
        """Put a message into the inbox; what comes over a connection that has ended goes nowhere. Any thread."""
        with self._changed:
            if not connection.ended:
                self._inbox.append((connection, message))
                connection.ended = message is None
                self._changed.notify_all()

    # What follows runs under the lock.

    def _serve(self) -> None:
        self._read_inbox()
        for number in self._core.attend(self._now(), lambda connection: connection.progress):
            self._drop(number, "silent")
        self._issue()

    def _read_inbox(self) -> None:
        while self._inbox:
            connection, message = self._inbox.popleft()
            if isinstance(message, Mapping) and connection.number is None:
                self._greet(connection, message)
            elif connection.number in self._connections:
                self._read(connection, connection.number, message)
            elif message is None and connection.number is None:
                self._core.counters["dismissed"] += 1
            elif message is not None and not connection.ended:
                self._refuse(
                    connection, PeerRefused("malformed", "malformed handshake: the first message is no introduction")
                )

    def _greet(self, connection: ProducerConnection, message: Mapping[str, Any]) -> None:
        try:
            hello, rival = self._core.read_hello(message)
            if rival is not None:
                self._drop(rival, "replaced")
            _, connection.number, welcome = self._core.admit(hello, connection.allocate)
            self._connections[connection.number] = connection
            connection.tell(welcome)
        except PeerRefused as refusal:
            self._refuse(connection, refusal)

    def _refuse(self, connection: ProducerConnection, refusal: PeerRefused) -> None:
        self._core.refused(refusal)
        connection.ended = True
        connection.tell(refusal)
        connection.hang_up("refused")

    def _read(self, connection: ProducerConnection, number: int, message: ProducerMessage) -> None:
        if message is None:
            self._drop(number, "gone")
            return
        try:
            self._take(connection, number, message)
        except ProtocolViolation as violation:
            self._drop(number, f"violation: {violation}")

    def _take(
        self, connection: ProducerConnection, number: int, message: Mapping[str, Any] | Post | InvalidMessage
    ) -> None:
        if not isinstance(message, Post):
            text = message.text if isinstance(message, InvalidMessage) else "a second hello"
            raise self._core.violation("message", text)
        try:
            connection.fill(message)
        except ValueError as error:
            raise self._core.violation("message", str(error)) from error
        place, order, sequence, num_transitions, total, _ = message
        self._core.take(
            number, place=place, order=order, sequence=sequence, num_transitions=num_transitions, total=total
        )
        connection.emptied(place)
        connection.tell(sequence)

    def _issue(self) -> None:
        for credit in self._core.issue():
            self._connections[credit.connection].tell(credit)

    def _drop(self, number: int, reason: str) -> None:
        connection = self._connections.pop(number)
        connection.ended = True
        self._core.drop(number, reason)
        connection.hang_up(reason)
        self._changed.notify_all()
