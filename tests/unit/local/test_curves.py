"""Figures over seeds: smoothing, interquartile means against scipy's, and bootstrap intervals."""

from __future__ import annotations

import numpy as np
import pytest

from rlsrl.local.curves import band_of, bootstrap_interval, interquartile_mean, smoothed


def test_each_value_becomes_the_mean_of_those_around_it() -> None:
    points = tuple((float(x), float(value)) for x, value in enumerate((0, 3, 6, 9, 30)))
    assert smoothed(points, 1) == points
    assert smoothed(points, 3) == ((0.0, 1.5), (1.0, 3.0), (2.0, 6.0), (3.0, 15.0), (4.0, 19.5))
    assert smoothed(points, 100)[0] == (0.0, pytest.approx(9.6))
    assert smoothed(points[:1], 5) == points[:1]


@pytest.mark.parametrize(
    ("values", "expected"),
    [  # by scipy.stats.trim_mean(values, 0.25), which rliable (Agarwal et al. 2021) uses
        ([7.0], 7.0),
        ([1.0, 2.0, 6.0], 3.0),
        ([1.0, 2.0, 6.0, 100.0], 4.0),
        ([5.0, -80.0, 1.0, 2.0, 3.0, 1000.0, 4.0, 6.0], 3.5),
        (list(range(10)), 4.5),
    ],
)
def test_interquartile_means_are_those_of_scipy(values: list[float], expected: float) -> None:
    assert interquartile_mean(np.array(values)) == expected
    both = np.stack([np.array(values), -np.array(values)], axis=1)
    assert interquartile_mean(both).tolist() == [expected, -expected]


def test_intervals_contain_the_true_mean_about_as_often_as_they_say() -> None:
    rng = np.random.default_rng(1)
    contained = []
    for _ in range(100):
        low, high = bootstrap_interval(rng.normal(10.0, 2.0, size=20))
        contained.append(low <= 10.0 <= high)
    assert 0.85 <= np.mean(contained) <= 1.0
    one = bootstrap_interval(np.array([3.0]))
    assert one == (3.0, 3.0)
    values = rng.normal(size=7)
    assert bootstrap_interval(values) == bootstrap_interval(values)


def test_a_band_covers_what_all_runs_have() -> None:
    first = tuple((float(x), 2.0 * x) for x in range(11))
    second = tuple((float(x), 4.0 * x) for x in range(2, 9, 2))
    band = band_of([first, second])
    assert band is not None
    assert (band.x[0], band.x[-1]) == (2.0, 8.0)
    np.testing.assert_allclose(band.centre, 3.0 * band.x)
    assert (band.low <= band.centre).all()
    assert (band.centre <= band.high).all()
    np.testing.assert_allclose([band.low[-1], band.high[-1]], [16.0, 32.0])
    for nothing in ([], [first, ()], [first, ((20.0, 1.0), (30.0, 1.0))], [first[:1], first[:1]]):
        assert band_of(nothing) is None
