"""The verdict on the seeds' figures."""

from __future__ import annotations

import numpy as np
import pytest
from learning_verdicts import ALIKE, Interval, mean_verdict, ratio_of_medians


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (*ALIKE, "alike"),
        (0.95, 1.05, "alike"),
        (0.79, 1.05, "not decided"),
        (0.95, 1.26, "not decided"),
        (0.5, 2.0, "not decided"),
        (0.5, 0.79, "lower"),
        (1.26, 1.5, "higher"),
    ],
)
def test_the_whole_interval_has_to_lie_within_the_bounds(low: float, high: float, expected: str) -> None:
    assert Interval(ratio=1.0, low=low, high=high).verdict == expected


def test_figures_without_spread_have_an_interval_of_one_point() -> None:
    assert ratio_of_medians([30.0] * 5, [20.0] * 4) == Interval(ratio=1.5, low=1.5, high=1.5)


def test_the_interval_covers_the_true_ratio_as_often_as_it_claims() -> None:
    rng = np.random.default_rng(1)
    held = []
    for _ in range(100):
        mine, theirs = rng.lognormal(np.log(1.1), 0.2, 15), rng.lognormal(0.0, 0.2, 15)
        interval = ratio_of_medians([*mine], [*theirs])
        assert interval.low <= interval.ratio <= interval.high
        held.append(interval.low <= 1.1 <= interval.high)
    assert 0.8 <= np.mean(held) <= 0.99


def test_more_seeds_make_it_narrower_and_the_same_ones_the_same() -> None:
    rng = np.random.default_rng(2)
    mine, theirs = [*rng.lognormal(0.0, 0.2, 80)], [*rng.lognormal(0.0, 0.2, 80)]
    few, many = ratio_of_medians(mine[:10], theirs[:10]), ratio_of_medians(mine, theirs)
    assert many.high - many.low < few.high - few.low
    assert ratio_of_medians(mine, theirs) == many


@pytest.mark.parametrize(
    ("mine", "expected"),
    [
        ([-17.0, -17.5, -17.9], "alike"),
        ([-18.5, -18.5, -18.5], "lower"),  # not above the bound
        ([-17.9, -17.9, -17.9], "alike"),
    ],
)
def test_a_mean_has_to_be_above_a_bound(mine: list[float], expected: str) -> None:
    assert mean_verdict(mine, [-18.0, -17.0, -19.0], above=-18.0) == expected


def test_a_mean_may_be_one_deviation_below_the_other() -> None:
    theirs = [0.0, 10.0, 20.0]  # mean 10, deviation 10
    assert mean_verdict([0.0, 0.0, 0.0], theirs, above=-18.0) == "alike"
    assert mean_verdict([-1.0, 0.0, 0.0], theirs, above=-18.0) == "lower"
