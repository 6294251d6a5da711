"""Sequences that are drawn for a recurrent network: the ledger and the metrics count their transitions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from prometheus_client import CollectorRegistry

from rlsrl.buffers.replay.draws import PrioritizedDraws
from rlsrl.buffers.replay.layout import FIRST_TRAINED, ReplayLayout
from rlsrl.buffers.replay.rows import RowForm
from rlsrl.data.random_slots import random_slot
from rlsrl.data.slots import ProducerId, Slot, rollout_layout
from rlsrl.data.specs import ArraySpec
from rlsrl.runtime.metrics import Metrics
from rlsrl.testing.replay import LedgerTerms, empty_replay_store
from rlsrl.testing.rollouts import discrete_env_spec
from rlsrl.workers.stored_transitions import Settlement, StoredTransitions

ENV_SPEC = discrete_env_spec()
NUM_STEPS, NUM_LANES, NUM_SEGMENTS = 6, 2, 8
STATE = {"hidden": ArraySpec(shape=(3,), dtype="float32")}


class Bench:
    def __init__(self, folder: Path) -> None:
        layout = rollout_layout(ENV_SPEC, num_steps=NUM_STEPS, num_lanes=NUM_LANES, state=STATE)
        store = ReplayLayout.of(layout, capacity=NUM_SEGMENTS * NUM_STEPS, has_priorities=True)
        opened = empty_replay_store(folder, store)
        self.segments, self.ledger = opened.segments, LedgerTerms()
        self.metrics = Metrics(CollectorRegistry())
        self.stored = StoredTransitions(
            opened,
            draws=PrioritizedDraws(opened.segments, exponent=1.0, offset=1e-9),
            form=RowForm(num_steps=1, discount=0.9, burn_in=True),
            ledger=self.ledger,
            metrics=self.metrics,
        )
        self._rng, self._sequence = np.random.default_rng(0), 0

    def slot(self) -> Slot:
        slot = random_slot(
            ENV_SPEC, num_steps=NUM_STEPS, num_lanes=NUM_LANES, rng=self._rng, end_probability=0.3, state=STATE
        )
        slot.producer, slot.sequence = ProducerId(0, 1), self._sequence
        self._sequence += 1
        return slot

    def transitions_of(self, number: int) -> int:
        return int(self.segments.arrays["mask"][number % NUM_SEGMENTS].sum())


def test_each_transition_of_a_trained_sequence_counts_once(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.stored.insert([bench.slot() for _ in range(3)])
    drawn = bench.stored.draw_rows(4, np.random.default_rng(1))
    assert drawn.num_transitions == int(drawn.arrays["mask"].sum()) < 4 * NUM_STEPS
    assert bench.metrics.replay_drawn._value.get() == drawn.num_transitions
    numbers = sorted({int(key) // NUM_STEPS for key in drawn.keys})
    expected = sum(map(bench.transitions_of, numbers))

    settlement = Settlement(step=7, keys=drawn.keys, trained_rows=None, errors=np.full(4, 0.5, np.float32))
    assert bench.stored.settle(settlement) == expected
    assert bench.stored.settle(settlement) == 0, "what it repeats counts nothing"

    assert bench.ledger.terms["trained"] == expected
    first_trained = bench.segments.arrays[FIRST_TRAINED]
    for number in range(3 * NUM_LANES):
        was_trained = bench.segments.arrays["mask"][number] & (number in numbers)
        np.testing.assert_array_equal(first_trained[number], np.where(was_trained, 7, 0))
    assert bench.segments.count_untrained() == bench.segments.num_transitions - expected


def test_rows_that_no_update_has_taken_stay_untrained(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.stored.insert([bench.slot() for _ in range(3)])
    keys = np.array([0, 2]) * NUM_STEPS
    errors = np.array([0.5, np.nan], np.float32)
    settlement = Settlement(step=1, keys=keys, trained_rows=np.array([0]), errors=errors)
    assert bench.stored.settle(settlement) == bench.transitions_of(0)
    assert bench.segments.count_trained_after(0) == bench.transitions_of(0)


def test_evicted_sequences_are_counted_by_their_transitions_trained_or_not(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    slots = [bench.slot() for _ in range(4)]
    bench.stored.insert(slots)
    bench.stored.settle(Settlement(step=1, keys=np.array([0]), trained_rows=None, errors=None))
    trained, untrained = map(bench.transitions_of, (0, 1))
    bench.stored.insert([bench.slot()])  # in the places of the first two segments
    assert bench.ledger.terms == {"trained": trained, "evicted": untrained}
    late = Settlement(step=2, keys=np.array([0, NUM_STEPS]), trained_rows=None, errors=np.ones(2, np.float32))
    assert bench.stored.settle(late) == 0, "these are gone"
