"""One field's reference as text, in the manner of ``kubectl explain``."""

from __future__ import annotations

import textwrap

from rlsrl.api.fields import FieldInfo, allowed, find, known_part, nearest, parse_path, show_path, show_value, type_name
from rlsrl.api.model import EDITS
from rlsrl.api.spec import API_VERSION, KIND

WIDTH = 100
"""Columns of the text."""


class UnknownField(LookupError):
    """The field does not exist. The text names the nearest match, or where the fields are listed."""


def explain(path: str = "") -> str:
    """Return the reference of the field at ``path``, such as ``spec.actors`` or ``actors``, or of the document.

    Raises:
        UnknownField: the field does not exist.
    """
    steps = parse_path(path)
    field = find(steps)
    if field is None:
        meant = nearest(steps)
        known = show_path(known_part(steps))
        hint = f"did you mean {show_path(meant)}?" if meant else f"`rlsrl explain {known}` lists the fields there"
        raise UnknownField(f"{KIND} has no field {show_path(steps)}; {hint}")
    return "\n".join(_lines(field))


def _lines(field: FieldInfo) -> list[str]:
    lines = [f"KIND:     {KIND}", f"VERSION:  {API_VERSION}"]
    if field.path:
        lines += [f"FIELD:    {show_path(field.path)} <{type_name(field.schema)}>{_necessity(field)}"]
    lines += [
        "",
        "DESCRIPTION:",
        *_indented(field.description, 4),
        "",
        "ALLOWED:",
        *_indented(allowed(field.schema), 4),
    ]
    if field.on_edit is not None and not field.children:
        lines += ["", "EDITS:", *_indented(EDITS[field.on_edit], 4)]
    if children := (field.item or field).children:
        lines += ["", "FIELDS:"]
        for child in children:
            lines += [f"  {child.path[-1]} <{type_name(child.schema)}>{_necessity(child)}"]
            lines += _indented(child.description, 6)
    return lines


def _necessity(field: FieldInfo) -> str:
    if field.required:
        return " required"
    return f" default {show_value(field.schema['default'], limit=64)}" if "default" in field.schema else ""


def _indented(text: str, columns: int) -> list[str]:
    indent = " " * columns
    return textwrap.wrap(
        text.replace("``", "`"), WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )
