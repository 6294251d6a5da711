"""Looking again and again for a moment before one sleeps.

Waking a thread whose core has gone to sleep takes some 50 us, on a virtual machine more: as long as a small network
takes to be evaluated. Whoever waits for less than a millisecond at a time polls, as hypervisors do for halted cores.
"""

from __future__ import annotations

import asyncio
import os
import selectors
import time
from collections.abc import Callable
from typing import TypeVar

POLLED_SECONDS = 0.001
"""The longest wait that is worth polling, and how long one polls at most."""

T = TypeVar("T")


class BriefPolling:
    """Waits for one kind of event, time and again, and polls for it as long as it comes soon. One thread uses it.

    Polls if the wait before was brief: so events that come seldom cost nothing, and the first that is late costs
    ``POLLED_SECONDS`` of a core. Between two looks whatever else wants the core, or the interpreter, has it.
    """

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._was_brief = False

    def wait(self, look: Callable[[], T], sleep: Callable[[], T]) -> T:
        """What ``look``, which returns at once, finds; else what ``sleep``, which waits for it, does.

        Nothing is found where what they return is false.
        """
        began = self._now()
        try:
            while self._was_brief and self._now() - began < POLLED_SECONDS:
                if found := look():
                    return found
                os.sched_yield()
            return sleep()
        finally:
            self._was_brief = self._now() - began < POLLED_SECONDS


class PollingSelector(selectors.DefaultSelector):
    """What an event loop waits for its events by, brief waits by polling."""

    def __init__(self) -> None:
        super().__init__()
        self._polling = BriefPolling()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """See ``selectors.BaseSelector.select``."""
        wait = super().select
        if timeout is not None and timeout <= 0:
            return wait(timeout)
        return self._polling.wait(lambda: wait(0), lambda: wait(timeout))


def polling_loop() -> asyncio.AbstractEventLoop:
    """An event loop for what is asked often and answered at once."""
    return asyncio.SelectorEventLoop(PollingSelector())
