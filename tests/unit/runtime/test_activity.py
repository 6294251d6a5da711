"""How a thread's last seconds were spent."""

from __future__ import annotations

import pytest

from rlsrl.runtime.activity import WINDOW_SECONDS, Activity
from rlsrl.testing.clock import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def activity(clock: ManualClock) -> Activity:
    return Activity(now=clock.monotonic)


def test_before_anything_was_done_nothing_is_known(activity: Activity, clock: ManualClock) -> None:
    assert activity.shares() == {}
    clock.advance(1.0)
    assert activity.shares() == {}


def test_shares_add_up_to_1_and_count_what_goes_on(activity: Activity, clock: ManualClock) -> None:
    for doing, seconds in (("working", 1.0), ("credit", 2.0), ("working", 1.0), ("parameters", 4.0)):
        activity.turn_to(doing)
        clock.advance(seconds)
    assert activity.shares() == {"working": 0.25, "credit": 0.25, "parameters": 0.5}


def test_only_the_last_seconds_count(activity: Activity, clock: ManualClock) -> None:
    activity.turn_to("credit")
    for _ in range(100):
        clock.advance(1.0)
        activity.shares()
    activity.turn_to("working")
    for second in range(1, int(WINDOW_SECONDS) + 1):
        clock.advance(1.0)
        assert activity.shares().get("working") == pytest.approx(second / WINDOW_SECONDS)
    clock.advance(1.0)
    assert activity.shares() == {"working": 1.0}


def test_time_that_does_not_count_is_in_no_share(activity: Activity, clock: ManualClock) -> None:
    activity.turn_to("working")
    clock.advance(1.0)
    activity.turn_to(None)
    clock.advance(5.0)
    activity.turn_to("batch")
    clock.advance(1.0)
    assert activity.shares() == {"working": 0.5, "batch": 0.5}
