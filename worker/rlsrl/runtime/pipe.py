"""A bounded queue between two threads that can be closed. ``queue.Queue`` cannot be on Python 3.11."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class PipeClosed(Exception):
    """The pipe was closed; by either end."""


class PipeTimeout(TimeoutError):
    """The deadline passed; the call can be made again."""


class Pipe(Generic[T]):
    """First in, first out, at most ``capacity`` items. Any number of threads may use either end.

    Not for signal handlers: a handler interrupts a thread that may hold the pipe's lock.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a pipe holds at least one item, not {capacity}")
        self._capacity = capacity
        self._items: deque[T] = deque()
        self._closed = False
        lock = threading.Lock()
        self._not_full = threading.Condition(lock)
        self._not_empty = threading.Condition(lock)

    def put(self, item: T, timeout: float | None = None) -> None:
        """Append ``item``; waits while the pipe is full, woken by ``get``, by ``close`` or after ``timeout`` seconds.

        Raises:
            PipeTimeout: it stayed full.
            PipeClosed: it is closed; ``item`` was not taken.
        """
        with self._not_full:
            if not self._not_full.wait_for(lambda: self._closed or len(self._items) < self._capacity, timeout):
                raise PipeTimeout(f"the pipe stayed full for {timeout} s")
            if self._closed:
                raise PipeClosed("nothing can be put into a closed pipe")
            self._items.append(item)
            self._not_empty.notify()

    def get(self, timeout: float | None = None) -> T:
        """The oldest item; waits while there is none, woken by ``put``, by ``close`` or after ``timeout`` seconds.

        What was put before ``close`` can still be had after it.

        Raises:
            PipeTimeout: it stayed empty.
            PipeClosed: it is closed and empty.
        """
        with self._not_empty:
            if not self._not_empty.wait_for(lambda: self._closed or bool(self._items), timeout):
                raise PipeTimeout(f"the pipe stayed empty for {timeout} s")
            if not self._items:
                raise PipeClosed("the pipe is closed and empty")
            item = self._items.popleft()
            self._not_full.notify()
            return item

    def close(self) -> None:
        """Take nothing more and wake whoever waits at either end. Idempotent."""
        with self._not_full:
            self._closed = True
            self._not_full.notify_all()
            self._not_empty.notify_all()

    def __len__(self) -> int:
        """Items waiting now."""
        with self._not_empty:
            return len(self._items)
