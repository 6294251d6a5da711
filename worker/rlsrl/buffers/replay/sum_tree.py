"""Whole numbers at places, with their sums in a tree: places are drawn exactly in proportion to their numbers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FANOUT = 16
"""Children of a node. A level costs a few calls of numpy, whatever its width: few levels of wide nodes are fast."""

Integers = NDArray[np.int64]


class SumTree:
    """Non-negative whole numbers at places. Sums are exact: nothing builds up, and a 0 is never drawn.

    Not thread-safe. The sum of all numbers must stay below 2 ** 63.
    """

    def __init__(self, size: int) -> None:
        """Start with zeros at the places 0 to ``size`` - 1."""
        num_parents = -(-size // FANOUT)
        self._numbers: Integers = np.zeros(num_parents * FANOUT, np.int64)
        self._sums: list[Integers] = []
        """By level, from the numbers up: each node's row has 0 and the sums of its first 1, 2, ... children."""
        while num_parents > 1:
            num_nodes, num_parents = num_parents, -(-num_parents // FANOUT)
            self._sums.append(np.zeros((max(num_nodes, num_parents * FANOUT), FANOUT + 1), np.int64))
        self._sums.append(np.zeros((1, FANOUT + 1), np.int64))

    @property
    def total(self) -> int:
        """The sum of all numbers."""
        return int(self._sums[-1][0, -1])

    def __getitem__(self, places: Integers) -> Integers:
        """Return the numbers at these places."""
        return self._numbers[places]

    def __setitem__(self, places: Integers, numbers: Integers | int) -> None:
        """Set the numbers at these places, [N]. If a place occurs twice, its last number counts."""
        self._numbers[places] = numbers
        nodes = places // FANOUT
        of_children = self._numbers.reshape(-1, FANOUT)[nodes]
        for level, sums in enumerate(self._sums):
            sums[nodes, 1:] = of_children.cumsum(axis=1)
            if level + 1 < len(self._sums):
                nodes = nodes // FANOUT
                of_children = sums[nodes[:, None] * FANOUT + np.arange(FANOUT), -1]

    def fill(self, numbers: Integers) -> None:
        """Set the numbers at all places, [size]."""
        self._numbers[: len(numbers)] = numbers
        of_children = self._numbers.reshape(-1, FANOUT)
        for sums in self._sums:
            nodes = len(of_children)
            of_children.cumsum(axis=1, out=sums[:nodes, 1:])
            whole = np.zeros(-(-nodes // FANOUT) * FANOUT, np.int64)
            whole[:nodes] = sums[:nodes, -1]
            of_children = whole.reshape(-1, FANOUT)

    def find(self, values: Integers) -> Integers:
        """Return the places, [N], whose numbers these values, [N], fall into: at least 0 and below ``total``.

        A place's share of all values is its number. So independent uniform values draw places in proportion to them.
        """
        left = values
        nodes = np.zeros(len(values), np.int64)
        for sums in reversed(self._sums):
            rows = sums[nodes]
            children = np.count_nonzero(rows[:, 1:] <= left[:, None], axis=1)
            left = left - np.take_along_axis(rows, children[:, None], axis=1)[:, 0]
            nodes = nodes * FANOUT + children
        return nodes
