"""A second pair of hands for a training step: a thread that works while a core has nothing else to do."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

T = TypeVar("T")

PROMPT_SECONDS = 0.002
"""A core is idle if a thread of the lowest priority runs within this time of being woken. Where all are busy it waits
for a tick of the scheduler's, some milliseconds, or much longer."""
LOWEST_PRIORITY = 19


class SpareCore:
    """Lends a hand with pieces of work, while there is an idle core. One thread owns it.

    Which thread did a piece must make no difference to what comes of it: an owner who has waited for one as long as his
    own took does it himself, too, as somebody else may need that core now. So pieces are pure, and may be done twice.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="spare-core", initializer=_yield_to_all)
        """Begins with the first offer, and ends with its owner or the process."""
        self._last: Future[None] | None = None

    def do(self, pieces: Sequence[Callable[[], T]]) -> list[T]:
        """What each of them returns, in their order. They should take about as long each, and milliseconds at least.

        Raises:
            Exception: what a piece raises.
        """
        offer = _Offer(pieces)
        if self._last is None or self._last.done():
            # Where no thread can be had, as when the process ends or is not allowed to, the owner does all.
            with contextlib.suppress(RuntimeError):
                self._last = self._thread.submit(offer.lend_a_hand)
        return offer.do_own_share()


class _Offer:
    """Pieces to be done, by whoever takes them first."""

    def __init__(self, pieces: Sequence[Callable[[], Any]]) -> None:
        self._pieces = pieces
        self._made_at = time.monotonic()
        self._changed = threading.Condition()
        self._num_taken = 0
        self._has_failed = False
        """The other thread has, at a piece."""
        self._results: dict[int, Any] = {}

    def do_own_share(self) -> list[Any]:
        """The owner's part of it: pieces while there are any, then those that are not done in time."""
        took = 0.0
        try:
            while (number := self._take()) is not None:
                began = time.monotonic()
                self._do(number)
                took = time.monotonic() - began
        finally:
            with self._changed:
                self._num_taken = len(self._pieces)  # nobody goes on where the owner has failed
        with self._changed:
            self._changed.wait_for(lambda: self._has_failed or len(self._results) == len(self._pieces), timeout=took)
            results = dict(self._results)
        return [results[number] if number in results else piece() for number, piece in enumerate(self._pieces)]

    def lend_a_hand(self) -> None:
        """The other thread's part: nothing, if it was not prompt. What a piece raises there its owner finds out."""
        if time.monotonic() - self._made_at > PROMPT_SECONDS:
            return
        try:
            while (number := self._take()) is not None:
                self._do(number)
        except BaseException:
            with self._changed:
                self._has_failed = True
                self._changed.notify()
            raise

    def _take(self) -> int | None:
        """The number of a piece that nobody has taken."""
        with self._changed:
            if self._num_taken == len(self._pieces):
                return None
            self._num_taken += 1
            return self._num_taken - 1

    def _do(self, number: int) -> None:
        result = self._pieces[number]()
        with self._changed:
            self._results[number] = result
            self._changed.notify()


def _yield_to_all() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)  # of this thread alone
    torch.set_num_threads(1)  # of its OpenMP and MKL: the process's own has been set
