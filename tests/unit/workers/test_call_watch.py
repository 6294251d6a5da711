"""When the call watch reports, and when it ends the worker. The test passes the time."""

from __future__ import annotations

import mmap
import signal
import subprocess
import sys
from collections.abc import Sequence

import pytest

from rlsrl.api.spec import Environment
from rlsrl.runtime.call_board import (
    BOARD_BYTES,
    CALL,
    CALL_NAMES,
    IDLE,
    LANE,
    NUM_CALLS,
    CallBoard,
    CallName,
    EnvironmentCall,
)
from rlsrl.testing.waiting import until
from rlsrl.workers.call_watch import call_limits
from rlsrl.workers.call_watch_process import (
    LIMIT_FIELDS,
    LONG_SECONDS,
    POLL_SECONDS,
    REPEAT_SECONDS,
    CallWatch,
    WatchOptions,
    is_stopped,
)


class Watched:
    """A worker with two threads, and what its watch does."""

    def __init__(self, *, step: float | None = None, reset: float | None = None) -> None:
        board = CallBoard(mmap.mmap(-1, BOARD_BYTES))
        self.entries = [board.open_entry(40), board.open_entry(50)]
        self.reports: list[tuple[list[tuple[int, str, float]], str]] = []
        self.ended: list[tuple[int, str]] = []
        limits: dict[CallName, float | None] = {"reset": reset, "make": reset, "close": reset}
        limits |= {"step": step, "render": step}
        self.watch = CallWatch(board, limits, report=self.report, end=self.end)

    def report(self, calls: Sequence[EnvironmentCall], limit: str) -> None:
        self.reports.append(([(call.first_rank, call.name, call.seconds) for call in calls], limit))

    def end(self, call: EnvironmentCall, limit: str) -> None:
        self.ended.append((call.first_rank, limit))

    def call(self, lane: int, name: CallName = "step", *, thread: int = 0) -> None:
        entry = self.entries[thread]
        entry[NUM_CALLS] += 1
        entry[CALL], entry[LANE] = CALL_NAMES.index(name), lane

    def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds / POLL_SECONDS)):
            self.watch.look(POLL_SECONDS)


def test_short_calls_are_not_reported() -> None:
    worker = Watched(step=1.0)
    for lane in range(20):
        worker.call(lane % 2)
        worker.pass_time(POLL_SECONDS)
    assert (worker.reports, worker.ended) == ([], [])


def test_a_long_call_is_reported_repeatedly_and_its_end_once() -> None:
    worker = Watched()
    worker.call(3)
    worker.pass_time(LONG_SECONDS)
    assert worker.reports == []
    worker.pass_time(POLL_SECONDS)
    assert worker.reports == [([(43, "step", LONG_SECONDS)], "")]
    worker.pass_time(REPEAT_SECONDS)
    assert worker.reports[1:] == [([(43, "step", LONG_SECONDS + REPEAT_SECONDS)], "")]
    worker.entries[0][LANE] = IDLE
    worker.pass_time(10 * REPEAT_SECONDS)
    assert worker.reports[2:] == [([], "")]


def test_the_longest_call_comes_first() -> None:
    worker = Watched()
    worker.call(0)
    worker.pass_time(1.0)
    worker.call(1, "reset", thread=1)
    worker.pass_time(LONG_SECONDS + REPEAT_SECONDS + 1.0)
    calls, _ = worker.reports[-1]
    assert [call[:2] for call in calls] == [(40, "step"), (51, "reset")]


@pytest.mark.parametrize(
    ("name", "other", "field"),
    [
        ("step", "reset", "environment.stepSeconds"),
        ("reset", "step", "environment.resetSeconds"),
        ("make", "step", "environment.resetSeconds"),
        ("close", "step", "environment.resetSeconds"),
        ("render", "reset", "environment.stepSeconds"),
    ],
)
def test_a_call_that_reaches_its_limit_is_reported_and_ends_the_worker(
    name: CallName, other: CallName, field: str
) -> None:
    worker = Watched(**{field.removeprefix("environment.").removesuffix("Seconds"): 2.0})
    worker.call(1, name)
    worker.call(0, other, thread=1)
    worker.pass_time(2.0)
    assert worker.ended == []
    worker.pass_time(POLL_SECONDS)
    assert worker.ended == [(41, field)]
    assert worker.reports == [([(41, name, 2.0)], field)]


def test_all_calls_but_the_wait_for_a_server_have_limits_and_their_fields() -> None:
    limits = call_limits(Environment(id="CartPole-v1", step_seconds=2.0, reset_seconds=3.0))
    assert limits.keys() == LIMIT_FIELDS.keys() == {*CALL_NAMES} - {"wait"}
    of_fields = {"environment.stepSeconds": 2.0, "environment.resetSeconds": 3.0}
    assert limits == {name: of_fields[field] for name, field in LIMIT_FIELDS.items()}


def test_a_stopped_worker_is_seen_so_that_its_calls_stand_still() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as worker:
        assert not is_stopped(worker.pid)
        worker.send_signal(signal.SIGSTOP)
        until(lambda: is_stopped(worker.pid), "the process stops")
        worker.send_signal(signal.SIGCONT)
        until(lambda: not is_stopped(worker.pid), "the process goes on")
        worker.kill()
    assert not is_stopped(worker.pid)


def test_options_survive_the_command_line() -> None:
    options = WatchOptions(board=3, role="actor", process="p", coordinator="h:1", limits={"step": None, "reset": 6.5})
    assert WatchOptions.from_json(options.to_json()) == options
