"""A helper thread for a training step: it computes only while a core is otherwise idle."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

T = TypeVar("T")

PROMPT_SECONDS = 0.002
"""A core is idle if a thread of the lowest priority starts within this time of being woken. While all cores are busy,
the thread waits for a tick of the scheduler: some milliseconds, or much longer."""
LOWEST_PRIORITY = 19
FIRST_PAUSE, LONGEST_PAUSE = 0.01, 1.0
"""Seconds without an offer, after one that the helper did not use, and after many in a row: each pause is twice as long
as the one before."""


class SpareCore:
    """Shares tasks with a helper thread while a core is idle. One thread, the owner, uses it.

    Tasks are pure, and may be computed twice. If the helper is late, the owner recomputes its task: it waits for the
    helper no longer than its own last task took, since another process may need the helper's core by then. Then it
    makes no offer for a while, so that busy cores cost next to nothing.
    """

    def __init__(self, *, prompt_seconds: float = PROMPT_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        """A helper that starts later than ``prompt_seconds`` after its wake runs no tasks. ``clock`` times pauses."""
        self._prompt_seconds = prompt_seconds
        self._clock = clock
        self._pause, self._next_offer = FIRST_PAUSE, -math.inf
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="spare-core", initializer=_yield_to_all)
        """Starts with the first tasks; ends with this object or the process."""
        self._last: Future[None] | None = None

    def run(self, tasks: Sequence[Callable[[], T]]) -> list[T]:
        """Return the tasks' results, in order. Tasks should take about equally long, and milliseconds at least.

        Raises:
            Exception: a task's error.
        """
        shared = _SharedTasks(tasks, self._prompt_seconds)
        is_offered = self._clock() >= self._next_offer and (self._last is None or self._last.done())
        if is_offered:
            # No thread can be started while the process ends, or beyond its limit: the owner computes all tasks.
            with contextlib.suppress(RuntimeError):
                self._last = self._thread.submit(shared.help)
        results = shared.complete()
        if is_offered:
            self._judge(shared)
        return results

    def _judge(self, shared: _SharedTasks) -> None:
        """Decide when the next offer is made, by what came of this one."""
        if shared.num_helped and not shared.num_late:
            self._pause = FIRST_PAUSE
        else:
            self._next_offer = self._clock() + self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)


class _SharedTasks:
    """Tasks that the owner and the helper take one by one."""

    def __init__(self, tasks: Sequence[Callable[[], Any]], prompt_seconds: float) -> None:
        self._tasks = tasks
        self._prompt_seconds = prompt_seconds
        self._made_at = time.monotonic()
        self._changed = threading.Condition()
        self._num_taken = 0
        self._helper_failed = False
        self._results: dict[int, Any] = {}
        self.num_helped = 0
        """Tasks that the helper took."""
        self.num_late = 0
        """Those of them that the owner had to repeat."""

    def complete(self) -> list[Any]:
        """Run tasks in the owner's thread until none is left, then those that the helper has not finished in time."""
        task_seconds = 0.0
        try:
            while (number := self._take()) is not None:
                started = time.monotonic()
                self._run(number)
                task_seconds = time.monotonic() - started
        finally:
            with self._changed:
                self._num_taken = len(self._tasks)  # a failure of the owner stops the helper
        with self._changed:
            self._changed.wait_for(
                lambda: self._helper_failed or len(self._results) == len(self._tasks), timeout=task_seconds
            )
            results = dict(self._results)
        self.num_late = len(self._tasks) - len(results)
        return [results[number] if number in results else task() for number, task in enumerate(self._tasks)]

    def help(self) -> None:
        """Run tasks in the helper's thread, if it started promptly. The owner repeats a task that fails here."""
        if time.monotonic() - self._made_at > self._prompt_seconds:
            return
        try:
            while (number := self._take()) is not None:
                self.num_helped += 1
                self._run(number)
        except BaseException:
            with self._changed:
                self._helper_failed = True
                self._changed.notify()
            raise

    def _take(self) -> int | None:
        """Return the number of a task that neither thread has taken, or None."""
        with self._changed:
            if self._num_taken == len(self._tasks):
                return None
            self._num_taken += 1
            return self._num_taken - 1

    def _run(self, number: int) -> None:
        result = self._tasks[number]()
        with self._changed:
            self._results[number] = result
            self._changed.notify()


def _yield_to_all() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)  # of this thread alone
    torch.set_num_threads(1)  # this thread's OpenMP and MKL have a count of their own
