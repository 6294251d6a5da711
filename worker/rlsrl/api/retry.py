"""How a user asks that a failed experiment is tried again: the annotations that `kubectl rlsrl retry` writes.

Both hold the number of the attempt that failed, so a request applies once: no later failure has this number.
"""

from __future__ import annotations

from typing import Final

RETRY_ANNOTATION: Final = "rlsrl.dev/retry"
"""The next attempt continues from the newest intact version."""
FRESH_ANNOTATION: Final = "rlsrl.dev/retry-fresh"
"""The next attempt begins from step 0, in a folder or bucket prefix of its own."""


def run_uid_of(uid: str, fresh_attempt: int | None) -> str:
    """Return the identity of an experiment's present run, which names the run's folder or bucket prefix.

    Args:
        uid: the experiment's ``metadata.uid``.
        fresh_attempt: the attempt that last began from step 0 (``status.freshAttempt``); None if none did.
    """
    return uid if fresh_attempt is None else f"{uid}-{fresh_attempt}"
