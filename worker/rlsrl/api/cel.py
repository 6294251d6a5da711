"""The models' rules as CEL expressions, for a Kubernetes API server."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic.alias_generators import to_camel

from rlsrl.api.model import Model
from rlsrl.api.spec.metadata import MAX_NAME_LENGTH, NAME_PATTERN


@dataclass(frozen=True, kw_only=True)
class CelRule:
    """One rule over an object, ``self``."""

    expression: str
    """True for an allowed object. The API server fills in defaults before it evaluates the expression."""
    message: str
    """What is allowed."""
    at: str | None = None
    """Path of the field to blame, from the object: ``.actors.ringSize``. None: the object itself."""


NAME_RULE = CelRule(
    expression=f"self.metadata.name.matches('{NAME_PATTERN}') && size(self.metadata.name) <= {MAX_NAME_LENGTH}",
    message=f"lower-case letters, digits and dashes, beginning with a letter, at most {MAX_NAME_LENGTH} characters",
    at=".metadata.name",
)
"""A CRD cannot restrict metadata by a schema. A rule of the whole object can."""


def cel_rules(model: type[Model]) -> tuple[CelRule, ...]:
    """Return the rules over several fields of the model, and those of its unions."""
    rules = (CelRule(expression=rule.cel, message=rule.message, at=f".{rule.at}") for rule in model.rules)
    return (*rules, *_member_rules(model))


def _member_rules(model: type[Model]) -> tuple[CelRule, ...]:
    rules = []
    if model.exactly_one:
        given = " + ".join(f"(has(self.{name}) ? 1 : 0)" for name in _names(model.exactly_one))
        message = f"exactly one of {', '.join(_names(model.exactly_one))}"
        rules.append(CelRule(expression=f"{given} == 1", message=message))
    if model.at_least_one:
        given = " || ".join(f"has(self.{name})" for name in _names(model.at_least_one))
        rules.append(CelRule(expression=given, message=f"at least one of {', '.join(_names(model.at_least_one))}"))
    return tuple(rules)


def _names(members: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(map(to_camel, members))


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
