"""Writes a store back to its disk behind training's back, so that a lost machine loses the last seconds only."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Self

import structlog

SECONDS = 30.0
"""Seconds between two writes, as between those of a Linux kernel."""

_log = structlog.get_logger(__name__)


class WriteBack:
    """Calls ``write`` every ``seconds``, in a thread of its own, while it is entered.

    A disk that fails is logged once: training needs it only after the machine is lost.
    """

    def __init__(self, write: Callable[[], None], *, seconds: float = SECONDS) -> None:
        """``write`` waits until the disk has all; it may raise OSError."""
        self._write = write
        self._seconds = seconds
        self._has_failed = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="write-back", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End the thread, after a write that has begun."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(self._seconds):
            try:
                self._write()
            except OSError as error:
                if not self._has_failed:
                    _log.warning("replay_store_not_written_back", why=str(error))
                self._has_failed = True
