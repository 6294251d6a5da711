"""Decide from the seeds' figures whether one program learns as well as another. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

ALIKE = (0.8, 1.25)
"""Bounds for the interval of the ratio."""
COVERAGE = 0.9
RESAMPLES = 10_000
RESAMPLING_SEED = 0

Verdict = Literal["alike", "higher", "lower", "not decided"]


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A ratio and its bootstrap interval."""

    ratio: float
    low: float
    high: float

    @property
    def verdict(self) -> Verdict:
        """The verdict. ``not decided``: the interval crosses a bound, and more seeds make it narrower."""
        low, high = ALIKE
        if low <= self.low and self.high <= high:
            return "alike"
        if self.high < low:
            return "lower"
        return "higher" if self.low > high else "not decided"


def ratio_of_medians(mine: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Return the ratio of the medians, with its percentile bootstrap interval (Efron 1979).

    Both sides are resampled. Equal figures give an equal interval.
    """
    rng = np.random.default_rng(RESAMPLING_SEED)
    above, below = (
        np.median(rng.choice(np.asarray(figures, np.float64), (RESAMPLES, len(figures))), axis=1)
        for figures in (mine, theirs)
    )
    low, high = np.quantile(above / below, [(1.0 - COVERAGE) / 2.0, (1.0 + COVERAGE) / 2.0])
    return Interval(ratio=statistics.median(mine) / statistics.median(theirs), low=float(low), high=float(high))


def mean_verdict(mine: Sequence[float], theirs: Sequence[float], *, above: float) -> Verdict:
    """Return the verdict for few seeds: alike if the mean is above a bound and at most one deviation below theirs."""
    lowest = max(above, statistics.mean(theirs) - statistics.stdev(theirs))
    return "alike" if statistics.mean(mine) >= lowest else "lower"
