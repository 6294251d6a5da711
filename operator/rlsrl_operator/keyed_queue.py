"""A work queue of keys: each key waits at most once, is worked on once at a time, and returns after a failure."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import structlog

FIRST_RETRY_SECONDS = 0.2
LAST_RETRY_SECONDS = 30.0
PAUSE_SECONDS = 0.2
"""The shortest time between two calls for one key. A starting pod causes some six watch events within a second."""

Key = TypeVar("Key")
_log = structlog.stdlib.get_logger("queue")


class KeyedQueue(Generic[Key]):
    """Calls ``work(key)`` for each key that was added, ``num_workers`` keys at a time.

    A key that is added during its call, or within ``pause`` seconds after, is worked on once more afterwards. ``work``
    returns the seconds until its next call, or None. An error is logged, and the key returns with a back-off.
    """

    def __init__(
        self,
        work: Callable[[Key], Awaitable[float | None]],
        *,
        num_workers: int,
        pause: float = PAUSE_SECONDS,
        first_retry: float = FIRST_RETRY_SECONDS,
        last_retry: float = LAST_RETRY_SECONDS,
    ) -> None:
        """The delay after a failure doubles with each failure, from ``first_retry`` to ``last_retry`` seconds."""
        self._work = work
        self._num_workers = num_workers
        self._pause = pause
        self._first_retry = first_retry
        self._last_retry = last_retry
        self._queue: asyncio.Queue[Key] = asyncio.Queue()
        self._waiting: set[Key] = set()
        self._busy: set[Key] = set()
        self._resting: set[Key] = set()
        self._again: set[Key] = set()
        """Keys that were added while they were busy or resting."""
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._num_failures: dict[Key, int] = {}
        self._since: dict[Key, float] = {}
        """When each waiting or busy key was added, in seconds on the monotonic clock; the oldest first."""

    @property
    def length(self) -> int:
        """The number of waiting keys."""
        return len(self._waiting)

    @property
    def num_failing(self) -> int:
        """The number of keys whose last call failed."""
        return len(self._num_failures)

    @property
    def oldest_seconds(self) -> float:
        """Seconds since the oldest waiting or busy key was added; 0 if there is none."""
        return time.monotonic() - next(iter(self._since.values())) if self._since else 0.0

    def add(self, key: Key) -> None:
        """Work on the key soon."""
        if (timer := self._timers.pop(key, None)) is not None:
            timer.cancel()
        if key in self._busy or key in self._resting:
            self._again.add(key)
        elif key not in self._waiting:
            self._waiting.add(key)
            self._since[key] = time.monotonic()
            self._queue.put_nowait(key)

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self._num_workers):
                group.create_task(self._work_on_keys())

    async def _work_on_keys(self) -> None:
        while True:
            key = await self._queue.get()
            self._waiting.discard(key)
            self._busy.add(key)
            delay = await self._attempt(key)
            self._busy.discard(key)
            self._since.pop(key)
            if key in self._num_failures:
                self._again.discard(key)
            self._resting.add(key)
            clock = asyncio.get_running_loop()
            clock.call_later(self._pause, self._end_rest, key)
            if delay is not None:
                self._timers[key] = clock.call_later(delay, self.add, key)

    def _end_rest(self, key: Key) -> None:
        self._resting.discard(key)
        if key in self._again:
            self._again.discard(key)
            self.add(key)

    async def _attempt(self, key: Key) -> float | None:
        try:
            delay: float | None = await self._work(key)
        except Exception as error:  # noqa: BLE001 - the other keys go on, and this key returns
            number = self._num_failures[key] = self._num_failures.get(key, 0) + 1
            retry = min(self._last_retry, self._first_retry * float(2 ** min(number - 1, 10)))
            _log.warning("reconcile_failed", key=str(key), error=f"{type(error).__name__}: {error}"[:500], retry=retry)
            return retry
        self._num_failures.pop(key, None)
        return delay
