"""Producers of samples: one for each rank of the trainer gang, used as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

from rlsrl.data.slots import ProducerId, SlotLayout
from rlsrl.runtime.ledger import ActorLedger, Posted
from rlsrl.streams.connect import producer_for
from rlsrl.streams.protocols import SampleProducer
from rlsrl.streams.sharded import Shard, ShardedProducer


class RankLedger:
    """What a producer writes down of the slots it makes for one rank."""

    def __init__(self, ledger: ActorLedger, rank: int) -> None:
        self._ledger = ledger
        self._rank = rank

    def produce(self, sequence: int, num_transitions: int) -> None:
        """See ``streams.protocols.ProducerLedger``."""
        self._ledger.produce(sequence, num_transitions, consumer=self._rank)

    def acknowledge(self, sequence: int) -> None:
        """See ``streams.protocols.ProducerLedger``."""
        self._ledger.acknowledge(sequence)


def open_producer(
    endpoints: Sequence[str], *, token: str, layout: SlotLayout, producer_id: ProducerId, ledger: ActorLedger
) -> SampleProducer:
    """A producer to the consumers at ``endpoints``, by rank; begins the ledger's new life.

    What former lives left unacknowledged is forgotten once every rank that it was posted to has accounted for its part.

    Raises:
        ConfigurationError: slots are too large for the transport.
    """
    previous = ledger.begin(producer_id.incarnation)
    asked = {entry.consumer for entry in previous}
    settled = _all_of(len(asked), lambda: ledger.settle(producer_id.incarnation))
    sequences = count()

    def shard(rank: int) -> Shard:
        return producer_for(endpoints[rank])(
            endpoints[rank],
            token=token,
            layout=layout,
            producer_id=producer_id,
            ledger=RankLedger(ledger, rank),
            previous=_posted_to(rank, previous),
            on_settled=settled,
            sequences=sequences,
        )

    shards = [shard(rank) for rank in range(len(endpoints))]
    return shards[0] if len(shards) == 1 else ShardedProducer(shards)


def _posted_to(rank: int, entries: Sequence[Posted]) -> tuple[Posted, ...]:
    return tuple(entry for entry in entries if entry.consumer == rank)


def _all_of(number: int, action: Callable[[], None]) -> Callable[[], None]:
    """A call that acts when it is made for the last of so many times."""
    remaining = count(number - 1, -1)

    def called() -> None:
        if next(remaining) == 0:
            action()

    return called
