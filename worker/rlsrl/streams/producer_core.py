"""The part of a producer that all transports share: its slots, and connecting inside ``acquire`` and ``flush``.

Transports connect and move messages. All use ``ProducerState``, so they cannot differ in what they promise. It uses no
sockets, no threads and no clock. It is not thread-safe: the transport holds a lock.

Memory belongs to a connection. After a connection breaks, slots in hand and unacknowledged slots keep its memory until
their content is copied into slots of the next connection.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Protocol

from numpy.typing import NDArray
from typing_extensions import override

from rlsrl.data.slots import ProducerId, Slot, SlotLayout
from rlsrl.data.version import Version
from rlsrl.rpc.back_off import BackOff
from rlsrl.runtime.clock import Clock, SystemClock
from rlsrl.runtime.ledger import ProducerProgress
from rlsrl.streams.closable import Closable
from rlsrl.streams.handshake import Hello, UnacknowledgedSlot, Welcome
from rlsrl.streams.protocols import PollableProducer, ProducerLedger, StreamError, StreamTimeout


@dataclass(frozen=True, kw_only=True)
class ProducerOptions:
    """The settings of a producer that do not depend on its transport."""

    token: str = field(repr=False)
    """The experiment's token."""
    layout: SlotLayout
    """Of this producer's slots."""
    producer_id: ProducerId
    """The leased index and its incarnation."""
    ledger: ProducerLedger
    """Written before a slot is posted and after it is acknowledged."""
    progress: ProducerProgress = field(default_factory=ProducerProgress)
    """This index's progress with the consumer, from ``ProducerAccount.progress``. The consumer settles the slots of
    former lives: it counts those that it never took as dropped or lost."""
    on_settled: Callable[[], None] = lambda: None
    """Called once, inside ``acquire`` or ``flush``, after the consumer has settled the slots of former lives."""
    sequences: Iterator[int] = field(default_factory=count)
    """Ascending sequence numbers. Producers of one incarnation with different consumers share them, so that a number
    names one slot."""
    clock: Clock = field(default_factory=SystemClock)


class ConsumerConnection(Protocol):
    """The admitted connection to a consumer, as a transport provides it."""

    def arrays(self, place: int) -> dict[str, NDArray[Any]]:
        """Return the arrays of the connection's slot ``place``: the same object at each call."""

    def post(self, place: int, credit: int, sequence: int, num_transitions: int, total: int) -> None:
        """Tell the consumer that this slot is filled. Never waits and never raises: see ``disconnected``."""


class ProducerState:
    """A producer's slots from credit to acknowledgement."""

    def __init__(self, options: ProducerOptions) -> None:
        self._options = options
        self._max_transitions = options.layout.num_steps * options.layout.num_lanes
        self._progress = options.progress
        self._connection: ConsumerConnection | None = None
        self._credits: deque[tuple[int, int, Version]] = deque()
        self._in_hand: dict[Slot, None] = {}
        self._posted: dict[int, Slot] = {}

    @property
    def is_admitted(self) -> bool:
        """Whether there is an admitted connection."""
        return self._connection is not None

    @property
    def unacknowledged(self) -> tuple[UnacknowledgedSlot, ...]:
        """(sequence, num_transitions) of each posted slot without an acknowledgement, ascending."""
        return tuple((sequence, slot.num_transitions) for sequence, slot in tuple(self._posted.items()))

    def hello(self) -> Hello:
        """Return the first message of a new connection."""
        return Hello(
            producer=self._options.producer_id,
            layout=self._options.layout,
            unacknowledged=self.unacknowledged,
            num_in_hand=len(self._in_hand),
            progress=self._progress,
        )

    def connected(self, welcome: Welcome, connection: ConsumerConnection) -> None:
        """Begin an admitted connection: free the slots that the consumer has, and post the others again.

        Raises:
            StreamError: the welcome does not fit the slots held.
        """
        self.acknowledged(welcome.mark)
        held = [*self._posted.values(), *self._in_hand]
        if len(welcome.claims) != len(held) or welcome.num_slots < len(held):
            raise StreamError(f"the consumer gave {len(welcome.claims)} credits for the {len(held)} slots held")
        self._connection = connection
        for place, (slot, order) in enumerate(zip(held, welcome.claims, strict=True)):
            slot.handle, slot.credit = place, order
        for slot in self._posted.values():
            self._send(slot, connection)
        if self._progress.left:
            self._progress = replace(self._progress, left=())
            self._options.on_settled()

    def disconnected(self) -> None:
        """End the connection. The consumer revokes its unused credits."""
        self._connection = None
        self._credits.clear()

    def credited(self, place: int, order: int, min_version: Version) -> None:
        """Store a credit for the connection's slot ``place``."""
        self._credits.append((place, order, min_version))

    def acknowledged(self, sequence: int) -> None:
        """Forget posted slots up to ``sequence``: the consumer has them."""
        for done in [posted for posted in self._posted if posted <= sequence]:
            self._options.ledger.acknowledge(done)
            slot = self._posted.pop(done)
            self._progress = replace(self._progress, sequence=slot.sequence, acknowledged=slot.total)

    def take_credit(self) -> Slot | None:
        """Return a slot to fill, from the oldest credit, or None without a credit."""
        if self._connection is None or not self._credits:
            return None
        place, order, min_version = self._credits.popleft()
        slot = Slot(arrays=self._connection.arrays(place), min_version=min_version, credit=order, handle=place)
        self._in_hand[slot] = None
        return slot

    def post(self, slot: Slot) -> None:
        """Number a filled slot, write it into the ledger, and send it if there is a connection.

        Raises:
            ValueError: the slot is not in hand, or its ``num_transitions`` is out of range.
        """
        if slot not in self._in_hand:
            raise ValueError("this slot is not in hand: it was posted before, or acquired from another producer")
        if not 0 <= slot.num_transitions <= self._max_transitions:
            raise ValueError(f"num_transitions is {slot.num_transitions}; allowed are 0 to {self._max_transitions}")
        del self._in_hand[slot]
        slot.producer, slot.sequence = self._options.producer_id, next(self._options.sequences)
        slot.total = self._options.ledger.produce(slot.sequence, slot.num_transitions)
        self._posted[slot.sequence] = slot
        if self._connection is not None:
            self._send(slot, self._connection)

    def _send(self, slot: Slot, connection: ConsumerConnection) -> None:
        arrays = connection.arrays(slot.handle)
        if slot.arrays is not arrays:
            for name, array in slot.arrays.items():
                arrays[name][...] = array
            slot.arrays = arrays
        connection.post(slot.handle, slot.credit, slot.sequence, slot.num_transitions, slot.total)


class ConnectingProducer(Closable, PollableProducer):
    """A producer with one connection at a time. ``acquire`` and ``flush`` connect it and reconnect it.

    The constructor does not connect. One thread uses the producer; any thread may call ``touch`` and ``close``.
    """

    def __init__(self, address: str, options: ProducerOptions, back_off: BackOff) -> None:
        """Prepare to connect to the consumer at ``address``; wait ``back_off`` between two attempts."""
        super().__init__(f"this producer of {address}")
        self._address = address
        self._token = options.token
        self._layout = options.layout
        self._now = options.clock.monotonic
        self._state = ProducerState(options)
        self._connection: object | None = None
        """The transport's connection, admitted or not."""
        self._back_off = back_off
        self._retries_at = -math.inf
        self._touches = 0

    @override
    def acquire(self, timeout: float) -> Slot:
        deadline = self._now() + timeout
        with self._exclusive():
            self._advance()
            while (slot := self._state.take_credit()) is None:
                self._wait(deadline, "no credit came")
            return slot

    @override
    def post(self, slot: Slot) -> None:
        with self._exclusive():
            self._state.post(slot)

    @override
    def flush(self, timeout: float) -> None:
        deadline = self._now() + timeout
        with self._exclusive():
            self._advance()
            while self._state.unacknowledged:
                self._wait(deadline, f"{len(self._state.unacknowledged)} slots were not acknowledged")

    @override
    def disconnect(self) -> None:
        with self._exclusive():
            self._hang_up()

    @property
    @override
    def unacknowledged(self) -> tuple[UnacknowledgedSlot, ...]:
        return self._state.unacknowledged

    @abstractmethod
    def _advance(self) -> None:
        """Do what needs no waiting: connect, read the consumer's answer, read messages."""

    @abstractmethod
    def _sleep(self, seconds: float) -> None:
        """Wait for a message of the consumer or for ``_wake``, at most ``seconds``."""

    def _hang_up(self) -> None:
        """End the connection, so that the consumer learns of it."""
        self._disconnect()

    def _disconnect(self) -> None:
        """Forget the connection."""
        self._connection = None
        self._state.disconnected()

    def _begin_attempt(self) -> None:
        """Set the time of the next attempt, for the case that the attempt which begins now fails."""
        self._retries_at = self._now() + self._back_off.next_delay()

    def _wait(self, deadline: float, problem: str) -> None:
        """Wait for the next event and handle it.

        Raises:
            StreamTimeout: the deadline has passed.
            StreamClosed: ``close`` was called.
        """
        now = self._now()
        if now >= deadline:
            without = "not connected" if self._connection is None else "waiting to be admitted"
            state = "connected" if self._state.is_admitted else without
            raise StreamTimeout(f"sample stream {self._address}: {problem} in time ({state})")
        self._sleep(max(0.0, min(deadline, self.retries_at) - now))
        self._check_open()
        self._advance()
