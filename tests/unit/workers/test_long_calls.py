from __future__ import annotations

import pytest
import structlog
from prometheus_client import Counter
from structlog.testing import LogCapture

from rlsrl.runtime.call_board import EnvironmentCall
from rlsrl.workers.leases import Lease
from rlsrl.workers.long_calls import EXPIRE_SECONDS, LongCalls


def call(rank: int, seconds: float, number: int = 1) -> EnvironmentCall:
    return EnvironmentCall(first_rank=rank, num_environments=number, name="step", seconds=seconds)


def actor(index: int) -> Lease:
    return Lease(role="actor", index=index, incarnation=2, instance="i", attempt=0, process="p", heard_at=0.0)


class Reports:
    """Reports, with what is counted and logged."""

    def __init__(self) -> None:
        self.counter = Counter("ended", "Ended workers.", registry=None)
        self.log = LogCapture()
        self.calls = LongCalls(ended=self.counter, log=structlog.wrap_logger(None, processors=[self.log]))

    def shown(self, now: float) -> list[tuple[str, int, int, float]]:
        return [(each.role, each.index, each.call.first_rank, each.call.seconds) for each in self.calls.present(now)]


@pytest.fixture
def reports() -> Reports:
    return Reports()


def test_calls_grow_with_time_and_the_longest_comes_first(reports: Reports) -> None:
    reports.calls.put(actor(0), [call(3, 6.0)], 100.0)
    reports.calls.put(actor(1), [call(9, 8.0, 4), call(8, 5.0)], 101.0)
    assert reports.shown(102.0) == [("actor", 1, 9, 9.0), ("actor", 0, 3, 8.0), ("actor", 1, 8, 6.0)]
    assert [str(each) for each in reports.calls.present(102.0)][:2] == [
        "environment ranks 9 to 12 have been in step for 9 s (actor-1)",
        "environment rank 3 has been in step for 8 s (actor-0)",
    ]


def test_a_report_replaces_the_one_before_and_an_empty_one_ends_it(reports: Reports) -> None:
    reports.calls.put(actor(0), [call(3, 6.0), call(4, 6.0)], 0.0)
    reports.calls.put(actor(0), [call(4, 8.0)], 2.0)
    assert reports.shown(2.0) == [("actor", 0, 4, 8.0)]
    reports.calls.put(actor(0), [], 4.0)
    assert reports.shown(4.0) == []


def test_a_report_without_repetition_expires_and_a_successor_has_none(reports: Reports) -> None:
    reports.calls.put(actor(0), [call(3, 6.0)], 0.0)
    reports.calls.put(actor(1), [call(5, 6.0)], 0.0)
    reports.calls.forget(actor(1))
    assert [found[:2] for found in reports.shown(EXPIRE_SECONDS)] == [("actor", 0)]
    assert reports.shown(EXPIRE_SECONDS + 0.1) == []


def test_a_worker_that_ends_at_a_limit_is_counted_and_logged(reports: Reports) -> None:
    reports.calls.put(actor(0), [call(3, 6.0)], 0.0)
    assert reports.log.entries == []
    reports.calls.put(actor(0), [call(3, 30.04)], 0.0, limit="environment.stepSeconds")
    assert reports.counter._value.get() == 1.0
    (event,) = reports.log.entries
    assert (event["event"], event["worker"], event["rank"]) == ("environment_hang", "actor-0", 3)
    assert (event["call"], event["seconds"], event["limit"]) == ("step", 30.0, "environment.stepSeconds")
