"""The interface that users' algorithms import: its names, signatures, fields and types, without docstrings."""

from __future__ import annotations

import ast
import difflib
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlsrl.algorithms import custom
from rlsrl.cli.init import templates

GOLDEN = Path(__file__).parent / "algorithm_interface.txt"
PAGE = Path(__file__).parents[2] / "docs" / "your-own-algorithm.md"
COMMAND = "python -m pytest tests/golden --update-golden"


def is_public(name: str) -> bool:
    return not name.startswith("_") or name in ("__init__", "__call__")


def name_of(node: ast.stmt) -> str | None:
    """Return the name that a statement of a module or class defines."""
    match node:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return name
        case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
            return name
    return None


def lines_of(node: ast.stmt, indent: str = "") -> Iterator[str]:
    """Yield what a statement defines, without docstrings and bodies of functions."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield from (f"{indent}@{ast.unparse(each)}" for each in node.decorator_list)
    if isinstance(node, ast.FunctionDef):
        returns = "" if node.returns is None else f" -> {ast.unparse(node.returns)}"
        yield f"{indent}def {node.name}({ast.unparse(node.args)}){returns}"
    elif isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(each) for each in (*node.bases, *(each.value for each in node.keywords)))
        yield f"{indent}class {node.name}({bases})"
        for each in node.body:
            if is_public(name_of(each) or "_"):
                yield from lines_of(each, indent + "    ")
    else:
        yield f"{indent}{ast.unparse(node)}"


def nodes_of(module: str) -> dict[str, ast.stmt]:
    """Return the statements of a module that define public names, by name."""
    source = importlib.import_module(module).__file__
    assert source is not None
    defined = ((name_of(node), node) for node in ast.parse(Path(source).read_text(encoding="utf-8")).body)
    return {name: node for name, node in defined if name is not None and is_public(name)}


def interface() -> str:
    """Return the interface as text, beginning with its version."""
    lines = [f"version {custom.INTERFACE}"]
    for module, names in custom.INTERFACE_MODULES.items():
        lines += ["", module]
        for name in names or nodes_of(module):
            # A package's name may come from one of its modules.
            home = getattr(getattr(importlib.import_module(module), name), "__module__", module)
            home = home if home.startswith(module) else module
            lines += lines_of(nodes_of(home)[name], "    ")
    return "\n".join(lines) + "\n"


def check(path: Path, made: str, update: bool) -> None:
    if update:
        path.write_text(made, encoding="utf-8")
    golden = path.read_text(encoding="utf-8") if path.exists() else ""
    if made != golden:
        diff = difflib.unified_diff(golden.splitlines(), made.splitlines(), "golden file", "now", lineterm="")
        told = (
            "the interface changed: raise its version (rlsrl.algorithms.custom.INTERFACE) if algorithms must follow, "
            f"and update the golden file by `{COMMAND}`"
        )
        pytest.fail("\n".join([told, *diff]), pytrace=False)


def test_the_interface_of_algorithms_matches_the_golden_file(update_golden: bool) -> None:
    check(GOLDEN, interface(), update_golden)


def test_a_changed_interface_is_shown_with_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "golden.txt"
    check(path, interface(), update=True)
    monkeypatch.setattr(custom, "INTERFACE", custom.INTERFACE + 1)
    with pytest.raises(pytest.fail.Exception, match=r"(?s)the interface changed: raise its version.*--update-golden"):
        check(path, interface(), update=False)
    check(path, interface(), update=True)
    monkeypatch.setitem(custom.INTERFACE_MODULES, "rlsrl.algorithms.rows", ("as_rows",))
    with pytest.raises(
        pytest.fail.Exception, match=r"-    def check_divides\(mask: NDArray\[np.bool_\], minibatch_size"
    ):
        check(path, interface(), update=False)


@pytest.mark.parametrize(
    "text",
    [PAGE.read_text(encoding="utf-8"), templates(has_algorithm=True)["my_algorithm.py"]],
    ids=["page", "template"],
)
def test_all_that_the_page_and_the_template_import_belongs_to_the_interface(text: str) -> None:
    imported = [
        (module, name)
        for module, names in re.findall(r"^from (rlsrl\.\S+) import (.+)$", text, re.MULTILINE)
        for name in names.split(", ")
    ]
    assert imported
    for module, name in imported:
        assert module in custom.INTERFACE_MODULES, f"{module} is not in INTERFACE_MODULES"
        assert name in (custom.INTERFACE_MODULES[module] or nodes_of(module)), f"{module}.{name}"
