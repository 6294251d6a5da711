"""One producer for the ranks of a gang, over real shared-memory streams."""

import threading
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import pytest

from rlsrl.data.slots import ProducerId, rollout_layout
from rlsrl.data.version import Version
from rlsrl.runtime.ledger import ActorLedger, LedgerPage, TrainerLedger, balance, read_pages
from rlsrl.streams.consumer_core import ConsumerOptions
from rlsrl.streams.producer_core import ProducerOptions
from rlsrl.streams.protocols import StreamClosed, StreamTimeout
from rlsrl.streams.sharded import ShardedProducer
from rlsrl.streams.shared_memory.consumer import SharedMemoryConsumer
from rlsrl.streams.shared_memory.producer import SharedMemoryProducer
from rlsrl.testing.rollouts import discrete_env_spec
from rlsrl.workers.build.samples import AddressedLedger

LAYOUT = rollout_layout(discrete_env_spec(), num_steps=3, num_lanes=2)
TOKEN = "token-of-the-tests"
V1 = Version(1, 0)


class Fleet:
    """One actor and two ranks."""

    def __init__(self, folder: Path, resources: ExitStack) -> None:
        self.folder = folder
        self._resources = resources
        self._name = f"rlsrl-test-{uuid.uuid4().hex}"
        self.trainers = [TrainerLedger(self._page("trainer", rank)) for rank in range(2)]
        for trainer in self.trainers:
            trainer.resume(None)
        self.consumers = [self._consumer(rank) for rank in range(2)]
        ledger = ActorLedger(self._page("actor", 0))
        ledger.begin(0)
        sequences = count()
        self.producer = ShardedProducer(
            [
                SharedMemoryProducer(
                    f"{self._name}-{rank}",
                    ProducerOptions(
                        token=TOKEN,
                        layout=LAYOUT,
                        producer_id=ProducerId(0, 0),
                        ledger=AddressedLedger(ledger, rank),
                        sequences=sequences,
                    ),
                )
                for rank in range(2)
            ]
        )
        resources.callback(self.producer.close)

    def _page(self, role: str, index: int) -> LedgerPage:
        return self._resources.enter_context(LedgerPage.open(self.folder / f"{role}-{index}.page", role, index))

    def _consumer(self, rank: int) -> SharedMemoryConsumer:
        options = ConsumerOptions(token=TOKEN, layout_digest=LAYOUT.step_digest, ledger=self.trainers[rank])
        consumer = SharedMemoryConsumer(f"{self._name}-{rank}", options)
        self._resources.callback(consumer.close)
        return consumer

    def connect(self) -> None:
        """Complete every handshake."""
        while any(not consumer.producers for consumer in self.consumers):
            with pytest.raises(StreamTimeout):
                self.producer.acquire(timeout=0.01)
            for consumer in self.consumers:
                consumer.receive(1, timeout=0.01)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with ExitStack() as resources:
        yield Fleet(tmp_path, resources)


def test_each_slot_goes_to_the_rank_that_granted_it_and_the_ledgers_balance(fleet: Fleet) -> None:
    fleet.connect()
    fleet.consumers[0].grant(2, V1)
    fleet.consumers[1].grant(4, V1)
    for _ in range(3):
        slot = fleet.producer.acquire(timeout=5)
        slot.num_transitions = 5
        fleet.producer.post(slot)
    received = [[*consumer.receive(10, timeout=5), *consumer.receive(10, timeout=0)] for consumer in fleet.consumers]
    assert [len(slots) for slots in received] == [1, 2]
    numbers = [slot.sequence for slots in received for slot in slots]
    assert sorted(numbers) == [0, 1, 2]
    fleet.producer.flush(timeout=5)
    assert fleet.producer.unacknowledged == ()
    for trainer, slots in zip(fleet.trainers, received, strict=True):
        trainer.trained(5 * len(slots))
    books = balance(read_pages(fleet.folder), ended=False)
    books.check()
    assert (books.produced, books.trained) == (15, 15)


def test_a_credit_of_either_rank_ends_the_wait(fleet: Fleet) -> None:
    fleet.connect()
    for rank in (1, 0):
        granting = threading.Timer(0.05, fleet.consumers[rank].grant, (2, V1))
        granting.start()
        slot = fleet.producer.acquire(timeout=30)
        slot.num_transitions = 1
        fleet.producer.post(slot)
        granting.join()
        (received,) = fleet.consumers[rank].receive(1, timeout=5)
        fleet.consumers[rank].release(received)


def test_close_ends_the_wait(fleet: Fleet) -> None:
    fleet.connect()
    closing = threading.Timer(0.05, fleet.producer.close)
    closing.start()
    with pytest.raises(StreamClosed):
        fleet.producer.acquire(timeout=30)
    closing.join()


def test_a_slot_of_another_producer_is_refused(fleet: Fleet) -> None:
    fleet.connect()
    fleet.consumers[0].grant(2, V1)
    slot = fleet.producer.acquire(timeout=5)
    slot.num_transitions = 1
    fleet.producer.post(slot)
    with pytest.raises(ValueError, match="not in hand"):
        fleet.producer.post(slot)
