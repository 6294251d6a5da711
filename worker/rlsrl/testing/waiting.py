"""Polling, for conditions that send no notification, such as a process's status."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

_Value = TypeVar("_Value")

DEADLINE_SECONDS = 120.0
"""Never reached: the conditions take seconds on an idle machine."""
_BETWEEN_SECONDS = 0.05
_LONGEST_BETWEEN_SECONDS = 0.5
_SHARE = 1 / 40
"""The pause before the next poll, as a share of the time waited so far."""


def until(condition: Callable[[], _Value | None], what: str, *, timeout: float = DEADLINE_SECONDS) -> _Value:
    """Poll until the condition returns a true value, and return this value.

    The pauses grow with the time waited, because polling slows down the awaited work, for example an API server on the
    same two cores.

    Raises:
        TimeoutError: no true value within ``timeout`` seconds; the text names ``what``.
    """
    start = time.monotonic()
    pause = threading.Event()
    while not (value := condition()):
        waited = time.monotonic() - start
        if waited > timeout:
            raise TimeoutError(f"not within {timeout} s: {what}")
        pause.wait(min(max(_BETWEEN_SECONDS, waited * _SHARE), _LONGEST_BETWEEN_SECONDS))
    return value
