"""Producers of samples: one for each consumer that takes a part of them, used as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count

from rlsrl.data.slots import ProducerId, SlotLayout
from rlsrl.rpc.tls import Tls
from rlsrl.runtime.addresses import Directory
from rlsrl.runtime.ledger import ProducerAccount
from rlsrl.streams.connect import producer_for
from rlsrl.streams.sharded import Shard, ShardedProducer


class AddressedLedger:
    """What a producer writes down of the slots it posts to one consumer."""

    def __init__(self, ledger: ProducerAccount, consumer: int) -> None:
        self._ledger = ledger
        self._consumer = consumer

    def produce(self, sequence: int, num_transitions: int) -> int:
        """See ``streams.protocols.ProducerLedger``."""
        return self._ledger.produce(sequence, num_transitions, consumer=self._consumer)

    def acknowledge(self, sequence: int) -> None:
        """See ``streams.protocols.ProducerLedger``."""
        self._ledger.acknowledge(sequence)


def open_producer(
    endpoints: Mapping[int, str],
    *,
    token: str,
    tls: Tls | None,
    layout: SlotLayout,
    producer_id: ProducerId,
    ledger: ProducerAccount,
    directory: Directory,
) -> Shard:
    """A producer to the consumers at ``endpoints``, by their index; begins the ledger's new life.

    What former lives left unacknowledged is forgotten once every consumer that it was posted to has accounted for its
    part.

    Raises:
        ConfigurationError: slots are too large for the transport.
    """
    previous = ledger.begin(producer_id.incarnation)
    asked = {entry.consumer for entry in previous}
    settled = _all_of(len(asked), lambda: ledger.settle(producer_id.incarnation))
    sequences = count()

    def shard(consumer: int, endpoint: str) -> Shard:
        make = producer_for(endpoint, find=directory.find, tls=tls)
        return make(
            endpoint,
            token=token,
            layout=layout,
            producer_id=producer_id,
            ledger=AddressedLedger(ledger, consumer),
            progress=ledger.progress(consumer),
            on_settled=settled,
            sequences=sequences,
        )

    shards = [shard(consumer, endpoint) for consumer, endpoint in endpoints.items()]
    return shards[0] if len(shards) == 1 else ShardedProducer(shards)


def _all_of(number: int, action: Callable[[], None]) -> Callable[[], None]:
    """A call that acts when it is made for the last of so many times."""
    remaining = count(number - 1, -1)

    def called() -> None:
        if next(remaining) == 0:
            action()

    return called
