"""One producer for several consumers: the ranks of a trainer gang, each with its share of every batch.

Each rank grants its own credits, and the first credit to arrive is used first, so no rank delays another. A slot's
sequence is unique over all ranks. A slot always goes to the rank that granted it, also when it is posted again: only
that rank recognises the repetition.
"""

from __future__ import annotations

import select
from collections.abc import Sequence
from contextlib import suppress

from typing_extensions import override

from rlsrl.data.slots import Slot
from rlsrl.runtime.clock import Clock, SystemClock
from rlsrl.streams.closable import Closable
from rlsrl.streams.protocols import PollableProducer, StreamTimeout


class ShardedProducer(Closable, PollableProducer):
    """Fills slots for several consumers, through one producer (a shard) for each.

    The shards share their source of sequence numbers. This producer owns the shards and closes them. One thread uses
    it; any thread may call ``touch`` and ``close``.
    """

    def __init__(self, shards: Sequence[PollableProducer], *, clock: Clock | None = None) -> None:
        super().__init__("this producer")
        self._shards = tuple(shards)
        self._now = (clock or SystemClock()).monotonic
        self._next = 0
        self._granted_by: dict[Slot, PollableProducer] = {}
        self._poll = select.epoll()
        for descriptor in (self._wake.fileno(), *(shard.fileno() for shard in self._shards)):
            self._poll.register(descriptor, select.EPOLLIN)

    @override
    def acquire(self, timeout: float) -> Slot:
        """Return a slot to fill; see ``SampleProducer.acquire``. A credit of any consumer ends the wait."""
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
        """Return a slot of the next consumer in turn that has granted a credit, or None."""
        for offset in range(len(self._shards)):
            shard = self._shards[(self._next + offset) % len(self._shards)]
            with suppress(StreamTimeout):
                slot = shard.acquire(timeout=0)
                self._granted_by[slot] = shard
                self._next += offset + 1
                return slot
        return None

    @override
    def post(self, slot: Slot) -> None:
        if slot not in self._granted_by:
            raise ValueError("this slot is not in hand: it was posted before, or acquired from another producer")
        with self._exclusive():
            self._granted_by.pop(slot).post(slot)

    @override
    def touch(self) -> None:
        for shard in self._shards:
            shard.touch()

    @override
    def flush(self, timeout: float) -> None:
        deadline = self._now() + timeout
        with self._exclusive():
            for shard in self._shards:
                shard.flush(max(0.0, deadline - self._now()))

    @override
    def disconnect(self) -> None:
        with self._exclusive():
            for shard in self._shards:
                shard.disconnect()

    @property
    @override
    def unacknowledged(self) -> tuple[tuple[int, int], ...]:
        return tuple(sorted(posted for shard in self._shards for posted in shard.unacknowledged))

    @override
    def fileno(self) -> int:
        return self._poll.fileno()

    @property
    @override
    def retries_at(self) -> float:
        return min(shard.retries_at for shard in self._shards)

    @override
    def _dispose(self) -> None:
        for shard in self._shards:
            shard.close()
        self._poll.close()
