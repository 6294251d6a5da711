"""A registry's metrics as plain numbers over an interval."""

from __future__ import annotations

import math

import pytest
from prometheus_client import CollectorRegistry, Gauge

from rlsrl.runtime.interval_metrics import MAX_INTERVAL_METRICS, MAX_NAME_LENGTH, IntervalMetrics
from rlsrl.runtime.metrics import Metrics
from rlsrl.testing.clock import ManualClock


class Watched:
    """The metrics of a worker, an interval of ten seconds that has begun, and the clock."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.registry = CollectorRegistry()
        self.metrics = Metrics(self.registry)
        self.intervals = IntervalMetrics(self.registry, now=self.clock.monotonic)

    def after(self, seconds: float) -> dict[str, float]:
        """Return rlsrl's own numbers that are due after so many more seconds."""
        self.clock.advance(seconds)
        due = self.intervals.due()
        return {name: value for name, value in due.items() if not name.startswith("process_")}


@pytest.fixture
def watched() -> Watched:
    watched = Watched()
    watched.metrics.env_steps.inc(1000)
    watched.intervals.repeat(10.0)
    return watched


def test_a_counter_is_its_rate_since_the_interval_began(watched: Watched) -> None:
    watched.metrics.env_steps.inc(50)
    watched.metrics.waiting_seconds.labels(reason="credit").inc(6.0)
    assert watched.after(20.0) == {"env_steps_per_second": 2.5, "waiting_seconds_per_second/credit": 0.3}
    watched.metrics.env_steps.inc(30)
    assert watched.after(10.0) == {"env_steps_per_second": 3.0, "waiting_seconds_per_second/credit": 0.0}


def test_a_histogram_is_the_mean_of_the_intervals_observations(watched: Watched) -> None:
    for lag in (0.0, 1.0, 5.0):
        watched.metrics.policy_lag.observe(lag)
    watched.metrics.inference_seconds.labels(stage="compute").observe(0.25)
    assert watched.after(10.0) == {
        "env_steps_per_second": 0.0,
        "policy_lag_steps": 2.0,
        "inference_seconds/compute": 0.25,
    }
    watched.metrics.policy_lag.observe(4.0)
    assert watched.after(10.0) == {"env_steps_per_second": 0.0, "policy_lag_steps": 4.0}


def test_a_gauge_is_its_present_value_and_is_absent_if_that_is_not_finite(watched: Watched) -> None:
    watched.metrics.version_step.set(7)
    watched.metrics.return_mean.set(math.nan)
    assert watched.after(10.0) == {"env_steps_per_second": 0.0, "version_step": 7.0}


def test_nothing_is_due_before_the_interval_has_ended(watched: Watched) -> None:
    assert watched.after(9.5) == {}
    assert watched.after(0.5) != {}
    assert watched.after(9.5) == {}


def test_zero_seconds_end_the_intervals(watched: Watched) -> None:
    watched.intervals.repeat(0.0)
    assert watched.after(1000.0) == {}


def test_a_new_length_keeps_the_beginning_of_the_interval(watched: Watched) -> None:
    watched.metrics.env_steps.inc(50)
    assert watched.after(5.0) == {}
    watched.intervals.repeat(20.0)
    assert watched.after(10.0) == {}
    assert watched.after(10.0) == {"env_steps_per_second": 2.0}


def test_of_the_process_the_cpu_memory_and_files_are_shown(watched: Watched) -> None:
    watched.clock.advance(10.0)
    due = watched.intervals.due()
    assert {name for name in due if name.startswith("process_")} == {
        "process_cpu_seconds_per_second",
        "process_open_fds",
        "process_resident_memory_bytes",
    }
    assert due["process_resident_memory_bytes"] > 1e6


def test_the_numbers_are_bounded(watched: Watched) -> None:
    gauge = Gauge("many", "Many.", ["key"], registry=watched.registry)
    gauge.labels(key="x" * MAX_NAME_LENGTH).set(1.0)
    for number in range(2 * MAX_INTERVAL_METRICS):
        gauge.labels(key=str(number)).set(1.0)
    watched.clock.advance(10.0)
    due = watched.intervals.due()
    assert len(due) == MAX_INTERVAL_METRICS
    assert max(map(len, due)) < MAX_NAME_LENGTH
