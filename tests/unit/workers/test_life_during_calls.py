"""When calls of environments count as signs of an actor's life. The test passes the time."""

from __future__ import annotations

import mmap
import threading

import pytest

from rlsrl.runtime.call_board import BOARD_BYTES, CALL, CALL_NAMES, IDLE, LANE, NUM_CALLS, CallBoard, CallName
from rlsrl.testing.clock import ManualClock
from rlsrl.testing.waiting import until
from rlsrl.workers.life_during_calls import LOOK_SECONDS, UNLIMITED_SECONDS, LifeDuringCalls


class Watched:
    """A worker with two threads, and the signs of life that its calls make."""

    def __init__(
        self, *, step: float | None = None, reset: float | None = None, look_seconds: float = LOOK_SECONDS
    ) -> None:
        board = CallBoard(mmap.mmap(-1, BOARD_BYTES))
        self.entries = [board.open_entry(0), board.open_entry(4)]
        self.clock = ManualClock()
        self.touches = 0
        limits: dict[CallName, float | None] = {"step": step, "reset": reset}
        self.life = LifeDuringCalls(board, limits, self.touch, clock=self.clock, look_seconds=look_seconds)

    def touch(self) -> None:
        self.touches += 1

    def call(self, name: CallName = "step", *, thread: int = 0) -> None:
        entry = self.entries[thread]
        entry[NUM_CALLS] += 1
        entry[CALL], entry[LANE] = CALL_NAMES.index(name), 0

    def end(self, *, thread: int = 0) -> None:
        self.entries[thread][LANE] = IDLE

    def touches_in(self, seconds: float) -> int:
        before = self.touches
        for _ in range(round(seconds / LOOK_SECONDS)):
            self.clock.advance(LOOK_SECONDS)
            self.life.look()
        return self.touches - before


def test_outside_of_calls_there_is_no_sign_of_life() -> None:
    worker = Watched(step=100.0)
    assert worker.touches_in(100.0) == 0
    worker.call()
    worker.end()
    assert worker.touches_in(100.0) == 0


@pytest.mark.parametrize(("name", "other"), [("step", "reset"), ("reset", "step")])
def test_a_call_shows_life_until_its_own_limit(name: CallName, other: CallName) -> None:
    worker = Watched(**{name: 100.0, other: 10.0})
    worker.call(name)
    assert worker.touches_in(100.0) == 100 / LOOK_SECONDS
    worker.touches_in(LOOK_SECONDS)
    assert worker.touches_in(1000.0) == 0


def test_a_step_without_a_limit_shows_life_for_half_a_minute() -> None:
    worker = Watched()
    worker.call()
    assert worker.touches_in(1000.0) == UNLIMITED_SECONDS / LOOK_SECONDS


def test_short_steps_one_after_the_other_show_life() -> None:
    worker = Watched()
    for _ in range(20):
        worker.call()
        assert worker.touches_in(UNLIMITED_SECONDS / 2) > 0


def test_a_wait_for_a_server_shows_no_life() -> None:
    worker = Watched(step=100.0)
    worker.call("wait")
    assert worker.touches_in(100.0) == 0


def test_one_call_beyond_its_limit_silences_all() -> None:
    worker = Watched(step=1000.0, reset=20.0)
    worker.call("reset")
    worker.call("step", thread=1)
    assert worker.touches_in(20.0) > 0
    worker.touches_in(LOOK_SECONDS)
    assert worker.touches_in(200.0) == 0
    worker.end()
    assert worker.touches_in(200.0) > 0


def test_time_in_which_the_process_stood_still_does_not_count() -> None:
    worker = Watched(step=20.0)
    worker.call()
    worker.life.look()
    worker.clock.advance(10_000.0)
    worker.life.look()
    assert worker.touches == 2


def test_the_thread_looks_until_it_is_closed() -> None:
    worker = Watched(step=100.0, look_seconds=0.001)
    worker.call()
    worker.life.start()
    until(lambda: worker.touches > 2, "signs of life")
    worker.life.close()
    assert "life-during-calls" not in {thread.name for thread in threading.enumerate()}
