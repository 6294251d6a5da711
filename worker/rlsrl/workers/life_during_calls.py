"""Shows an actor's life to its consumers while its environments take no longer than they may.

A consumer gives a silent producer's credits to others. A producer shows life with each step, but one call of an
environment may take longer than the peer time-out. So a thread looks at the call board and shows life in its stead. A
process that is stopped, and a call that holds the interpreter lock, stay silent.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from rlsrl.runtime.call_board import CallBoard, CallClock, CallName
from rlsrl.runtime.clock import Clock

LOOK_SECONDS = 5.0
"""Seconds between two looks at the board: a few within the peer time-out."""
UNLIMITED_SECONDS = 30.0
"""How long a step without a limit counts as life. Longer ones are silence: the call may never return."""


class LifeDuringCalls:
    """Calls ``touch`` at each look while every present call of an environment is within its limit."""

    def __init__(
        self,
        board: CallBoard,
        limits: Mapping[CallName, float | None],
        touch: Callable[[], None],
        *,
        clock: Clock,
        look_seconds: float = LOOK_SECONDS,
    ) -> None:
        """Prepare to look.

        Args:
            board: the worker's calls.
            limits: the longest duration of each call, in seconds; None: no limit; absent: the call is no sign of life.
            touch: thread-safe.
            clock: measures how long calls last.
            look_seconds: seconds between two looks of the thread.
        """
        self._calls = CallClock(board)
        self._limits = limits
        self._touch = touch
        self._clock = clock
        self._look_seconds = look_seconds
        self._seen = clock.monotonic()
        """The moment of the last look."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="life-during-calls", daemon=True)

    def start(self) -> None:
        """Look again and again, in a thread, until ``close``."""
        self._thread.start()

    def close(self) -> None:
        """End the thread: it calls ``touch`` no more."""
        self._closing.set()
        self._thread.join()

    def look(self) -> None:
        """Look once."""
        before, self._seen = self._seen, self._clock.monotonic()
        # Time in which this process itself stood still does not count.
        calls = self._calls.look(min(self._seen - before, 2 * self._look_seconds))
        if calls and all(call.seconds < self._allowed(call.name) for call in calls):
            self._touch()

    def _allowed(self, name: CallName) -> float:
        limit = self._limits.get(name, 0.0)
        return UNLIMITED_SECONDS if limit is None else limit

    def _run(self) -> None:
        while not self._closing.wait(self._look_seconds):
            self.look()
