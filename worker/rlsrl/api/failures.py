"""How worker processes fail: exit codes, and whether two failures are the same.

The controller of a local run and the operator use it to tell failures that are sure to repeat from others.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

CONFIGURATION_ERROR = 2
"""Exit code of a worker whose configuration is invalid: a restart would end the same way."""
ENVIRONMENT_FAULT = 3
"""Exit code of a worker whose environments end the run: a restart would end the same way."""
NOT_STORED = 4
"""Exit code of a trainer whose last version could not be stored in the time that it has. A restart would repeat the
training since the newest stored version, and then fail in the same way."""
RUN_DAMAGED = 5
"""Exit code of a worker that finds what its run has stored damaged or missing: a restart would end the same way."""
TEMPORARY_FAILURE = 75
"""Exit code (EX_TEMPFAIL) of a worker that cannot reach another process or a store: the worker itself may be well."""
KILLED = 128
"""A process that a signal ended has an exit code above this one, or below 0."""
FUTILE_STARTS = 3
"""Failures in a row that are the same, without progress between them, before no further start is made."""

_TRACEBACK = re.compile(r'Traceback \(most recent call last\)|\s+File "')
"""Begins the first line of a traceback. Its head may be cut off."""
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|[0-9]+")
"""Parts that differ between two reports of the same failure: addresses, ports, process numbers, lines of a file."""


def signature(code: int, lines: Sequence[str]) -> str:
    """Return a text that is equal for the same exception at the same place, and ``""`` for one that may not repeat.

    Args:
        code: the exit code.
        lines: the last lines of the process's output. Of a traceback all lines count, without their numbers and their
            order: the ranks of a gang print at the same time. Of other output the last line counts.
    """
    if code <= 0 or code > KILLED or code == TEMPORARY_FAILURE or not lines:
        return ""
    begin = next((number for number, line in enumerate(lines) if _TRACEBACK.match(line)), len(lines) - 1)
    found = sorted({_NUMBERS.sub("#", line) for line in lines[begin:]})
    return hashlib.sha256("\n".join([str(code), *found]).encode()).hexdigest()[:16]
