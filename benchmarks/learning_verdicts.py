"""From what seeds came to, to whether one program learns no worse than another. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

ALIKE = (0.8, 1.25)
"""Within which the interval of the ratio has to lie."""
COVERAGE = 0.9
RESAMPLES = 10_000
RESAMPLING_SEED = 0

Verdict = Literal["alike", "higher", "lower", "not decided"]


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A bootstrap interval, and the figure that it is about."""

    ratio: float
    low: float
    high: float

    @property
    def verdict(self) -> Verdict:
        """Not decided where the interval lies across a bound: more seeds make it narrower."""
        low, high = ALIKE
        if low <= self.low and self.high <= high:
            return "alike"
        if self.high < low:
            return "lower"
        return "higher" if self.low > high else "not decided"


def ratio_of_medians(mine: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Of the two medians, with the percentile bootstrap interval (Efron 1979): seeds are drawn anew on either side.

    The same figures give the same interval.
    """
    rng = np.random.default_rng(RESAMPLING_SEED)
    above, below = (
        np.median(rng.choice(np.asarray(figures, np.float64), (RESAMPLES, len(figures))), axis=1)
        for figures in (mine, theirs)
    )
    low, high = np.quantile(above / below, [(1.0 - COVERAGE) / 2.0, (1.0 + COVERAGE) / 2.0])
    return Interval(ratio=statistics.median(mine) / statistics.median(theirs), low=float(low), high=float(high))


def mean_verdict(mine: Sequence[float], theirs: Sequence[float], *, above: float) -> Verdict:
    """Of too few seeds for an interval: alike if the mean is above a bound, and at most one deviation below theirs."""
    lowest = max(above, statistics.mean(theirs) - statistics.stdev(theirs))
    return "alike" if statistics.mean(mine) >= lowest else "lower"
