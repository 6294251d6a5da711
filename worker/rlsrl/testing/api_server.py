"""A Kubernetes API server's checks of a custom resource: defaults, schema, rules. For tests without a cluster.

It implements the features of our own CRD, as the API server does with strict field validation: it removes nulls, adds
defaults, refuses unknown fields, and applies the rules to documents that fit the schema, or fail in bounds and patterns
only.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from functools import cache
from ipaddress import ip_network
from typing import Any

import celpy
from celpy.adapter import json_to_cel
from celpy.celtypes import ListType, StringType
from celpy.evaluation import CELEvalError

OpenApiSchema = Mapping[str, Any]

_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "number": (int, float),
    "integer": (int, float),
}


def faults(schema: OpenApiSchema, document: Mapping[str, Any], former: Mapping[str, Any] | None = None) -> list[str]:
    """Return why the document is refused, as a new object or as an update of ``former``; empty if it is accepted."""
    whole = _read(schema, document)
    before = None if former is None else _read(schema, former)
    misfits = list(_misfits(schema, whole, ""))
    if any(not isinstance(each, _OutOfBounds) for each in misfits):
        return misfits
    return [*misfits, *_broken_rules(schema, whole, "", before)]


class _OutOfBounds(str):
    """A misfit with which the API server still applies the rules."""


def _read(schema: OpenApiSchema, document: Mapping[str, Any]) -> Any:
    return with_defaults(schema, _pruned_of_nulls(schema, copy.deepcopy(dict(document))))


def faults_of_defaults(schema: OpenApiSchema, path: str = "") -> list[str]:
    """Return why the definition itself is refused: the API server applies the rules to each default alone, and as an
    unchanged former value."""
    found = list(_broken_rules(schema, schema["default"], path, schema["default"])) if "default" in schema else []
    for name, each in schema.get("properties", {}).items():
        found += faults_of_defaults(each, f"{path}.{name}")
    return found


def with_defaults(schema: OpenApiSchema, value: Any) -> Any:
    """Return the value with the defaults of missing fields, also inside defaults."""
    if isinstance(value, dict):
        for name, each in schema.get("properties", {}).items():
            if name not in value and "default" in each:
                value[name] = copy.deepcopy(each["default"])
            if name in value:
                value[name] = with_defaults(each, value[name])
    if isinstance(value, list) and "items" in schema:
        return [with_defaults(schema["items"], each) for each in value]
    return value


def _pruned_of_nulls(schema: OpenApiSchema, value: Any) -> Any:
    if isinstance(value, dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        properties, others = schema.get("properties", {}), schema.get("additionalProperties", {})
        kept = {name: each for name, each in value.items() if each is not None or "additionalProperties" in schema}
        return {name: _pruned_of_nulls(properties.get(name, others), each) for name, each in kept.items()}
    if isinstance(value, list) and "items" in schema:
        return [_pruned_of_nulls(schema["items"], each) for each in value]
    return value


def _misfits(schema: OpenApiSchema, value: Any, path: str) -> Iterator[str]:
    if schema.get("x-kubernetes-preserve-unknown-fields"):
        return
    kind = schema["type"]
    if not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "boolean"):
        yield f"{path}: {value!r} is not of type {kind}"
        return
    if isinstance(value, float) and kind == "integer" and not value.is_integer():
        yield f"{path}: {value!r} is not an integer"
    if "enum" in schema and value not in schema["enum"]:
        yield f"{path}: {value!r} is not one of {schema['enum']}"
    if isinstance(value, str) and "pattern" in schema and not re.search(schema["pattern"].replace("$", r"\Z"), value):
        yield _OutOfBounds(f"{path}: {value!r} does not match {schema['pattern']}")
    if schema.get("format") == "cidr" and not _is_cidr(value):
        yield f"{path}: {value!r} is not of the format cidr"
    yield from _out_of_bounds(schema, value, path)
    if isinstance(value, list):
        for index, each in enumerate(value):
            yield from _misfits(schema["items"], each, f"{path}[{index}]")
    if isinstance(value, dict) and path != ".metadata":
        yield from _wrong_members(schema, value, path)


def _is_cidr(value: str) -> bool:
    try:
        ip_network(value, strict=False)
    except ValueError:
        return False
    return "/" in value


def _out_of_bounds(schema: OpenApiSchema, value: Any, path: str) -> Iterator[str]:
    size = len(value) if isinstance(value, str | list | dict) else value
    for low in ("minimum", "minLength", "minItems"):
        if low in schema and (size < schema[low] or (schema.get("exclusiveMinimum") and size == schema[low])):
            yield _OutOfBounds(f"{path}: {value!r} is below {schema[low]}")
    for high in ("maximum", "maxLength", "maxItems", "maxProperties"):
        if high in schema and size > schema[high]:
            fault = f"{path}: {value!r} is above {schema[high]}"
            yield _OutOfBounds(fault) if high == "maximum" else fault


def _wrong_members(schema: OpenApiSchema, value: Mapping[str, Any], path: str) -> Iterator[str]:
    properties = schema.get("properties", {})
    for name in schema.get("required", []):
        if name not in value:
            yield f"{path}.{name}: missing"
    for name, each in value.items():
        if name in properties:
            yield from _misfits(properties[name], each, f"{path}.{name}")
        elif "additionalProperties" in schema:
            yield from _misfits(schema["additionalProperties"], each, f"{path}.{name}")
        else:
            yield f"{path}.{name}: unknown field"


def _broken_rules(schema: OpenApiSchema, value: Any, path: str, former: Any = None) -> Iterator[str]:
    """Yield the broken rules. ``former`` is the previous value; without one the rules about edits are skipped."""
    names = {"self": json_to_cel(value), **({} if former is None else {"oldSelf": json_to_cel(former)})}
    for rule in schema.get("x-kubernetes-validations", []):
        if "oldSelf" in rule["rule"] and former is None:
            continue
        try:
            holds = bool(_program(rule["rule"]).evaluate(names))
        except CELEvalError as error:
            yield f"{path}: {rule['rule']}: {error}"
            continue
        if not holds:
            yield f"{path}{rule.get('fieldPath', '')}: {_message(rule, names)}"
    if isinstance(value, dict):
        for name, each in schema.get("properties", {}).items():
            if name in value:
                before = former.get(name) if isinstance(former, dict) else None
                yield from _broken_rules(each, value[name], f"{path}.{name}", before)
    if isinstance(value, list) and "items" in schema:
        for index, each in enumerate(value):
            yield from _broken_rules(schema["items"], each, f"{path}[{index}]")


def _message(rule: Mapping[str, str], names: Mapping[str, Any]) -> str:
    """Return the message of a broken rule: what its expression makes, or its text where that fails."""
    if "messageExpression" not in rule:
        return rule["message"]
    try:
        return str(_program(rule["messageExpression"]).evaluate(dict(names)))
    except CELEvalError:
        return rule["message"]


def _format(text: StringType, values: ListType) -> StringType:
    """Kubernetes' ``format`` of strings, for ``%d`` alone."""
    return StringType(str(text) % tuple(values))


@cache
def _program(rule: str) -> celpy.Runner:
    environment = celpy.Environment()
    return environment.program(environment.compile(rule), functions={"format": _format})
