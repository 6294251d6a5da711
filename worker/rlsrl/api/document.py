"""YAML text as JSON values with line and column: the input of ``load``, changed by ``--set``.

The reader follows ``kubectl``, so that a file means the same on one machine and on a cluster: ``1e-3`` is a number, a
date is a string, keys are strings. A value that JSON lacks becomes a problem with a place, never an exception.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import yaml
from typing_extensions import override

from rlsrl.api.fields import Path, allowed_at, show_path, show_value

MAX_BYTES = 512 * 1024
"""Longer files are refused. An object's annotations alone may take 256 KiB."""
MAX_DEPTH = 64
"""Deeper nesting is refused."""
MAX_VALUES = 100_000
"""More values are refused. Each use of an alias counts: aliases of aliases multiply."""

_INTEGER_LIMIT = 2**63


@dataclass(frozen=True, kw_only=True)
class SourcePosition:
    """A position in a user's text."""

    source: str
    """The file's name, or the command-line argument."""
    line: int = 0
    """From 1; 0 for a command-line argument."""
    column: int = 0
    """From 1; 0 for a command-line argument."""

    @override
    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One error in a document."""

    place: SourcePosition
    path: str
    """The field, for example ``spec.actors.replicas``; empty for the text as a whole."""
    message: str
    """What is wrong, with the value if there is one."""
    value: Any = None
    """The refused value."""
    allowed: str = ""
    """What the field allows."""
    nearest: str = ""
    """The field that the user probably meant."""

    @override
    def __str__(self) -> str:
        lines = [f"{self.place}: {f'{self.path}: ' if self.path else ''}{self.message}"]
        lines += [f"    allowed: {self.allowed}"] if self.allowed else []
        lines += [f"    did you mean: {self.nearest}"] if self.nearest else []
        return "\n".join(lines)


class SpecError(ValueError):
    """The document is not a valid RLExperiment. The text lists every problem."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        self.problems: tuple[Problem, ...] = problems
        """Every problem with its field (``path``), ``message``, refused ``value`` and what is ``allowed``."""
        super().__init__("\n".join(map(str, problems)))


@dataclass(frozen=True, kw_only=True)
class Document:
    """One YAML document as JSON values."""

    source: str
    value: Any
    """Mappings, lists, strings, numbers, booleans and None."""
    keys: Mapping[Path, SourcePosition] = field(default_factory=dict)
    """The place of each mapping key, by path."""
    values: Mapping[Path, SourcePosition] = field(default_factory=dict)
    """The place where each value begins, by path."""
    problems: tuple[Problem, ...] = ()
    """Parts that could not be read. Their value is None."""

    def place_of(self, path: Path, *, key: bool = False) -> SourcePosition:
        """Return the place of the value at ``path``, or of its key; if absent, that of the enclosing mapping."""
        places = self.keys if key else self.values
        while path:
            if path in places:
                return places[path]
            path, places = path[:-1], self.keys
        return SourcePosition(source=self.source, line=1, column=1)

    @property
    def unreadable(self) -> bool:
        """Whether the text has no value to validate."""
        return self.value is None and bool(self.problems)

    def with_value(self, path: tuple[str, ...], other: Document) -> Document:
        """Return this document with ``other`` at ``path``.

        Missing mappings on the way are added. A value of another type on the way stays.
        """

        def put(current: Any, at: Path) -> Any:
            if at == path:
                return other.value
            if self.unreadable or not (current is None or isinstance(current, dict)):
                return current
            step = path[len(at)]
            inner = current or {}
            return {**inner, step: put(inner.get(step), (*at, step))}

        def outside(places: Mapping[Path, SourcePosition]) -> dict[Path, SourcePosition]:
            return {at: place for at, place in places.items() if at[: len(path)] != path}

        made = {path[:length]: SourcePosition(source=other.source) for length in range(1, len(path) + 1)}
        return replace(
            self,
            value=put(self.value, ()),
            keys=made | outside(self.keys) | dict(other.keys),
            values=outside(self.values) | dict(other.values),
            problems=self.problems + other.problems,
        )


def read_document(text: str | bytes, source: str) -> Document:
    """Read the one document in ``text``. Errors in the text become ``Document.problems``."""
    return _Reader(source, ()).read(text)


def read_value(text: str, source: str, path: tuple[str, ...]) -> Document:
    """Read the value for ``path`` of a document, for ``Document.with_value``. Empty text is null."""
    return _Reader(source, path).read(text)


class _Unreadable(Exception):
    """The text cannot be parsed any further."""

    def __init__(self, message: str, mark: yaml.Mark | None = None) -> None:
        super().__init__(message)
        self.mark = mark


def _decoded(text: str | bytes) -> str:
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise _Unreadable(f"not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}") from error
    if len(text.encode(errors="surrogatepass")) > MAX_BYTES:
        raise _Unreadable(f"longer than {MAX_BYTES} bytes")
    return text


class _Composer(yaml.SafeLoader):
    """Builds nodes, not objects. Resolves scalars as kubectl does."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - yaml's own way
    _depth = 0

    @override
    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self._depth == MAX_DEPTH:
            raise _Unreadable(f"nested more than {MAX_DEPTH} deep", parent.start_mark if parent else None)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


_SCALARS = (
    ("null", r"(?:~|null|Null|NULL|)$", [*"~nN", ""]),
    ("bool", r"(?:true|True|TRUE|yes|Yes|YES|on|On|ON|false|False|FALSE|no|No|NO|off|Off|OFF)$", [*"tTyYoOfFnN"]),
    ("int", r"[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|0o?[0-7_]+|0|[1-9][0-9_]*)$", [*"-+0123456789"]),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$", [*"-+.0123456789"]),
    ("float", r"(?:[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$", [*"-+."]),
    ("merge", r"<<$", ["<"]),
)
"""Tag, pattern and first characters of each plain scalar other than strings. The first match wins."""


class _Dumper(yaml.SafeDumper):
    """Quotes every string that YAML or ``kubectl`` would read as another type."""


def _represent_string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Escape line breaks other than newlines: PyYAML folds them."""
    style = '"' if any(line_break in text for line_break in "\r\x85\u2028\u2029") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_string)
for _tag, _form, _first in _SCALARS:
    _Composer.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_form), _first)
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_form), _first)


def write_document(value: Any) -> str:
    """Return a JSON value as YAML. ``read_document`` reads it back."""
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True))


class _Reader:
    """Turns the nodes of one text into values with places. The text's value belongs at path ``at`` of the document."""

    def __init__(self, source: str, at: tuple[str, ...]) -> None:
        self._source = source
        self._at = at
        self._keys: dict[Path, SourcePosition] = {}
        self._values: dict[Path, SourcePosition] = {}
        self._problems: list[Problem] = []
        self._num_values = 0
        self._open: set[int] = set()

    def read(self, text: str | bytes) -> Document:
        value = None
        try:
            value = self._read(_decoded(text))
        except _Unreadable as error:
            self._report(self._at, error.mark, str(error))
        return Document(
            source=self._source, value=value, keys=self._keys, values=self._values, problems=tuple(self._problems)
        )

    def _read(self, text: str) -> Any:
        nodes = _compose(text)
        if not nodes and not self._at:
            raise _Unreadable("the text is empty: an RLExperiment is expected")
        value = self._value(nodes[0], self._at) if nodes else None
        if len(nodes) > 1:
            self._report(self._at, nodes[1].start_mark, "a second document begins here", allowed="one document a file")
        return value

    def _value(self, node: yaml.Node, path: Path) -> Any:
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            raise _Unreadable(f"more than {MAX_VALUES} values, aliases counted each time", node.start_mark)
        self._values[path] = self._place(node.start_mark)
        if id(node) in self._open:
            self._report(path, node.start_mark, "this alias is inside the value that it refers to")
            return None
        self._open.add(id(node))
        try:
            if node.tag == "tag:yaml.org,2002:map" and isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            if node.tag == "tag:yaml.org,2002:seq" and isinstance(node, yaml.SequenceNode):
                return [self._value(item, (*path, index)) for index, item in enumerate(node.value)]
            return self._scalar(node, path)
        finally:
            self._open.discard(id(node))

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        for key, value in node.value:
            kind = key.tag.rpartition(":")[2]
            if kind == "merge":
                self._report(path, key.start_mark, "merge keys (<<) are not supported", allowed="the fields themselves")
            elif not (isinstance(key, yaml.ScalarNode) and kind == "str" and _is_unicode(key.value)):
                self._report(path, key.start_mark, "the key is not a string", allowed="a string; put quotes around it")
            elif key.value in mapping:
                first = self._keys[*path, key.value]
                self._report(
                    (*path, key.value), key.start_mark, f"appears twice, first at line {first.line}", allowed="once"
                )
            else:
                inner = (*path, key.value)
                self._keys[inner] = self._place(key.start_mark)
                mapping[key.value] = self._value(value, inner)
        return mapping

    def _scalar(self, node: yaml.Node, path: Path) -> Any:
        text = str(node.value)
        try:
            match node.tag:
                case "tag:yaml.org,2002:null":
                    return None
                case "tag:yaml.org,2002:bool":
                    return text.lower() in ("true", "yes", "on")
                case "tag:yaml.org,2002:int":
                    return _integer(text)
                case "tag:yaml.org,2002:float":
                    return _number(text)
                case "tag:yaml.org,2002:str":
                    return _string(text)
        except ValueError as error:
            self._report(path, node.start_mark, f"{show_value(text)} {error}", allowed=allowed_at(path))
            return None
        self._report(
            path, node.start_mark, f"the tag {show_value(node.tag)} is not supported", allowed=allowed_at(path)
        )
        return None

    def _report(self, path: Path, mark: yaml.Mark | None, message: str, allowed: str = "") -> None:
        self._problems.append(
            Problem(place=self._place(mark), path=show_path(path) if path else "", message=message, allowed=allowed)
        )

    def _place(self, mark: yaml.Mark | None) -> SourcePosition:
        if self._at:
            return SourcePosition(source=self._source)
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        return SourcePosition(source=self._source, line=line, column=column)


_CURES = {
    "'\\t'": "indent with spaces, not with tabs",
    "'<block mapping start>'": "indent the line as far as its siblings",
    "mapping values are not allowed": "indent the line as far as its siblings, and put quotes around text with `: `",
}
"""The cure of an error of YAML's syntax, by a part of its message."""


def _compose(text: str) -> list[yaml.Node]:
    """Return the non-empty documents in ``text``."""
    try:
        composer = _Composer(text)
        nodes: list[yaml.Node] = []
        while composer.check_node():
            node = composer.get_node()
            if node is not None and node.tag != "tag:yaml.org,2002:null":
                nodes.append(node)
    except yaml.MarkedYAMLError as error:
        problem = ", ".join(part for part in (error.context, error.problem) if part)
        cure = "".join(f": {cure}" for part, cure in _CURES.items() if part in problem)
        raise _Unreadable(f"not YAML: {problem}{cure}", error.problem_mark or error.context_mark) from error
    except yaml.reader.ReaderError as error:
        raise _Unreadable(f"not YAML: {error.reason}: {error.character!r} at {error.position}") from error
    except (ValueError, OverflowError) as error:  # an escape or a directive with an invalid number
        raise _Unreadable(f"not YAML: {error}") from error
    return nodes


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _string(text: str) -> str:
    if not _is_unicode(text):
        raise ValueError("contains half of a surrogate pair")
    return text


def _integer(text: str) -> int:
    digits = text.replace("_", "").lower()
    sign, bare = (-1 if digits.startswith("-") else 1), digits.lstrip("+-")
    if len(bare) > MAX_DEPTH + 2:
        raise ValueError("does not fit into 64 bits")
    octal = bare.startswith("0") and bare.isdigit()
    value = sign * (int(bare, 8) if octal else int(bare, 0))
    if not -_INTEGER_LIMIT <= value < _INTEGER_LIMIT:
        raise ValueError("does not fit into 64 bits")
    return value


def _number(text: str) -> float:
    if "inf" in text.lower() or "nan" in text.lower():
        raise ValueError("is not a finite number")
    value = float(text)
    if abs(value) == float("inf"):
        raise ValueError("is not a finite number")
    return value
