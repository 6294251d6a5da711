"""Kubernetes quantities, such as ``512Mi``, as numbers."""

from __future__ import annotations

import re
from decimal import Decimal

_QUANTITY = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)(?:([eE][+-]?[0-9]+)|([KMGTPE]i|[mkMGTPE])?)")
_FACTORS = {
    "": Decimal(1),
    "m": Decimal("0.001"),
    **{prefix: Decimal(1000) ** power for power, prefix in enumerate("kMGTPE", 1)},
    **{f"{prefix}i": Decimal(1024) ** power for power, prefix in enumerate("KMGTPE", 1)},
}


def amount_of(quantity: object) -> int | None:
    """Return a quantity of bytes as a whole number, rounded down; None if it is no quantity."""
    found = _QUANTITY.fullmatch(str(quantity))
    if found is None:
        return None
    number, exponent, suffix = found.groups()
    return int(Decimal(f"{number}{exponent or ''}") * _FACTORS[suffix or ""])
