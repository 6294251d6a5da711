"""The conformance suite of sample streams: tests that each transport inherits.

A test module subclasses ``SampleStreamConformance`` and gives it a fixture ``transport``; for a transport between
processes also ``SampleStreamProcessConformance``, which runs each end in its own process and kills or stops it.
"""

# ruff: noqa: D102 - these are tests, named for what they say

from __future__ import annotations

import gc
import random
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from typing_extensions import override

from rlsrl.data.slots import ProducerId
from rlsrl.data.version import INITIAL, Version
from rlsrl.runtime.ledger import ActorLedger, TrainerLedger
from rlsrl.streams.protocols import HandshakeRefused, SampleConsumer, SampleProducer, StreamClosed, StreamTimeout
from rlsrl.testing.clock import ManualClock
from rlsrl.testing.leaks import open_descriptors, traced_memory
from rlsrl.testing.process_driver import DrivenProcess, driven_processes
from rlsrl.testing.stream_bench import (
    DEADLINE,
    NUM_LANES,
    TRANSITIONS,
    V1,
    ObservableConsumer,
    StreamBench,
    Transport,
    fill,
    small_layout,
    value_of,
)

PATIENCE = 1.0
"""Peer time-out in seconds for tests that wait, in real time, until a stopped process is revoked."""
V2, V3 = Version(1, 2), Version(2, 0)


class _WithBench:
    @pytest.fixture
    def bench(self, transport: Transport, tmp_path: Path) -> Iterator[StreamBench]:
        bench = StreamBench(transport, tmp_path)
        yield bench
        bench.close()

    @pytest.fixture
    def pool(self) -> Iterator[ThreadPoolExecutor]:
        with ThreadPoolExecutor(max_workers=4) as pool:
            yield pool


class SampleStreamConformance(_WithBench):
    """One stream with all ends in this process."""

    @pytest.fixture
    def clock(self) -> ManualClock:
        return ManualClock()

    @pytest.fixture
    def still(self, transport: Transport, tmp_path: Path, clock: ManualClock) -> Iterator[StreamBench]:
        """Return a bench with a clock that only the test advances."""
        bench = StreamBench(transport, tmp_path, clock=clock)
        yield bench
        bench.close()

    # Order and content.

    def test_slots_arrive_in_order_with_what_was_written(self, bench: StreamBench) -> None:
        consumer, producer = bench.consumer(granted=6), bench.producer(index=3, incarnation=7)
        for value in range(6):
            producer.post(fill(bench.acquire(consumer, producer), value))
            (slot,) = bench.take(consumer, 1)
            assert value_of(slot) == value
            assert (slot.producer, slot.sequence, slot.credit) == (ProducerId(3, 7), value, value)
            assert slot.num_transitions == TRANSITIONS
            consumer.release(slot)
        bench.flush(consumer, producer)
        assert bench.balance().in_buffer == 6 * TRANSITIONS

    def test_min_version_is_that_of_the_newest_grant(self, bench: StreamBench) -> None:
        consumer, producer = bench.consumer(slots_per_producer=3), bench.producer()
        consumer.grant(NUM_LANES, V2)
        first = bench.acquire(consumer, producer)
        consumer.grant(NUM_LANES, V3)
        consumer.grant(NUM_LANES, V1)
        second, third = bench.acquire(consumer, producer), bench.acquire(consumer, producer)
        assert [first.min_version, second.min_version, third.min_version] == [V2, V3, V3]
        producer.post(fill(first, 1))
        assert bench.take(consumer, 1)[0].min_version == V2

    def test_credits_rotate_over_producers_by_index(self, bench: StreamBench) -> None:
        consumer = bench.consumer()
        producers = {index: bench.producer(index) for index in (2, 0, 1)}
        bench.connect(consumer, *producers.values())
        assert consumer.producers == (ProducerId(0, 0), ProducerId(1, 0), ProducerId(2, 0))
        consumer.grant(6 * NUM_LANES, V1)
        orders = {
            index: [bench.acquire(consumer, producer).credit for _ in range(2)] for index, producer in producers.items()
        }
        assert orders == {0: [0, 3], 1: [1, 4], 2: [2, 5]}

    def test_producers_may_differ_in_width(self, bench: StreamBench) -> None:
        consumer = bench.consumer()
        wide, narrow = bench.producer(0, num_lanes=3), bench.producer(1, num_lanes=2)
        bench.connect(consumer, wide, narrow)
        consumer.grant(5, V1)
        assert bench.acquire(consumer, wide).num_lanes == 3
        assert bench.acquire(consumer, narrow).num_lanes == 2
        assert bench.try_acquire(consumer, wide) is None
        assert bench.try_acquire(consumer, narrow) is None

    def test_slots_that_receive_has_not_returned_are_outstanding(self, bench: StreamBench) -> None:
        consumer, producer = bench.consumer(granted=2), bench.producer()
        slots = [bench.acquire(consumer, producer) for _ in range(2)]
        assert [*consumer.outstanding] == [0, 1]
        for slot in slots:
            producer.post(fill(slot, 1))
        assert [slot.credit for slot in consumer.receive(1, DEADLINE)] == [0]
        assert [*consumer.outstanding] == [1]
        assert [slot.credit for slot in consumer.receive(1, DEADLINE)] == [1]
        assert [*consumer.outstanding] == []

    # Back-pressure.

    def test_producers_fill_no_more_than_was_granted(self, bench: StreamBench) -> None:
        consumer, producer = bench.consumer(), bench.producer()
        bench.connect(consumer, producer)
        consumer.grant(NUM_LANES, V1)
        producer.post(fill(bench.acquire(consumer, producer), 1))
        assert bench.try_acquire(consumer, producer) is None
        (slot,) = bench.take(consumer, 1)
        consumer.release(slot)
        assert bench.try_acquire(consumer, producer) is None
        consumer.grant(NUM_LANES, V2)
        assert bench.acquire(consumer, producer).credit == 1

    def test_a_slot_gets_no_credit_before_its_release(self, bench: StreamBench) -> None:
        consumer, producer = bench.consumer(granted=3), bench.producer()
        for value in range(2):
            producer.post(fill(bench.acquire(consumer, producer), value))
        slots = bench.take(consumer, 2)
        assert bench.try_acquire(consumer, producer) is None
        consumer.release(slots[0])
        fill(bench.acquire(consumer, producer), 9)
        assert value_of(slots[1]) == 1

    def test_a_slot_is_released_once(self, bench: StreamBench) -> None:
        consumer, producer = bench.consumer(granted=1), bench.producer()
        producer.post(fill(bench.acquire(consumer, producer), 1))
        (slot,) = bench.take(consumer, 1)
        consumer.release(slot)
        with pytest.raises(ValueError, match="released before"):
            consumer.release(slot)

    def test_only_a_slot_in_hand_is_posted_and_once(self, bench: StreamBench) -> None:
        consumer, producer = bench.consumer(granted=2), bench.producer()
        slot = bench.acquire(consumer, producer)
        slot.num_transitions = TRANSITIONS + 1
        with pytest.raises(ValueError, match="num_transitions"):
            producer.post(slot)
        producer.post(fill(slot, 1))
        with pytest.raises(ValueError, match="not in hand"):
            producer.post(slot)
        assert [value_of(slot) for slot in bench.take(consumer, 1)] == [1]

    # Close during a wait.

    @pytest.mark.parametrize("has_consumer", [False, True])
    def test_close_wakes_a_producer_that_waits_for_a_credit(
        self, bench: StreamBench, pool: ThreadPoolExecutor, has_consumer: bool
    ) -> None:
        producer = bench.producer()
        if has_consumer:
            bench.connect(bench.consumer(), producer)
        waiting = pool.submit(producer.acquire, DEADLINE)
        producer.close()
        with pytest.raises(StreamClosed):
            waiting.result(DEADLINE)
        with pytest.raises(StreamClosed):
            producer.acquire(0.0)
        producer.close()

    def test_close_wakes_a_producer_that_flushes(self, bench: StreamBench, pool: ThreadPoolExecutor) -> None:
        consumer, producer = bench.consumer(granted=1), bench.producer()
        producer.post(fill(bench.acquire(consumer, producer), 1))
        waiting = pool.submit(producer.flush, DEADLINE)
        producer.close()
        with pytest.raises(StreamClosed):
            waiting.result(DEADLINE)

    def test_close_wakes_a_consumer_that_receives(self, bench: StreamBench, pool: ThreadPoolExecutor) -> None:
        consumer, producer = bench.consumer(peer_timeout=100 * DEADLINE), bench.producer()
        waiting = pool.submit(consumer.receive, 1, 100 * DEADLINE)
        while not consumer.producers:  # once it is admitted the consumer is known to serve
            with pytest.raises(StreamTimeout):
                producer.acquire(0.01)
        consumer.close()
        assert not waiting.result(DEADLINE)
        assert not consumer.receive(1, DEADLINE)
        consumer.close()

    def test_a_grant_from_another_thread_ends_both_waits(self, bench: StreamBench, pool: ThreadPoolExecutor) -> None:
        consumer, producer = bench.consumer(), bench.producer()
        bench.connect(consumer, producer)
        receiving = pool.submit(consumer.receive, 1, DEADLINE)
        acquiring = pool.submit(producer.acquire, DEADLINE)
        consumer.grant(NUM_LANES, V1)
        producer.post(fill(acquiring.result(DEADLINE), 4))
        assert [value_of(slot) for slot in receiving.result(DEADLINE)] == [4]

    # Ends that close and return.

    def test_credits_of_a_closed_producer_go_to_others(self, bench: StreamBench) -> None:
        consumer, leaver, stayer = bench.consumer(slots_per_producer=3), bench.producer(0), bench.producer(1)
        bench.connect(consumer, leaver, stayer)
        consumer.grant(2 * NUM_LANES, V1)
        bench.acquire(consumer, leaver)
        assert bench.acquire(consumer, stayer).credit == 1
        consumer.grant(NUM_LANES, V2)
        assert [*consumer.outstanding] == [0, 1, 2]
        leaver.close()
        orders = [bench.acquire(consumer, stayer) for _ in range(2)]
        assert [(slot.credit, slot.min_version) for slot in orders] == [(3, V2), (4, V2)]
        assert [*consumer.outstanding] == [1, 3, 4]
        assert consumer.producers == (ProducerId(1, 0),)

    def test_credits_of_a_disconnected_producer_go_to_others_until_it_connects_again(self, bench: StreamBench) -> None:
        consumer, leaver, stayer = bench.consumer(slots_per_producer=2), bench.producer(0), bench.producer(1)
        bench.connect(consumer, leaver, stayer)
        consumer.grant(2 * NUM_LANES, V1)
        leaver.post(fill(bench.acquire(consumer, leaver), 3))
        bench.flush(consumer, leaver)
        (slot,) = bench.take(consumer, 1)
        consumer.release(slot)
        consumer.grant(NUM_LANES, V2)  # for the producer that has waited longest
        leaver.disconnect()
        bench.until(consumer, lambda: consumer.producers == (ProducerId(1, 0),))
        for value in range(2):
            stayer.post(fill(bench.acquire(consumer, stayer), value))
        bench.flush(consumer, stayer)
        assert [value_of(slot) for slot in bench.take(consumer, 2)] == [0, 1]
        bench.connect(consumer, leaver)
        consumer.grant(NUM_LANES, V3)
        leaver.post(fill(bench.acquire(consumer, leaver), 4))
        bench.flush(consumer, leaver)
        (slot,) = bench.take(consumer, 1)
        assert (slot.producer, slot.sequence, value_of(slot)) == (ProducerId(0, 0), 1, 4)
        assert bench.balance().in_buffer == 4 * TRANSITIONS

    def test_slots_posted_before_close_arrive(self, bench: StreamBench) -> None:
        consumer, producer = bench.consumer(granted=2), bench.producer()
        slots = [bench.acquire(consumer, producer) for _ in range(2)]
        for value, slot in enumerate(slots):
            producer.post(fill(slot, value))
        producer.close()
        arrived = bench.take(consumer, 2)
        bench.until(consumer, lambda: not consumer.producers)
        assert [value_of(slot) for slot in arrived] == [0, 1]
        for slot in arrived:
            consumer.release(slot)

    def test_unacknowledged_slots_reach_the_next_consumer_once(self, bench: StreamBench) -> None:
        consumer, producer = bench.consumer(granted=2), bench.producer()
        slots = [bench.acquire(consumer, producer) for _ in range(2)]
        producer.post(fill(slots[0], 5))
        bench.take(consumer, 1)
        producer.post(fill(slots[1], 6))
        consumer.close()
        successor = bench.consumer()
        bench.flush(successor, producer)
        assert [(slot.sequence, value_of(slot)) for slot in bench.take(successor, 1)] == [(1, 6)]
        assert bench.balance().in_buffer == 2 * TRANSITIONS
        successor.grant(NUM_LANES, V3)
        assert bench.try_acquire(successor, producer) is None, "the slot that was posted again counts against the grant"
        successor.grant(NUM_LANES, V3)
        assert bench.acquire(successor, producer).min_version == V3

    def test_a_slot_taken_without_acknowledgement_is_not_delivered_again(self, bench: StreamBench) -> None:
        class FailsAfterTaking(TrainerLedger):
            @override
            def take(self, producer: ProducerId, sequence: int, num_transitions: int, total: int) -> None:
                super().take(producer, sequence, num_transitions, total)
                raise RuntimeError("killed in the ledger")

        assert self._received_after_a_kill_in(FailsAfterTaking, bench) == []

    def test_a_slot_that_was_not_stored_reaches_the_next_consumer(self, bench: StreamBench) -> None:
        class FailsToTake(TrainerLedger):
            @override
            def take(self, producer: ProducerId, sequence: int, num_transitions: int, total: int) -> None:
                del producer, sequence, num_transitions, total
                raise RuntimeError("killed in the ledger")

        assert self._received_after_a_kill_in(FailsToTake, bench) == [(0, 5)]

    @staticmethod
    def _received_after_a_kill_in(ledger: type[TrainerLedger], bench: StreamBench) -> list[tuple[int, int]]:
        """Post a slot to a consumer whose ledger fails; return the slots that its successor receives."""
        consumer, producer = bench.consumer(granted=1, ledger=ledger(bench.trainer_page())), bench.producer()
        producer.post(fill(bench.acquire(consumer, producer), 5))
        with pytest.raises(RuntimeError, match="killed in the ledger"):
            bench.until(consumer, lambda: False)
        consumer.close()
        assert [*producer.unacknowledged] == [(0, TRANSITIONS)]
        successor = bench.consumer()
        bench.flush(successor, producer)
        assert not producer.unacknowledged
        assert bench.balance().in_buffer == TRANSITIONS
        return [(slot.sequence, value_of(slot)) for slot in bench.received]

    def test_a_slot_is_counted_before_it_is_sent(self, bench: StreamBench) -> None:
        class FailsToCount(ActorLedger):
            @override
            def produce(self, sequence: int, num_transitions: int, consumer: int = 0) -> int:
                del sequence, num_transitions, consumer
                raise RuntimeError("killed before the ledger")

        ledger = FailsToCount(bench.actor_page(0))
        ledger.begin(0)
        consumer, producer = bench.consumer(granted=1), bench.producer(ledger=ledger, progress=ledger.progress())
        slot = bench.acquire(consumer, producer)
        with pytest.raises(RuntimeError, match="killed before"):
            producer.post(fill(slot, 5))
        producer.close()
        bench.until(consumer, lambda: not consumer.producers)
        assert bench.received == []
        assert bench.balance().in_buffer == 0

    def test_a_slot_in_hand_outlives_its_consumer(self, bench: StreamBench) -> None:
        consumer, producer = bench.consumer(granted=2), bench.producer()
        first, second = bench.acquire(consumer, producer), bench.acquire(consumer, producer)
        fill(first, 1)
        fill(second, 2)
        consumer.close()
        successor = bench.consumer()
        bench.connect(successor, producer)
        assert [*successor.outstanding] == [0, 1]
        producer.post(second)
        producer.post(first)
        arrived = bench.take(successor, 2)
        assert [(slot.sequence, value_of(slot), slot.min_version) for slot in arrived] == [
            (0, 2, INITIAL),
            (1, 1, INITIAL),
        ]
        assert {slot.credit for slot in arrived} == {0, 1}
        for slot in arrived:
            successor.release(slot)

    def test_a_slot_posted_without_a_consumer_waits_for_the_next(self, bench: StreamBench) -> None:
        consumer, producer = bench.consumer(granted=1), bench.producer()
        slot = bench.acquire(consumer, producer)
        consumer.close()
        with pytest.raises(StreamTimeout):
            producer.acquire(0.0)
        producer.post(fill(slot, 3))
        assert [*producer.unacknowledged] == [(0, TRANSITIONS)]
        with pytest.raises(StreamTimeout):
            producer.flush(0.0)
        successor = bench.consumer()
        bench.flush(successor, producer)
        assert [value_of(slot) for slot in bench.take(successor, 1)] == [3]

    def test_a_credit_is_void_after_its_consumer_closes(self, bench: StreamBench) -> None:
        consumer, producer = bench.consumer(granted=2), bench.producer()
        producer.post(fill(bench.acquire(consumer, producer), 1))
        bench.take(consumer, 1)
        bench.flush(consumer, producer)
        consumer.close()
        bench.lose(producer)
        successor = bench.consumer()
        bench.connect(successor, producer)
        successor.grant(NUM_LANES, V2)
        slot = bench.acquire(successor, producer)
        assert (slot.credit, slot.min_version) == (0, V2)

    def test_a_producer_that_was_never_admitted_finds_the_next_consumer(self, bench: StreamBench) -> None:
        consumer, producer = bench.consumer(), bench.producer()
        with pytest.raises(StreamTimeout):
            producer.acquire(0.0)
        consumer.close()
        successor = bench.consumer(granted=1)
        assert bench.acquire(successor, producer).credit == 0

    def test_a_producer_may_start_before_its_consumer(self, bench: StreamBench, pool: ThreadPoolExecutor) -> None:
        producer = bench.producer()
        waiting = pool.submit(producer.acquire, DEADLINE)
        consumer = bench.consumer(granted=1)
        bench.until(consumer, waiting.done)
        assert waiting.result().min_version == V1

    @pytest.mark.parametrize("ends_cleanly", [False, True])
    def test_a_new_incarnation_replaces_the_old_and_settles_for_it(
        self, bench: StreamBench, ends_cleanly: bool
    ) -> None:
        consumer, producer = bench.consumer(granted=2), bench.producer(0, 0)
        slots = [bench.acquire(consumer, producer) for _ in range(2)]
        producer.post(fill(slots[0], 1))
        bench.take(consumer, 1)
        consumer.close()
        producer.post(fill(slots[1], 2))
        if ends_cleanly:
            bench.actor_ledger(0).end()
        producer.close()
        assert bench.balance().unsettled == TRANSITIONS
        successor = bench.consumer()
        reborn = bench.producer(0, 1)
        bench.connect(successor, reborn)
        assert successor.producers == (ProducerId(0, 1),)
        bench.until_settled(successor, reborn)
        books = bench.balance()
        untaken = books.dropped["end_of_run"] if ends_cleanly else books.lost["producer_died"]
        assert (untaken, books.in_buffer, books.unsettled) == (TRANSITIONS, TRANSITIONS, 0)

    def test_lost_slots_are_counted_once_however_often_they_are_reported(self, bench: StreamBench) -> None:
        consumer = bench.consumer()
        settled: list[int] = []
        ledger = bench.actor_ledger(0)
        ledger.begin(0)
        ledger.produce(0, TRANSITIONS)
        for incarnation in (1, 2, 3):
            ledger.begin(incarnation)
            producer = bench.producer(
                0,
                incarnation,
                ledger=ledger,
                progress=ledger.progress(),
                on_settled=partial(settled.append, incarnation),
            )
            bench.until_settled(consumer, producer, partial(settled.__contains__, incarnation))
            producer.close()
            bench.until(consumer, lambda: not consumer.producers)
        assert settled == [1, 2, 3]
        assert bench.balance().lost["producer_died"] == TRANSITIONS

    def test_a_succeeded_incarnation_is_refused(self, bench: StreamBench) -> None:
        consumer, newer = bench.consumer(), bench.producer(0, 5)
        older = bench.producer(0, 4, ledger=bench.actor_ledger(1))
        bench.connect(consumer, newer)
        self._assert_refused(bench, consumer, older, "incarnation", "incarnation 4 of producer 0 was succeeded")
        assert consumer.producers == (ProducerId(0, 5),)

    def test_an_incarnation_succeeded_in_a_former_life_is_refused(self, bench: StreamBench) -> None:
        consumer, newer = bench.consumer(granted=1), bench.producer(0, 5)
        newer.post(fill(bench.acquire(consumer, newer), 1))
        bench.take(consumer, 1)
        consumer.close()
        newer.close()
        successor = bench.consumer()
        older = bench.producer(0, 4, ledger=bench.actor_ledger(1))
        self._assert_refused(bench, successor, older, "incarnation", "incarnation 4 of producer 0 was succeeded")

    # Handshakes that do not match.

    def test_a_wrong_layout_is_refused_with_both_digests(self, bench: StreamBench) -> None:
        other = small_layout(observation=5)
        consumer, producer = bench.consumer(), bench.producer(layout=other)
        self._assert_refused(bench, consumer, producer, "layout", small_layout().step_digest, other.step_digest)

    def test_a_wrong_token_is_refused_and_the_consumer_lives_on(self, bench: StreamBench) -> None:
        consumer = bench.consumer()
        for index in range(3):
            self._assert_refused(bench, consumer, bench.producer(index, token="another"), "token", "token")
        assert consumer.counters["refused_token"] == 3
        consumer.grant(NUM_LANES, V1)
        good = bench.producer(9)
        good.post(fill(bench.acquire(consumer, good), 1))
        assert [value_of(slot) for slot in bench.take(consumer, 1)] == [1]

    @staticmethod
    def _assert_refused(
        bench: StreamBench, consumer: ObservableConsumer, producer: SampleProducer, kind: str, *texts: str
    ) -> None:
        before = consumer.counters.get(f"refused_{kind}", 0)
        with pytest.raises(HandshakeRefused) as refusal:
            bench.acquire(consumer, producer)
        assert all(text in str(refusal.value) for text in texts), str(refusal.value)
        assert consumer.counters[f"refused_{kind}"] == before + 1

    # Time.

    def test_a_silent_holder_of_a_credit_is_revoked(self, still: StreamBench, clock: ManualClock) -> None:
        consumer, silent, lively = still.consumer(peer_timeout=8.0), still.producer(0), still.producer(1)
        still.connect(consumer, silent, lively)
        consumer.grant(2 * NUM_LANES, V1)
        in_hand = fill(still.acquire(consumer, silent), 1)
        still.acquire(consumer, lively)
        for _ in range(12):
            clock.advance(1.0)
            still.touch(consumer, lively)
            still.serve(consumer)
        assert consumer.counters["revoked"] == 1
        assert consumer.producers == (ProducerId(1, 0),)
        assert [*consumer.outstanding] == [1, 2]
        replacement = still.acquire(consumer, lively)
        assert replacement.credit == 2
        # The silent producer continues: its slot arrives once, and no other slot is overwritten.
        fill(replacement, 2)
        fill(in_hand, 1)
        silent.post(in_hand)
        still.flush(consumer, silent)
        lively.post(replacement)
        assert sorted((slot.producer, value_of(slot)) for slot in still.take(consumer, 2)) == [
            (ProducerId(0, 0), 1),
            (ProducerId(1, 0), 2),
        ]

    def test_touching_keeps_a_credit(self, still: StreamBench, clock: ManualClock) -> None:
        consumer, producer = still.consumer(granted=1, peer_timeout=8.0), still.producer()
        still.acquire(consumer, producer)
        for _ in range(100):
            clock.advance(2.0)
            still.touch(consumer, producer)
            still.serve(consumer)
        assert [*consumer.outstanding] == [0]

    def test_any_thread_may_touch_while_the_owner_comes_and_goes(
        self, bench: StreamBench, pool: ThreadPoolExecutor
    ) -> None:
        consumer, producer = bench.consumer(peer_timeout=DEADLINE), bench.producer()
        done = threading.Event()

        def touch() -> int:
            touches = 0
            while not done.is_set():
                producer.touch()
                touches += 1
            return touches

        touching = pool.submit(touch)
        for value in range(20):
            consumer.grant(NUM_LANES, V1)
            producer.post(fill(bench.acquire(consumer, producer), value))
            bench.flush(consumer, producer)
            (slot,) = bench.take(consumer, 1)
            assert value_of(slot) == value
            consumer.release(slot)
            producer.disconnect()
            bench.until(consumer, lambda: not consumer.producers)
        producer.close()
        producer.touch()
        done.set()
        assert touching.result(timeout=DEADLINE) > 20

    def test_a_producer_without_a_credit_may_be_silent(self, still: StreamBench, clock: ManualClock) -> None:
        consumer, producer = still.consumer(peer_timeout=8.0), still.producer()
        still.connect(consumer, producer)
        for _ in range(100):
            clock.advance(2.0)
            still.serve(consumer)
        assert consumer.producers == (ProducerId(0, 0),)

    def test_a_consumer_that_was_frozen_revokes_no_producer(self, still: StreamBench, clock: ManualClock) -> None:
        consumer, producer = still.consumer(granted=1, peer_timeout=8.0), still.producer()
        still.acquire(consumer, producer)
        clock.advance(1000.0)
        still.serve(consumer)
        assert [*consumer.outstanding] == [0]

    def test_the_first_credits_wait_for_the_expected_producers(self, bench: StreamBench) -> None:
        consumer = bench.consumer(granted=3, expected_producers=3)
        producers = {index: bench.producer(index) for index in (2, 1, 0)}
        bench.connect(consumer, producers[2], producers[1])
        assert [*consumer.outstanding] == []
        orders = {index: bench.acquire(consumer, producers[index]).credit for index in (0, 1, 2)}
        assert orders == {0: 0, 1: 1, 2: 2}

    def test_the_first_credits_wait_no_longer_than_the_startup_time_out(
        self, still: StreamBench, clock: ManualClock
    ) -> None:
        consumer, producer = still.consumer(granted=1, expected_producers=3, startup_timeout=30.0), still.producer()
        still.connect(consumer, producer)
        clock.advance(29.0)
        assert still.try_acquire(consumer, producer) is None
        clock.advance(1.0)
        assert still.acquire(consumer, producer).credit == 0

    # Leaks.

    def test_many_threads_lose_and_duplicate_no_slot(self, bench: StreamBench, pool: ThreadPoolExecutor) -> None:
        consumer = bench.consumer(peer_timeout=DEADLINE)
        producers = [bench.producer(index) for index in range(3)]
        count = 60

        def produce(producer: SampleProducer) -> None:
            for value in range(count):
                producer.post(fill(producer.acquire(DEADLINE), value))
            producer.flush(DEADLINE)
            producer.close()  # or it would sit on credits that others need

        futures = [pool.submit(produce, producer) for producer in producers]
        consumer.grant(4 * NUM_LANES, V1)
        seen: dict[ProducerId | None, list[int]] = {}
        orders: list[int] = []
        while not all(future.done() for future in futures):
            for slot in consumer.receive(64, 0.01):
                seen.setdefault(slot.producer, []).append(value_of(slot))
                assert slot.sequence == value_of(slot)
                orders.append(slot.credit)
                consumer.release(slot)
                consumer.grant(NUM_LANES, V1)
        for future in futures:
            future.result()
        assert seen == {ProducerId(index, 0): [*range(count)] for index in range(3)}
        assert len(set(orders)) == len(orders)
        assert bench.balance().in_buffer == 3 * count * TRANSITIONS

    def test_reconnecting_leaks_nothing(self, still: StreamBench) -> None:
        consumer = still.consumer(granted=1)

        def come_and_go(incarnation: int) -> None:
            producer = still.producer(0, incarnation)
            producer.post(fill(still.acquire(consumer, producer), 1))
            still.flush(consumer, producer)
            producer.close()
            (slot,) = still.take(consumer, 1)
            still.until(consumer, lambda: not consumer.producers)
            consumer.release(slot)
            consumer.grant(NUM_LANES, V1)

        come_and_go(0)
        before = held_resources()
        for incarnation in range(1, 200):
            come_and_go(incarnation)
        still.until(consumer, lambda: held_resources() <= before)

    def test_a_succession_of_consumers_leaks_nothing(self, still: StreamBench, clock: ManualClock) -> None:
        producer = still.producer()

        def serve_and_go() -> SampleConsumer:
            consumer = still.consumer(granted=2)
            clock.advance(1.0)  # longer than any back-off
            producer.post(fill(still.acquire(consumer, producer), 1))
            # The producer reconnects only inside its calls. If it had not seen the end of the last connection, it used
            # a credit of that connection, and posts the slot again to this consumer.
            still.flush(consumer, producer)
            still.take(consumer, 1)
            consumer.close()
            return consumer

        serve_and_go()
        before = held_resources()
        for _ in range(49):
            serve_and_go()
        still.until(serve_and_go(), lambda: held_resources() <= before)

    def test_steady_state_allocates_nothing(self, still: StreamBench) -> None:
        consumer, producer = still.consumer(granted=2), still.producer()

        def rollouts(count: int) -> None:
            for value in range(count):
                slot = still.acquire(consumer, producer)
                producer.touch()
                producer.post(fill(slot, value))
                (arrived,) = still.take(consumer, 1)
                consumer.release(arrived)
                consumer.grant(NUM_LANES, V1)

        rollouts(20)
        tracemalloc.start()
        try:
            rollouts(20)
            before = traced_memory()
            rollouts(200)
            # A leaked slot or message would cost a kilobyte for each rollout.
            still.until(consumer, lambda: traced_memory() - before < 8192)
        finally:
            tracemalloc.stop()


class SampleStreamProcessConformance(_WithBench):
    """One stream with ends in processes that are killed and stopped."""

    @pytest.fixture
    def spawn(self, bench: StreamBench, transport: Transport, tmp_path: Path) -> Iterator[Callable[..., DrivenProcess]]:
        """Return a function that starts one end of the stream in its own process."""
        reference = f"{type(transport).__module__}:{type(transport).__qualname__}"
        setup = {"transport": reference, "address": bench.address, "folder": str(tmp_path)}
        with driven_processes("rlsrl.testing.sample_stream_end", **setup) as start:
            yield start

    def test_slots_cross_processes_in_order(self, bench: StreamBench, spawn: Callable[..., DrivenProcess]) -> None:
        consumer = bench.consumer(granted=2)
        producer = spawn(role="producer")
        producer.send("produce", count=20, timeout=DEADLINE)
        for value in range(20):
            (slot,) = bench.take(consumer, 1)
            assert (slot.sequence, value_of(slot)) == (value, value)
            consumer.release(slot)
            consumer.grant(NUM_LANES, V1)
        producer.reply()

    def test_the_credit_of_a_killed_holder_goes_to_another(
        self, bench: StreamBench, spawn: Callable[..., DrivenProcess]
    ) -> None:
        consumer, survivor = bench.consumer(granted=1), bench.producer(1)
        victim = spawn(role="producer", index=0)
        assert acquire(bench, consumer, victim) == 0
        victim.call("fill", value=1)
        bench.connect(consumer, survivor)
        victim.kill()
        slot = bench.acquire(consumer, survivor)
        assert slot.credit == 1
        assert [*consumer.outstanding] == [1]
        survivor.post(fill(slot, 2))
        assert [value_of(slot) for slot in bench.take(consumer, 1)] == [2]

    def test_a_slot_arrives_or_is_counted_as_lost_though_its_producer_was_killed_right_after_posting(
        self, bench: StreamBench, spawn: Callable[..., DrivenProcess], transport: Transport
    ) -> None:
        consumer = bench.consumer(granted=2)
        victim = spawn(role="producer")
        acquire(bench, consumer, victim)
        victim.call("fill", value=5)
        victim.send("post_and_die")
        victim.wait_dead()
        bench.until(consumer, lambda: not consumer.producers)
        arrived = bench.take(consumer, 1 if transport.posts_outlive_producers else len(bench.received))
        assert [value_of(slot) for slot in arrived] in ([5], [])
        for slot in arrived:
            consumer.release(slot)
        # The successor reports the slot as unacknowledged; the ledger's mark shows whether the slot arrived.
        reborn = bench.producer(0, 1)
        bench.acquire(consumer, reborn)
        bench.until_settled(consumer, reborn)
        books = bench.balance()
        assert books.in_buffer == len(arrived) * TRANSITIONS
        assert books.lost["producer_died"] == (1 - len(arrived)) * TRANSITIONS

    def test_a_stopped_holder_is_revoked_and_overwrites_no_slot_when_it_continues(
        self, bench: StreamBench, spawn: Callable[..., DrivenProcess]
    ) -> None:
        consumer, lively = bench.consumer(peer_timeout=PATIENCE, expected_producers=2), bench.producer(1)
        bench.keep_alive(lively)
        frozen = spawn(role="producer", index=0)
        consumer.grant(2 * NUM_LANES, V1)
        bench.connect(consumer, lively)
        acquire(bench, consumer, frozen)
        frozen.stop()
        in_hand = bench.acquire(consumer, lively)
        bench.until(consumer, lambda: consumer.counters.get("revoked", 0) == 1)
        replacement = bench.acquire(consumer, lively)
        fill(in_hand, 2)
        fill(replacement, 3)
        frozen.resume()
        frozen.call("fill", value=1)
        frozen.call("post")
        assert (value_of(in_hand), value_of(replacement)) == (2, 3)
        frozen.send("flush", timeout=DEADLINE)
        (late,) = bench.take(consumer, 1)
        assert (late.producer, value_of(late)) == (ProducerId(0, 0), 1)
        frozen.reply()
        lively.post(in_hand)
        lively.post(replacement)
        assert [value_of(slot) for slot in bench.take(consumer, 2)] == [2, 3]
        assert bench.balance().in_buffer == 3 * TRANSITIONS

    def test_a_killed_consumer_is_replaced_without_lost_or_duplicate_slots(
        self, bench: StreamBench, spawn: Callable[..., DrivenProcess]
    ) -> None:
        first, producer = spawn(role="consumer", granted=2), bench.producer()
        first.send("receive", max_items=1, timeout=DEADLINE)
        producer.post(fill(producer.acquire(DEADLINE), 1))
        in_hand = producer.acquire(DEADLINE)
        assert first.reply() == [[0, 0, 0, 1]]
        first.stop()
        producer.post(fill(in_hand, 2))
        with pytest.raises(StreamTimeout):
            producer.acquire(0.01)
        first.kill()
        second = spawn(role="consumer")
        second.send("receive", max_items=1, timeout=DEADLINE)
        producer.flush(DEADLINE)
        assert second.reply() == [[0, 1, 0, 2]]
        second.kill()
        producer.close()
        books = bench.balance(ended=True)
        assert (books.produced, books.lost["receiver_died"]) == (2 * TRANSITIONS, 2 * TRANSITIONS)

    def test_a_slot_in_hand_when_the_consumer_is_killed_reaches_the_next(
        self, bench: StreamBench, spawn: Callable[..., DrivenProcess]
    ) -> None:
        first, producer = spawn(role="consumer", granted=1), bench.producer()
        first.send("receive", max_items=1, timeout=DEADLINE)
        in_hand = producer.acquire(DEADLINE)
        first.kill()
        producer.touch()
        producer.post(fill(in_hand, 4))
        second = spawn(role="consumer")
        second.send("receive", max_items=1, timeout=DEADLINE)
        producer.flush(DEADLINE)
        assert second.reply() == [[0, 0, 0, 4]]

    def test_a_stopped_consumer_loses_no_slot(self, bench: StreamBench, spawn: Callable[..., DrivenProcess]) -> None:
        consumer, producer = spawn(role="consumer", granted=1), bench.producer()
        consumer.stop()
        with pytest.raises(StreamTimeout):
            producer.acquire(0.05)
        consumer.resume()
        consumer.send("receive", max_items=1, timeout=DEADLINE)
        producer.post(fill(producer.acquire(DEADLINE), 1))
        assert consumer.reply() == [[0, 0, 0, 1]]

    def test_kills_at_any_moment_keep_the_ledger_balanced(
        self, bench: StreamBench, spawn: Callable[..., DrivenProcess], pool: ThreadPoolExecutor
    ) -> None:
        """Producers die while they produce, consumers while they take; in the end every transition is counted."""
        rng = random.Random(7)
        stop = threading.Event()
        producer = bench.producer(0)

        def produce() -> None:
            value = 0
            while not stop.is_set():
                try:
                    producer.post(fill(producer.acquire(0.05), value))
                    value += 1
                except StreamTimeout:
                    continue

        producing = pool.submit(produce)
        taken = 0
        for life in range(3):
            consumer = spawn(role="consumer", granted=4)
            victim = spawn(role="producer", index=1, incarnation=life)
            victim.send("produce", count=10_000, timeout=DEADLINE)
            for _ in range(rng.randrange(5, 25)):
                slots = consumer.call("receive", max_items=64, timeout=DEADLINE)
                taken += len(slots)
                consumer.call("release")
                consumer.call("grant", num_lanes=NUM_LANES * len(slots), min_version=V1)
            for process in rng.sample([consumer, victim], 2):
                process.kill()
        stop.set()
        producing.result(DEADLINE)
        producer.close()
        bench.actor_ledger(0).end()
        books = bench.balance(ended=True)
        assert books.lost["receiver_died"] >= taken * TRANSITIONS
        assert books.lost["producer_died"] <= 3 * 2 * TRANSITIONS
        assert books.produced > 0


def acquire(bench: StreamBench, consumer: SampleConsumer, process: DrivenProcess) -> int:
    """Acquire a slot in the process while the consumer is served; return the order of its credit."""
    process.send("acquire", timeout=DEADLINE)
    bench.until(consumer, process.has_reply)
    return int(process.reply())


def held_resources() -> tuple[int, int]:
    """Return the numbers of descriptors and mapped segments of this process, after a garbage collection."""
    gc.collect()
    return open_descriptors(), mapped_segments()


def mapped_segments() -> int:
    """Return the number of slot segments mapped into this process."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return sum("rlsrl-slots" in line for line in maps)
