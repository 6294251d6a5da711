"""Checks for leaks of memory, threads and descriptors in this process."""

from __future__ import annotations

import gc
import os
import threading
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from rlsrl.testing.waiting import until

_NUM_MEASUREMENTS = 3
"""A leak shows in each of them."""
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
        TimeoutError: each of three measurements found a leak; names it.
    """
    for _ in range(5):
        come_and_go()
    for _ in range(_NUM_MEASUREMENTS - 1):
        with suppress(TimeoutError):
            return _measure(come_and_go, times)
    return _measure(come_and_go, times)


def _measure(come_and_go: Callable[[], None], times: int) -> None:
    settle = partial(until, timeout=SETTLE_SECONDS)
    gc.collect()
    threads, descriptors = threading.active_count(), open_descriptors()
    tracemalloc.start()
    try:
        come_and_go()
        before = traced_memory()
        for _ in range(times):
            come_and_go()
        # Caches fill up, and some kilobytes come and go; one leak a call would be at least a kilobyte each.
        settle(lambda: traced_memory() - before < 16_384 + 300 * times, f"{times} times leave memory as it was")
    finally:
        tracemalloc.stop()
    settle(lambda: threading.active_count() <= threads, f"no more than {threads} threads are left")
    settle(lambda: open_descriptors() <= descriptors, f"no more than {descriptors} descriptors are left")
