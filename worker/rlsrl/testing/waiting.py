"""Waiting for what nobody will tell: only for conditions that have to be asked for, as a process's status."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

_Value = TypeVar("_Value")

DEADLINE_SECONDS = 120.0
"""For what takes seconds on an idle machine: never reached."""
_BETWEEN_SECONDS = 0.05
_LONGEST_BETWEEN_SECONDS = 0.5
_SHARE = 1 / 40
"""Of the time waited so far, for the pause before the next question."""


def until(condition: Callable[[], _Value | None], what: str, *, timeout: float = DEADLINE_SECONDS) -> _Value:
    """Ask again and again until the answer is true; the answer.

    The longer it has waited the longer it leaves between two questions, as asking takes from what is waited for: the
    API server of a cluster on the same two cores.

    Raises:
        TimeoutError: it was not within ``timeout`` seconds; names ``what``.
    """
    start = time.monotonic()
    pause = threading.Event()
    while not (value := condition()):
        waited = time.monotonic() - start
        if waited > timeout:
            raise TimeoutError(f"not within {timeout} s: {what}")
        pause.wait(min(max(_BETWEEN_SECONDS, waited * _SHARE), _LONGEST_BETWEEN_SECONDS))
    return value
