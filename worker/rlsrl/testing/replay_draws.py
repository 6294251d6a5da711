"""Whether transitions are drawn with the probabilities that a draw says, by Pearson's test."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from rlsrl.buffers.replay.layout import MARK, ReplayLayout
from rlsrl.buffers.replay.segments import Indices, Segments
from rlsrl.testing.replay import Numbered, SlotSource

LEAST_PROBABILITY = 0.001
"""Of a chi-square statistic at least as large as that which was found, at fixed seeds."""


def filled(num_slots: int, *, num_segments: int = 12, longest: int = 9, seed: int = 0) -> Segments:
    """Return segments of 5 steps, filled with that many slots of 2 lanes, in a store with room for priorities."""
    source = SlotSource(num_steps=5, num_lanes=2, make=partial(Numbered, longest=longest), seed=seed)
    layout = ReplayLayout.of(source.layout, capacity=num_segments * 5, has_priorities=True)
    segments = Segments(layout, bytearray(layout.nbytes))
    for _ in range(num_slots):
        segments.insert(source.slot())
    return segments


def held_keys(segments: Segments) -> Indices:
    """Return the keys of all transitions that are held, sorted."""
    num_steps = segments.layout.num_steps
    place, step = np.nonzero(segments.arrays["mask"] & (segments.arrays[MARK] > 0)[:, None])
    keys: Indices = np.sort((segments.arrays[MARK][place] - 1) * num_steps + step)
    return keys


def chi_square(counts: NDArray[np.int64], expected: NDArray[np.float64]) -> float:
    """Return the probability of counts at least as far from those expected (Pearson's test)."""
    statistic = torch.tensor((np.square(counts - expected) / expected).sum(), dtype=torch.float64)
    freedom = torch.tensor(len(counts) - 1.0, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))


def p_value_of_ratios(items: Indices, ratios: NDArray[np.float64], num_items: int) -> float:
    """Return the probability of draws as uneven as these if, weighted by their ratios, all items were drawn equally.

    Args:
        items: The items drawn, [N], each of 0 to ``num_items`` - 1 at least once.
        ratios: The importance ratio of each draw, [N], the same for each draw of an item.
        num_items: How many there are.

    Raises:
        ValueError: an item was not drawn.
    """
    counts, of_items = np.bincount(items, minlength=num_items), np.zeros(num_items)
    of_items[items] = ratios
    if not counts.all():
        raise ValueError(f"{np.count_nonzero(counts == 0)} of {num_items} items were not drawn")
    return chi_square(counts, len(items) / num_items / of_items)
