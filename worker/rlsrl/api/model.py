"""What all models of the API have in common: strict, frozen, closed, and honest about unions.

The same documents stand before a Kubernetes API server, so the models read them as it does: a null is a field left out,
``1.0`` and ``1e3`` are integers, and a union is a set of optional members of which exactly one is given.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
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

RULES = "rules"
"""The type of the pydantic error that carries violations, under the key of the same name in its context."""


@dataclass(frozen=True, kw_only=True)
class Violation:
    """One broken rule that concerns more than one field."""

    at: tuple[str, ...]
    """The field to blame, by YAML names, from the model that states the rule; empty for that model itself."""
    message: str
    """What is wrong."""
    allowed: str
    """What would be right."""


def refuse(violations: Iterable[Violation]) -> None:
    """Refuse the model being validated if there is any violation; for use in its validators.

    Raises:
        PydanticCustomError: of type ``rules``, which pydantic turns into a ``ValidationError``.
    """
    found = tuple(violations)
    if found:
        raise _error(found)


def _error(violations: tuple[Violation, ...]) -> PydanticCustomError:
    text = "; ".join(f"{'.'.join(each.at)}: {each.message}" if each.at else each.message for each in violations)
    return PydanticCustomError(RULES, "{text}", {"text": text, RULES: violations})


def _with_violations(error: ValidationError, violations: tuple[Violation, ...], value: Any) -> ValidationError:
    """The error with the violations of the same model beside what its fields said."""
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


INTEGRAL = BeforeValidator(_integral)
"""Takes ``1.0`` and ``1e3`` for integers, as kubectl sends them on; stands last in an ``Annotated[int, ...]``."""

OnEdit = Literal["live", "roll", "gang", "refuse"]
"""What becomes of a running experiment on a cluster when a field is edited."""

ON_EDIT = "x-rlsrl-on-edit"
"""The JSON schema's keyword for it; what is inside of a field that has one has it too, unless it has its own."""


@dataclass(frozen=True)
class Edit:
    """Stands in an ``Annotated``: what an edit of that field does."""

    does: OnEdit

    def __get_pydantic_json_schema__(self, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {**handler(core_schema), ON_EDIT: self.does}


LIVE = Edit("live")
"""Workers go on, and are told within seconds."""
ROLL = Edit("roll")
"""Workers that it concerns are replaced, added or ended, one after another; the trainers go on."""
GANG = Edit("gang")
"""The trainers end at one step, store it, and go on from it as the next attempt; others are replaced as needed."""
REFUSE = Edit("refuse")
"""It would be another experiment."""

EDITS: Mapping[OnEdit, str] = {
    "live": "May be edited at any time: workers are told.",
    "roll": "An edit replaces the workers that it concerns, and not the trainers.",
    "gang": "An edit lets the trainers begin anew from where they are.",
    "refuse": "Cannot be edited.",
}
"""The same for who looks a field up."""

Name = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=128)]
"""A Python identifier: the name of an argument."""

Arguments = Annotated[dict[str, JsonValue], Field(max_length=64)]
"""Keyword arguments for the user's own code: any JSON, handed on as it is. Their names are that code's to judge: an API
server cannot look at the keys of a map whose values are of any type."""

PodTemplate = Annotated[dict[str, JsonValue], Field(max_length=8)]
"""Metadata and spec of pods, as in a Deployment's ``template``: Kubernetes' to judge, and the operator's."""

Ignored = Annotated[JsonValue, Field(json_schema_extra={"readOnly": True})]
"""What only Kubernetes writes: accepted, so that its own output can be read back, and not looked at."""


class Model(BaseModel):
    """Base of all models: camelCase in YAML, snake_case in Python, no unknown field, no coercion, no mutation."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        validate_by_alias=True,
        validate_by_name=True,
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    exactly_one: ClassVar[tuple[str, ...]] = ()
    """Members of the union that this model is; exactly one must be given."""
    at_least_one: ClassVar[tuple[str, ...]] = ()
    """Optional fields of which one or more must be given."""

    @model_validator(mode="wrap")
    @classmethod
    def _read(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Drop nulls, then check members beside the fields, so that wrong fields do not hide a wrong union."""
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
        refuse(violations)
        return model

    @classmethod
    def _member_violations(cls, value: Mapping[str, Any]) -> Iterable[Violation]:
        for members, allowed, limit in (
            (cls.exactly_one, "exactly one of", 1),
            (cls.at_least_one, "at least one of", len(cls.at_least_one)),
        ):
            given = [to_camel(name) for name in members if name in value or to_camel(name) in value]
            names = ", ".join(map(to_camel, members))
            if members and not given:
                yield Violation(at=(), message=f"has none of {names}", allowed=f"{allowed} {names}")
            elif len(given) > limit:
                yield Violation(at=(), message=f"has {' and '.join(given)}", allowed=f"{allowed} {names}")

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler.resolve_ref_schema(handler(core_schema))
        for keyword, members in (("oneOf", cls.exactly_one), ("anyOf", cls.at_least_one)):
            if members:
                schema[keyword] = [{"required": [to_camel(name)]} for name in members]
        return schema
