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

    def to_json(self) -> dict[str, str]:
        """Return the rule as an entry of ``x-kubernetes-validations``."""
        path = {} if self.at is None else {"fieldPath": self.at}
        return {"rule": self.expression, "message": self.message, **path}


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
