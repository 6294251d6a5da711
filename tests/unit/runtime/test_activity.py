"""The shares of time in which a thread worked or waited."""

from __future__ import annotations

import pytest

from rlsrl.runtime.activity import WINDOW_SECONDS, Activity, stage_of, working_on
from rlsrl.testing.clock import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def activity(clock: ManualClock) -> Activity:
    return Activity(now=clock.monotonic)


def test_before_any_work_there_are_no_shares(activity: Activity, clock: ManualClock) -> None:
    assert activity.shares() == {}
    clock.advance(1.0)
    assert activity.shares() == {}


def test_shares_add_up_to_1_and_include_the_present_activity(activity: Activity, clock: ManualClock) -> None:
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


def test_stages_are_parts_of_the_work(activity: Activity, clock: ManualClock) -> None:
    activity.turn_to("working")
    clock.advance(4.0)
    activity.spent({"environment": 2.0, "inference": 1.0})
    activity.turn_to("credit")
    clock.advance(1.0)
    shares = activity.shares()
    assert shares == {working_on("environment"): 0.4, working_on("inference"): 0.2, "working": 0.2, "credit": 0.2}


def test_work_that_began_before_the_window_is_no_more_than_all_of_it(activity: Activity, clock: ManualClock) -> None:
    activity.turn_to("working")
    for _ in range(100):
        clock.advance(1.0)
        activity.shares()
    activity.spent({"environment": 100.0})
    assert activity.shares() == {working_on("environment"): 1.0}


def test_the_share_of_waiting_is_exact_however_late_work_is(activity: Activity, clock: ManualClock) -> None:
    """A slot takes half a minute, and waiting takes half of the time."""
    for slot in range(5):
        for second in range(30):
            activity.turn_to("working" if second % 2 else "credit")
            clock.advance(1.0)
            shares = activity.shares()
            if slot or second > WINDOW_SECONDS:
                assert shares["credit"] == pytest.approx(0.5, abs=0.05)
                assert sum(shares.values()) == pytest.approx(1.0)
        activity.spent({"environment": 10.0, "inference": 5.0})


@pytest.mark.parametrize(
    ("what", "stage"), [("working", ""), (working_on("copy"), "copy"), ("inference", None), ("", None)]
)
def test_activities_are_work_or_waiting(what: str, stage: str | None) -> None:
    assert stage_of(what) == stage


def test_excluded_time_is_in_no_share(activity: Activity, clock: ManualClock) -> None:
    activity.turn_to("working")
    clock.advance(1.0)
    activity.turn_to(None)
    clock.advance(5.0)
    activity.turn_to("batch")
    clock.advance(1.0)
    assert activity.shares() == {"working": 0.5, "batch": 0.5}
