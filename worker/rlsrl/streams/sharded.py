"""One producer for several consumers: the ranks of a trainer gang, each with its part of every batch.

Each rank grants its own credits; whichever comes first is filled first, so no rank can hold up another's. A slot's
number names it among all of them, and it goes back to the rank that granted it, also when it is posted again: that rank
knows it.
"""

from __future__ import annotations

import select
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from rlsrl.data.slots import Slot
from rlsrl.runtime.clock import Clock, SystemClock
from rlsrl.streams.closable import Closable
from rlsrl.streams.protocols import SampleProducer, StreamTimeout


class Shard(SampleProducer, Protocol):
    """A producer that can be waited for beside others."""

    def fileno(self) -> int:
        """A descriptor that is readable when ``acquire`` may get further."""

    @property
    def retries_at(self) -> float:
        """When ``acquire`` may get further by itself, on the clock's monotonic scale."""


class ShardedProducer(Closable):
    """Fills slots for whichever of several consumers grants one; implements ``SampleProducer``.

    The shards share a source of sequence numbers and are given to it: it closes them. One thread uses it, except
    ``close``.
    """

    def __init__(self, shards: Sequence[Shard], *, clock: Clock | None = None) -> None:
        super().__init__("this producer")
        self._shards = tuple(shards)
        self._now = (clock or SystemClock()).monotonic
        self._next = 0
        self._granted_by: dict[Slot, Shard] = {}
        self._poll = select.epoll()
        for descriptor in (self._wake.fileno(), *(shard.fileno() for shard in self._shards)):
            self._poll.register(descriptor, select.EPOLLIN)

    def acquire(self, timeout: float) -> Slot:
        """See ``SampleProducer.acquire``. Woken by a credit of any consumer."""
        deadline = self._now() + timeout
        with self._exclusive():
            while (slot := self._take_credit()) is None:
                now = self._now()
                if now >= deadline:
                    raise StreamTimeout(f"no credit came from any of {len(self._shards)} consumers in time")
                self._poll.poll(max(0.0, min(deadline, self.retries_at) - now))
                self._check_open()
            return slot

    def _take_credit(self) -> Slot | None:
        """A slot from the next consumer, in turn, that has granted one."""
        for offset in range(len(self._shards)):
            shard = self._shards[(self._next + offset) % len(self._shards)]
            with suppress(StreamTimeout):
                slot = shard.acquire(timeout=0)
                self._granted_by[slot] = shard
                self._next += offset + 1
                return slot
        return None

    def post(self, slot: Slot) -> None:
        """See ``SampleProducer.post``.

        Raises:
            ValueError: the slot is not in hand.
        """
        if slot not in self._granted_by:
            raise ValueError("this slot is not in hand: it was posted before, or acquired from another producer")
        with self._exclusive():
            self._granted_by.pop(slot).post(slot)

    def touch(self) -> None:
        """See ``SampleProducer.touch``."""
        for shard in self._shards:
            shard.touch()

    def flush(self, timeout: float) -> None:
        """See ``SampleProducer.flush``."""
        deadline = self._now() + timeout
        with self._exclusive():
            for shard in self._shards:
                shard.flush(max(0.0, deadline - self._now()))

    @property
    def unacknowledged(self) -> tuple[tuple[int, int], ...]:
        """See ``SampleProducer.unacknowledged``; of all consumers."""
        return tuple(sorted(posted for shard in self._shards for posted in shard.unacknowledged))

    def fileno(self) -> int:
        """A descriptor that is readable when ``acquire`` may get further; see also ``retries_at``."""
        return self._poll.fileno()

    @property
    def retries_at(self) -> float:
        """When ``acquire`` may get further by itself, on the clock's monotonic scale."""
        return min(shard.retries_at for shard in self._shards)

    def _dispose(self) -> None:
        for shard in self._shards:
            shard.close()
        self._poll.close()
