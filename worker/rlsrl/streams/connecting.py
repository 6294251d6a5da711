"""The part of a producer that all transports share: connect, reconnect and wait inside ``acquire`` and ``flush``."""

from __future__ import annotations

import math
from abc import abstractmethod

from typing_extensions import override

from rlsrl.data.slots import Slot
from rlsrl.rpc.back_off import BackOff
from rlsrl.streams.closable import Closable
from rlsrl.streams.handshake import UnacknowledgedSlot
from rlsrl.streams.producer_state import ProducerOptions, ProducerState
from rlsrl.streams.protocols import PollableProducer, StreamTimeout


class ConnectingProducer(Closable, PollableProducer):
    """A producer with one connection at a time. ``acquire`` and ``flush`` connect it and reconnect it.

    The constructor does not connect. One thread uses the producer; any thread may call ``close``.
    """

    def __init__(self, address: str, options: ProducerOptions, back_off: BackOff) -> None:
        """Prepare to connect to the consumer at ``address``; wait ``back_off`` between two attempts."""
        super().__init__(f"this producer of {address}")
        self._address = address
        self._token = options.token
        self._layout = options.layout
        self._now = options.clock.monotonic
        self._state = ProducerState(options)
        self._is_admitted = False
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

    @property
    @override
    def unacknowledged(self) -> tuple[UnacknowledgedSlot, ...]:
        return self._state.unacknowledged

    @property
    @abstractmethod
    def _is_connected(self) -> bool:
        """Whether there is a connection, admitted or not."""

    @abstractmethod
    def _advance(self) -> None:
        """Do what needs no waiting: connect, read the consumer's answer, read messages."""

    @abstractmethod
    def _sleep(self, seconds: float) -> None:
        """Wait for a message of the consumer or for ``_wake``, at most ``seconds``."""

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
            without = "waiting to be admitted" if self._is_connected else "not connected"
            state = "connected" if self._is_admitted else without
            raise StreamTimeout(f"sample stream {self._address}: {problem} in time ({state})")
        self._sleep(max(0.0, min(deadline, self.retries_at) - now))
        self._check_open()
        self._advance()
