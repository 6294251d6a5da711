"""What a consumer decides, whatever carries its stream: whom to admit, what to believe, what to count, whom to give up.

Transports bring messages in and take answers out; they share this part, so that they cannot differ in what they
promise. No sockets, no threads, no clock: time is an argument. Not thread-safe: the transport holds a lock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rlsrl.data.slots import ProducerId
from rlsrl.data.version import Version
from rlsrl.runtime.ledger import ACCOUNT_CLOSED
from rlsrl.streams.credits import Credit, CreditBook, UnknownCredit
from rlsrl.streams.handshake import MAX_SLOTS, Hello, Posted, Refusal, Welcome
from rlsrl.streams.protocols import ConsumerLedger

LOOKS_PER_TIMEOUT = 4
"""How often a holder of credits is looked at within the peer time-out, at least, before it is given up."""


class Violation(Exception):  # noqa: N818 - named for what it is
    """A producer sent what it had no right to; nothing of it was believed. It is disconnected and counted."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


@dataclass(kw_only=True, slots=True)
class _Session:
    """One connection's state."""

    producer: ProducerId
    max_transitions: int
    last_sequence: int
    progress: int = 0
    silence: float = 0.0
    """Seconds watched without progress while it held a credit."""


class Intake:
    """The sessions of a consumer, their credits and their ledger."""

    def __init__(
        self, *, slots_per_producer: int, ledger: ConsumerLedger, peer_timeout: float, expected_producers: int = 0
    ) -> None:
        if not 1 <= slots_per_producer <= MAX_SLOTS:
            raise ValueError(f"slots_per_producer is {slots_per_producer}, not from 1 to {MAX_SLOTS}")
        if peer_timeout <= 0:
            raise ValueError(f"peer_timeout is {peer_timeout} seconds, not above 0")
        self.book = CreditBook(expected_producers=expected_producers)
        self._slots_per_producer = slots_per_producer
        self._ledger = ledger
        self._peer_timeout = peer_timeout
        self._sessions: dict[int, _Session] = {}
        self._next_connection = 0
        self._last_look: float | None = None

    @property
    def look_interval(self) -> float:
        """Seconds after which ``look`` wants to be called again."""
        return self._peer_timeout / LOOKS_PER_TIMEOUT

    @property
    def producers(self) -> tuple[ProducerId, ...]:
        """Who is connected, by index."""
        return tuple(sorted(session.producer for session in self._sessions.values()))

    def rival(self, producer: ProducerId) -> int | None:
        """The connection that a newcomer replaces; the transport takes what it had posted and drops it first.

        Raises:
            Refusal: the newcomer is an incarnation that was succeeded.
        """
        for connection, session in self._sessions.items():
            if session.producer.index == producer.index:
                if producer.incarnation < session.producer.incarnation:
                    raise _succeeded(producer)
                return connection
        return None

    def admit(self, hello: Hello) -> tuple[int, Welcome]:
        """Open a session; returns its connection's number and what to answer.

        What dead incarnations had posted and nobody took is written down as lost before the answer can say so.

        Raises:
            Refusal: the ledger knows a successor of that incarnation.
        """
        mark = self._ledger.mark(hello.producer)
        if mark == ACCOUNT_CLOSED:
            raise _succeeded(hello.producer)
        for incarnation in sorted(hello.previous):
            self._settle(ProducerId(hello.producer.index, incarnation), hello.previous[incarnation])
        num_claims = sum(sequence > mark for sequence, _ in hello.unacknowledged) + hello.num_in_hand
        num_slots = max(self._slots_per_producer, num_claims)
        connection = self._next_connection
        self._next_connection += 1
        self._sessions[connection] = _Session(
            producer=hello.producer,
            max_transitions=hello.layout.num_steps * hello.layout.num_lanes,
            last_sequence=mark,
        )
        claims = self.book.connect(
            connection,
            index=hello.producer.index,
            num_lanes=hello.layout.num_lanes,
            num_slots=num_slots,
            num_claims=num_claims,
        )
        return connection, Welcome(mark=mark, num_slots=num_slots, claims=tuple(claim.order for claim in claims))

    def _settle(self, former: ProducerId, entries: tuple[Posted, ...]) -> None:
        """Write down what a dead incarnation had posted here and that never came; 0 of it closes its account, too."""
        mark = self._ledger.mark(former)
        self._ledger.lost_with_producer(former, sum(count for sequence, count in entries if sequence > mark))

    def take(self, connection: int, *, slot: int, order: int, sequence: int, num_transitions: int) -> Credit:
        """A slot came: judge it and write it into the ledger. Afterwards it may be acknowledged.

        Raises:
            Violation: the producer has no right to that; the slot's number must not be used for anything.
        """
        session = self._sessions[connection]
        if sequence <= session.last_sequence:
            raise Violation("sequence", f"sequence {sequence} after {session.last_sequence}")
        if not 0 <= num_transitions <= session.max_transitions:
            raise Violation("transitions", f"{num_transitions} transitions in a slot of {session.max_transitions}")
        try:
            credit = self.book.receive(connection, order=order, slot=slot)
        except UnknownCredit as error:
            raise Violation("credit", str(error)) from error
        session.last_sequence = sequence
        session.silence = 0.0
        self._ledger.take(session.producer, sequence, num_transitions)
        return credit

    def producer_of(self, connection: int) -> ProducerId:
        """Who is at the other end."""
        return self._sessions[connection].producer

    def drop(self, connection: int) -> tuple[Credit, ...]:
        """A connection is over; returns the credits that became void and go to others."""
        del self._sessions[connection]
        return self.book.disconnect(connection)

    def grant(self, num_lanes: int, min_version: Version) -> None:
        """See ``SampleConsumer.grant``."""
        self.book.grant(num_lanes, min_version)

    def look(self, now: float, progress_of: Callable[[int], int]) -> list[int]:
        """The connections whose holder of a credit was seen to make no progress for longer than the peer time-out.

        Only time in which the consumer was looking counts: one that was itself away or frozen blames nobody.
        """
        watched = 0.0 if self._last_look is None else min(now - self._last_look, self.look_interval)
        self._last_look = now
        return [
            connection
            for connection, session in self._sessions.items()
            if self._is_silent(connection, session, progress_of(connection), watched)
        ]

    def _is_silent(self, connection: int, session: _Session, progress: int, watched: float) -> bool:
        if progress != session.progress or not self.book.has_credit(connection):
            session.progress, session.silence = progress, 0.0
            return False
        session.silence += watched
        return session.silence > self._peer_timeout


def _succeeded(producer: ProducerId) -> Refusal:
    return Refusal(
        "incarnation", f"incarnation {producer.incarnation} of producer {producer.index} was succeeded by a later one"
    )
