"""The RLExperiment as a plain JSON schema: for editors, and for looking up fields by path."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import Any

from rlsrl.api.model import CEL_RULES
from rlsrl.api.spec import API_VERSION, KIND, RLExperiment

JsonSchema = dict[str, Any]
"""A JSON schema, or a part of one."""


@cache
def json_schema() -> JsonSchema:
    """Return the schema of a document with all references inlined. Callers must not change it."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"{KIND} {API_VERSION}",
        **inlined(RLExperiment.model_json_schema(by_alias=True), without=("title", CEL_RULES)),
    }


def inlined(schema: JsonSchema, *, without: Collection[str] = ("title",)) -> JsonSchema:
    """Return a model's schema with all references inlined, nullable fields optional, and without some keywords."""
    return _inline(schema, schema.get("$defs", {}), {*without, "$defs"})


def _inline(schema: JsonSchema, definitions: dict[str, JsonSchema], without: Collection[str]) -> JsonSchema:
    if "$ref" in schema:
        target = definitions[schema["$ref"].rsplit("/", 1)[-1]]
        siblings = {key: value for key, value in schema.items() if key != "$ref"}
        return _inline({**target, **siblings}, definitions, without)
    if {"type": "null"} in schema.get("anyOf", ()):
        members = [each for each in schema["anyOf"] if each != {"type": "null"}]
        siblings = {key: value for key, value in schema.items() if key != "anyOf"}
        optional = members[0] if len(members) == 1 else {"anyOf": members}
        return _inline({**optional, **siblings}, definitions, without)
    inlined = {key: value for key, value in schema.items() if key not in without}
    if "patternProperties" in inlined:
        ((pattern, value),) = inlined.pop("patternProperties").items()
        inlined["propertyNames"] = {**inlined.get("propertyNames", {}), "pattern": pattern}
        inlined["additionalProperties"] = value
    for key in ("items", "additionalProperties", "propertyNames"):
        if isinstance(inlined.get(key), dict):
            inlined[key] = _inline(inlined[key], definitions, without)
    if "properties" in inlined:
        members = inlined["properties"].items()
        inlined["properties"] = {name: _inline(member, definitions, without) for name, member in members}
    if "default" in inlined:
        default = _without_nulls(inlined.pop("default"))
        if default is not None:
            inlined["default"] = default
    return inlined


def _without_nulls(value: Any) -> Any:
    """Return a default without the members that are null."""
    if isinstance(value, dict):
        return {name: _without_nulls(member) for name, member in value.items() if member is not None}
    return value
