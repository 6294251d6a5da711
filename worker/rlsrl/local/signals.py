"""Signals as messages: the main loop reads them, so no handler interrupts other code."""

from __future__ import annotations

import contextlib
import signal
import socket
from types import TracebackType
from typing import Any, Self

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask for a clean end: Ctrl-C, ``kill``, a closed terminal."""


class SignalInbox:
    """Collects ``ENDING_SIGNALS`` while entered, instead of their usual effect. Main thread only.

    ``fileno`` is readable while signals wait, so they wake a ``select``.
    """

    def __init__(self) -> None:
        self._receiver, self._sender = socket.socketpair()
        self._receiver.setblocking(False)
        self._sender.setblocking(False)

    def __enter__(self) -> Self:
        self._previous_fd = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        # An empty handler replaces the default effect; the number arrives through the wake-up descriptor.
        self._previous: dict[signal.Signals, Any] = {
            signum: signal.signal(signum, lambda *_: None) for signum in ENDING_SIGNALS
        }
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(self._previous_fd)
        self._receiver.close()
        self._sender.close()

    def fileno(self) -> int:
        """Return a descriptor that is readable while signals wait."""
        return self._receiver.fileno()

    def read(self) -> tuple[signal.Signals, ...]:
        """Return the signals received since the last call, in order, without waiting."""
        received = b""
        with contextlib.suppress(BlockingIOError):
            received = self._receiver.recv(4096)
        return tuple(signal.Signals(number) for number in received if number in ENDING_SIGNALS)
