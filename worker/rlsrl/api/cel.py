"""The models' rules as CEL expressions, for a Kubernetes API server."""

from __future__ import annotations

from typing import NamedTuple


class CelRule(NamedTuple):
    """One rule over an object, ``self``."""

    expression: str
    """True for an allowed object. The API server fills in defaults before it evaluates the expression."""
    message: str
    """What is allowed."""
    at: str | None = None
    """Path of the field to blame, from the object: ``.actors.ringSize``. None: the object itself."""
    numbers: tuple[tuple[str, str], ...] = ()
    """Integers of the object that the message ends with: (name, expression)."""

    def to_json(self) -> dict[str, str]:
        """Return the rule as an entry of ``x-kubernetes-validations``.

        The API server shows ``messageExpression``, or ``message`` if it cannot evaluate that.
        """
        made = {"rule": self.expression, "message": self.message}
        if self.numbers:
            text = f"{self.message} ({', '.join(f'{name} %d' for name, _ in self.numbers)})"
            # It refuses ``+`` and ``string``: it cannot tell how long the text becomes, and so what it costs.
            made["messageExpression"] = f"{text!r}.format([{', '.join(number for _, number in self.numbers)}])"
        if self.at is not None:
            made["fieldPath"] = self.at
        return made


def immutable_rule(name: str, *, always: bool, whole: bool) -> CelRule:
    """Return the rule for a member that must not be edited.

    Args:
        name: the member's YAML name.
        always: whether the member is always present.
        whole: whether the rule compares the member's value; with False it compares presence alone.
    """
    same = f"self.{name} == oldSelf.{name}"
    both = f"has(self.{name}) == has(oldSelf.{name})"
    expression = same if always else f"{both} && (!has(self.{name}) || {same})" if whole else both
    return CelRule(
        expression=expression,
        message="cannot be edited: create another experiment under another name",
        at=f".{name}",
    )
