"""What producers share that connect to a consumer elsewhere, in the calls that wait."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator

from rlsrl.data.slots import ProducerId, Slot, SlotLayout
from rlsrl.runtime.clock import Clock, SystemClock
from rlsrl.runtime.ledger import ProducerProgress
from rlsrl.streams.closable import Closable
from rlsrl.streams.handshake import Posted
from rlsrl.streams.producer_state import ProducerState
from rlsrl.streams.protocols import ProducerLedger, StreamTimeout


class ConnectingProducer(Closable):
    """Most of a ``SampleProducer``: one connection at a time, made and mended in ``acquire`` and ``flush``.

    Never in the constructor. One thread uses it, except ``close``.
    """

    def __init__(
        self,
        address: str,
        *,
        token: str,
        layout: SlotLayout,
        producer_id: ProducerId,
        ledger: ProducerLedger,
        progress: ProducerProgress,
        on_settled: Callable[[], None],
        sequences: Iterator[int] | None,
        clock: Clock | None,
        back_off_seconds: tuple[float, float],
    ) -> None:
        """Prepare to connect.

        Args:
            address: of the consumer.
            token: the experiment's.
            layout: of this producer's slots.
            producer_id: the leased index and incarnation.
            ledger: written before a slot is posted and after it is acknowledged.
            progress: of this index with the consumer, as ``ProducerAccount.progress`` gives it: the consumer settles
                what former lives left, and counts what it never got as lost.
            on_settled: called once, in the thread of ``acquire`` or ``flush``, when the consumer has done so: the
                entries may be forgotten.
            sequences: where slots get their numbers: rising, from 0 unless given. Producers of one incarnation that
                post to different consumers share one, so that a number names one slot.
            clock: the machine's unless given.
            back_off_seconds: without a consumer it is tried again after the first, then after twice as long each time,
                up to the last.
        """
        super().__init__(f"this producer of {address}")
        self._address = address
        self._token = token
        self._layout = layout
        self._now = (clock or SystemClock()).monotonic
        self._state = ProducerState(
            producer=producer_id,
            layout=layout,
            ledger=ledger,
            progress=progress,
            on_settled=on_settled,
            sequences=sequences,
        )
        self._is_admitted = False
        self._first_back_off, self._last_back_off = back_off_seconds
        self._back_off = self._first_back_off
        self._retries_at = -math.inf
        self._touches = 0

    def acquire(self, timeout: float) -> Slot:
        """See ``SampleProducer.acquire``."""
        deadline = self._now() + timeout
        with self._exclusive():
            self._advance()
            while (slot := self._state.take_credit()) is None:
                self._wait(deadline, "no credit came")
            return slot

    def post(self, slot: Slot) -> None:
        """See ``SampleProducer.post``.

        Raises:
            ValueError: the slot is not in hand, or has no possible ``num_transitions``.
            StreamClosed: ``close`` was called.
        """
        with self._exclusive():
            self._state.post(slot)

    def flush(self, timeout: float) -> None:
        """See ``SampleProducer.flush``. Woken by acknowledgements, by ``close``, or by the timeout.

        Raises:
            StreamTimeout: some slots were still unacknowledged.
            StreamClosed, HandshakeRefused: as ``acquire``.
        """
        deadline = self._now() + timeout
        with self._exclusive():
            self._advance()
            while self._state.unacknowledged:
                self._wait(deadline, f"{len(self._state.unacknowledged)} slots were not acknowledged")

    @property
    def unacknowledged(self) -> tuple[Posted, ...]:
        """See ``SampleProducer.unacknowledged``."""
        return self._state.unacknowledged

    @abstractmethod
    def fileno(self) -> int:
        """A descriptor that is readable when ``acquire`` may get further; see also ``retries_at``."""

    @property
    @abstractmethod
    def retries_at(self) -> float:
        """When ``acquire`` may get further by itself, on the clock's monotonic scale; infinite while admitted."""

    @property
    @abstractmethod
    def _is_connected(self) -> bool:
        """Whether there is a connection, admitted or not."""

    @abstractmethod
    def _advance(self) -> None:
        """Do what can be done without waiting: connect, be admitted, read."""

    @abstractmethod
    def _sleep(self, seconds: float) -> None:
        """Wait for news of the connection or for ``_wake``, at most so long."""

    def _back_away(self) -> None:
        """Put off the try after this one."""
        self._retries_at = self._now() + self._back_off
        self._back_off = min(2 * self._back_off, self._last_back_off)

    def _come_back(self) -> None:
        """The consumer is there: once it is gone, the next try is soon."""
        self._back_off = self._first_back_off

    def _wait(self, deadline: float, complaint: str) -> None:
        """Wait for the next event until the deadline, and deal with it."""
        now = self._now()
        if now >= deadline:
            met = "waiting to be admitted" if self._is_connected else "not connected"
            state = "connected" if self._is_admitted else met
            raise StreamTimeout(f"sample stream {self._address}: {complaint} in time ({state})")
        self._sleep(max(0.0, min(deadline, self.retries_at) - now))
        self._check_open()
        self._advance()
