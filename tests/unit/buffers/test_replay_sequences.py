"""Sequences of a replay store, against loops over the slots that were inserted; and how often they are drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from gymnasium.wrappers import FrameStackObservation

from rlsrl.buffers.replay.draws import Draws, PrioritizedDraws, UniformDraws
from rlsrl.buffers.replay.layout import FIRST_TRAINED, MARK, ReplayLayout
from rlsrl.buffers.replay.rows import FOLLOWING, RowForm, rows_of, sequences_of, transitions_of
from rlsrl.buffers.replay.segments import Segments
from rlsrl.data.random_slots import random_slot
from rlsrl.data.sequences import HAS_BURN_IN, IS_FIRST
from rlsrl.data.slots import ProducerId, Slot, rollout_layout
from rlsrl.data.specs import ArraySpec
from rlsrl.testing.replay import Numbered, SlotSource
from rlsrl.testing.replay_draws import LEAST_PROBABILITY, chi_square
from rlsrl.testing.rollouts import discrete_env_spec

ENV_SPEC = discrete_env_spec(num_features=3, num_actions=4)
NUM_STEPS, NUM_LANES, DISCOUNT = 6, 3, 0.9
STATE = {"hidden": ArraySpec(shape=(2,), dtype="float32"), "cell": ArraySpec(shape=(2,), dtype="float32")}
OBSERVATION = "observation"


@dataclass
class Kept:
    """Where a segment came from."""

    slot: Slot
    lane: int
    before: Slot | None
    """The slot before it of the same producer, if none is missing between."""


class Filled:
    """Segments with slots of a producer, of which some are lost on the way."""

    def __init__(self, *, num_segments: int, lost: tuple[int, ...] = (), num_slots: int = 8) -> None:
        layout = rollout_layout(ENV_SPEC, num_steps=NUM_STEPS, num_lanes=NUM_LANES, state=STATE)
        self.layout = ReplayLayout.of(layout, capacity=num_segments * NUM_STEPS, has_priorities=True)
        self.memory = bytearray(self.layout.nbytes)
        self.segments = Segments(self.layout, self.memory)
        self.kept: dict[int, Kept] = {}
        rng, before = np.random.default_rng(0), None
        for sequence in range(num_slots):
            slot = random_slot(
                ENV_SPEC, num_steps=NUM_STEPS, num_lanes=NUM_LANES, rng=rng, end_probability=0.2, state=STATE
            )
            slot.producer, slot.sequence = ProducerId(0, 1), sequence
            if sequence % 4 == 3:
                slot.arrays["mask"][:, 1] = False  # nothing to train on in this lane
            if sequence in lost:
                before = None
                continue
            for lane, number in enumerate(self.segments.insert(slot).numbers):
                self.kept[number] = Kept(slot, lane, before)
            before = slot

    @property
    def held(self) -> list[int]:
        return sorted(int(mark) - 1 for mark in self.segments.arrays[MARK] if mark)

    @property
    def keys(self) -> np.ndarray:
        """The keys of those held that have a transition."""
        with_some = [each for each in self.held if self.kept[each].slot.arrays["mask"][:, self.kept[each].lane].any()]
        return np.array(with_some) * NUM_STEPS


def n_step(slot: Slot, lane: int, start: int, num_steps: int) -> tuple[float, float, int]:
    """Return (reward, discount, frame that follows) of a step, by a loop within the slot."""
    reward, weight, step = 0.0, 1.0, start
    arrays = {name: slot.arrays[name][:, lane] for name in ("reward", "terminated", "truncated", "mask")}
    while True:
        reward += weight * arrays["reward"][step]
        weight *= DISCOUNT
        has_ended = arrays["terminated"][step] or arrays["truncated"][step]
        if has_ended or step + 1 in (NUM_STEPS, start + num_steps) or not arrays["mask"][step + 1]:
            return reward, 0.0 if arrays["terminated"][step] else weight, step + 1
        step += 1


@pytest.mark.parametrize("num_steps", [1, 3, 20])
@pytest.mark.parametrize("burn_in", [False, True])
def test_sequences_are_those_of_the_slots(burn_in: bool, num_steps: int) -> None:
    filled = Filled(num_segments=14, lost=(5,))
    held = filled.held
    keys = np.array(held) * NUM_STEPS
    rows = rows_of(filled.segments, keys, RowForm(num_steps=num_steps, discount=DISCOUNT, burn_in=burn_in))
    num_known = 0
    for row, number in enumerate(held):
        kept = filled.kept[number]
        arrays = {name: kept.slot.arrays[name][:, kept.lane] for name in ("action", "mask", OBSERVATION)}
        np.testing.assert_array_equal(rows["action"][row], np.where(arrays["mask"], arrays["action"], 0))
        np.testing.assert_array_equal(rows["mask"][row], arrays["mask"])
        for step in np.flatnonzero(arrays["mask"]):
            reward, discount, following = n_step(kept.slot, kept.lane, int(step), num_steps)
            assert rows["reward"][row, step] == pytest.approx(reward, rel=1e-5, abs=1e-6)
            assert rows["discount"][row, step] == pytest.approx(discount, rel=1e-5)
            assert rows[FOLLOWING][row, step] == following
        is_held = number - NUM_LANES in held and kept.before is not None
        before = kept.before if burn_in and is_held else None
        num_known += before is not None
        own, first = arrays[OBSERVATION], [False, *~arrays["mask"]]
        state = (kept.slot if before is None else before).arrays
        for name in STATE:
            np.testing.assert_array_equal(rows[f"state/{name}"][row], state[f"state/{name}"][kept.lane])
        if not burn_in:
            np.testing.assert_array_equal(rows[OBSERVATION][row], own)
            np.testing.assert_array_equal(rows[IS_FIRST][row], first)
            continue
        assert rows[HAS_BURN_IN][row] == (before is not None)
        np.testing.assert_array_equal(rows[OBSERVATION][row, NUM_STEPS:], own)
        if before is None:
            np.testing.assert_array_equal(rows[IS_FIRST][row, NUM_STEPS:], first)
        else:
            np.testing.assert_array_equal(
                rows[OBSERVATION][row, :NUM_STEPS], before.arrays[OBSERVATION][:-1, kept.lane]
            )
            known = [False, *~before.arrays["mask"][:, kept.lane], *first[1:]]
            np.testing.assert_array_equal(rows[IS_FIRST][row], known)
    assert len(held) == 14
    assert 0 < num_known < 14 if burn_in else num_known == 0


def test_n_step_returns_are_those_of_transitions_where_they_end_within_the_sequence() -> None:
    filled, form = Filled(num_segments=12), RowForm(num_steps=3, discount=DISCOUNT)
    sequences = sequences_of(filled.segments, filled.keys, form)
    compared = 0
    for row, key in enumerate(filled.keys.tolist()):
        for step in np.flatnonzero(sequences["mask"][row, : NUM_STEPS - 2]):
            transition = transitions_of(filled.segments, np.array([key + step]), form)
            assert sequences["reward"][row, step] == transition["reward"][0]
            assert sequences["discount"][row, step] == transition["discount"][0]
            following = sequences[OBSERVATION][row, sequences[FOLLOWING][row, step]]
            np.testing.assert_array_equal(following, transition[f"next/{OBSERVATION}"][0])
            compared += 1
    assert compared > 20


@pytest.mark.parametrize("num_steps", [1, 2, 6])
def test_stacked_images_are_those_of_the_slots(num_steps: int) -> None:
    source = SlotSource(num_steps=num_steps, num_lanes=2, make=lambda: FrameStackObservation(Numbered(image=True), 4))
    slot_layout = rollout_layout(source.env_spec, num_steps=num_steps, num_lanes=2, state=STATE)
    layout = ReplayLayout.of(slot_layout, capacity=20 * num_steps, stacks={OBSERVATION: 4})
    segments, rng = Segments(layout, bytearray(layout.nbytes)), np.random.default_rng(0)
    slots = []
    for _ in range(8):
        slot = source.slot()
        slot.arrays |= {f"state/{name}": rng.standard_normal((2, 2), np.float32) for name in STATE}
        segments.insert(slot)
        slots.append(slot)
    keys = np.arange(2, 16) * num_steps
    rows = rows_of(segments, keys, RowForm(num_steps=1, discount=DISCOUNT, burn_in=True))
    assert rows[HAS_BURN_IN].all()
    for row, number in enumerate(range(2, 16)):
        slot, before, lane = slots[number // 2], slots[number // 2 - 1], number % 2
        expected = np.concatenate([before.arrays[OBSERVATION][:-1, lane], slot.arrays[OBSERVATION][:, lane]])
        np.testing.assert_array_equal(rows[OBSERVATION][row], expected)


def test_an_action_of_a_step_without_a_transition_is_not_read() -> None:
    filled = Filled(num_segments=NUM_LANES, num_slots=1)
    mask = filled.segments.arrays["mask"]
    filled.segments.arrays["action"][~mask] = -7
    rows = rows_of(filled.segments, filled.keys, RowForm(num_steps=1, discount=DISCOUNT))
    assert not rows["mask"].all()
    assert rows["action"].min() == 0
    assert filled.segments.arrays["action"].min() == -7, "the store keeps what came"


def p_value(draws: Draws, keys: np.ndarray, share: np.ndarray) -> float:
    drawn = draws.draw(20_000, np.random.default_rng(0))
    places = np.searchsorted(keys, drawn.keys)
    assert np.array_equal(keys[places], drawn.keys)
    np.testing.assert_allclose(drawn.share, share[places])
    return chi_square(np.bincount(places, minlength=len(keys)), share * 20_000)


def test_sequences_are_drawn_with_equal_probabilities_or_by_their_errors() -> None:
    """Sequences without a transition are not drawn."""
    filled = Filled(num_segments=14)
    keys, segments = filled.keys, filled.segments
    assert segments.num_rows == len(keys) < len(filled.held)
    equal = np.full(len(keys), 1 / len(keys))
    uniform, by_priority = UniformDraws(segments), PrioritizedDraws(segments, exponent=0.5, offset=0.01)
    assert uniform.mass == len(keys)
    assert p_value(uniform, keys, equal) > LEAST_PROBABILITY
    assert p_value(by_priority, keys, equal) > LEAST_PROBABILITY, "at first"
    errors = np.random.default_rng(1).exponential(size=len(keys)).astype(np.float32)
    by_priority.settle(keys, errors)
    priorities = np.rint((errors.astype(np.float64) + 0.01) ** 0.5 * 2**20)
    assert p_value(by_priority, keys, priorities / priorities.sum()) > LEAST_PROBABILITY
    with pytest.raises(AssertionError):
        p_value(by_priority, keys, equal)
    later = Segments(filled.layout, filled.memory)
    assert (later.num_rows, later.num_transitions) == (segments.num_rows, segments.num_transitions)
    again = PrioritizedDraws(later, exponent=0.5, offset=0.01)
    assert p_value(again, keys, priorities / priorities.sum()) > LEAST_PROBABILITY, "priorities outlive the process"


def test_new_sequences_have_the_largest_priority_and_removed_ones_none() -> None:
    filled = Filled(num_segments=2 * NUM_LANES, num_slots=2)
    draws = PrioritizedDraws(filled.segments, exponent=1.0, offset=0.0)
    draws.settle(filled.keys, np.full(len(filled.keys), 0.5, np.float32))
    draws.settle(filled.keys[-1:], np.array([4.0], np.float32))
    gone, kept = filled.keys[:NUM_LANES], filled.keys[NUM_LANES:]
    slot = random_slot(ENV_SPEC, num_steps=NUM_STEPS, num_lanes=NUM_LANES, rng=np.random.default_rng(9), state=STATE)
    slot.producer, slot.sequence = ProducerId(0, 1), 2
    draws.inserted(filled.segments.insert(slot).numbers)
    draws.settle(gone, np.full(len(gone), 100.0, np.float32))  # these are not there any more
    keys = np.concatenate([kept, (np.arange(NUM_LANES) + 2 * NUM_LANES) * NUM_STEPS])
    priorities = np.array([0.5, 0.5, 4.0, 4.0, 4.0, 4.0])
    assert p_value(draws, keys, priorities / priorities.sum()) > LEAST_PROBABILITY


def test_a_layout_with_states_has_one_row_for_each_segment() -> None:
    layout = rollout_layout(ENV_SPEC, num_steps=NUM_STEPS, num_lanes=1, state=STATE)
    found = ReplayLayout.of(layout, capacity=100, has_priorities=True)
    without = ReplayLayout.of(rollout_layout(ENV_SPEC, num_steps=NUM_STEPS, num_lanes=1), capacity=100)
    assert (found.rows_per_segment, without.rows_per_segment) == (1, NUM_STEPS)
    assert (found.states, without.states) == (("state/hidden", "state/cell"), ())
    assert {"state/hidden", "state/cell"} <= {*found.sealed}
    arrays: dict[str, Any] = Segments(found, bytearray(found.nbytes)).arrays  # type: ignore[assignment]
    assert arrays["state/hidden"].shape == (found.num_segments, 2)
    assert arrays[FIRST_TRAINED].shape == (found.num_segments, NUM_STEPS), "each transition counts by itself"
