"""The fields of an RLExperiment by path: what each allows, and the nearest match of a misspelt path."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from pydantic.alias_generators import to_camel

from rlsrl.api.model import ON_EDIT, ON_EDIT_OF_MEMBERS, OnEdit
from rlsrl.api.schema import JsonSchema, json_schema
from rlsrl.api.synonyms import synonym

Path = tuple[str | int, ...]
"""Steps from the document to a value: field names and list indices."""


_PLAIN_STEP = re.compile(r"[A-Za-z0-9_-]+")
_INDEXED = re.compile(r"([^\[\]]+)((?:\[\d+\])+)")


@dataclass(frozen=True, kw_only=True)
class FieldInfo:
    """One field of the document."""

    path: Path
    schema: JsonSchema
    required: bool
    on_edit: OnEdit | None = None
    """The effect of an edit on a cluster; None outside of the spec."""

    @property
    def description(self) -> str:
        """The field's description on one line."""
        return " ".join(str(self.schema.get("description", "")).split())

    @property
    def children(self) -> tuple[FieldInfo, ...]:
        """The field's members in the order of the reference, without those that only Kubernetes writes."""
        return tuple(child for child in _members(self) if not child.schema.get("readOnly"))

    @property
    def item(self) -> FieldInfo | None:
        """The entries of a list of mappings, under the list's own path; None for every other field."""
        inner = self.schema.get("items", {})
        return replace(self, schema=inner, required=False) if "properties" in inner else None


def show_path(path: Path) -> str:
    """Return a path as users write it: ``spec.policy.network.mlp.hiddenSizes[0]``; unusual keys in ``["..."]``."""
    text = ""
    for step in path:
        if isinstance(step, str) and _PLAIN_STEP.fullmatch(step):
            text += f".{step}" if text else step
        else:
            text += f"[{show_value(step)}]"
    return text or "the document"


def show_value(value: Any, limit: int = 60) -> str:
    """Return a JSON value on one line, printable, cut to ``limit`` characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    shown = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    return shown if len(shown) <= limit else f"{shown[: limit - 3]}..."


def root() -> FieldInfo:
    """Return the document itself."""
    return FieldInfo(path=(), schema=json_schema(), required=True)


def find(path: Path) -> FieldInfo | None:
    """Return the field at ``path``, or None. List items and members of free JSON count as fields.

    A member of a list's mappings is found with and without an index: ``egress[0].to`` and ``egress.to``.
    """
    field = root()
    for step in path:
        found = _step(field, step)
        if found is None:
            return None
        field = found
    return field


def parse_path(text: str) -> Path:
    """Return the path that a user wrote with dots, and maybe indices: ``egress[0].to``. ``spec.`` is optional."""
    steps = tuple(step for part in text.split(".") for step in _with_indices(part)) if text else ()
    if steps and find(steps[:1]) is None:
        return ("spec", *steps)
    return steps


def _with_indices(part: str) -> Path:
    match = _INDEXED.fullmatch(part)
    if match is None:
        return (part,)
    return (match[1], *(int(index) for index in re.findall(r"\d+", match[2])))


def known_part(path: Path) -> Path:
    """Return the longest beginning of a path that is a field."""
    while find(path) is None:
        path = path[:-1]
    return path


def nearest(path: Path) -> Path | None:
    """Return the nearest match of a wrong path, or None.

    A field that another library calls by that name comes first, then a similar sibling, then a field of that name
    elsewhere.
    """
    known = known_part(path)
    wrong, rest = path[len(known)], path[len(known) + 1 :]
    if not isinstance(wrong, str):
        return None
    last = rest[-1] if rest and isinstance(rest[-1], str) else wrong
    if (meant := synonym(last)) is not None:
        here = (*known, meant[-1])  # another algorithm has a field of that name, too
        return here if find(here) else meant
    beside = find(known)
    siblings = {str(child.path[-1]): child.path for child in beside.children} if beside else {}
    if name := _closest(wrong, siblings):
        corrected = (*siblings[name], *rest)
        return corrected if find(corrected) else siblings[name]
    elsewhere = {str(field.path[-1]): field.path for field in reversed(all_fields())}
    found = _closest(last, elsewhere)
    return elsewhere[found] if found else None


@cache
def all_fields() -> tuple[FieldInfo, ...]:
    """Return every named field that users may write, parents before children."""

    def walk(field: FieldInfo) -> Iterator[FieldInfo]:
        for child in field.children:
            yield child
            yield from walk(child)

    return tuple(walk(root()))


def allowed(schema: JsonSchema) -> str:
    """Return the allowed values in words: ``integer from 1 to 4096``."""
    if "const" in schema or "enum" in schema:
        return " or ".join(map(str, schema.get("enum", [schema.get("const")])))
    match schema.get("type"):
        case "integer" | "number" as kind:
            return f"{kind}{_range(schema)}"
        case "boolean":
            return "true or false"
        case "string":
            return f"string{_string_form(schema)}"
        case "array":
            return f"list{_size(schema, 'Items', 'items')}, each {allowed(schema['items'])}"
        case "object" if "properties" in schema:
            return f"mapping with {members_rule(schema)}"
        case "object":
            keys = _string_form(schema.get("propertyNames", {}))
            values = allowed(schema["additionalProperties"])
            return f"mapping{_size(schema, 'Properties', 'entries')}; keys: string{keys}; values: {values}"
        case _:
            return "any JSON value"


def allowed_at(path: Path) -> str:
    """Return the allowed values of the field at ``path``; any JSON if the field is unknown."""
    field = find(path)
    return allowed(field.schema if field else {})


def members_rule(schema: JsonSchema) -> str:
    """Return the names of a mapping's fields in words, with the rule of a union."""
    names = [name for name, member in schema["properties"].items() if not member.get("readOnly")]
    for keyword, words in (("oneOf", "exactly one of"), ("anyOf", "at least one of")):
        members = [choice["required"][0] for choice in schema.get(keyword, ())]
        if len(members) > 1:
            others = [name for name in names if name not in members]
            return f"{words} {', '.join(members)}{'; also ' if others else ''}{', '.join(others)}"
    return f"the fields {', '.join(names)}" if names else "no fields: {}"


def type_name(schema: JsonSchema) -> str:
    """Return the name of the field's type in YAML, such as ``mapping`` or ``list of string``."""
    match schema.get("type"):
        case "array":
            return f"list of {type_name(schema['items'])}"
        case "object":
            return "mapping"
        case None:
            return "string" if "const" in schema or "enum" in schema else "any"
        case name:
            return str(name)


def _members(field: FieldInfo) -> Iterator[FieldInfo]:
    required = field.schema.get("required", ())
    inherited = field.schema.get(ON_EDIT_OF_MEMBERS, field.on_edit)
    for name, schema in field.schema.get("properties", {}).items():
        on_edit = schema.get(ON_EDIT, inherited)
        yield FieldInfo(path=(*field.path, name), schema=schema, required=name in required, on_edit=on_edit)


def _step(field: FieldInfo, step: str | int) -> FieldInfo | None:
    if isinstance(step, str) and (item := field.item) is not None:
        return _step(item, step)
    if isinstance(step, int):
        inner = field.schema.get("items")
    elif "properties" in field.schema:
        return next((child for child in _members(field) if child.path[-1] == step), None)
    else:
        inner = field.schema.get("additionalProperties")
    if inner is None and "type" not in field.schema and "const" not in field.schema:
        inner = {}
    if inner is None:
        return None
    return FieldInfo(path=(*field.path, step), schema=inner, required=False, on_edit=field.on_edit)


def _closest(name: str, candidates: Iterable[str]) -> str | None:
    by_form = {candidate.lower(): candidate for candidate in candidates}
    match = difflib.get_close_matches(to_camel(name).lower(), by_form, n=1, cutoff=0.7)
    return by_form[match[0]] if match else None


def _range(schema: JsonSchema) -> str:
    high = _number(schema["maximum"])
    if "exclusiveMinimum" in schema:
        return f" above {_number(schema['exclusiveMinimum'])}, up to {high}"
    return f" from {_number(schema['minimum'])} to {high}"


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e16 else f"{value:g}"


def _string_form(schema: JsonSchema) -> str:
    form = f" matching {schema['pattern']}" if "pattern" in schema else ""
    length = f" of at most {schema['maxLength']} characters" if "maxLength" in schema else ""
    example = f", for example {schema['examples'][0]}" if "examples" in schema else ""
    return f"{length}{form}{example}"


def _size(schema: JsonSchema, unit: str, word: str) -> str:
    low, high = schema.get(f"min{unit}"), schema[f"max{unit}"]
    return f" of {low} to {high} {word}" if low else f" of at most {high} {word}"
