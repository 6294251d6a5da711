"""What a sample stream promises on every transport.

One consumer (a trainer rank or a buffer worker) serves many producers (actors or buffer workers). Credits control the
flow: a producer fills a slot only after the consumer granted a credit, and only the consumer's rate limiter grants
them. Back-pressure is ``acquire`` waiting. No queue size bounds the stream, and every dropped slot is counted.

Slots of one producer stay in order. The wire delivers at least once, ``receive`` returns each slot once: the consumer
drops a repeated slot by its (index, incarnation, sequence). The consumer acknowledges a slot after its ledger records
it. A producer keeps unacknowledged slots and posts them again to the next life of the consumer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rlsrl.data.slots import ProducerId, Slot
from rlsrl.data.version import Version
from rlsrl.runtime.ledger import Mark, ProducerProgress


class StreamError(Exception):
    """A stream failed."""


class StreamClosed(StreamError):
    """``close`` was called on this end of the stream. Raised by waiting calls and by later calls."""


class HandshakeRefused(StreamError):
    """The peer refused this end: wrong token, protocol version or layout. The text has the values of both ends."""


class StreamTimeout(StreamError, TimeoutError):
    """The deadline has passed. The caller may call again."""


class SampleProducer(Protocol):
    """The end of a stream that fills slots. One thread uses it; any thread may call ``touch`` and ``close``."""

    def acquire(self, timeout: float) -> Slot:
        """Return a slot to fill, acting with weights of at least ``slot.min_version``.

        Waiting here is the back-pressure. A credit, ``close`` or the timeout (seconds) ends the wait. Without a
        consumer it reconnects with back-off until the timeout.

        Raises:
            StreamTimeout: no credit came in time.
            StreamClosed: ``close`` was called.
            HandshakeRefused: the consumer refused this producer.
        """

    def post(self, slot: Slot) -> None:
        """Hand over a filled slot. The caller sets ``num_transitions``; ``post`` sets ``sequence`` and ``producer``.

        Never waits for the consumer. Without a connection the slot is sent after the next connect.

        Raises:
            ValueError: the slot is not in hand, or its ``num_transitions`` is out of range.
            StreamClosed: ``close`` was called.
        """

    def touch(self) -> None:
        """Show that the holder of a slot is alive.

        Call it once a step, and during every wait with a slot in hand. The consumer revokes the credits of a holder
        that shows no life for longer than the peer time-out.
        """

    def flush(self, timeout: float) -> None:
        """Wait until every posted slot is acknowledged. An acknowledgement, ``close`` or the timeout ends the wait.

        Raises:
            StreamTimeout: some slots are still unacknowledged.
            StreamClosed, HandshakeRefused: as ``acquire``.
        """

    def disconnect(self) -> None:
        """Give the unused credits back, for other producers; ``acquire`` and ``flush`` connect again.

        Unacknowledged slots are posted again then, and a slot in hand stays in hand: flush first, and hold none.
        """

    @property
    def unacknowledged(self) -> tuple[tuple[int, int], ...]:
        """(sequence, num_transitions) of each posted slot without an acknowledgement."""

    def close(self) -> None:
        """Give the credits back and wake the waiting thread. Idempotent."""


class PollableProducer(SampleProducer, Protocol):
    """A producer whose owner can wait for it together with other descriptors."""

    def fileno(self) -> int:
        """Return a descriptor that is readable when ``acquire`` may make progress. See also ``retries_at``."""

    @property
    def retries_at(self) -> float:
        """Monotonic time at which ``acquire`` may make progress without an event; infinite while connected."""


class SampleConsumer(Protocol):
    """The end of a stream that grants credits and receives filled slots.

    One thread calls ``receive`` and ``release``. Any thread may call ``grant``, ``outstanding`` and ``close``.
    """

    def grant(self, num_lanes: int, min_version: Version, room: int = 0) -> None:
        """Allow producers to fill ``num_lanes`` more lanes with weights of at least ``min_version``. Never waits.

        A credit goes to a producer with a free slot: to the one whose last credit is oldest, then to the lowest index.
        So the order of credits does not depend on the order in which slots are released. Lanes without a free slot
        wait for one. The credits of a producer that disconnects or is revoked go to others, with the newest
        ``min_version`` granted.

        A producer may connect with slots that it filled, or began to fill, under a credit of a former connection. The
        consumer gives them credits of its own with ``min_version`` ``INITIAL`` and takes their lanes off the granted
        lanes. Grant dropped lanes again. A slot wider than the remaining lanes waits for the next grant, unless it
        exceeds them by at most ``room``: the last grants of a run need not be whole slots.
        """

    def receive(self, max_items: int, timeout: float) -> Sequence[Slot]:
        """Return at most ``max_items`` filled slots in order of arrival; none after ``timeout`` s or ``close``."""

    def release(self, slot: Slot) -> None:
        """Give the slot's memory back. It may carry a new credit."""

    @property
    def outstanding(self) -> tuple[int, ...]:
        """Order numbers, ascending, of credits that a producer holds or whose slots ``receive`` has not returned."""

    @property
    def producers(self) -> tuple[ProducerId, ...]:
        """The connected producers, by index."""

    def close(self) -> None:
        """Stop serving and wake the waiting thread. Idempotent."""


class ConsumerLedger(Protocol):
    """A consumer's record of the slots it took, written before it acknowledges. It survives the consumer's process."""

    def marked_sequence(self, producer: ProducerId) -> int:
        """Return the highest sequence number of that incarnation that is accounted for; -1 for none.

        ``rlsrl.runtime.ledger.ACCOUNT_CLOSED`` means that a later incarnation has connected.
        """

    def meet(self, producer: ProducerId, progress: ProducerProgress) -> Mark:
        """Settle the slots of the producer's former lives; return the mark to continue from.

        To settle is to count the untaken slots as dropped or lost, and to take no more slots of those lives. A repeated
        call changes nothing.
        """

    def take(self, producer: ProducerId, sequence: int, num_transitions: int, total: int) -> None:
        """Record a slot as held in memory: set the producer's mark to ``sequence`` and ``total``; raise ``in_buffer``.

        ``total`` is the producer's count of the transitions that it has posted to this consumer, this slot included.
        """


class ProducerLedger(Protocol):
    """A producer's record of its slots, written before it posts them. It survives the producer's process."""

    def produce(self, sequence: int, num_transitions: int) -> int:
        """Count a slot as produced; return the transitions ever posted to the consumer, this slot included."""

    def acknowledge(self, sequence: int) -> None:
        """Record that the consumer has the slot."""
