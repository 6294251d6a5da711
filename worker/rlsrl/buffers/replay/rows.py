"""Rows of a replay store: transitions with the rewards of n steps and the frame they lead to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlsrl.buffers.replay.layout import EPISODE_START
from rlsrl.buffers.replay.segments import NONE, Indices, Segments, stack_places
from rlsrl.data.specs import Arrays

NEXT = "next/"
"""Prefix of the paths of observations that transitions lead to."""
IMPORTANCE = "importance"
"""Name of the rows' importance ratios, [N] float32, in (0, 1]: see ``importance_of``. Which power of it corrects a
loss, the algorithm decides."""


def largest_ratios(share: NDArray[np.float64], *, size: int) -> list[float]:
    """Return the largest ``1 / P(i)`` of the rows of each minibatch, by the probabilities [K * size] of the draws."""
    largest: list[float] = (1.0 / share.reshape(-1, size).min(axis=1)).tolist()
    return largest


def importance_of(share: NDArray[np.float64], of_ranks: Sequence[Sequence[float]], *, size: int) -> NDArray[np.float32]:
    """Return the importance ratios of rows, [K * size], by the probabilities with which this rank drew them.

    A row's ratio says how much more often it would be drawn if the transitions of all ranks had the same probability.
    Of R ranks, each draws an equal part of a minibatch from its own store. So among N transitions of all ranks the
    ratio is ``R / (N * P(i))``, however many of them each rank has. It is divided by the largest ratio of its minibatch
    over all ranks' rows, as in Schaul et al. 2016, section 3.4: R and N cancel.

    Args:
        share: ``Drawn.share``.
        of_ranks: ``largest_ratios`` of each rank.
        size: Rows of this rank's part of a minibatch.
    """
    largest = np.max(np.array(of_ranks, np.float64), axis=0)[:, np.newaxis]
    ratios: NDArray[np.float64] = 1.0 / share.reshape(-1, size) / largest
    return ratios.reshape(-1).astype(np.float32)


def as_stored(reward: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return rewards as they are."""
    return reward


@dataclass(frozen=True, kw_only=True)
class RowForm:
    """What a row makes of its transition and of those after it in the episode."""

    num_steps: int
    """Steps whose rewards a row has: n of n-step returns."""
    discount: float
    """Per env step."""
    rewards: Callable[[NDArray[np.float32]], NDArray[np.float32]] = as_stored
    """Returns stored rewards as the algorithm sees them."""


def rows_of(segments: Segments, keys: Indices, form: RowForm) -> Arrays:
    """Return the transitions with these keys, [N]: ``number * T + step`` for a step of a segment that is held.

    With up to n = ``form.num_steps`` steps from each on, fewer at the end of an episode and where the lane's next
    segment is not there yet:

    - ``action`` [N, ...] and observations [N, ...] by path;
    - ``reward`` [N]: the sum of the steps' rewards, each as ``form.rewards`` returns it, the k-th weighted by
      ``discount ** k``;
    - ``next/...`` [N, ...]: observations after the last of the steps;
    - ``discount`` [N]: the weight of a value of these, ``discount ** steps``, or 0 if the episode terminated.
    """
    discount, rewards = form.discount, form.rewards
    layout, flat = segments.layout, segments.flat
    first = last = keys % layout.num_places
    reward = rewards(flat["reward"][first])
    weight = np.full(len(keys), discount, np.float32)
    for _ in range(1, form.num_steps):
        last, goes_on = _after(segments, last)
        reward += np.where(goes_on, weight * rewards(flat["reward"][last]), np.float32(0.0))
        weight *= np.where(goes_on, np.float32(discount), np.float32(1.0))
    weight *= ~flat["terminated"][last]
    rows = {"action": flat["action"].take(first, axis=0), "reward": reward, "discount": weight}
    for name in layout.frames:
        rows[name] = _frames(segments, name, first)
        rows[NEXT + name] = _frames(segments, name, last, 1)
    return rows


def fields_of(segments: Segments, keys: Indices, names: Iterable[str]) -> Arrays:
    """Return these fields of the transitions' slots, each [N, ...]: observations are those that were acted on."""
    places, frames = keys % segments.layout.num_places, segments.layout.frames
    return {
        name: _frames(segments, name, places) if name in frames else segments.flat[name].take(places, axis=0)
        for name in names
    }


def _after(segments: Segments, places: Indices) -> tuple[Indices, NDArray[np.bool_]]:
    """Return the places of the transitions after these in their episodes, and whether there are any; else these.

    None follows the end of an episode, a step whose successor has not arrived, and a step before one that is no
    transition: after a fault, an episode of the slot before is not marked as truncated.
    """
    layout, flat = segments.layout, segments.flat
    segment, step = np.divmod(places, layout.num_steps)
    is_last = step + 1 == layout.num_steps
    following = segments.following[segment]
    after = np.where(is_last, following % layout.num_segments * layout.num_steps, places + 1)
    has_ended = flat["terminated"][places] | flat["truncated"][places]
    exists = ~has_ended & (~is_last | (following != NONE))
    exists &= flat["mask"][np.where(exists, after, places)]
    return np.where(exists, after, places), exists


def _frames(segments: Segments, name: str, places: Indices, after: int = 0) -> NDArray[Any]:
    """Return the observations ``after`` steps after these steps' own, [N, ...]."""
    layout, flat = segments.layout, segments.flat
    segment = places // layout.num_steps
    frames = places + segment + after  # a segment has one frame more than it has steps
    if name not in layout.stacks:
        whole: NDArray[Any] = flat[name].take(frames, axis=0)
        return whole
    depth = layout.stacks[name]
    of_segment = stack_places(places % layout.num_steps + after, flat[EPISODE_START][frames], depth)
    images: NDArray[Any] = flat[name].take(segment[:, None] * (layout.num_steps + depth) + of_segment, axis=0)
    return images
