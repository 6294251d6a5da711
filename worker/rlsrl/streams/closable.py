"""An end of a stream that one thread uses, and any thread may close."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

from rlsrl.streams.eventfd import EventFd
from rlsrl.streams.protocols import StreamClosed


class Closable(ABC):
    """Whoever is in a call owns what the end holds; ``close`` disposes of it, or leaves that to the owner it has woken.

    Calls that use anything of it are in ``_exclusive``, and wait for ``_wake`` beside whatever else they wait for.
    """

    def __init__(self, name: str) -> None:
        """``name`` is how complaints call it."""
        self._name = name
        self._closed = False
        self._in_call = threading.Lock()
        self._wake = EventFd()

    def close(self) -> None:
        """Give back what is held and wake whoever waits. Idempotent; not from a signal handler."""
        self._closed = True
        self._wake.set()
        self._dispose_if_idle()

    @abstractmethod
    def _dispose(self) -> None:
        """Close everything but ``_wake``; nobody is in another call. Called again if ``close`` is."""

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        try:
            with self._in_call:
                self._check_open()
                yield
        finally:
            if self._closed:
                self._dispose_if_idle()

    def _check_open(self) -> None:
        if self._closed:
            raise StreamClosed(f"{self._name} was closed")

    def _dispose_if_idle(self) -> None:
        """Dispose, unless somebody is in another call, who then does it on leaving."""
        if not self._in_call.acquire(blocking=False):
            return
        try:
            self._dispose()
            self._wake.close()
        finally:
            self._in_call.release()
