"""How often transitions of several shards are drawn, against one store with all of them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from rlsrl.buffers.replay.draws import Draws, PrioritizedDraws, UniformDraws
from rlsrl.buffers.replay.segments import Indices, Segments
from rlsrl.buffers.replay.shards import Allotment
from rlsrl.testing.replay_draws import LEAST_PROBABILITY, chi_square, filled, held_keys, p_value_of_ratios

NUM_DRAWS = 60_000
SLOTS = {0: 2, 3: 5, 4: 1, 7: 6}
"""Slots of each shard: they differ in size."""
DEAD = 7
"""The shard that dies: the largest one."""


class Shard:
    """A shard with its transitions and the weights by which one store would draw them."""

    def __init__(self, number: int, num_slots: int, *, is_prioritized: bool) -> None:
        self.segments: Segments = filled(num_slots, seed=number)
        self.keys: Indices = held_keys(self.segments)
        self.weights = np.ones(len(self.keys))
        self.draws: Draws = UniformDraws(self.segments)
        if is_prioritized:
            self.draws = PrioritizedDraws(self.segments, exponent=1.0, offset=0.0)
            self.learn(4.0**-number * np.random.default_rng(number).uniform(0.5, 1.5, len(self.keys)))

    def learn(self, errors: np.ndarray) -> None:
        self.draws.settle(self.keys, errors.astype(np.float32))
        self.weights = np.rint(np.abs(errors.astype(np.float32)).astype(np.float64) * 2**20)


class Store:
    """The shards as one store: their transitions are numbered through, by shard."""

    def __init__(self, shards: Mapping[int, Shard]) -> None:
        self.shards = shards
        sizes = [len(shard.keys) for shard in shards.values()]
        self.num_items = sum(sizes)
        self._first = dict(zip(shards, np.cumsum([0, *sizes]), strict=False))

    @property
    def probabilities(self) -> np.ndarray:
        weights = np.concatenate([shard.weights for shard in self.shards.values()])
        return weights / weights.sum()

    @property
    def masses(self) -> dict[int, int]:
        return {number: shard.draws.mass for number, shard in self.shards.items()}

    def drawn(self, allotment: Allotment, *, seed: int) -> tuple[Indices, np.ndarray]:
        """Return the items that were drawn, [N], and their shares, [N]."""
        items, within = {}, {}
        for number, num_rows in allotment.num_rows.items():
            shard = self.shards[number]
            drawn = shard.draws.draw(num_rows, np.random.default_rng((seed, number)))
            items[number] = self._first[number] + np.searchsorted(shard.keys, drawn.keys)
            within[number] = drawn.share
        return allotment.joined(items), allotment.share(within)

    def p_value_of(self, items: Indices, share: np.ndarray) -> float:
        """Return the probability of draws as uneven as these, if weighted by their ratios all items were equal."""
        return p_value_of_ratios(items, 1.0 / (self.num_items * share), self.num_items)


def store_of(*, is_prioritized: bool) -> Store:
    return Store({number: Shard(number % 5, slots, is_prioritized=is_prioritized) for number, slots in SLOTS.items()})


def equally(masses: Mapping[int, int], num_rows: int, rng: np.random.Generator) -> Allotment:
    """Draw equally many rows from each shard, whatever its size."""
    return Allotment.draw(dict.fromkeys(masses, 1), num_rows, rng)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("has_died", [False, True])
@pytest.mark.parametrize("is_prioritized", [False, True])
def test_transitions_of_shards_are_drawn_as_from_one_store(is_prioritized: bool, has_died: bool, seed: int) -> None:
    store, rng = store_of(is_prioritized=is_prioritized), np.random.default_rng(seed)
    allotment = Allotment.draw(store.masses, NUM_DRAWS, rng)
    if has_died:  # after it was chosen for some rows, and before it gave them
        assert DEAD in allotment.num_rows
        store = Store({number: shard for number, shard in store.shards.items() if number != DEAD})
        allotment = Allotment.draw(store.masses, NUM_DRAWS, rng)
    items, share = store.drawn(allotment, seed=seed)
    np.testing.assert_allclose(share, store.probabilities[items])
    counts = np.bincount(items, minlength=store.num_items)
    assert chi_square(counts, store.probabilities * NUM_DRAWS) > LEAST_PROBABILITY
    assert store.p_value_of(items, share) > LEAST_PROBABILITY


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("is_prioritized", [False, True])
def test_equal_draws_from_unequal_shards_need_weights(is_prioritized: bool, seed: int) -> None:
    store = store_of(is_prioritized=is_prioritized)
    allotment = equally(store.masses, NUM_DRAWS, np.random.default_rng(seed))
    items, share = store.drawn(allotment, seed=seed)
    assert store.p_value_of(items, share) > LEAST_PROBABILITY, "their weights correct them"
    unweighted = np.full(NUM_DRAWS, 1.0 / store.num_items)
    assert store.p_value_of(items, unweighted) < LEAST_PROBABILITY


@pytest.mark.parametrize("seed", range(3))
def test_ratios_stay_exact_where_masses_are_old(seed: int) -> None:
    store, rng = store_of(is_prioritized=True), np.random.default_rng(seed)
    reported = store.masses
    for number, shard in store.shards.items():
        shard.learn(rng.uniform(0.5, 1.5, len(shard.keys)) * (1 + number))
    items, share = store.drawn(Allotment.draw(reported, NUM_DRAWS, rng), seed=seed)
    assert store.p_value_of(items, share) > LEAST_PROBABILITY
    assert store.p_value_of(items, store.probabilities[items]) < LEAST_PROBABILITY, "as if masses were new"


def test_minibatches_have_rows_of_all_shards() -> None:
    allotment = Allotment.draw({2: 30, 5: 10}, 4000, np.random.default_rng(0))
    minibatches = allotment.shards.reshape(10, -1)
    assert set(minibatches.ravel().tolist()) == {2, 5}
    part = np.count_nonzero(minibatches == 2, axis=1) / 400
    assert part.min() > 0.65
    assert part.max() < 0.85


def test_rows_are_parted_and_joined_in_their_order() -> None:
    allotment = Allotment.draw({1: 1, 0: 2, 9: 3, 4: 0}, 50, np.random.default_rng(0))
    rows = np.arange(100).reshape(50, 2)
    parts = allotment.parted(rows)
    assert {shard: len(part) for shard, part in parts.items()} == allotment.num_rows
    assert set(parts) == {0, 1, 9}, "a shard without a transition gives none"
    np.testing.assert_array_equal(allotment.joined(parts), rows)


def test_large_masses_keep_their_proportions() -> None:
    allotment = Allotment.draw({0: 1 << 62, 1: 1 << 62, 2: 1 << 62}, 9, np.random.default_rng(0))
    np.testing.assert_allclose(allotment.probability, 1 / 3)


@pytest.mark.parametrize("masses", [{}, {0: 0, 1: 0}])
def test_shards_without_transitions_give_no_rows(masses: Mapping[int, int]) -> None:
    with pytest.raises(ValueError, match="none has a row"):
        Allotment.draw(masses, 4, np.random.default_rng(0))
