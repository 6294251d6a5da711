"""A bounded queue between threads that can be closed. ``queue.Queue`` of Python 3.11 cannot be closed."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class PipeClosed(Exception):
    """The pipe is closed."""


class Pipe(Generic[T]):
    """A first-in, first-out queue of at most ``capacity`` items. Any number of threads may use either end.

    Signal handlers must not use it: a handler may interrupt a thread that holds the pipe's lock.
    """

    def __init__(self, capacity: int) -> None:
        assert capacity > 0, "put would wait forever"
        self._capacity = capacity
        self._items: deque[T] = deque()
        self._closed = False
        lock = threading.Lock()
        self._not_full = threading.Condition(lock)
        self._not_empty = threading.Condition(lock)

    def put(self, item: T) -> None:
        """Append ``item``. Waits while the pipe is full; ``get`` and ``close`` wake it.

        Raises:
            PipeClosed: the pipe is closed; ``item`` was not appended.
        """
        with self._not_full:
            self._not_full.wait_for(lambda: self._closed or len(self._items) < self._capacity)
            if self._closed:
                raise PipeClosed("the pipe is closed")
            self._items.append(item)
            self._not_empty.notify()

    def replace(self, item: T) -> None:
        """Append ``item``. If the pipe is full, drop the oldest item instead of waiting.

        Raises:
            PipeClosed: the pipe is closed; ``item`` was not appended.
        """
        with self._not_full:
            if self._closed:
                raise PipeClosed("the pipe is closed")
            if len(self._items) >= self._capacity:
                self._items.popleft()
            self._items.append(item)
            self._not_empty.notify()

    def take_newest(self) -> T | None:
        """Return the newest item and drop the others, or return None if the pipe is empty. Never waits."""
        with self._not_full:
            newest = self._items[-1] if self._items else None
            self._items.clear()
            self._not_full.notify_all()
            return newest

    def get(self) -> T:
        """Return the oldest item. Waits for one; ``put`` and ``close`` wake it.

        Items that were put before ``close`` are still returned after it.

        Raises:
            PipeClosed: the pipe is closed and empty.
        """
        with self._not_empty:
            self._not_empty.wait_for(lambda: self._closed or bool(self._items))
            if not self._items:
                raise PipeClosed("the pipe is closed and empty")
            item = self._items.popleft()
            self._not_full.notify()
            return item

    def close(self) -> None:
        """Refuse further items and wake the waiting threads at both ends. Idempotent."""
        with self._not_full:
            self._closed = True
            self._not_full.notify_all()
            self._not_empty.notify_all()
