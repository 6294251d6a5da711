"""What a sample stream promises, whatever carries it.

One consumer (a trainer rank or a buffer worker) serves many producers (actors or buffer workers). Flow is by credit: a
slot may be filled only after the consumer granted it, and only the consumer's rate limiter grants. Back-pressure is
``acquire`` waiting; nothing else bounds the stream and nothing is dropped without being counted.

Order is kept per producer. Delivery is at least once on the wire, and exactly once out of ``receive``: the consumer
drops a resend it has seen, by (index, incarnation, sequence). A slot is acknowledged once a consumer holds it in memory
and its ledger says so; a producer keeps what is not acknowledged and posts it again to the consumer's next life.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rlsrl.data.slots import ProducerId, Slot
from rlsrl.data.version import Version
from rlsrl.runtime.ledger import Mark, ProducerProgress


class StreamError(Exception):
    """Something about a stream failed."""


class StreamClosed(StreamError):
    """This end was closed; raised by calls that were waiting and by later ones."""


class HandshakeRefused(StreamError):
    """The peer answered and said no (token, protocol version, slot layout); the text names both sides' values."""


class StreamTimeout(StreamError, TimeoutError):
    """The deadline passed; the call can be made again."""


class SampleProducer(Protocol):
    """The end that fills slots. One thread uses it, except ``close``, which any thread may call."""

    def acquire(self, timeout: float) -> Slot:
        """A slot to fill, acted with weights of at least ``slot.min_version``. Waiting here IS back-pressure.

        Woken by a credit from the consumer, by ``close``, or by the timeout in seconds. While no consumer answers it
        reconnects with back-off until the timeout.

        Raises:
            StreamTimeout: no credit came in time.
            StreamClosed: ``close`` was called.
            HandshakeRefused: the consumer is there and will not have us.
        """

    def post(self, slot: Slot) -> None:
        """Hand over a filled slot; ``num_transitions`` must be set, ``sequence`` and ``producer`` are set here.

        Never waits for the consumer: an unreachable one gets the slot after reconnection.
        """

    def touch(self) -> None:
        """Say that the holder of a slot is alive (once a step, and whenever it waits with a slot in hand, for weights
        for example): the consumer revokes credits of a holder that stays silent for longer than its peer time-out.
        """

    def flush(self, timeout: float) -> None:
        """Wait until everything posted is acknowledged.

        Raises:
            StreamTimeout: some slots were still unacknowledged.
        """

    @property
    def unacknowledged(self) -> tuple[tuple[int, int], ...]:
        """(sequence, num_transitions) of each posted slot whose acknowledgement has not come."""

    def close(self) -> None:
        """Give back what is held and wake whoever waits. Idempotent."""


class SampleConsumer(Protocol):
    """The end that grants credits and gets filled slots.

    ``receive`` and ``release`` belong to one thread; others may call ``grant``, ``outstanding`` and ``close``.
    """

    def grant(self, num_lanes: int, min_version: Version) -> None:
        """Allow producers to fill that many more lanes with weights of at least ``min_version``.

        Credits go to the producer that was given one longest ago, then to the lowest index, among those with a free
        slot: their order does not follow the order in which memory came back. What no free slot can take yet is kept
        until one can. The credits of a producer that disconnects or is revoked go to others by themselves, with the
        newest ``min_version`` granted.

        Slots that a producer filled, or began to fill, under a credit of a former connection (to this consumer or the
        one before) come as credits nobody granted: they get an order when the producer connects, with ``min_version``
        ``INITIAL``, and their lanes are taken off what is granted. Lanes that are dropped instead of trained have to be
        granted again. A slot wider than what is left of the grants waits for the next one.
        """

    def receive(self, max_items: int, timeout: float) -> Sequence[Slot]:
        """Filled slots in order of arrival, at most ``max_items``; empty after ``timeout`` seconds or ``close``."""

    def release(self, slot: Slot) -> None:
        """The slot's arrays are no longer needed: its memory may carry a new credit."""

    @property
    def outstanding(self) -> tuple[int, ...]:
        """Order numbers of credits held by a live producer, or whose slots ``receive`` has not returned, ascending."""

    @property
    def producers(self) -> tuple[ProducerId, ...]:
        """Who is connected, by index."""

    def close(self) -> None:
        """Stop serving and wake whoever waits. Idempotent."""


class ConsumerLedger(Protocol):
    """Where a consumer writes what it took, before it acknowledges. Survives the consumer's process."""

    def mark(self, producer: ProducerId) -> int:
        """The highest sequence taken from that incarnation, -1 for none, ``rlsrl.runtime.ledger.ACCOUNT_CLOSED`` for
        one that was succeeded.
        """

    def meet(self, producer: ProducerId, progress: ProducerProgress) -> Mark:
        """A producer has come: settle what its former lives left, and close their accounts, so that nothing is counted
        twice; returns the mark to go on from. Repeating it is fine.
        """

    def take(self, producer: ProducerId, sequence: int, num_transitions: int, total: int) -> None:
        """Record a slot as held in memory: raises the mark, to the producer's own ``total``, and counts
        ``in_buffer``.
        """


class ProducerLedger(Protocol):
    """Where a producer writes what it made, before it posts. Survives the producer's process."""

    def produce(self, sequence: int, num_transitions: int) -> int:
        """Count a slot as produced and not yet acknowledged; returns what was ever posted to the consumer, this slot
        included.
        """

    def acknowledge(self, sequence: int) -> None:
        """The consumer has the slot."""
