"""Versions: the names of a policy's weights."""

from __future__ import annotations

from typing import NamedTuple, Self

from typing_extensions import override


class Version(NamedTuple):
    """Names immutable weights by the attempt and the step that made them, and orders them in that order.

    ``attempt`` is the fencing token: it rises each time the trainer gang starts. So weights of a gang that was declared
    dead are never taken for newer ones. ``step`` counts calls of ``Learner.step``.
    """

    attempt: int
    step: int

    @override
    def __str__(self) -> str:
        return f"{self.attempt}.{self.step}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what ``str`` wrote, for example ``"2.1500"``.

        Raises:
            ValueError: the text is not ``<attempt>.<step>`` with two non-negative integers.
        """
        attempt, dot, step = text.partition(".")
        if not (dot and attempt.isascii() and attempt.isdigit() and step.isascii() and step.isdigit()):
            raise ValueError(f"version {text!r} is not of the form <attempt>.<step>, for example 2.1500")
        return cls(int(attempt), int(step))


INITIAL = Version(0, 0)
"""The least version: a credit with this minimum accepts any weights."""
