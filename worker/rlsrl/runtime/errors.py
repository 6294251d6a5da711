"""Errors that end a worker. ``rlsrl.api.failures`` has their exit codes."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from difflib import get_close_matches
from textwrap import shorten

_HEAD_BYTES, _TAIL_BYTES = 700, 250
"""What ``shortened`` keeps of a long text. A kubelet keeps the last 2 KB of a worker's log, and the operator 1024
characters of a condition's message."""

MAX_DAMAGE_CHARACTERS = 160
"""Longest text of ``damage``."""


USERS_ERRORS = (Exception, SystemExit, KeyboardInterrupt)
"""What a user's code may raise. Its ``sys.exit()`` must not end a process of rlsrl with an exit code of its own."""


class ConfigurationError(ValueError):
    """The experiment cannot run as written. The text says where, what is wrong and what to do."""


class RunDamaged(ConfigurationError):
    """The run cannot continue with what it has stored. The text says which file, what is wrong and what to do."""


class EnvironmentFailed(RuntimeError):
    """An environment raised too often, or could not be made. The text names its rank; the cause is its own error."""

    def __init__(self, text: str, *, traceback: str = "") -> None:
        super().__init__(text)
        self.traceback: str = traceback
        """The traceback of the environment's first error, from its own first frame on; empty if it has no frame."""


class EnvironmentFault(RuntimeError):
    """Environments give nothing that can be trained on. The text says which, what is wrong and what to do."""


class RankLost(RuntimeError):
    """Another rank of the trainer gang has ended, or did not answer in time."""


def is_temporary(error: BaseException) -> bool:
    """Return whether the error or one of its causes says that another process or a store could not be reached.

    An address that is still in use belongs to another process, too.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ConnectionError | TimeoutError | RankLost):
            return True
        if isinstance(cause, OSError) and cause.errno == errno.EADDRINUSE:
            return True
        cause = cause.__cause__
    return False


class NotStored(RuntimeError):
    """The last version could not be stored. The text says where, why and what to do."""

    def __init__(self, text: str, *, is_final: bool) -> None:
        """``is_final``: the trainer has tried as long as it may. False: it was asked to exit before that."""
        super().__init__(text)
        self.is_final = is_final


def damage(error: Exception) -> str:
    """Return why content cannot be read, on one short line.

    The ``repr`` of a decoding error would hold the whole content.
    """
    return shorten(f"{type(error).__name__}: {error}", MAX_DAMAGE_CHARACTERS, placeholder="...")


def shortened(text: str) -> str:
    """Return the text, or only its beginning and its end if a condition's message cannot hold it.

    The cause is at the beginning or at the end.
    """
    raw = text.encode()
    if len(raw) <= _HEAD_BYTES + _TAIL_BYTES:
        return text
    head, tail = (part.decode(errors="ignore") for part in (raw[:_HEAD_BYTES], raw[-_TAIL_BYTES:]))
    return f"{head} ... ({len(raw) - _HEAD_BYTES - _TAIL_BYTES} bytes left out) ... {tail}"


def did_you_mean(value: str, candidates: Iterable[str]) -> str:
    """Return ``" (did you mean 'x'?)"`` with the nearest candidate, or ``""`` if none is near."""
    nearest = get_close_matches(value, list(candidates), n=1)
    return f" (did you mean {nearest[0]!r}?)" if nearest else ""
