"""Build a worker's ends of sample streams: one producer, with a stream to each of its consumers, or one consumer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from itertools import count

from typing_extensions import override

from rlsrl.data.slots import ProducerId, SlotLayout
from rlsrl.rpc.tls import Tls
from rlsrl.runtime.addresses import Directory, own_address
from rlsrl.runtime.ledger import ProducerAccount, key_of
from rlsrl.streams.connect import open_sample_consumer, open_sample_producer
from rlsrl.streams.consumer_core import ConsumerOptions
from rlsrl.streams.producer_core import ProducerOptions
from rlsrl.streams.protocols import ConsumerLedger, PollableProducer, ProducerLedger, SampleConsumer
from rlsrl.streams.sharded import ShardedProducer
from rlsrl.workers.context import WorkerContext


class AddressedLedger(ProducerLedger):
    """A producer's account with one of its consumers."""

    def __init__(self, account: ProducerAccount, consumer: int) -> None:
        """``consumer`` is its key."""
        self._account = account
        self._consumer = consumer

    @override
    def produce(self, sequence: int, num_transitions: int) -> int:
        return self._account.produce(sequence, num_transitions, consumer=self._consumer)

    @override
    def acknowledge(self, sequence: int) -> None:
        self._account.acknowledge(sequence)


def open_producer(
    endpoints: Mapping[int, str],
    *,
    consumers: str,
    token: str,
    tls: Tls | None,
    layout: SlotLayout,
    producer_id: ProducerId,
    ledger: ProducerAccount,
    directory: Directory,
) -> PollableProducer:
    """Return a producer for consumers of the role ``consumers`` at ``endpoints``, by index, and begin the ledger's new
    life.

    The ledger forgets the unacknowledged slots of former lives once every consumer of such a slot has settled them.

    Raises:
        ConfigurationError: a slot is too large for the transport.
    """
    previous = ledger.begin(producer_id.incarnation)
    unsettled = {entry.consumer for entry in previous}
    on_settled = _after_calls(len(unsettled), lambda: ledger.forget_settled(producer_id.incarnation))
    sequences = count()

    def shard(index: int, endpoint: str) -> PollableProducer:
        consumer = key_of(consumers, index)
        options = ProducerOptions(
            token=token,
            layout=layout,
            producer_id=producer_id,
            ledger=AddressedLedger(ledger, consumer),
            progress=ledger.progress(consumer),
            on_settled=on_settled,
            sequences=sequences,
        )
        return open_sample_producer(endpoint, options, find=directory.find, tls=tls)

    shards = [shard(index, endpoint) for index, endpoint in endpoints.items()]
    return shards[0] if len(shards) == 1 else ShardedProducer(shards)


def open_consumer(
    endpoint: str,
    context: WorkerContext,
    resources: ExitStack,
    *,
    layout: SlotLayout,
    ledger: ConsumerLedger,
    slots_per_producer: int,
    peer_timeout: float,
    expected_producers: int,
) -> SampleConsumer:
    """Return a consumer that serves ``endpoint``; ``resources`` closes it.

    Raises:
        OSError: another process serves the endpoint.
    """
    options = ConsumerOptions(
        token=context.token,
        layout_digest=layout.step_digest,
        ledger=ledger,
        slots_per_producer=slots_per_producer,
        peer_timeout=peer_timeout,
        expected_producers=expected_producers,
    )
    consumer = open_sample_consumer(
        own_address(endpoint), options, tls=context.tls, on_unauthenticated=context.count_unauthenticated
    )
    resources.callback(consumer.close)
    return consumer


def _after_calls(num_calls: int, action: Callable[[], None]) -> Callable[[], None]:
    """Return a function whose call number ``num_calls`` runs the action."""
    remaining = count(num_calls - 1, -1)

    def called() -> None:
        if next(remaining) == 0:
            action()

    return called
