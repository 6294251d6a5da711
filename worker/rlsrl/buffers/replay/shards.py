"""Draws over shards: stores with draws of their own, from which rows are drawn as from one store.

A row is drawn in two stages: a shard in proportion to its mass, then a row by the shard's own draws. A row with the
weight w in a shard with the mass m has the probability ``m / sum(m) * w / m = w / sum(m)``, which is that of one store
with all rows. If masses are older than draws, they do not cancel. So ``share`` has the
probabilities that were used, and importance ratios stay exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from rlsrl.buffers.replay.segments import Indices


@dataclass(frozen=True, kw_only=True)
class Allotment:
    """The shards that give the rows of a draw."""

    shards: Indices
    """The shard of each row, [N]."""
    probability: NDArray[np.float64]
    """The probability with which each row's shard was chosen, [N]."""

    @classmethod
    def draw(cls, masses: Mapping[int, int], num_rows: int, rng: np.random.Generator) -> Self:
        """Choose the shard of each row independently, in proportion to the masses by shard.

        So any cut of the rows into minibatches draws each of them from all shards. If a shard dies before it has given
        its rows, draw anew without it: the others' transitions then have the probabilities of a store without it.

        Raises:
            ValueError: no shard has a mass.
        """
        numbers = np.array(sorted(shard for shard, mass in masses.items() if mass > 0), np.int64)
        if not numbers.size:
            raise ValueError(f"of {len(masses)} shards, none has a row")
        total = sum(masses[shard] for shard in numbers.tolist())
        probabilities = np.array([masses[shard] / total for shard in numbers.tolist()])
        chosen = rng.choice(len(numbers), num_rows, p=probabilities / probabilities.sum())
        return cls(shards=numbers[chosen], probability=probabilities[chosen])

    @property
    def num_rows(self) -> dict[int, int]:
        """Number of rows of each shard that gives any."""
        shards, counts = np.unique(self.shards, return_counts=True)
        return dict(zip(shards.tolist(), counts.tolist(), strict=True))

    def parted(self, rows: NDArray[Any]) -> dict[int, NDArray[Any]]:
        """Return each shard's part of an array with an entry for each row, [N, ...]."""
        return {shard: rows[self.shards == shard] for shard in self.num_rows}

    def joined(self, parts: Mapping[int, NDArray[Any]]) -> NDArray[Any]:
        """Return an array with an entry for each row, [N, ...], from the shards' parts. Undoes ``parted``."""
        first = next(iter(parts.values()))
        rows = np.empty((len(self.shards), *first.shape[1:]), first.dtype)
        for shard, part in parts.items():
            rows[self.shards == shard] = part
        return rows

    def share(self, within: Mapping[int, NDArray[np.float64]]) -> NDArray[np.float64]:
        """Return the probability with which each row was drawn from all shards, [N].

        ``within``: ``Drawn.share`` of each shard's part.
        """
        share: NDArray[np.float64] = self.probability * self.joined(within)
        return share
