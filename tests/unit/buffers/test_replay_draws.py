"""How often transitions are drawn, against their probabilities."""

from __future__ import annotations

import numpy as np
import pytest

from rlsrl.buffers.replay.draws import LARGEST, SCALE, Draws, PrioritizedDraws, UniformDraws
from rlsrl.buffers.replay.layout import ReplayLayout
from rlsrl.buffers.replay.segments import Segments
from rlsrl.testing.replay import SlotSource
from rlsrl.testing.replay_draws import LEAST_PROBABILITY, chi_square, filled, held_keys


def p_value(draws: Draws, keys: np.ndarray, share: np.ndarray, num_draws: int = 40_000, seed: int = 0) -> float:
    """Return the probability of counts as far from ``share`` as those of the draws; all keys drawn must be known."""
    drawn = draws.draw(num_draws, np.random.default_rng(seed))
    places = np.searchsorted(keys, drawn.keys)
    assert np.array_equal(keys[places], drawn.keys)
    np.testing.assert_allclose(drawn.share, share[places])
    return chi_square(np.bincount(places, minlength=len(keys)), share * num_draws)


@pytest.mark.parametrize("num_slots", [1, 4, 15])
@pytest.mark.parametrize("longest", [1, 9])
def test_uniform_draws_have_equal_probabilities(num_slots: int, longest: int) -> None:
    segments = filled(num_slots, longest=longest)
    keys = held_keys(segments)
    assert len(keys) == segments.num_transitions
    assert p_value(UniformDraws(segments), keys, np.full(len(keys), 1 / len(keys))) > LEAST_PROBABILITY
    uneven = np.linspace(1.0, 1.5, len(keys))
    drawn = UniformDraws(segments).draw(40_000, np.random.default_rng(0))
    counts = np.bincount(np.searchsorted(keys, drawn.keys), minlength=len(keys))
    assert chi_square(counts, uneven / uneven.sum() * 40_000) < LEAST_PROBABILITY, "the test sees a difference"


def test_a_single_transition_among_many_places_is_found() -> None:
    segments = filled(6)
    segments.arrays["mask"][...] = False
    segments.arrays["mask"][7, 3] = True
    segments.num_transitions = 1
    drawn = UniformDraws(segments).draw(30, np.random.default_rng(0))
    assert set(drawn.keys.tolist()) == {7 * 5 + 3}


def test_draws_by_priority_are_proportional_to_what_errors_say() -> None:
    segments = filled(15)
    keys = held_keys(segments)
    draws = PrioritizedDraws(segments, exponent=0.6, offset=0.01)
    equal = np.full(len(keys), 1 / len(keys))
    assert p_value(draws, keys, equal) > LEAST_PROBABILITY, "at first"
    errors = np.random.default_rng(1).standard_normal(len(keys)).astype(np.float32)
    draws.settle(keys, errors)
    priorities = np.rint((np.abs(errors.astype(np.float64)) + 0.01) ** 0.6 * 2**20)
    assert p_value(draws, keys, priorities / priorities.sum()) > LEAST_PROBABILITY
    with pytest.raises(AssertionError):
        p_value(draws, keys, equal)


def test_new_transitions_have_the_largest_priority_and_removed_ones_none() -> None:
    source = SlotSource(num_steps=5, num_lanes=2)
    layout = ReplayLayout.of(source.layout, capacity=12 * 5, has_priorities=True)
    segments = Segments(layout, bytearray(layout.nbytes))
    draws = PrioritizedDraws(segments, exponent=1.0, offset=0.0)
    for _ in range(6):
        draws.inserted(segments.insert(source.slot()).numbers)
    old = held_keys(segments)
    draws.settle(old, np.full(len(old), 0.25, np.float32))
    draws.settle(old[-1:], np.array([-4.0], np.float32))
    draws.settle(old[-1:], np.array([0.5], np.float32))
    inserted = segments.insert(source.slot()).numbers
    draws.inserted(inserted)
    draws.settle(old[:1], np.array([100.0], np.float32))
    keys = held_keys(segments)
    assert old[0] not in keys
    assert keys[-1] >= inserted.start * 5
    priorities = np.where(keys >= inserted.start * 5, 4.0, 0.25)
    priorities[keys == old[-1]] = 0.5
    assert p_value(draws, keys, priorities / priorities.sum()) > LEAST_PROBABILITY


def test_a_transition_that_was_settled_twice_has_its_last_priority() -> None:
    segments = filled(6)
    keys, draws = held_keys(segments), PrioritizedDraws(segments, exponent=1.0, offset=0.0)
    errors = np.ones(len(keys), np.float32)
    draws.settle(np.concatenate([keys, keys[:1]]), np.concatenate([errors, errors[:1] * 9]))
    expected = np.ones(len(keys))
    expected[0] = 9.0
    assert p_value(draws, keys, expected / expected.sum()) > LEAST_PROBABILITY


def test_errors_of_any_size_have_a_priority() -> None:
    segments = filled(6)
    keys, draws = held_keys(segments), PrioritizedDraws(segments, exponent=1.0, offset=0.0)
    errors = np.ones(len(keys), np.float32)
    errors[:2] = 0.0, 3e38
    draws.settle(keys, errors)
    drawn = draws.draw(2000, np.random.default_rng(0))
    share = dict(zip(drawn.keys.tolist(), drawn.share.tolist(), strict=True))
    assert share[int(keys[1])] > 0.9
    assert draws._tree[keys[:1] % segments.layout.num_places] == 1


def test_priorities_outlive_the_process() -> None:
    source = SlotSource(num_steps=5, num_lanes=2)
    layout = ReplayLayout.of(source.layout, capacity=12 * 5, has_priorities=True)
    memory = bytearray(layout.nbytes)
    segments = Segments(layout, memory)
    draws = PrioritizedDraws(segments, exponent=0.6, offset=0.01)
    for _ in range(9):
        draws.inserted(segments.insert(source.slot()).numbers)
        keys = held_keys(segments)
        draws.settle(keys[::2], np.random.default_rng(len(keys)).standard_normal(len(keys[::2])).astype(np.float32) * 9)
    draws.settle(held_keys(segments), np.full(segments.num_transitions, 0.5, np.float32))
    later = Segments(layout, memory)
    resumed = PrioritizedDraws(later, exponent=0.6, offset=0.01)
    resumed.load_state_dict(draws.state_dict())
    for _ in range(2):
        before, after = (each.draw(1000, np.random.default_rng(1)) for each in (draws, resumed))
        np.testing.assert_array_equal(before.keys, after.keys)
        np.testing.assert_array_equal(before.share, after.share)
        slot = source.slot()
        for each, own in ((draws, segments), (resumed, later)):
            each.inserted(own.insert(slot).numbers)  # no transition has the largest priority now


def test_priorities_of_large_stores_have_a_sum_that_fits() -> None:
    segments = filled(6)
    draws = PrioritizedDraws(segments, exponent=1.0, offset=0.0)
    assert draws._most == min(LARGEST, (1 << 62) // segments.layout.num_places)
    draws._most = 5 * SCALE  # as of a store that is that much larger
    draws.settle(held_keys(segments), np.full(segments.num_transitions, 3e38, np.float32))
    assert draws._tree.total == draws._most * segments.num_transitions


def test_a_segment_whose_priorities_a_kill_prevented_has_the_largest() -> None:
    segments = filled(6)
    keys, draws = held_keys(segments), PrioritizedDraws(segments, exponent=1.0, offset=0.0)
    priorities = np.where(keys == keys[-1], 4.0, 0.25)
    draws.settle(keys, priorities.astype(np.float32))
    source = SlotSource(num_steps=5, num_lanes=2)
    inserted = segments.insert(source.slot()).numbers
    resumed = PrioritizedDraws(segments, exponent=1.0, offset=0.0)
    before, keys = keys, held_keys(segments)
    assert keys[-1] >= inserted.start * 5
    priorities = np.where((keys >= inserted.start * 5) | (keys == before[-1]), 4.0, 0.25)
    assert p_value(resumed, keys, priorities / priorities.sum()) > LEAST_PROBABILITY
