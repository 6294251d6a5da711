"""Environments on another machine: the errors of their clients, as the handling of environment faults sees them.

``rlsrl.envs.http`` raises these errors. An environment of the user's own may raise them, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class EnvironmentUnreachable(Exception):
    """The server of an environment does not answer, or has lost the episode. The environment itself may be well.

    The episode is truncated, and the environment is made again once ``wait`` returns True. No budget is spent.
    """

    def __init__(self, text: str, *, wait: Callable[[float], bool] | None = None) -> None:
        """``wait``: by default it sleeps, so that the next try comes after a moment."""
        super().__init__(text)
        self.wait = wait or _sleep
        """Wait up to that many seconds for the server. Return whether another try may succeed. Thread-safe."""


class RemoteEnvironmentError(Exception):
    """The environment itself raised an error in its server. It counts as if the environment had raised it here."""

    def __init__(self, text: str, *, kind: str, traceback: str) -> None:
        super().__init__(text)
        self.kind = kind
        """The name of the type of the environment's error."""
        self.traceback = traceback
        """The traceback in the server."""


class WaitAbandoned(Exception):
    """The wait for a server was given up: the environments are no longer wanted. The text says which server."""


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return True
