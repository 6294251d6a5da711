"""How commands write numbers, times and tables."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

UNKNOWN = "-"


def printable(text: str) -> str:
    """The text without what would command a terminal: a pod's last words are its own."""
    return "".join(
        each if each.isprintable() or each == "\n" else "\N{REPLACEMENT CHARACTER}" for each in text.expandtabs(4)
    )


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of equal length, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def span(seconds: float) -> str:
    """A length of time in its two largest units: 45s, 3m12s, 2h5m, 4d1h."""
    whole = max(0, int(seconds))
    for unit, size, smaller, smaller_size in (("d", 86_400, "h", 3_600), ("h", 3_600, "m", 60), ("m", 60, "s", 1)):
        if whole >= size:
            rest = whole % size // smaller_size
            return f"{whole // size}{unit}{f'{rest}{smaller}' if rest else ''}"
    return f"{whole}s"


def since(text: str | None, now: datetime) -> str:
    """How long ago a time was that Kubernetes wrote; ``-`` if it wrote none."""
    return span((now - datetime.fromisoformat(text)).total_seconds()) if text else UNKNOWN
