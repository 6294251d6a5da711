from __future__ import annotations

import pytest

from rlsrl.workers.recent_rate import RecentRate


def rate_after(*counts: tuple[float, float]) -> RecentRate:
    rate = RecentRate()
    for at, count in counts:
        rate.note(at, count)
    return rate


def test_the_rate_is_that_of_the_last_seconds() -> None:
    slow_then_fast = [(float(at), 10.0 * at) for at in range(100)]
    slow_then_fast += [(100.0 + at, 1000.0 + 500.0 * at) for at in range(21)]
    assert rate_after(*slow_then_fast).per_second(120.0) == pytest.approx(500.0)


def test_a_stall_shows_no_speed() -> None:
    rate = rate_after(*[(float(at), 100.0 * at) for at in range(20)])
    assert rate.per_second(25.0) == pytest.approx(100.0)
    for at in range(20, 40):
        rate.note(float(at), 1900.0)
    assert rate.per_second(40.0) == 0.0


def test_long_steps_are_not_a_stall() -> None:
    rate = rate_after((0.0, 0.0), (60.0, 600.0), (120.0, 1200.0))
    assert rate.per_second(200.0) == pytest.approx(10.0)
    assert rate.per_second(241.0) == 0.0


def test_before_two_values_the_rate_is_unknown_also_after_a_restart() -> None:
    assert RecentRate().per_second(1.0) is None
    assert rate_after((0.0, 0.0)).per_second(1.0) is None
    assert rate_after((0.0, 0.0), (1.0, 50.0), (2.0, 10.0)).per_second(2.0) is None
