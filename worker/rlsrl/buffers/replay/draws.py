"""Which rows of a replay store are drawn: all with equal probability, or by priority.

Rows are transitions, or whole segments: see ``ReplayLayout``. The key of a transition is ``number * T + step``. That of
a segment is its first step's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from rlsrl.buffers.replay.layout import MARK, PRIORITY
from rlsrl.buffers.replay.segments import Indices, Segments
from rlsrl.buffers.replay.sum_tree import SumTree

MOST_ATTEMPTS = 20
"""Rounds in which places without a row are drawn again, before the rows are listed."""
SCALE = 1 << 20
"""Whole numbers of a priority of 1."""
LARGEST = 1 << 40
"""The largest whole number of a priority. In stores of more than 4 million places it is less: see ``_most``."""


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """Rows that were drawn, with replacement."""

    keys: Indices
    """[N]: see ``rows.rows_of``."""
    share: NDArray[np.float64]
    """The probability with which each was drawn, [N]."""


class Draws(Protocol):
    """Draws rows from segments, of which there is at least one."""

    @property
    def mass(self) -> int:
        """The sum of the rows' weights: a row of weight w has the probability ``w / mass``."""

    def inserted(self, numbers: range) -> None:
        """Know of new segments, in the places of those that they removed."""

    def draw(self, num_rows: int, rng: np.random.Generator) -> Drawn:
        """Draw rows independently."""

    def settle(self, keys: Indices, errors: NDArray[np.float32]) -> None:
        """Learn of the errors of rows that were trained, [N]. Those that are gone meanwhile are left out."""

    def state_dict(self) -> dict[str, Any]:
        """Return JSON values for ``load_state_dict``: what the store does not keep."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; an empty one says nothing."""


class UniformDraws(Draws):
    """Every row has the same probability."""

    def __init__(self, segments: Segments) -> None:
        self._segments = segments

    @property
    @override
    def mass(self) -> int:
        return self._segments.num_rows

    @override
    def inserted(self, numbers: range) -> None:
        """Nothing follows from it."""

    @override
    def draw(self, num_rows: int, rng: np.random.Generator) -> Drawn:
        """Draw places, and draw those without a row again: all rows keep the same probability."""
        segments, of_segment = self._segments, self._segments.layout.rows_per_segment
        places = segments.layout.num_segments * of_segment
        end = segments.next_number * of_segment
        first = max(0, end - places)
        rows = rng.integers(first, end, num_rows)
        found = segments.has_row(rows % places)
        for _ in range(MOST_ATTEMPTS):
            if found.all():
                break
            missing = np.flatnonzero(~found)
            rows[missing] = again = rng.integers(first, end, missing.size)
            found[missing] = segments.has_row(again % places)
        else:
            missing = np.flatnonzero(~found)
            every = np.arange(first, end)
            rows[missing] = rng.choice(every[segments.has_row(every % places)], missing.size)
        keys = rows if of_segment > 1 else rows * segments.layout.num_steps
        return Drawn(keys=keys, share=np.full(num_rows, 1.0 / segments.num_rows))

    @override
    def settle(self, keys: Indices, errors: NDArray[np.float32]) -> None:
        """Nothing follows from it."""

    @override
    def state_dict(self) -> dict[str, Any]:
        return {}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """There is nothing to continue."""


class PrioritizedDraws(Draws):
    """Proportional prioritisation (Schaul et al. 2016): ``P(i) = p_i / sum p`` (eq. 1).

    ``p_i = (|error_i| + offset) ** exponent``. New rows have the largest priority that there ever was.
    Priorities are rounded to multiples of 2 ** -20, and ``share`` is by what they are rounded to. They are kept with
    the segments, whose layout has room for them.
    """

    def __init__(self, segments: Segments, *, exponent: float, offset: float) -> None:
        """Draw by the priorities that the segments have kept."""
        self._segments = segments
        self._exponent = exponent
        self._offset = offset
        self._priorities = segments.flat[PRIORITY]
        """By place: 1 at least for each row that is held."""
        self._of_segment = segments.layout.rows_per_segment
        self._tree = SumTree(len(self._priorities))
        self._most = min(LARGEST, (1 << 62) // len(self._priorities))
        """So that the sum of all is below 2 ** 63."""
        is_held = segments.rows_held()
        self._largest = int(self._priorities.max(where=is_held, initial=SCALE))
        # Between a segment and its priorities there may have been a kill.
        self._priorities[is_held & (self._priorities == 0)] = self._largest
        self._tree.fill(np.where(is_held, self._priorities, 0))

    @property
    @override
    def mass(self) -> int:
        return self._tree.total

    @override
    def inserted(self, numbers: range) -> None:
        """Give the new rows the largest priority."""
        self._refresh(np.arange(numbers.start, numbers.stop))

    @override
    def draw(self, num_rows: int, rng: np.random.Generator) -> Drawn:
        """Draw rows by priority."""
        total = self._tree.total
        places = self._tree.find(rng.integers(0, total, num_rows))
        segment, step = np.divmod(places, self._of_segment)
        numbers = self._segments.arrays[MARK][segment] - 1
        return Drawn(
            keys=numbers * self._segments.layout.num_steps + step,
            share=self._tree[places] / total,
        )

    @override
    def settle(self, keys: Indices, errors: NDArray[np.float32]) -> None:
        """Give these rows the priorities of their errors."""
        number, step = np.divmod(keys, self._segments.layout.num_steps)
        held = self._segments.are_held(number)
        places = number[held] % self._segments.layout.num_segments * self._of_segment + step[held]
        priorities = (np.abs(errors[held].astype(np.float64)) + self._offset) ** self._exponent
        rounded = np.clip(np.rint(priorities * SCALE), 1, self._most).astype(np.int64)
        self._priorities[places] = rounded
        self._tree[places] = rounded
        self._largest = max(self._largest, int(rounded.max(initial=0)))

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"largest": self._largest}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._largest = min(max(self._largest, int(state.get("largest", 0))), self._most)

    def _refresh(self, numbers: Indices) -> None:
        """Set the priorities of whole segments: the largest for rows, 0 elsewhere."""
        segment = numbers % self._segments.layout.num_segments
        places = (segment[:, None] * self._of_segment + np.arange(self._of_segment)).reshape(-1)
        priorities = np.where(self._segments.has_row(places), self._largest, 0)
        self._priorities[places] = priorities
        self._tree[places] = priorities
