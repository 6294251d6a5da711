"""The helper thread runs tasks while a core is idle, and the owner never waits long for it."""

from __future__ import annotations

import gc
import math
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from rlsrl.algorithms import spare_core
from rlsrl.algorithms.spare_core import LOWEST_PRIORITY, SpareCore
from rlsrl.testing.waiting import until

PATIENCE = 30.0


def prompt_core() -> SpareCore:
    """Return a core whose helper runs tasks however busy this machine is."""
    return SpareCore(prompt_seconds=math.inf)


def hand() -> str:
    """Return which of the two threads this is."""
    return "own" if threading.current_thread() is threading.main_thread() else "spare"


def square(number: int) -> Callable[[], tuple[int, str]]:
    return lambda: (number**2, hand())


def test_two_threads_run_tasks_at_once_and_the_helper_has_the_lowest_priority() -> None:
    meeting = threading.Barrier(2)
    priorities: dict[str, int] = {}

    def meet() -> None:
        if hand() in priorities:
            return  # The owner repeats the helper's task, which has lost its core since they met.
        priorities[hand()] = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        meeting.wait(PATIENCE)

    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert own < LOWEST_PRIORITY, "the test must not run at the lowest priority"
    prompt_core().run([meet, meet])
    assert priorities == {"own": own, "spare": LOWEST_PRIORITY}


def test_a_late_helper_runs_nothing() -> None:
    core = SpareCore(prompt_seconds=-1.0)
    for _ in range(20):
        assert core.run([square(number) for number in range(3)]) == [(0, "own"), (1, "own"), (4, "own")]


def test_results_come_in_the_order_of_the_tasks() -> None:
    core = prompt_core()
    for _ in range(20):
        assert [result for result, _ in core.run([square(number) for number in range(7)])] == [n**2 for n in range(7)]


def test_the_owner_does_not_wait_for_a_helper_that_lost_its_core() -> None:
    has_begun, may_end, hands = threading.Event(), threading.Event(), []

    def slow_where_spare() -> str:
        hands.append(hand())
        if hand() == "spare":
            has_begun.set()
            may_end.wait(3 * PATIENCE)
        else:
            has_begun.wait(PATIENCE)
        return hand()

    core = prompt_core()
    try:
        assert core.run([slow_where_spare, slow_where_spare]) == ["own", "own"]
        assert sorted(hands) == ["own", "own", "spare"], "the lost task is run again"
        assert core.run([square(2), square(3)]) == [(4, "own"), (9, "own")], "a busy helper gets no tasks"
    finally:
        may_end.set()

    def lends_again() -> bool:
        lent = threading.Event()

        def meet() -> None:
            if hand() == "spare":
                lent.set()
            lent.wait(0.1)

        core.run([meet, meet])
        return lent.is_set()

    until(lends_again, "the helper runs tasks again")


def test_the_owner_repeats_a_task_that_fails_in_the_helper() -> None:
    has_failed = threading.Event()

    def failing_where_spare() -> str:
        if hand() == "spare":
            has_failed.set()
            raise ArithmeticError("of the spare core's")
        has_failed.wait(PATIENCE)
        return hand()

    assert prompt_core().run([failing_where_spare, failing_where_spare]) == ["own", "own"]
    assert has_failed.is_set()


def test_offers_in_vain_are_followed_by_pauses_that_double(monkeypatch: pytest.MonkeyPatch) -> None:
    now, offers, helps = 0.0, [], False

    class Helper(ThreadPoolExecutor):
        def submit(self, help_with_tasks: Callable[[], None]) -> Any:  # type: ignore[override]
            offers.append(now)
            if helps:
                help_with_tasks()
            future: Future[None] = Future()
            future.set_result(None)
            return future

    monkeypatch.setattr(spare_core, "ThreadPoolExecutor", Helper)
    core = SpareCore(prompt_seconds=math.inf, clock=lambda: now)

    def run_for(seconds: float) -> list[float]:
        nonlocal now
        offers.clear()
        end = now + seconds
        while now < end:
            core.run([square(1), square(2)])
            now += 0.001
        return offers

    assert run_for(3.5) == pytest.approx([0, 0.01, 0.03, 0.07, 0.15, 0.31, 0.63, 1.27, 2.27, 3.27], abs=0.02)
    helps = True
    assert len(run_for(2.0)) > 1000, "after the last pause every offer helps"
    helps = False
    start = now
    assert run_for(0.05) == pytest.approx([start, start + 0.01, start + 0.03], abs=0.005), "pauses are short again"


def test_a_tasks_error_is_raised() -> None:
    def failing() -> None:
        raise ArithmeticError("of a task's")

    with pytest.raises(ArithmeticError, match="of a task's"):
        prompt_core().run([failing, failing])


def test_the_helper_thread_ends_with_its_owner() -> None:
    before = set(threading.enumerate())
    core = prompt_core()
    core.run([square(1), square(2)])
    (thread,) = set(threading.enumerate()) - before
    del core
    gc.collect()
    until(lambda: not thread.is_alive(), "the thread has ended")
