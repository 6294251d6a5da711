"""Whether something keeps what it should have given back: memory, threads, descriptors of this process."""

from __future__ import annotations

import gc
import os
import threading
import tracemalloc
from collections.abc import Callable

from rlsrl.testing.waiting import until

MAX_LOOKS = 3
"""How often it is looked whether something leaks: what leaks does so each time."""
SETTLE_SECONDS = 15.0
"""How long what was closed may take to be gone."""


def traced_memory() -> int:
    """Bytes that are in use, without what only a collection would free; ``tracemalloc`` traces."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def open_descriptors() -> int:
    """Descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def assert_leaks_nothing(come_and_go: Callable[[], None], *, times: int) -> None:
    """Threads and descriptors are as before, and memory does not grow with the number of times.

    What changes once is no leak, for example that gRPC ends its poller while nobody uses it: a leak is there each time.

    Raises:
        TimeoutError: something was kept at each of ``MAX_LOOKS`` looks; says what.
    """
    for _ in range(5):
        come_and_go()
    for _ in range(MAX_LOOKS - 1):
        try:
            _look(come_and_go, times)
        except TimeoutError:
            continue
        return
    _look(come_and_go, times)


def _look(come_and_go: Callable[[], None], times: int) -> None:
    gc.collect()
    threads, descriptors = threading.active_count(), open_descriptors()
    tracemalloc.start()
    try:
        come_and_go()
        before = traced_memory()
        for _ in range(times):
            come_and_go()
        # Caches fill up and some kilobytes come and go; what one of them kept would be a kilobyte at least.
        _settle(lambda: traced_memory() - before < 16_384 + 300 * times, f"{times} times leave memory as it was")
    finally:
        tracemalloc.stop()
    _settle(lambda: threading.active_count() <= threads, f"no more than {threads} threads are left")
    _settle(lambda: open_descriptors() <= descriptors, f"no more than {descriptors} descriptors are left")


def _settle(is_as_before: Callable[[], bool], what: str) -> None:
    until(is_as_before, what, timeout=SETTLE_SECONDS)
