"""Checks for leaks of memory, threads and descriptors in this process."""

from __future__ import annotations

import gc
import os
import threading
import tracemalloc
from collections.abc import Callable

from rlsrl.testing.waiting import until

MAX_LOOKS = 3
"""Number of measurements. A leak shows in each of them."""
SETTLE_SECONDS = 15.0
"""Time for closed resources to disappear."""


def traced_memory() -> int:
    """Return the bytes in use after a garbage collection, as ``tracemalloc`` counts them."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def open_descriptors() -> int:
    """Return the number of this process's open descriptors."""
    return len(os.listdir("/proc/self/fd"))


def assert_leaks_nothing(come_and_go: Callable[[], None], *, times: int) -> None:
    """Check that repeated calls leave no threads or descriptors, and that memory does not grow with their number.

    A single change is not a leak, for example when gRPC stops an unused poller. A leak shows in each measurement.

    Raises:
        TimeoutError: each of the ``MAX_LOOKS`` measurements found a leak; names it.
    """
    for _ in range(5):
        come_and_go()
    for _ in range(MAX_LOOKS - 1):
        try:
            _measure(come_and_go, times)
        except TimeoutError:
            continue
        return
    _measure(come_and_go, times)


def _measure(come_and_go: Callable[[], None], times: int) -> None:
    gc.collect()
    threads, descriptors = threading.active_count(), open_descriptors()
    tracemalloc.start()
    try:
        come_and_go()
        before = traced_memory()
        for _ in range(times):
            come_and_go()
        # Caches fill up, and some kilobytes come and go; one leak a call would be at least a kilobyte each.
        _settle(lambda: traced_memory() - before < 16_384 + 300 * times, f"{times} times leave memory as it was")
    finally:
        tracemalloc.stop()
    _settle(lambda: threading.active_count() <= threads, f"no more than {threads} threads are left")
    _settle(lambda: open_descriptors() <= descriptors, f"no more than {descriptors} descriptors are left")


def _settle(is_as_before: Callable[[], bool], what: str) -> None:
    until(is_as_before, what, timeout=SETTLE_SECONDS)
