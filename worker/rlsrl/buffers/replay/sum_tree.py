"""Whole numbers at places, with their sums in a tree: places are drawn exactly in proportion to their numbers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BLOCK = 32
"""Numbers of a block. Sums of all blocks are added up for each draw, in one call of numpy: a call costs as much as some
thousand additions, so a tree of two levels is faster than a deep one, up to 10 million places at least."""

Integers = NDArray[np.int64]


class SumTree:
    """Non-negative whole numbers at places. Sums are exact: nothing builds up, and a 0 is never drawn.

    Not thread-safe. The sum of all numbers must stay below 2 ** 63.
    """

    def __init__(self, size: int) -> None:
        """Start with zeros at the places 0 to ``size`` - 1."""
        num_blocks = -(-size // BLOCK)
        self._blocks: Integers = np.zeros((num_blocks, BLOCK), np.int64)
        self._numbers = self._blocks.reshape(-1)
        self._sums: Integers = np.zeros(num_blocks, np.int64)
        """Of each block."""

    @property
    def total(self) -> int:
        """The sum of all numbers."""
        return int(self._sums.sum())

    def __getitem__(self, places: Integers) -> Integers:
        """Return the numbers at these places."""
        return self._numbers[places]

    def __setitem__(self, places: Integers, numbers: Integers | int) -> None:
        """Set the numbers at these places, [N]. If a place occurs twice, its last number counts."""
        self._numbers[places] = numbers
        blocks = places // BLOCK
        self._sums[blocks] = self._blocks.take(blocks, axis=0).sum(axis=1)

    def fill(self, numbers: Integers) -> None:
        """Set the numbers at all places, [size]."""
        self._numbers[: len(numbers)] = numbers
        self._blocks.sum(axis=1, out=self._sums)

    def find(self, values: Integers) -> Integers:
        """Return the places, [N], whose numbers these values, [N], fall into: at least 0 and below ``total``.

        A place's share of all values is its number. So independent uniform values draw places in proportion to them.
        """
        ends = self._sums.cumsum()
        blocks = ends.searchsorted(values, side="right")
        left = values - (ends[blocks] - self._sums[blocks])
        ends_within = self._blocks.take(blocks, axis=0).cumsum(axis=1)
        places: Integers = blocks * BLOCK + (ends_within > left[:, None]).argmax(axis=1)
        return places
