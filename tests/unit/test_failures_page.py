"""Each cell of docs/failures.md has the text of a test: the test exists, and its code has the text."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlsrl.api import reasons

REPOSITORY = Path(__file__).parents[2]
TABLES: Mapping[str, list[dict[str, Any]]] = yaml.safe_load(
    (REPOSITORY / "docs" / "failures.yaml").read_text(encoding="utf-8")
)
COLUMNS = ("run", "top", "why", "condition", "alert", "exit")
NONE = "none"
"""A cell whose column says nothing about the failure, on purpose."""
CELLS = [
    pytest.param(row[column], id=f"{row['what']}: {column}")
    for rows in TABLES.values()
    for row in rows
    for column in COLUMNS
    if row.get(column, NONE) != NONE
]
Definitions = Mapping[str, ast.AST]
"""What a module defines at its top level, by name."""


@cache
def definitions(path: Path) -> Definitions:
    found: dict[str, ast.AST] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id: node for target in targets if isinstance(target, ast.Name)}
    return found


def texts(name: str, known: Definitions, seen: set[str]) -> Iterator[str]:
    """Yield the constants in a definition, and in those of its module that it uses: helpers, fixtures, tables."""
    seen.add(name)
    for node in ast.walk(known[name]):
        if isinstance(node, ast.Constant):
            yield str(node.value)
        used = node.id if isinstance(node, ast.Name) else node.arg if isinstance(node, ast.arg) else ""
        if used in known and used not in seen:
            yield from texts(used, known, seen)
        elif isinstance(value := getattr(reasons, used, None), str) and used.isupper():
            yield value


@pytest.mark.parametrize("cell", CELLS)
def test_a_cell_is_what_its_test_asserts(cell: dict[str, Any]) -> None:
    assert set(cell) == {"says", "test"}
    path, _, name = cell["test"].partition("::")
    known = definitions(REPOSITORY / path)
    assert name.startswith("test_")
    assert name in known, f"{path} has no {name}"
    said = list(texts(name, known, set()))
    if isinstance(cell["says"], int):
        assert str(cell["says"]) in said
        return
    for part in [cell["says"]] if isinstance(cell["says"], str) else cell["says"]:
        assert any(part in text for text in said), f"{name} has no {part!r}"


def test_every_row_says_something() -> None:
    for rows in TABLES.values():
        for row in rows:
            assert set(row) <= {"what", *COLUMNS}, row["what"]
            assert any(row.get(column, NONE) != NONE for column in COLUMNS), row["what"]
