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


def until(condition: Callable[[], _Value | None], what: str, *, timeout: float = DEADLINE_SECONDS) -> _Value:
    """Ask again and again until the answer is true; the answer.

    Raises:
        TimeoutError: it was not within ``timeout`` seconds; names ``what``.
    """
    deadline = time.monotonic() + timeout
    pause = threading.Event()
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout} s: {what}")
        pause.wait(_BETWEEN_SECONDS)
    return value
