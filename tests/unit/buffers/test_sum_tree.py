"""Sums of a tree against sums of a plain array."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsrl.buffers.replay.sum_tree import BLOCK, SumTree

SIZES = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, BLOCK**2, BLOCK**2 + 1, 5000, BLOCK**3 + 1]


def filled(size: int, rng: np.random.Generator) -> tuple[SumTree, np.ndarray]:
    numbers = rng.integers(0, 1 << 40, size) * (rng.random(size) < 0.7)
    numbers[rng.integers(size)] = 3
    tree = SumTree(size)
    tree[np.arange(size)] = numbers
    return tree, numbers


@pytest.mark.parametrize("size", SIZES)
def test_it_finds_what_a_plain_sum_finds(size: int) -> None:
    rng = np.random.default_rng(size)
    tree, numbers = filled(size, rng)
    for _ in range(3):
        assert tree.total == numbers.sum()
        edges = numbers.cumsum()
        values = np.concatenate(
            [rng.integers(0, tree.total, 200), [0, tree.total - 1], edges[:-1][edges[:-1] < edges[-1]]]
        )
        assert np.array_equal(tree.find(values), np.searchsorted(edges, values, side="right"))
        places = rng.integers(0, size, 1 + size // 3)
        tree[places] = changed = rng.integers(0, 1 << 40, len(places))
        for place, number in zip(places, changed, strict=True):
            numbers[place] = number
        assert np.array_equal(tree[np.arange(size)], numbers)


@given(st.lists(st.tuples(st.integers(0, 299), st.integers(0, 5)), min_size=1, max_size=40))
def test_the_last_of_several_numbers_for_a_place_counts(changes: list[tuple[int, int]]) -> None:
    tree, numbers = SumTree(300), np.zeros(300, np.int64)
    for start in range(0, len(changes), 7):
        part = np.array(changes[start : start + 7])
        tree[part[:, 0]] = part[:, 1]
        for place, number in part:
            numbers[place] = number
    assert tree.total == numbers.sum()
    if tree.total:
        assert np.array_equal(tree.find(np.arange(tree.total)), np.repeat(np.arange(300), numbers))
