"""What a consumer decides, whatever carries its stream: whom to admit, what to believe, what to count, whom to give up.

Transports bring messages in and take answers out; they share this part, so that they cannot differ in what they
promise. No sockets, no threads, no clock: time is an argument. Not thread-safe: the transport holds a lock.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import structlog
from numpy.typing import NDArray

from rlsrl.data.slots import ProducerId, Slot, SlotLayout
from rlsrl.data.version import Version
from rlsrl.runtime.ledger import ACCOUNT_CLOSED
from rlsrl.streams.credits import Credit, CreditBook, UnknownCredit
from rlsrl.streams.handshake import MAX_SLOTS, Hello, PeerRefused, Welcome
from rlsrl.streams.protocols import ConsumerLedger

LOOKS_PER_TIMEOUT = 4
"""How often a holder of credits is looked at within the peer time-out, at least, before it is given up."""

_log = structlog.get_logger(__name__)


class Memory(Protocol):
    """What a transport keeps a connection's slots in."""

    @property
    def slots(self) -> Sequence[dict[str, NDArray[Any]]]:
        """Each slot's arrays."""


MemoryT = TypeVar("MemoryT", bound=Memory)


class ProtocolViolation(Exception):
    """A producer sent what it had no right to; nothing of it was believed. Disconnect it with ``drop``."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


@dataclass(kw_only=True, slots=True)
class _Session(Generic[MemoryT]):
    """One admitted connection."""

    producer: ProducerId
    memory: MemoryT
    max_transitions: int
    last_sequence: int
    last_total: int
    progress: int = 0
    silence: float = 0.0
    """Seconds watched without progress while it held a credit."""


class ConsumerCore(Generic[MemoryT]):
    """The sessions of a consumer, their credits and their ledger."""

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
        now: float,
    ) -> None:
        """See ``SharedMemoryConsumer``; ``now`` is when it starts to serve.

        Raises:
            ValueError: an argument is out of range.
        """
        if not 1 <= slots_per_producer <= MAX_SLOTS:
            raise ValueError(f"slots_per_producer is {slots_per_producer}, not from 1 to {MAX_SLOTS}")
        if peer_timeout <= 0:
            raise ValueError(f"peer_timeout is {peer_timeout} seconds, not above 0")
        self.counters: Counter[str] = Counter()
        """What happened so far: ``connected``, ``gone``, ``revoked``, ``refused_<kind>``, ``violation_<kind>``."""
        self._token = token
        self._layout_digest = layout_digest
        self._ledger = ledger
        self._slots_per_producer = slots_per_producer
        self._peer_timeout = peer_timeout
        self._look_interval = peer_timeout / LOOKS_PER_TIMEOUT
        self._opens_at = now + startup_timeout
        self._last_look = now
        self._book = CreditBook(expected_producers=expected_producers)
        self._sessions: dict[int, _Session[MemoryT]] = {}
        self._arrived: deque[Slot] = deque()
        self._next_connection = 0

    @property
    def producers(self) -> tuple[ProducerId, ...]:
        """Who is connected, by index."""
        return tuple(sorted(session.producer for session in self._sessions.values()))

    @property
    def outstanding(self) -> tuple[int, ...]:
        """See ``SampleConsumer.outstanding``: what has arrived and was not handed out yet belongs to it."""
        return tuple(sorted([*self._book.outstanding, *(slot.credit for slot in self._arrived)]))

    # Connections.

    def producer_of(self, connection: int) -> ProducerId:
        """Whose connection it is."""
        return self._sessions[connection].producer

    def read_hello(self, message: Mapping[str, Any]) -> tuple[Hello, int | None]:
        """Judge an introduction; returns it with the connection that its sender replaces, if any.

        The transport takes what had been posted over that one, and drops it, before it admits the newcomer.

        Raises:
            PeerRefused: we will not have it. ``refused`` counts it.
        """
        hello = Hello.from_json(message, token=self._token, layout_digest=self._layout_digest)
        for connection, session in self._sessions.items():
            if session.producer.index == hello.producer.index:
                if hello.producer.incarnation < session.producer.incarnation:
                    raise _succeeded(hello.producer)
                return hello, connection
        return hello, None

    def admit(self, hello: Hello, allocate: Callable[[SlotLayout, int], MemoryT]) -> tuple[MemoryT, int, Welcome]:
        """Open a session over fresh memory; returns that, its connection's number and what to answer.

        What former lives of it left is settled in the ledger before the answer can say so.

        Raises:
            PeerRefused: the ledger knows a successor, or there is no memory. ``refused`` counts it.
        """
        producer, layout = hello.producer, hello.layout
        mark = self._ledger.mark(producer)
        if mark == ACCOUNT_CLOSED:
            raise _succeeded(producer)
        num_claims = sum(sequence > mark for sequence, _ in hello.unacknowledged) + hello.num_in_hand
        num_slots = max(self._slots_per_producer, num_claims)
        try:
            memory = allocate(layout, num_slots)
        except OSError as error:
            raise PeerRefused("capacity", f"no memory for {num_slots} slots here: {error}") from error
        met = self._ledger.meet(producer, hello.progress)
        connection = self._next_connection
        self._next_connection += 1
        self._sessions[connection] = _Session(
            producer=producer,
            memory=memory,
            max_transitions=layout.num_steps * layout.num_lanes,
            last_sequence=met.sequence,
            last_total=met.total,
        )
        claims = self._book.connect(
            connection, index=producer.index, num_lanes=layout.num_lanes, num_slots=num_slots, num_claims=num_claims
        )
        self.counters["connected"] += 1
        _log.info("producer_connected", **_names(producer), num_lanes=layout.num_lanes, num_claims=num_claims)
        welcome = Welcome(mark=met.sequence, num_slots=num_slots, claims=tuple(claim.order for claim in claims))
        return memory, connection, welcome

    def refused(self, refusal: PeerRefused) -> None:
        """Count a producer that was sent away."""
        self.counters[f"refused_{refusal.kind}"] += 1
        _log.warning("producer_refused", kind=refusal.kind, reason=str(refusal))

    def drop(self, connection: int, reason: str) -> None:
        """A connection is over; its credits are void and their lanes go to others with the next ``issue``."""
        session = self._sessions.pop(connection)
        void = [credit.order for credit in self._book.disconnect(connection)]
        self.counters["gone"] += 1
        _log.info("producer_gone", **_names(session.producer), reason=reason, void_credits=void)

    # Slots.

    def grant(self, num_lanes: int, min_version: Version) -> None:
        """See ``SampleConsumer.grant``."""
        self._book.grant(num_lanes, min_version)

    def issue(self) -> list[Credit]:
        """The credits to send now."""
        return self._book.issue()

    def take(self, connection: int, *, place: int, order: int, sequence: int, num_transitions: int, total: int) -> None:
        """A slot came: judge it and write it into the ledger. Afterwards it may be acknowledged.

        Raises:
            ProtocolViolation: the producer has no right to that. It is counted.
        """
        session = self._sessions[connection]
        if sequence <= session.last_sequence:
            raise self.violation("sequence", f"sequence {sequence} after {session.last_sequence}")
        if not 0 <= num_transitions <= session.max_transitions:
            raise self.violation("transitions", f"{num_transitions} transitions of at most {session.max_transitions}")
        if not session.last_total + num_transitions <= total < 1 << 62:
            raise self.violation("total", f"{num_transitions} transitions bring {session.last_total} to {total}")
        try:
            credit = self._book.receive(connection, order=order, slot=place)
        except UnknownCredit as error:
            raise self.violation("credit", str(error)) from error
        session.last_sequence, session.last_total, session.silence = sequence, total, 0.0
        self._ledger.take(session.producer, sequence, num_transitions, total)
        slot = Slot(
            arrays=session.memory.slots[credit.slot],
            min_version=credit.min_version,
            credit=credit.order,
            producer=session.producer,
            sequence=sequence,
            num_transitions=num_transitions,
            handle=(connection, credit.slot),
        )
        self._arrived.append(slot)

    def violation(self, kind: str, text: str) -> ProtocolViolation:
        """Count a breach of the protocol; returns the error to raise."""
        self.counters[f"violation_{kind}"] += 1
        _log.warning("producer_violation", kind=kind, reason=text)
        return ProtocolViolation(kind, text)

    @property
    def has_arrivals(self) -> bool:
        """Whether ``hand_out`` has something."""
        return bool(self._arrived)

    def hand_out(self, max_items: int) -> list[Slot]:
        """What has arrived, in order of arrival."""
        return [self._arrived.popleft() for _ in range(min(max_items, len(self._arrived)))]

    def release(self, slot: Slot) -> None:
        """See ``SampleConsumer.release``."""
        connection, place = slot.handle
        self._book.release(connection, place)

    # Time.

    @property
    def next_duty(self) -> float:
        """When ``attend`` wants to be called, at the latest."""
        looks_at = self._last_look + self._look_interval
        return looks_at if self._book.is_open else min(looks_at, self._opens_at)

    def attend(self, now: float, progress_of: Callable[[MemoryT], int]) -> list[int]:
        """Do what is due; returns the connections to give up: what was posted over them is taken first, then ``drop``.

        They held a credit and were seen to make no progress for longer than the peer time-out. Only time in which the
        consumer was looking counts: one that was itself away or frozen blames nobody.
        """
        if now >= self._opens_at and not self._book.is_open:
            _log.warning("startup_timeout", num_connected=len(self._sessions))
            self._book.open()
        if now < self._last_look + self._look_interval:
            return []
        self._last_look = now
        silent = [
            connection
            for connection, session in self._sessions.items()
            if self._is_silent(connection, session, progress_of(session.memory))
        ]
        self.counters["revoked"] += len(silent)
        return silent

    def _is_silent(self, connection: int, session: _Session[MemoryT], progress: int) -> bool:
        if progress != session.progress or not self._book.has_credit(connection):
            session.progress, session.silence = progress, 0.0
            return False
        session.silence += self._look_interval
        return session.silence > self._peer_timeout


def _names(producer: ProducerId) -> dict[str, int]:
    return {"producer": producer.index, "incarnation": producer.incarnation}


def _succeeded(producer: ProducerId) -> PeerRefused:
    return PeerRefused(
        "incarnation", f"incarnation {producer.incarnation} of producer {producer.index} was succeeded by a later one"
    )
