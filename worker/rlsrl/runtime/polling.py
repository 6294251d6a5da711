"""Looking again and again for a moment before one sleeps.

Waking a thread whose core has gone to sleep takes some 50 us, on a virtual machine more: as long as a small network
takes to be evaluated. Whoever waits for less than a millisecond time after time polls, as hypervisors do for halted
cores.
"""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable
from typing import TypeVar

POLLED_SECONDS = 0.001
"""A wait is brief if it takes less; so long at most one polls."""
BRIEF_WAITS = 8
"""So many waits in a row have to be brief before one polls."""

T = TypeVar("T")


class BriefPolling:
    """Waits for something time after time, and polls for it as long as each wait is brief. One thread uses it.

    One wait that is not makes it sleep through the next ``BRIEF_WAITS``: so what comes seldom, or now soon and now
    late, is hardly ever polled for. Between two looks others on this core, or in this process, have their turn.
    """

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._num_brief = 0
        """Brief waits since the last one that was not."""
        # Where there is one core, whoever polls keeps it from those that are waited for.
        self._may_poll = len(os.sched_getaffinity(0)) > 1

    def wait(self, find: Callable[[float | None], T], timeout: float | None) -> T:
        """What ``find`` finds within ``timeout`` seconds, None: without end; something false if that is nothing.

        ``find`` gets the seconds that it may take, 0 for a look.
        """
        began = self._now()
        try:
            if self._may_poll and self._num_brief >= BRIEF_WAITS:
                end = began + (POLLED_SECONDS if timeout is None else min(timeout, POLLED_SECONDS))
                while (now := self._now()) < end:
                    if found := find(0):
                        return found
                    os.sched_yield()
                timeout = None if timeout is None else max(0.0, timeout - (now - began))
            return find(timeout)
        finally:
            self._num_brief = self._num_brief + 1 if self._now() - began < POLLED_SECONDS else 0


class PollingSelector(selectors.DefaultSelector):
    """What an event loop waits by that is asked often and answers at once: polls while it is told to."""

    def __init__(self, polling: BriefPolling | None = None) -> None:
        """Nothing is polled before ``polls`` is True."""
        super().__init__()
        self._polling = polling or BriefPolling()
        self.polls = False
        """Whether brief waits are polled. Any thread may change it."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """See ``selectors.BaseSelector.select``."""
        if not self.polls or (timeout is not None and timeout <= 0):
            return super().select(timeout)
        return self._polling.wait(super().select, timeout)
