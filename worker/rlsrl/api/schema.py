"""The RLExperiment as a plain JSON schema: for editors, and for looking up fields by path."""

from __future__ import annotations

from functools import cache
from typing import Any

from rlsrl.api.spec import API_VERSION, KIND, RLExperiment

JsonSchema = dict[str, Any]
"""A JSON schema, or a part of one."""


@cache
def json_schema() -> JsonSchema:
    """Return the schema of a document with all references inlined. Callers must not change it."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"{KIND} {API_VERSION}",
        **inlined(RLExperiment.model_json_schema(by_alias=True)),
    }


def inlined(schema: JsonSchema) -> JsonSchema:
    """Return a model's schema with all references inlined."""
    definitions = schema.get("$defs", {})
    return _inline({key: value for key, value in schema.items() if key != "$defs"}, definitions)


def _inline(schema: JsonSchema, definitions: dict[str, JsonSchema]) -> JsonSchema:
    """Inline references, turn nullable fields into optional ones, and drop titles."""
    if "$ref" in schema:
        target = definitions[schema["$ref"].rsplit("/", 1)[-1]]
        siblings = {key: value for key, value in schema.items() if key != "$ref"}
        return _inline({**target, **siblings}, definitions)
    if "anyOf" in schema and {"type": "null"} in schema["anyOf"]:
        (member,) = (each for each in schema["anyOf"] if each != {"type": "null"})
        siblings = {key: value for key, value in schema.items() if key != "anyOf"}
        return _inline({**member, **siblings}, definitions)
    inlined = {key: value for key, value in schema.items() if key != "title"}
    if "patternProperties" in inlined:
        ((pattern, value),) = inlined.pop("patternProperties").items()
        inlined["propertyNames"] = {**inlined.get("propertyNames", {}), "pattern": pattern}
        inlined["additionalProperties"] = value
    for key in ("items", "additionalProperties", "propertyNames"):
        if isinstance(inlined.get(key), dict):
            inlined[key] = _inline(inlined[key], definitions)
    if "properties" in inlined:
        inlined["properties"] = {name: _inline(member, definitions) for name, member in inlined["properties"].items()}
    if "default" in inlined:
        default = without_nulls(inlined.pop("default"))
        if default is not None:
            inlined["default"] = default
    return inlined


def without_nulls(value: Any) -> Any:
    """Return a default without the members that are null."""
    if isinstance(value, dict):
        return {name: without_nulls(member) for name, member in value.items() if member is not None}
    return value
