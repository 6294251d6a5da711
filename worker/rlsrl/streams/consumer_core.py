"""The decisions of a consumer on every transport: admit producers, check messages, record slots, drop the silent.

A transport moves messages. It calls ``ConsumerCore.handle`` for each message, and the core answers through
``ProducerConnection.send``. So the transports cannot differ in what they promise. The core uses no sockets, no threads
and no clock: time is an argument. It is not thread-safe: the transport holds a lock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import structlog
from numpy.typing import NDArray
from typing_extensions import override

from rlsrl.data.slots import ProducerId, Slot, SlotLayout
from rlsrl.data.version import Version
from rlsrl.runtime.clock import Clock, SystemClock
from rlsrl.runtime.ledger import ACCOUNT_CLOSED
from rlsrl.streams.credits import Credit, CreditBook, UnknownCredit
from rlsrl.streams.handshake import MAX_SLOTS, Hello, PeerRefused, Welcome
from rlsrl.streams.protocols import ConsumerLedger, SampleConsumer

CHECKS_PER_TIMEOUT = 4
"""How many times within the peer time-out the core checks that a holder of credits makes progress."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class ConsumerOptions:
    """The settings of a consumer that do not depend on its transport."""

    token: str = field(repr=False)
    """The experiment's token. Producers must show it."""
    layout_digest: str
    """``SlotLayout.step_digest`` of the slots. Each producer chooses its own number of lanes."""
    ledger: ConsumerLedger
    """Written before a slot is acknowledged; read when a producer connects."""
    slots_per_producer: int = 2
    """Slots of each connection, from 1 to 64. A producer that brings more filled slots gets more."""
    peer_timeout: float = 10.0
    """Seconds, above 0. A producer that holds a credit and is silent for longer is disconnected."""
    expected_producers: int = 0
    """Issue no credit before so many producers are connected: a fleet of known size then gets its credits in the order
    of its indices, in whatever order it connects."""
    startup_timeout: float = 30.0
    """Seconds after which the consumer stops waiting for ``expected_producers``."""
    clock: Clock = field(default_factory=SystemClock)

    def __post_init__(self) -> None:
        if not 1 <= self.slots_per_producer <= MAX_SLOTS:
            raise ValueError(f"slots_per_producer is {self.slots_per_producer}; allowed are 1 to {MAX_SLOTS}")
        if self.peer_timeout <= 0:
            raise ValueError(f"peer_timeout is {self.peer_timeout} seconds; it must be above 0")


class Post(NamedTuple):
    """The message that a slot is filled."""

    place: int
    """Number of the slot on its connection."""
    order: int
    """``Credit.order`` of the slot's credit."""
    sequence: int
    num_transitions: int
    total: int
    """Transitions that the producer has posted to this consumer, this slot included."""
    body: memoryview | None = None
    """The slot's content, if the transport sends it inside the message."""


class InvalidMessage(NamedTuple):
    """A message that the transport cannot decode."""

    text: str
    """Why."""


ProducerMessage = Mapping[str, Any] | Post | InvalidMessage | None
"""A message to the consumer: a hello, a post, an invalid message, or None for the end of the connection."""

ConsumerMessage = Welcome | PeerRefused | Credit | int
"""A message to the producer: the answer to its hello, a credit, or the sequence that is acknowledged."""


class ProducerConnection(ABC):
    """The connection of one producer, as its consumer uses it. The consumer's lock guards it."""

    def __init__(self) -> None:
        self.number: int | None = None
        """Number of the admitted connection; None before admission."""
        self.has_ended = False
        """True once the core is finished with the connection. Later messages are ignored."""

    @abstractmethod
    def allocate(self, layout: SlotLayout, num_slots: int) -> None:
        """Make memory for ``num_slots`` slots.

        Raises:
            OSError: there is not enough memory.
            PeerRefused: this transport cannot serve such slots.
        """

    def check_body(self, post: Post) -> None:  # noqa: B027 - not every transport sends a body
        """Check the content that travels inside the message.

        Raises:
            ValueError: the content is not one slot.
        """

    @abstractmethod
    def arrays(self, post: Post) -> dict[str, NDArray[Any]]:
        """Return the posted slot's arrays. ``post`` was checked, so the slot exists."""

    @property
    @abstractmethod
    def progress(self) -> int:
        """A number that changes as long as the producer shows life."""

    def read(self) -> tuple[ProducerMessage, ...]:
        """Return the next message if one has arrived that the transport has not passed to ``handle``. Never waits."""
        return ()

    @abstractmethod
    def send(self, message: ConsumerMessage) -> None:
        """Send a message to the producer. Never waits and never raises."""

    @abstractmethod
    def hang_up(self, reason: str) -> None:
        """End the connection after the messages sent before. Never waits."""


class _Violation(Exception):
    """A producer broke the protocol. Nothing of its message was used."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


@dataclass(kw_only=True, slots=True)
class _Session:
    """An admitted producer."""

    producer: ProducerId
    number: int
    connection: ProducerConnection
    max_transitions: int
    last_sequence: int
    last_total: int
    progress: int = 0
    silence: float = 0.0
    """Seconds without progress while the producer held a credit."""


class ConsumerCore:
    """The sessions of a consumer, their credits and their ledger."""

    def __init__(self, options: ConsumerOptions, *, now: float) -> None:
        """Start at ``now``, in seconds of the monotonic clock."""
        self.counters: Counter[str] = Counter()
        """Events so far: ``connected``, ``gone``, ``revoked`` (silent), ``dismissed`` (never sent a hello),
        ``refused_<kind>`` and ``violation_<kind>``."""
        self._options = options
        self._ledger = options.ledger
        self._check_interval = options.peer_timeout / CHECKS_PER_TIMEOUT
        self._opens_at = now + options.startup_timeout
        self._last_check = now
        self._book = CreditBook(expected_producers=options.expected_producers)
        self._sessions: dict[int, _Session] = {}
        self._arrived: deque[Slot] = deque()
        self._next_number = 0

    @property
    def producers(self) -> tuple[ProducerId, ...]:
        """The connected producers, by index."""
        return tuple(sorted(session.producer for session in self._sessions.values()))

    @property
    def progress(self) -> Mapping[ProducerId, int]:
        """``ProducerConnection.progress`` of each connected producer."""
        return {session.producer: session.connection.progress for session in self._sessions.values()}

    @property
    def outstanding(self) -> tuple[int, ...]:
        """Orders, ascending, of credits that a producer holds or whose slots ``hand_out`` has not returned."""
        return tuple(sorted([*self._book.outstanding, *(slot.credit for slot in self._arrived)]))

    # Messages.

    def handle(self, connection: ProducerConnection, message: ProducerMessage) -> None:
        """Act on one message of a connection: admit or refuse the producer, take a slot, or drop the connection."""
        if connection.has_ended:
            return
        session = None if connection.number is None else self._sessions[connection.number]
        if session is None:
            self._greet(connection, message)
        elif message is None:
            self._drop(session, "gone")
        else:
            try:
                self._take(session, message)
            except _Violation as violation:
                self.counters[f"violation_{violation.kind}"] += 1
                _log.warning("producer_violation", kind=violation.kind, reason=str(violation))
                self._drop(session, f"violation: {violation}")

    def read(self, connection: ProducerConnection) -> None:
        """Act on every message that has arrived on a connection."""
        while not connection.has_ended and (messages := connection.read()):
            self.handle(connection, *messages)

    def _greet(self, connection: ProducerConnection, message: ProducerMessage) -> None:
        """Act on the first message of a connection."""
        if message is None:
            self.dismiss(connection, "gone")
            return
        try:
            if isinstance(message, InvalidMessage):
                raise PeerRefused("malformed", f"malformed handshake: {message.text}")
            if isinstance(message, Post):
                raise PeerRefused("malformed", "malformed handshake: the first message is not a hello")
            connection.send(self._admit(connection, message))
        except PeerRefused as refusal:
            self.count_refusal(refusal)
            connection.send(refusal)
            self._end(connection, "refused")

    def _admit(self, connection: ProducerConnection, message: Mapping[str, Any]) -> Welcome:
        """Open a session; return the answer to the hello.

        The ledger settles the slots of the index's former lives before the answer can be sent.

        Raises:
            PeerRefused: the hello is not valid here, a later incarnation is known, or there is no memory.
        """
        hello = Hello.from_json(message, token=self._options.token, layout_digest=self._options.layout_digest)
        producer, layout = hello.producer, hello.layout
        self._replace_former(producer)
        marked = self._ledger.marked_sequence(producer)
        if marked == ACCOUNT_CLOSED:
            raise _succeeded(producer)
        num_claims = sum(sequence > marked for sequence, _ in hello.unacknowledged) + hello.num_in_hand
        num_slots = max(self._options.slots_per_producer, num_claims)
        try:
            connection.allocate(layout, num_slots)
        except OSError as error:
            raise PeerRefused("capacity", f"the consumer has no memory for {num_slots} slots: {error}") from error
        met = self._ledger.meet(producer, hello.progress)
        number = connection.number = self._next_number
        self._next_number += 1
        self._sessions[number] = _Session(
            producer=producer,
            number=number,
            connection=connection,
            max_transitions=layout.num_steps * layout.num_lanes,
            last_sequence=met.sequence,
            last_total=met.total,
        )
        claims = self._book.connect(
            number, index=producer.index, num_lanes=layout.num_lanes, num_slots=num_slots, num_claims=num_claims
        )
        self.counters["connected"] += 1
        _log.info("producer_connected", **_names(producer), num_lanes=layout.num_lanes, num_claims=num_claims)
        return Welcome(mark=met.sequence, num_slots=num_slots, claims=tuple(claim.order for claim in claims))

    def _replace_former(self, producer: ProducerId) -> None:
        """Drop the older connection of the same index, after its slots are taken.

        Raises:
            PeerRefused: the connected producer is a later incarnation.
        """
        for session in [*self._sessions.values()]:
            if session.producer.index == producer.index:
                if producer.incarnation < session.producer.incarnation:
                    raise _succeeded(producer)
                self._give_up(session, "replaced")

    def count_refusal(self, refusal: PeerRefused) -> None:
        """Count and log a producer that is refused."""
        self.counters[f"refused_{refusal.kind}"] += 1
        _log.warning("producer_refused", kind=refusal.kind, reason=str(refusal))

    # Ends.

    def dismiss(self, connection: ProducerConnection, reason: str) -> None:
        """End a connection that has sent no hello."""
        self.counters["dismissed"] += 1
        _log.info("producer_never_introduced", reason=reason)
        self._end(connection, reason)

    def close(self) -> None:
        """End every session."""
        for session in [*self._sessions.values()]:
            self._drop(session, "closed")

    def _give_up(self, session: _Session, reason: str) -> None:
        """End a session whose producer may be alive, after the slots that it has posted are taken."""
        self.read(session.connection)
        if not session.connection.has_ended:
            self._drop(session, reason)

    def _drop(self, session: _Session, reason: str) -> None:
        """End a session and revoke its credits. The next ``issue`` gives their lanes to other producers."""
        del self._sessions[session.number]
        revoked = [credit.order for credit in self._book.disconnect(session.number)]
        self.counters["gone"] += 1
        _log.info("producer_gone", **_names(session.producer), reason=reason, revoked_credits=revoked)
        self._end(session.connection, reason)

    def _end(self, connection: ProducerConnection, reason: str) -> None:
        connection.has_ended = True
        connection.hang_up(reason)

    # Slots.

    def grant(self, num_lanes: int, min_version: Version, room: int) -> None:
        """Add lanes to the allowance and send the credits that fit; see ``SampleConsumer.grant``."""
        self._book.grant(num_lanes, min_version, room)
        self.issue()

    def issue(self) -> None:
        """Send the credits that can be issued now."""
        for credit in self._book.issue():
            self._sessions[credit.connection].connection.send(credit)

    def release(self, slot: Slot) -> None:
        """Make the slot free again and send the credits that fit."""
        number, place = slot.handle
        self._book.release(number, place)
        self.issue()

    def _take(self, session: _Session, message: Mapping[str, Any] | Post | InvalidMessage) -> None:
        """Take a slot: check it, write it into the ledger, then acknowledge it.

        Raises:
            _Violation: the producer may not send this message.
        """
        post = _checked(session, message)
        try:
            credit = self._book.receive(session.number, order=post.order, slot=post.place)
        except UnknownCredit as error:
            raise _Violation("credit", str(error)) from error
        session.last_sequence, session.last_total, session.silence = post.sequence, post.total, 0.0
        self._ledger.take(session.producer, post.sequence, post.num_transitions, post.total)
        slot = Slot(
            arrays=session.connection.arrays(post),
            min_version=credit.min_version,
            credit=credit.order,
            producer=session.producer,
            sequence=post.sequence,
            num_transitions=post.num_transitions,
            handle=(session.number, credit.slot),
        )
        self._arrived.append(slot)
        session.connection.send(post.sequence)

    @property
    def has_arrivals(self) -> bool:
        """Whether ``hand_out`` has a slot to return."""
        return bool(self._arrived)

    def hand_out(self, max_items: int) -> list[Slot]:
        """Return at most ``max_items`` slots in order of arrival."""
        return [self._arrived.popleft() for _ in range(min(max_items, len(self._arrived)))]

    # Time.

    @property
    def next_duty(self) -> float:
        """The latest time of the next call of ``attend``."""
        checks_at = self._last_check + self._check_interval
        return checks_at if self._book.is_open else min(checks_at, self._opens_at)

    def attend(self, now: float) -> None:
        """Do what is due at ``now``: open the book after the start-up time-out, and drop silent producers.

        A producer is silent if it holds a credit and makes no progress for longer than the peer time-out. Only time in
        which the consumer checks counts: after its own delay a consumer drops no producer.
        """
        if now >= self._opens_at and not self._book.is_open:
            _log.warning("startup_timeout", num_connected=len(self._sessions))
            self._book.open()
        if now < self._last_check + self._check_interval:
            return
        self._last_check = now
        silent = [session for session in self._sessions.values() if self._is_silent(session)]
        self.counters["revoked"] += len(silent)
        for session in silent:
            self._give_up(session, "silent")

    def _is_silent(self, session: _Session) -> bool:
        progress = session.connection.progress
        if progress != session.progress or not self._book.has_credit(session.number):
            session.progress, session.silence = progress, 0.0
            return False
        session.silence += self._check_interval
        return session.silence > self._options.peer_timeout


class CoreConsumer(SampleConsumer, ABC):
    """The part of a ``SampleConsumer`` that is the same on every transport: calls of the core under one lock."""

    def __init__(self, options: ConsumerOptions, lock: AbstractContextManager[Any]) -> None:
        """``lock`` guards the core and its connections. ``receive`` holds it only while it works."""
        self._lock = lock
        self._now = options.clock.monotonic
        self._core = ConsumerCore(options, now=self._now())
        self._closed = False

    @override
    def grant(self, num_lanes: int, min_version: Version, room: int = 0) -> None:
        with self._lock:
            self._core.grant(num_lanes, min_version, room)

    @override
    def release(self, slot: Slot) -> None:
        with self._lock:
            self._core.release(slot)

    @property
    @override
    def outstanding(self) -> tuple[int, ...]:
        with self._lock:
            return self._core.outstanding

    @property
    @override
    def producers(self) -> tuple[ProducerId, ...]:
        with self._lock:
            return self._core.producers

    @property
    def counters(self) -> Mapping[str, int]:
        """Events so far; see ``ConsumerCore.counters``."""
        with self._lock:
            return dict(self._core.counters)


def _checked(session: _Session, message: Mapping[str, Any] | Post | InvalidMessage) -> Post:
    """Return the message if it is a post that this producer may send, its credit aside."""
    if not isinstance(message, Post):
        raise _Violation("message", message.text if isinstance(message, InvalidMessage) else "a second hello")
    try:
        session.connection.check_body(message)
    except ValueError as error:
        raise _Violation("message", str(error)) from error
    sequence, num_transitions, total = message.sequence, message.num_transitions, message.total
    if sequence <= session.last_sequence:
        raise _Violation("sequence", f"sequence {sequence} after {session.last_sequence}")
    if not 0 <= num_transitions <= session.max_transitions:
        raise _Violation("transitions", f"{num_transitions} transitions; allowed are 0 to {session.max_transitions}")
    if not session.last_total + num_transitions <= total < 1 << 62:
        raise _Violation("total", f"total {total} after {session.last_total} and {num_transitions} more transitions")
    return message


def _names(producer: ProducerId) -> dict[str, int]:
    return {"producer": producer.index, "incarnation": producer.incarnation}


def _succeeded(producer: ProducerId) -> PeerRefused:
    text = f"incarnation {producer.incarnation} of producer {producer.index} was succeeded by a later one"
    return PeerRefused("incarnation", text)
