"""Tables as text, for commands and for objects that programs print."""

from __future__ import annotations

from collections.abc import Sequence

UNKNOWN = "-"


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Format rows of equal length, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
