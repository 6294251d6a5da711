"""Change the code of one symbol by a pattern, so that a mutant does not repeat the code that it breaks.

A pattern is Python with two kinds of holes:

- ``$name`` matches one expression, one identifier, or as a line of its own one statement. The same name matches equal
  code everywhere in a pattern. In the replacement it stands for what it matched.
- ``...`` matches one expression, or any number of arguments, elements, operands of ``and`` and ``or``, or statements.

Code is compared as a syntax tree: layout, quotes and comments do not count. A pattern matches once in its symbol.
"""

from __future__ import annotations

import ast
import builtins
import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_HOLE = "__hole_"
_BLOCKS = ("body", "orelse", "finalbody")
_IGNORED_FIELDS = ("ctx", "type_comment", "kind")

Captures = Mapping[str, Any]
"""What each named hole has matched: a node, or the text of an identifier."""


class NoMatchError(ValueError):
    """The symbol does not exist, or the pattern does not match it exactly once."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """Replace the one match of a pattern in a symbol."""

    symbol: str
    """Module and qualified name, for example ``rlsrl.buffers.fifo.FifoBuffer.put``."""
    replace: str
    by: str
    """Empty to delete the matched statements."""

    def apply(self, source_roots: Sequence[Path]) -> tuple[Path, str]:
        """Return the symbol's file and its changed text.

        Raises:
            NoMatchError: the symbol or the pattern is not found, or the pattern matches more than once.
        """
        file, qualified_name = _locate(self.symbol, source_roots)
        module = ast.parse(file.read_text(encoding="utf-8"))
        known = _identifiers(module)
        symbol = _find_symbol(module, qualified_name, self.symbol)
        if (pattern := _as_expression(self.replace)) is not None and (by := _as_expression(self.by)) is not None:
            _check_identifiers(by, known, self.symbol)
            _replace_expression(symbol, pattern, by, self)
        else:
            statements = _parse(self.by)
            _check_identifiers(ast.Module(statements, []), known, self.symbol)
            _replace_statements(symbol, _parse(self.replace), statements, self)
        return file, ast.unparse(ast.fix_missing_locations(module)) + "\n"


def _locate(symbol: str, source_roots: Sequence[Path]) -> tuple[Path, list[str]]:
    parts = symbol.split(".")
    for length in range(len(parts) - 1, 0, -1):
        for root in source_roots:
            path = root.joinpath(*parts[:length])
            for file in (path.with_suffix(".py"), path / "__init__.py"):
                if file.is_file():
                    return file, parts[length:]
    raise NoMatchError(f"{symbol}: no module of that name under {', '.join(map(str, source_roots))}")


def _find_symbol(module: ast.Module, qualified_name: Sequence[str], symbol: str) -> ast.AST:
    node: ast.AST = module
    for name in qualified_name:
        found = [child for child in _definitions(node) if child.name == name]
        if len(found) != 1:
            raise NoMatchError(f"{symbol}: {len(found)} definitions of {name!r}, not one")
        node = found[0]
    return node


def _definitions(node: ast.AST) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the definitions in a node, but not those inside them."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        else:
            yield from _definitions(child)


def _parse(code: str) -> list[ast.stmt]:
    return ast.parse(re.sub(r"\$(\w+)", rf"{_HOLE}\1", code)).body


def _as_expression(code: str) -> ast.expr | None:
    match _parse(code):
        case [ast.Expr(value)]:
            return value
    return None


def _replace_expression(symbol: ast.AST, pattern: ast.expr, by: ast.expr, change: Change) -> None:
    found = [
        (parent, field, index, captures)
        for parent, field, index, child in _children(symbol)
        if isinstance(child, ast.expr)
        for captures in _match(pattern, child, {})
    ]
    _check_unique(len(found), change)
    parent, field, index, captures = found[0]
    new = _filled(by, captures)
    if index is None:
        setattr(parent, field, new)
    else:
        getattr(parent, field)[index] = new


def _replace_statements(symbol: ast.AST, pattern: list[ast.stmt], by: list[ast.stmt], change: Change) -> None:
    found = [
        (block, start, end, captures)
        for block in _blocks(symbol)
        for start in range(len(block))
        for end in range(start + 1, len(block) + 1)
        for captures in _match_list(pattern, block[start:end], {})
    ]
    _check_unique(len(found), change)
    block, start, end, captures = found[0]
    block[start:end] = [_filled(statement, captures) for statement in by]
    if not block:
        block.append(ast.Pass())


def _check_unique(num_matches: int, change: Change) -> None:
    if num_matches != 1:
        raise NoMatchError(f"{change.symbol}: {num_matches} matches of {change.replace.strip()!r}, not one")


def _children(node: ast.AST) -> Iterator[tuple[ast.AST, str, int | None, Any]]:
    for parent in ast.walk(node):
        for field, value in ast.iter_fields(parent):
            if isinstance(value, list):
                for index, child in enumerate(value):
                    yield parent, field, index, child
            else:
                yield parent, field, None, value


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for parent in ast.walk(node):
        for field in _BLOCKS:
            block = getattr(parent, field, None)
            if isinstance(block, list):
                yield block


def _hole(node: Any) -> str | None:
    """Return the name of the hole that this node of a pattern is, or None."""
    if isinstance(node, ast.Expr):
        node = node.value
    if isinstance(node, ast.Name):
        node = node.id
    return node.removeprefix(_HOLE) if isinstance(node, str) and node.startswith(_HOLE) else None


def _is_ellipsis(node: Any) -> bool:
    if isinstance(node, ast.Expr):
        node = node.value
    return isinstance(node, ast.Constant) and node.value is ...


def _match(pattern: Any, found: Any, captures: Captures) -> Iterator[Captures]:
    """Yield the captures of each way in which the pattern matches."""
    if (name := _hole(pattern)) is not None:
        is_kind = isinstance(found, str if isinstance(pattern, str) else type(pattern).__mro__[1])
        if is_kind and (name not in captures or _same(captures[name], found)):
            yield {**captures, name: found}
    elif _is_ellipsis(pattern):
        if isinstance(found, ast.expr):
            yield captures
    elif isinstance(pattern, list) and isinstance(found, list):
        yield from _match_list(pattern, found, captures)
    elif isinstance(pattern, ast.AST):
        if type(pattern) is type(found):
            fields = [field for field in pattern._fields if field not in _IGNORED_FIELDS]
            if isinstance(pattern, ast.Call) and any(map(_is_ellipsis, pattern.args)):
                found = _without_other_keywords(pattern, found)
            yield from _match_fields(pattern, found, fields, captures)
    elif pattern == found and type(pattern) is type(found):
        yield captures


def _match_fields(pattern: ast.AST, found: ast.AST, fields: Sequence[str], captures: Captures) -> Iterator[Captures]:
    if not fields:
        yield captures
        return
    for extended in _match(getattr(pattern, fields[0]), getattr(found, fields[0]), captures):
        yield from _match_fields(pattern, found, fields[1:], extended)


def _match_list(pattern: Sequence[Any], found: Sequence[Any], captures: Captures) -> Iterator[Captures]:
    if not pattern:
        if not found:
            yield captures
    elif _is_ellipsis(pattern[0]):
        for length in range(len(found) + 1):
            yield from _match_list(pattern[1:], found[length:], captures)
    elif found:
        for extended in _match(pattern[0], found[0], captures):
            yield from _match_list(pattern[1:], found[1:], extended)


def _without_other_keywords(pattern: ast.Call, found: ast.Call) -> ast.Call:
    """Return the call without the keyword arguments that ``...`` among the pattern's arguments stands for."""
    wanted = [keyword.arg for keyword in pattern.keywords]
    return ast.Call(found.func, found.args, [keyword for keyword in found.keywords if keyword.arg in wanted])


def _same(one: Any, other: Any) -> bool:
    return next(_match(one, other, {}), None) is not None


def _filled(template: Any, captures: Captures) -> Any:
    """Return the replacement with what the holes matched."""

    class Fill(ast.NodeTransformer):
        def generic_visit(self, node: ast.AST) -> ast.AST:
            if (name := _hole(node)) is not None:
                found = copy.deepcopy(captures[name])
                return ast.Expr(found) if isinstance(node, ast.stmt) and isinstance(found, ast.expr) else found
            for field, value in ast.iter_fields(node):
                if isinstance(value, str) and (name := _hole(value)) is not None:
                    setattr(node, field, captures[name])
            return super().generic_visit(node)

    return Fill().visit(copy.deepcopy(template))


def _identifiers(module: ast.Module) -> set[str]:
    """Return the names and attributes that the module uses or defines."""
    known = set(dir(builtins))
    for node in ast.walk(module):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                known.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                known.add(name)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                known.update((alias.asname or alias.name).partition(".")[0] for alias in names)
    return known


def _check_identifiers(by: ast.AST, known: set[str], symbol: str) -> None:
    """Refuse a replacement that would fail by an unknown name: its tests would notice that, and not the harm."""
    names = [node for node in ast.walk(by) if isinstance(node, ast.Name)]
    used = {node.id for node in names} - {node.id for node in names if isinstance(node.ctx, ast.Store)}
    for node in ast.walk(by):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("np", "torch", "os"):
            used.add(node.attr)
    unknown = {name for name in used if not name.startswith(_HOLE)} - known
    if unknown:
        raise NoMatchError(f"{symbol}: the replacement uses {', '.join(sorted(unknown))}, which its module does not")
