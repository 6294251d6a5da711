"""What a producer keeps, whatever carries its stream: credits, slots in hand, slots posted and not acknowledged.

Transports connect and move messages; they share this part, so that they cannot differ in what they promise. No
sockets, no threads, no clock. Not thread-safe: the transport holds a lock.

Memory belongs to a connection. When one breaks, slots in hand and unacknowledged slots keep the old connection's
memory, which nobody else is ever given, until their content has been copied into a slot of the next connection.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from typing import Any, Protocol

from numpy.typing import NDArray

from rlsrl.data.slots import ProducerId, Slot, SlotLayout
from rlsrl.data.version import Version
from rlsrl.runtime.ledger import ProducerProgress
from rlsrl.streams.handshake import Hello, Posted, Welcome
from rlsrl.streams.protocols import ProducerLedger, StreamError


class ConsumerConnection(Protocol):
    """A live connection to a consumer, as a transport gives it."""

    def arrays(self, place: int) -> dict[str, NDArray[Any]]:
        """The arrays of the connection's slot number ``place``; the same object each time."""

    def post(self, place: int, credit: int, sequence: int, num_transitions: int, total: int) -> None:
        """Tell the consumer that this slot is filled. Never waits and never raises: see ``disconnected``."""


class ProducerState:
    """A producer's slots from credit to acknowledgement."""

    def __init__(
        self,
        *,
        producer: ProducerId,
        layout: SlotLayout,
        ledger: ProducerLedger,
        progress: ProducerProgress,
        on_settled: Callable[[], None],
        sequences: Iterator[int] | None = None,
    ) -> None:
        self._producer = producer
        self._layout = layout
        self._max_transitions = layout.num_steps * layout.num_lanes
        self._ledger = ledger
        self._progress = progress
        self._on_settled = on_settled
        self._connection: ConsumerConnection | None = None
        self._sequences = sequences if sequences is not None else count()
        self._credits: deque[tuple[int, int, Version]] = deque()
        self._in_hand: dict[Slot, None] = {}
        self._posted: dict[int, Slot] = {}

    @property
    def unacknowledged(self) -> tuple[Posted, ...]:
        """(sequence, num_transitions) of what was posted and not acknowledged, ascending."""
        return tuple((sequence, slot.num_transitions) for sequence, slot in tuple(self._posted.items()))

    def hello(self) -> Hello:
        """How to introduce ourselves over a new connection."""
        return Hello(
            producer=self._producer,
            layout=self._layout,
            unacknowledged=self.unacknowledged,
            num_in_hand=len(self._in_hand),
            progress=self._progress,
        )

    def connected(self, welcome: Welcome, connection: ConsumerConnection) -> None:
        """The consumer admitted us: settle what it knows, post again what it does not."""
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
            self._on_settled()

    def disconnected(self) -> None:
        """The connection is over, and with it the credits nobody had taken up."""
        self._connection = None
        self._credits.clear()

    def credited(self, place: int, order: int, min_version: Version) -> None:
        """The consumer granted a credit for the connection's slot number ``place``."""
        self._credits.append((place, order, min_version))

    def acknowledged(self, sequence: int) -> None:
        """The consumer holds everything up to ``sequence``."""
        for done in [posted for posted in self._posted if posted <= sequence]:
            self._ledger.acknowledge(done)
            slot = self._posted.pop(done)
            self._progress = replace(self._progress, sequence=slot.sequence, acknowledged=slot.total)

    def take_credit(self) -> Slot | None:
        """A slot to fill, from the oldest credit."""
        if self._connection is None or not self._credits:
            return None
        place, order, min_version = self._credits.popleft()
        slot = Slot(arrays=self._connection.arrays(place), min_version=min_version, credit=order, handle=place)
        self._in_hand[slot] = None
        return slot

    def post(self, slot: Slot) -> None:
        """Number a filled slot, write it down as produced and send it if there is a connection.

        Raises:
            ValueError: the slot is not in hand, or has no possible number of transitions.
        """
        if slot not in self._in_hand:
            raise ValueError("this slot is not in hand: it was posted before, or acquired from another producer")
        if not 0 <= slot.num_transitions <= self._max_transitions:
            raise ValueError(f"num_transitions {slot.num_transitions} is not from 0 to {self._max_transitions}")
        del self._in_hand[slot]
        slot.producer, slot.sequence = self._producer, next(self._sequences)
        slot.total = self._ledger.produce(slot.sequence, slot.num_transitions)
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
