"""``make lint``: fail where a function of ``worker/`` or ``operator/`` has more than 60 lines, or a class over 300.

``LARGER`` names the classes that may be larger, each with its reason.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from class_names import modules, report

FUNCTION_LINES, CLASS_LINES = 60, 300
_SUITE = "a conformance suite: one test for each promise of a protocol"
LARGER: Mapping[str, str] = {
    "InferenceStreamConformance": _SUITE,
    "ParameterDBConformance": _SUITE,
    "SampleStreamConformance": _SUITE,
}


@dataclass(frozen=True)
class Size:
    """The size of one class or function."""

    name: str
    place: str
    """``file:line``."""
    lines: int
    limit: int


def sizes(source: str, file: str) -> Iterator[Size]:
    """Yield the sizes of all classes and functions of a module, from the line of their name to their last."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            limit = CLASS_LINES if isinstance(node, ast.ClassDef) else FUNCTION_LINES
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            yield Size(node.name, f"{file}:{node.lineno}", lines, limit)


def faults(found: Iterable[Size], larger: Mapping[str, str]) -> list[str]:
    """Return a message for each size above its limit, and for each exception that nothing needs."""
    above = [size for size in found if size.lines > size.limit]
    messages = [
        f"{size.place}: {size.name} has {size.lines} lines, the limit is {size.limit}: split it by what it is for"
        for size in above
        if size.name not in larger
    ]
    unneeded = larger.keys() - {size.name for size in above}
    return messages + [f"LARGER has {name}, which is within the limit: remove it" for name in sorted(unneeded)]


def main() -> int:
    """Check the source trees of the repository; return the exit code."""
    return report(faults((size for text, file in modules() for size in sizes(text, file)), LARGER))


if __name__ == "__main__":
    sys.exit(main())
