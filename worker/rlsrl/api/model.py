"""The base of all models of the API: strict, frozen, closed, with rules over several fields.

A Kubernetes API server reads the same documents, so the models read them alike: a null is an absent field, ``1.0`` and
``1e3`` are integers, and a union is a set of optional members of which exactly one is set.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    JsonValue,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError
from typing_extensions import override

from rlsrl.api.cel import CelRule
from rlsrl.api.rules import CrossFieldRule, Violation

RULES = "rules"
"""The type of the pydantic error that carries violations, and the key of the violations in its context."""


def _refuse(violations: tuple[Violation, ...]) -> None:
    """Raise a pydantic error of type ``RULES`` unless there is no violation; for use in validators."""
    if violations:
        raise _error(violations)


def refusal(message: str, *, allowed: str) -> PydanticCustomError:
    """Return the error that a validator of one value raises: what is wrong, and what would be right."""
    return _error((Violation(at=(), message=message, allowed=allowed),))


def _error(violations: tuple[Violation, ...]) -> PydanticCustomError:
    text = "; ".join(f"{'.'.join(each.at)}: {each.message}" if each.at else each.message for each in violations)
    return PydanticCustomError(RULES, "{text}", {"text": text, RULES: violations})


def _with_violations(error: ValidationError, violations: tuple[Violation, ...], value: Any) -> ValidationError:
    """Return the error with the violations of the same model beside the errors of its fields."""
    details = [
        InitErrorDetails(
            type=_error(each["ctx"][RULES]) if each["type"] == RULES else each["type"],
            loc=each["loc"],
            input=each["input"],
            ctx=each.get("ctx", {}),
        )
        for each in error.errors(include_url=False)
    ]
    details.append(InitErrorDetails(type=_error(violations), loc=(), input=value, ctx={}))
    return ValidationError.from_exception_data(error.title, details)


def _integral(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def yaml_name(attribute: str) -> str:
    """Return a field's name in YAML: ``keep_last`` is ``keepLast``, and ``from_`` is ``from``, a keyword of Python."""
    return to_camel(attribute.removesuffix("_"))


INTEGRAL = BeforeValidator(_integral)
"""Accepts ``1.0`` and ``1e3``, which kubectl sends for integers. Must stand last in an ``Annotated[int, ...]``."""

OnEdit = Literal["live", "roll", "gang", "refuse"]
"""The effect of an edit of a field on a running experiment on a cluster."""

ON_EDIT = "x-rlsrl-on-edit"
"""The JSON schema keyword of the effect. Members inherit it unless they have their own."""

ON_EDIT_OF_MEMBERS = "x-rlsrl-on-edit-of-members"
"""The JSON schema keyword of what members inherit instead."""


CEL_RULES = "x-rlsrl-rules"
"""The JSON schema keyword of a model's rules over several fields, as CEL expressions."""


@dataclass(frozen=True)
class EditEffect:
    """Marks a field, in its ``Annotated``, with the effect of an edit."""

    effect: OnEdit
    members: OnEdit | None = None
    """What the field's members inherit, if not ``effect``."""

    def __get_pydantic_json_schema__(self, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        of_members = {} if self.members is None else {ON_EDIT_OF_MEMBERS: self.members}
        return {**handler(core_schema), ON_EDIT: self.effect, **of_members}


LIVE = EditEffect("live")
"""Workers keep running and get the new value within seconds."""
ROLL = EditEffect("roll")
"""Workers of the edited role are replaced, added or ended one after another. Trainers keep running."""
GANG = EditEffect("gang")
"""All trainers store their state at one common step and resume from it as the next attempt."""
REFUSE = EditEffect("refuse")
"""The edit is refused: the result would be another experiment."""
REFUSE_OTHER = EditEffect("refuse", members="gang")
"""For the members of a union: another one is refused. Members of the one that is set are edited as with ``GANG``."""

EDITS: Mapping[OnEdit, str] = {
    "live": "An edit takes effect within seconds, without a restart.",
    "roll": "An edit replaces the workers of the role. Trainers keep running.",
    "gang": "An edit restarts the trainers from their current step.",
    "refuse": "Cannot be edited.",
}
"""The effects in the words of the reference."""

Name = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=128)]
"""A Python identifier: the name of an argument."""

MAX_ARGUMENTS = 32_768
"""Largest number of characters of ``Arguments`` as JSON, and of all arguments of an experiment together. On a cluster
one ConfigMap, of at most 1 MiB, has a copy for each role, quoted twice."""


def _short(arguments: dict[str, Any]) -> dict[str, Any]:
    if (size := len(json.dumps(arguments))) > MAX_ARGUMENTS:
        largest = max(arguments, key=lambda name: len(json.dumps(arguments[name])))
        message = f"has {size} characters as JSON, most of them in {largest!r}"
        allowed = f"at most {MAX_ARGUMENTS}; put data into a file of the image or a volume, and pass its path"
        raise refusal(message, allowed=allowed)
    return arguments


Arguments = Annotated[dict[str, JsonValue], Field(max_length=64), AfterValidator(_short)]
"""Keyword arguments for the user's own code: any JSON, passed on unchanged. Only that code checks their names: an API
server cannot restrict the keys of a map with values of any type."""

PodTemplate = Annotated[dict[str, JsonValue], Field(max_length=8)]
"""Metadata and spec of pods, as in a Deployment's ``template``. Kubernetes and the operator check them."""

Ignored = Annotated[JsonValue, Field(json_schema_extra={"readOnly": True})]
"""A field that only Kubernetes writes: accepted, so that its output can be read back, and ignored."""


class Model(BaseModel):
    """Base of all models: camelCase in YAML, snake_case in Python, no unknown field, no coercion, no mutation."""

    model_config = ConfigDict(
        alias_generator=yaml_name,
        validate_by_alias=True,
        validate_by_name=True,
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    exactly_one: ClassVar[tuple[str, ...]] = ()
    """Members of the union that this model is. Exactly one must be set."""
    at_least_one: ClassVar[tuple[str, ...]] = ()
    """Optional fields of which one or more must be set."""
    rules: ClassVar[tuple[CrossFieldRule, ...]] = ()
    """Rules over several fields of the model, members included."""

    @property
    def member(self) -> str:
        """The name of the union's member that is set."""
        return next(name for name in self.exactly_one if getattr(self, name) is not None)

    @model_validator(mode="wrap")
    @classmethod
    def _read(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Drop nulls, then check the union beside the fields, so that wrong fields do not hide a wrong union."""
        if not isinstance(value, Mapping):
            return handler(value)
        given = {name: member for name, member in value.items() if member is not None}
        violations = tuple(cls._member_violations(given))
        try:
            model = handler(given)
        except ValidationError as error:
            if not violations:
                raise
            raise _with_violations(error, violations, value) from error
        _refuse(violations)
        return model

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        _refuse(tuple(found for rule in self.rules if (found := rule.violation(self)) is not None))
        return self

    @classmethod
    def _member_violations(cls, value: Mapping[str, Any]) -> Iterable[Violation]:
        for members, allowed, limit in (
            (cls.exactly_one, "exactly one of", 1),
            (cls.at_least_one, "at least one of", len(cls.at_least_one)),
        ):
            given = [yaml_name(name) for name in members if name in value or yaml_name(name) in value]
            names = ", ".join(map(yaml_name, members))
            if members and not given:
                yield Violation(at=(), message=f"has none of {names}", allowed=f"{allowed} {names}")
            elif len(given) > limit:
                yield Violation(at=(), message=f"has {' and '.join(given)}", allowed=f"{allowed} {names}")

    @classmethod
    @override
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler.resolve_ref_schema(handler(core_schema))
        for keyword, members in (("oneOf", cls.exactly_one), ("anyOf", cls.at_least_one)):
            if members:
                schema[keyword] = [{"required": [yaml_name(name)]} for name in members]
        schema[CEL_RULES] = list(cls.cel_rules())
        return schema

    @classmethod
    def cel_rules(cls) -> Iterable[CelRule]:
        """Yield the rules over several fields of the model, and those of its unions."""
        for rule in cls.rules:
            if rule.cel is not None:
                yield CelRule(expression=rule.cel, message=rule.message, at=f".{rule.at}", numbers=rule.numbers)
        one, any_of = ([yaml_name(name) for name in members] for members in (cls.exactly_one, cls.at_least_one))
        if one:
            given = " + ".join(f"(has(self.{name}) ? 1 : 0)" for name in one)
            yield CelRule(expression=f"{given} == 1", message=f"exactly one of {', '.join(one)}")
        if any_of:
            given = " || ".join(f"has(self.{name})" for name in any_of)
            yield CelRule(expression=given, message=f"at least one of {', '.join(any_of)}")
