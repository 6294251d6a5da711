"""Rules over several fields: one record a rule, from which the models' check and the API server's CEL derive.

``check`` judges in Python and knows the values; ``cel`` states the same for a Kubernetes API server. Tests judge
generated documents by both and demand the same verdict.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple


class Fault(NamedTuple):
    """One document's way to break a rule."""

    message: str
    """What is wrong, with the values."""
    allowed: str
    """What would be right."""


@dataclass(frozen=True, kw_only=True)
class Violation:
    """One broken rule over several fields."""

    at: tuple[str, ...]
    """Path of the field to blame, by YAML names, from the model that states the rule; empty for that model itself."""
    message: str
    """What is wrong."""
    allowed: str
    """What would be right."""


@dataclass(frozen=True, kw_only=True)
class CrossFieldRule:
    """One rule over several fields of a model, stated for Python and for an API server."""

    at: str
    """Dotted path of the field to blame, by YAML names, from the model: ``actors.ringSize``."""
    check: Callable[[Any], Fault | None]
    """Gets the validated model; returns the fault, or None for an allowed document."""
    cel: str | None
    """A CEL expression over ``self``, the model's object with defaults filled in: true for an allowed document. None if
    CEL cannot express the rule: the operator then reports the fault."""
    message: str
    """What is allowed, without values: the API server's message."""
    numbers: tuple[tuple[str, str], ...] = ()
    """Integers of the document that end the API server's message: (name, CEL expression)."""

    def violation(self, model: Any) -> Violation | None:
        """Return how the model breaks the rule, or None."""
        fault = self.check(model)
        if fault is None:
            return None
        return Violation(at=tuple(self.at.split(".")), message=fault.message, allowed=fault.allowed)


def near_multiples(number: int, wanted: int) -> str:
    """Return text for an ``allowed``: a multiple of ``number``, with the nearest below and above ``wanted``."""
    below = wanted // number * number
    return f"a multiple of {number}, for example {f'{below} or ' if below else ''}{below + number}"


def near_divisors(number: int, wanted: int) -> str:
    """Return text for an ``allowed``: a divisor of ``number``, with the nearest below and above ``wanted``."""
    if number == 1:
        return "1"
    below = next((each for each in range(min(wanted, number), 1, -1) if number % each == 0), None)
    above = next((each for each in range(wanted, number + 1) if number % each == 0), None)
    near = [str(each) for each in (below, above) if each is not None]
    return f"a divisor of {number}{', for example ' if near else ''}{' or '.join(near)}"
