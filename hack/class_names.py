"""``make lint``: fail where one public class name has two meanings under ``worker/`` and ``operator/``.

Counted are classes and type aliases at the top of a module whose name begins with a capital letter. Aliases that are
defined alike have the same meaning. ``ALLOWED`` names the exceptions, each with its reason.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOTS = ("worker", "operator")
GENERATED = re.compile(r"_pb2(_grpc)?\.pyi?$")
ALLOWED: Mapping[str, str] = {
    "Object": "a Kubernetes object as JSON everywhere; a Mapping where it is only read",
}
_PUBLIC = re.compile(r"[A-Z]\w*[a-z]\w*$")


@dataclass(frozen=True)
class Definition:
    """One definition of a public class or type alias."""

    name: str
    place: str
    """``file:line``."""
    meaning: str
    """Equal for aliases that are defined alike; unique for a class."""


def definitions(source: str, file: str) -> Iterator[Definition]:
    """Yield the public classes and type aliases of a module."""
    for node in ast.parse(source).body:
        place = f"{file}:{node.lineno}"
        if isinstance(node, ast.ClassDef) and _PUBLIC.match(node.name):
            yield Definition(node.name, place, meaning=place)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript | ast.BinOp):
            for target in node.targets:
                if isinstance(target, ast.Name) and _PUBLIC.match(target.id):
                    yield Definition(target.id, place, meaning=ast.unparse(node.value))


def faults(found: Iterable[Definition], allowed: Mapping[str, str]) -> list[str]:
    """Return a message for each name with several meanings, and for each exception that is not needed."""
    by_name: dict[str, list[Definition]] = defaultdict(list)
    for each in found:
        by_name[each.name].append(each)
    twice = {name: each for name, each in by_name.items() if len({one.meaning for one in each}) > 1}
    messages = [
        f"{name} is defined more than once, with different meanings: {', '.join(one.place for one in each)}."
        " Rename all but one."
        for name, each in sorted(twice.items())
        if name not in allowed
    ]
    unused = sorted(name for name in allowed if name not in twice)
    return messages + [f"{name} has one meaning: remove it from ALLOWED in hack/class_names.py." for name in unused]


def modules() -> Iterator[tuple[str, str]]:
    """Yield each module of the repository's source trees: its text, and its path from the repository's root."""
    top = Path(__file__).parents[1]
    for root in ROOTS:
        for file in sorted((top / root).rglob("*.py")):
            if not GENERATED.search(file.name):
                yield file.read_text(), str(file.relative_to(top))


def report(messages: Sequence[str]) -> int:
    """Print the faults and return the exit code."""
    sys.stderr.writelines(f"lint: {message}\n" for message in messages)
    return 1 if messages else 0


def main() -> int:
    """Check the source trees of the repository; return the exit code."""
    return report(faults([each for text, file in modules() for each in definitions(text, file)], ALLOWED))


if __name__ == "__main__":
    sys.exit(main())
