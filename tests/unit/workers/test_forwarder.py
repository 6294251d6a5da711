"""The forwarder between actors and a trainer, over real streams."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsrl.api.role_names import BUFFER, TRAINER
from rlsrl.data.slots import ProducerId, Slot
from rlsrl.data.version import INITIAL, Version
from rlsrl.runtime.addresses import Directory
from rlsrl.runtime.clock import SystemClock
from rlsrl.runtime.ledger import (
    ActorLedger,
    Balance,
    BufferLedger,
    LedgerPage,
    TrainerLedger,
    balance,
    read_pages,
    settle_ledger,
)
from rlsrl.streams.closable import EventFd
from rlsrl.streams.connect import open_sample_consumer
from rlsrl.streams.consumer_core import ConsumerOptions
from rlsrl.streams.protocols import HandshakeRefused, SampleConsumer, SampleProducer, StreamClosed, StreamTimeout
from rlsrl.testing.stream_bench import DEADLINE, NUM_LANES, TOKEN, TRANSITIONS, fill, small_layout, value_of
from rlsrl.workers.build.samples import open_producer
from rlsrl.workers.forwarder import DownstreamCredits, Forwarder

NOWHERE_ELSE = Directory(lambda role, index: None)
LAYOUT = small_layout()
V1, V2, V3, LATER = Version(1, 1), Version(1, 2), Version(1, 3), Version(2, 0)
TICK = 0.002


class Chain:
    """Actors, a buffer worker and a trainer in this process, driven from one thread."""

    def __init__(self, folder: Path, resources: ExitStack, prefix: str) -> None:
        self._folder = folder
        self._resources = resources
        self._name = f"{prefix}rlsrl-test-{uuid.uuid4().hex}"
        self.arrived: list[Slot] = []
        self._actors: list[SampleProducer] = []
        trainer = TrainerLedger(self._page("trainer", 0), producers=BUFFER)
        trainer.resume(None)
        self.trainer = self._consumer("trainer", trainer, slots=4)
        self._lives = 0
        self.start_buffer()

    def _page(self, role: str, index: int) -> LedgerPage:
        return self._resources.enter_context(LedgerPage.open(self._folder / f"{role}-{index}.page", role, index))

    def _consumer(self, role: str, ledger: TrainerLedger | BufferLedger, *, slots: int) -> SampleConsumer:
        endpoint = f"{self._name}-{role}"
        options = ConsumerOptions(
            token=TOKEN, layout_digest=LAYOUT.step_digest, ledger=ledger, slots_per_producer=slots
        )
        consumer = open_sample_consumer(endpoint, options, tls=None, on_unauthenticated=lambda: None)
        self._resources.callback(consumer.close)
        return consumer

    def start_buffer(self, *, token: str = TOKEN) -> None:
        """Start one life of the buffer worker."""
        self.page = LedgerPage.open(self._folder / "buffer-0.page", "buffer", 0)
        self._resources.callback(self.page.close)
        self.ledger = BufferLedger(self.page)
        self.downstream = open_producer(
            {0: f"{self._name}-trainer"},
            consumers=TRAINER,
            token=token,
            tls=None,
            layout=LAYOUT,
            producer_id=ProducerId(0, self._lives),
            ledger=self.ledger,
            directory=NOWHERE_ELSE,
        )
        self._resources.callback(self.downstream.close)
        self._lives += 1
        self.upstream = self._consumer("buffer", self.ledger, slots=2)
        self.forwarder = Forwarder(
            upstream=self.upstream,
            downstream=self.downstream,
            num_lanes=NUM_LANES,
            ledger=self.ledger,
            clock=SystemClock(),
        )
        self._resources.callback(self.forwarder.close)
        self.forwarder.start()

    def kill_buffer(self) -> None:
        """End the buffer worker at once: it writes, sends and counts nothing more."""
        self.page.close()
        self.downstream.close()
        self.upstream.close()

    def actor(self, index: int = 0, *, num_lanes: int = NUM_LANES) -> SampleProducer:
        """Return an actor of the buffer worker."""
        producer = open_producer(
            {0: f"{self._name}-buffer"},
            consumers=BUFFER,
            token=TOKEN,
            tls=None,
            layout=LAYOUT.with_lanes(num_lanes),
            producer_id=ProducerId(index, 0),
            ledger=ActorLedger(self._page("actor", index)),
            directory=NOWHERE_ELSE,
        )
        self._resources.callback(producer.close)
        self._actors.append(producer)
        return producer

    def serve(self) -> None:
        """Let every part handle the messages that have arrived."""
        for actor in self._actors:
            with suppress(StreamTimeout, StreamClosed):
                actor.flush(0)
        self.forwarder.check()
        self.forwarder.receive(TICK)
        self.forwarder.forward()
        slots = self.trainer.receive(64, TICK)
        assert all(slot.oldest_version >= slot.min_version for slot in slots), "the policy lag is kept"
        self.arrived += slots

    def until(self, happened: Callable[[], bool]) -> None:
        """Serve until ``happened`` returns True."""
        deadline = time.monotonic() + DEADLINE
        while not happened():
            assert time.monotonic() < deadline, "the awaited event did not happen"
            self.serve()

    def acquire(self, actor: SampleProducer, *, seconds: float = DEADLINE) -> Slot:
        """Serve until the actor has a credit; return its slot. Fail after the deadline."""
        deadline = time.monotonic() + seconds
        while (slot := self.try_acquire(actor)) is None:
            assert time.monotonic() < deadline, "no credit came"
        return slot

    def try_acquire(self, actor: SampleProducer) -> Slot | None:
        """Return a slot, or None if the actor gets no credit for a while."""
        for _ in range(20):
            self.serve()
            try:
                return actor.acquire(TICK)
            except StreamTimeout:
                continue
        return None

    def flush(self, actor: SampleProducer) -> None:
        """Serve until every acknowledgement has arrived."""
        self.until(lambda: not (actor.unacknowledged or self.downstream.unacknowledged))

    def take(self, count: int) -> list[Slot]:
        """Serve until ``count`` slots have reached the trainer; return them."""
        self.until(lambda: len(self.arrived) >= count)
        taken, self.arrived = self.arrived[:count], self.arrived[count:]
        return taken

    def balance(self, *, ended: bool = False) -> Balance:
        """Return the balance of all ledgers; fail if it does not add up."""
        books = balance(read_pages(self._folder), ended=ended)
        books.check()
        return books


@pytest.fixture(params=["", "unix-abstract:"], ids=["shared memory", "grpc"])
def chain(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Chain]:
    with ExitStack() as resources:
        yield Chain(tmp_path, resources, request.param)


def rollout(slot: Slot, value: int, version: Version) -> Slot:
    """Fill a slot with the value, as acted with these weights."""
    fill(slot, value)
    slot.arrays["version_attempt"][:], slot.arrays["version_step"][:] = version
    return slot


def reward_of(slot: Slot) -> int:
    """Return a slot's value."""
    return int(slot.arrays["reward"][0, 0])


def test_slots_of_actors_reach_the_trainer_in_order(chain: Chain) -> None:
    actor = chain.actor(3)
    chain.trainer.grant(6 * NUM_LANES, INITIAL)
    for value in range(6):
        actor.post(fill(chain.acquire(actor), value))
        (slot,) = chain.take(1)
        assert value_of(slot) == value
        assert (slot.producer, slot.sequence, slot.num_transitions) == (ProducerId(0, 0), value, TRANSITIONS)
        chain.trainer.release(slot)
    chain.flush(actor)
    books = chain.balance()
    assert (books.produced, books.in_buffer, books.unsettled) == (6 * TRANSITIONS, 6 * TRANSITIONS, 0)
    assert chain.page.record.counters["passed_on"] == 6 * TRANSITIONS


def test_actors_fill_no_more_than_the_trainer_granted(chain: Chain) -> None:
    actor = chain.actor()
    assert chain.try_acquire(actor) is None
    chain.trainer.grant(NUM_LANES, INITIAL)
    actor.post(fill(chain.acquire(actor), 1))
    assert chain.try_acquire(actor) is None
    (slot,) = chain.take(1)
    chain.trainer.release(slot)
    assert chain.try_acquire(actor) is None
    chain.trainer.grant(NUM_LANES, INITIAL)
    assert chain.acquire(actor).num_lanes == NUM_LANES


def test_min_version_of_the_trainer_reaches_the_actors(chain: Chain) -> None:
    actor = chain.actor()
    chain.trainer.grant(NUM_LANES, V1)
    first = chain.acquire(actor)
    chain.trainer.grant(NUM_LANES, V3)
    second = chain.acquire(actor)
    assert [first.min_version, second.min_version] == [V1, V3]


def test_policy_lag_is_kept_in_any_order_of_arrival(chain: Chain) -> None:
    slow, fast = chain.actor(0), chain.actor(1)
    assert chain.try_acquire(fast) is chain.try_acquire(slow) is None  # both are connected
    chain.trainer.grant(NUM_LANES, V1)
    old = chain.acquire(slow)
    chain.trainer.grant(NUM_LANES, V3)
    new = chain.acquire(fast)
    fast.post(rollout(new, 3, V3))
    (slot,) = chain.take(1)
    assert (slot.min_version, reward_of(slot)) == (V3, 3)
    slow.post(rollout(old, 1, V1))
    (slot,) = chain.take(1)
    assert (slot.min_version, reward_of(slot)) == (V1, 1)


def test_only_slots_that_a_killed_buffer_worker_held_are_lost(chain: Chain) -> None:
    actor = chain.actor()
    chain.trainer.grant(2 * NUM_LANES, INITIAL)
    held, later = chain.acquire(actor), chain.acquire(actor)
    actor.post(fill(held, 1))
    taken: list[Slot] = []
    while not taken:  # the slot is acknowledged, and the worker dies before it forwards it
        taken += chain.upstream.receive(1, TICK)
        with pytest.raises(StreamTimeout):
            actor.acquire(TICK)
    chain.kill_buffer()
    actor.post(fill(later, 2))
    chain.start_buffer()
    (slot,) = chain.take(1)
    assert (value_of(slot), slot.producer) == (2, ProducerId(0, 1))
    actor.post(fill(chain.acquire(actor), 3))
    assert [value_of(slot) for slot in chain.take(1)] == [3], "the lost one is made up for"
    chain.flush(actor)
    books = chain.balance()
    assert (books.produced, books.in_buffer) == (3 * TRANSITIONS, 2 * TRANSITIONS)
    assert (books.lost["receiver_died"], books.lost["producer_died"]) == (TRANSITIONS, 0)


def test_lost_posts_are_settled_by_the_next_incarnation(chain: Chain) -> None:
    actor = chain.actor()
    chain.trainer.grant(NUM_LANES, INITIAL)
    actor.post(fill(chain.acquire(actor), 1))
    while chain.page.record.counters["passed_on"] == 0:
        chain.forwarder.receive(TICK)
        chain.forwarder.forward()
        with pytest.raises(StreamTimeout):
            actor.acquire(TICK)
    chain.kill_buffer()
    chain.start_buffer()
    chain.until(lambda: chain.balance().unsettled == 0)
    books = chain.balance()
    assert books.in_buffer + books.lost["producer_died"] == books.produced == TRANSITIONS
    assert books.lost["receiver_died"] == 0


def test_a_stale_rollout_is_dropped_and_its_lanes_are_granted_again(chain: Chain) -> None:
    actor = chain.actor()
    chain.trainer.grant(NUM_LANES, V1)
    in_hand = chain.acquire(actor)
    chain.kill_buffer()
    chain.trainer.grant(0, LATER)  # credits of the next life require new weights
    chain.start_buffer()
    chain.until(lambda: chain.forwarder.num_credits == 1)
    actor.post(rollout(in_hand, 1, V1))
    chain.until(lambda: chain.page.record.counters["dropped.old_attempt"] == TRANSITIONS)
    slot = chain.acquire(actor)
    assert slot.min_version == LATER
    actor.post(rollout(slot, 2, LATER))
    assert [reward_of(slot) for slot in chain.take(1)] == [2]
    assert chain.balance().dropped["old_attempt"] == TRANSITIONS


@pytest.mark.parametrize("num_lanes", [1, 2 * NUM_LANES])
def test_a_slot_of_another_width_is_dropped_and_all_its_lanes_are_granted_again(chain: Chain, num_lanes: int) -> None:
    """Such a slot may come from a former life or under a current credit, until the actor is replaced."""
    former = chain.actor(0, num_lanes=num_lanes)
    transitions = TRANSITIONS // NUM_LANES * num_lanes
    chain.trainer.grant(2 * NUM_LANES, V1)
    in_hand = chain.acquire(former)
    chain.kill_buffer()
    chain.start_buffer()
    chain.until(lambda: chain.forwarder.num_credits == 2)
    former.post(rollout(in_hand, 1, V1))
    chain.until(lambda: chain.page.record.counters["dropped.old_attempt"] == transitions)
    former.post(rollout(chain.acquire(former, seconds=10.0), 2, V1))
    chain.until(lambda: chain.page.record.counters["dropped.old_attempt"] == 2 * transitions)
    former.close()
    actor = chain.actor(1)
    for value in (3, 4):
        actor.post(rollout(chain.acquire(actor), value, V1))
    assert [reward_of(slot) for slot in chain.take(2)] == [3, 4]
    assert chain.try_acquire(actor) is None, "nothing is granted twice"


def test_close_counts_the_remaining_slots_as_dropped(chain: Chain) -> None:
    actor = chain.actor()
    chain.trainer.grant(2 * NUM_LANES, INITIAL)
    for value in range(2):
        actor.post(fill(chain.acquire(actor), value))
    chain.flush(actor)
    chain.forwarder.close()
    chain.ledger.end()
    actor.close()
    chain.trainer.close()
    books = chain.balance(ended=True)
    chain.page.close()
    assert books.produced == 2 * TRANSITIONS
    assert books.to_json() == {**chain.balance(ended=True).to_json()}


def test_ledgers_of_a_chain_settle(tmp_path: Path) -> None:
    """A slot that the buffer worker holds or has posted does not count as lost with the actor."""
    with ExitStack() as resources:
        chain = Chain(tmp_path, resources, "")
        actor = chain.actor()
        chain.trainer.grant(2 * NUM_LANES, INITIAL)
        for value in range(2):
            actor.post(fill(chain.acquire(actor), value))
        chain.take(1)
        chain.kill_buffer()
    before = balance(read_pages(tmp_path), ended=True)
    settle_ledger(tmp_path)
    after = balance(read_pages(tmp_path), ended=True)
    after.check()
    assert before.to_json() == after.to_json()
    assert after.produced == sum(after.lost.values()) + sum(after.dropped.values()) == 2 * TRANSITIONS


def test_a_refusal_by_the_trainer_ends_the_worker(tmp_path: Path) -> None:
    with ExitStack() as resources:
        chain = Chain(tmp_path, resources, "")
        chain.kill_buffer()
        chain.start_buffer(token="another")
        with pytest.raises(HandshakeRefused, match="token"):
            chain.until(lambda: False)


class IdleShard:
    """A producer without credits that counts touches."""

    def __init__(self) -> None:
        self.wake = EventFd()
        self.looks = threading.Semaphore(0)
        self.touches = 0
        self.retries_at = float("inf")
        self.unacknowledged = ()

    def fileno(self) -> int:
        return self.wake.fileno()

    def acquire(self, timeout: float) -> Slot:
        self.looks.release()
        raise StreamTimeout(f"none within {timeout} s")

    def touch(self) -> None:
        self.touches += 1

    def post(self, slot: Slot) -> None:
        raise AssertionError(slot)

    def flush(self, timeout: float) -> None:
        raise AssertionError(timeout)

    def close(self) -> None:
        self.wake.close()


def test_a_hanging_worker_does_not_touch_its_liveness(tmp_path: Path) -> None:
    with ExitStack() as resources:
        chain = Chain(tmp_path, resources, "")
        shard = IdleShard()
        shard.wake.set()  # keeps its thread running
        forwarder = Forwarder(
            upstream=chain.upstream,
            downstream=shard,
            num_lanes=NUM_LANES,
            ledger=chain.ledger,
            clock=SystemClock(),
        )
        resources.callback(forwarder.close)
        forwarder.start()

        def look_around() -> int:
            for _ in range(20):
                assert shard.looks.acquire(timeout=DEADLINE)
            return shard.touches

        assert look_around() == look_around() == 1
        forwarder.receive(0.0)
        forwarder.forward()
        while look_around() == 1:
            pass
        assert look_around() == look_around() == 2


# Which credit a rollout fills.


def credit(version: Version) -> Slot:
    return Slot(arrays={}, min_version=version)


def test_a_rollout_takes_the_credit_with_the_newest_version_that_it_satisfies() -> None:
    in_hand = DownstreamCredits()
    for version in (V1, V2, V2, V3):
        in_hand.add(credit(version))
    assert in_hand.newest_version == V3
    filled = [in_hand.take_for(version) for version in (V2, V3, V2, V1)]
    assert [slot.min_version for slot in filled if isinstance(slot, Slot)] == [V2, V3, V2, V1]
    assert len(in_hand) == 0


def test_a_rollout_without_a_credit_is_stale_or_of_an_old_attempt() -> None:
    in_hand = DownstreamCredits()
    in_hand.add(credit(V3))
    assert in_hand.take_for(V2) == "stale"
    in_hand.add(credit(LATER))
    assert in_hand.take_for(V2) == "old_attempt"
    assert len(in_hand) == 2


@given(st.data())
def test_each_granted_rollout_finds_a_credit(data: st.DataObject) -> None:
    """Credits of rising versions are granted upstream; rollouts arrive in any order, with any later weights."""
    in_hand = DownstreamCredits()
    granted = 0
    rolling: list[Version] = []
    step = 0
    for _ in range(data.draw(st.integers(1, 30))):
        match data.draw(st.sampled_from(["order", "issue", "come"])):
            case "order":
                step += data.draw(st.integers(0, 2))
                in_hand.add(credit(Version(1, step)))
                granted += 1
            case "issue" if granted:
                granted -= 1
                acted = in_hand.newest_version.step + data.draw(st.integers(0, 2))
                rolling.append(Version(1, acted))
            case "come" if rolling:
                version = rolling.pop(data.draw(st.integers(0, len(rolling) - 1)))
                found = in_hand.take_for(version)
                assert isinstance(found, Slot)
                assert found.min_version <= version
    assert len(in_hand) == granted + len(rolling)
