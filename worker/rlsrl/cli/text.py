"""Formatting of texts and times in commands."""

from __future__ import annotations

import shutil
import textwrap
from datetime import datetime
from typing import TextIO

from rlsrl.runs.text_table import UNKNOWN

MAX_WIDTH = 100
"""Columns of a line on a terminal."""


def printable(text: str) -> str:
    """Replace control characters: the output of a pod must not control the terminal."""
    return "".join(
        each if each.isprintable() or each == "\n" else "\N{REPLACEMENT CHARACTER}" for each in text.expandtabs(4)
    )


def wrapped(text: str, width: int | None) -> str:
    """Wrap lines that are longer than ``width``; continuation lines are indented. None: no limit."""
    if width is None:
        return text
    return "\n".join(
        textwrap.fill(line, width, subsequent_indent=" " * 8, break_long_words=False, break_on_hyphens=False)
        for line in text.splitlines()
    )


def width_of(stream: TextIO) -> int | None:
    """Return the columns that lines may take; None for files and pipes, which get one line for each fact."""
    return min(MAX_WIDTH, shutil.get_terminal_size().columns) if stream.isatty() else None


def span(seconds: float) -> str:
    """Format a duration in its two largest units: 45s, 3m12s, 2h5m, 4d1h."""
    whole = max(0, int(seconds))
    for unit, size, smaller, smaller_size in (("d", 86_400, "h", 3_600), ("h", 3_600, "m", 60), ("m", 60, "s", 1)):
        if whole >= size:
            rest = whole % size // smaller_size
            return f"{whole // size}{unit}{f'{rest}{smaller}' if rest else ''}"
    return f"{whole}s"


def since(text: str | None, now: datetime) -> str:
    """Format the time elapsed since a Kubernetes timestamp; ``-`` for None."""
    return span((now - datetime.fromisoformat(text)).total_seconds()) if text else UNKNOWN
