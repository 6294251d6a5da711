"""Print the bytes that ``make run`` and ``make setup`` install, PyTorch's apart, and those that each other extra adds.

Measured are the distributions of this environment that the extras require, by the files that they list. So the program
needs an environment with all extras: ``.venv/bin/python hack/install_bytes.py`` after ``make setup``.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).resolve().parents[1]
PYTORCH = re.compile(r"torch|triton|(nvidia|cuda)-.*")
"""The distributions of PyTorch's CUDA build."""
FORMER_COMMIT, FORMER_BYTES = "7f8b5c2a", 1_229_000_000
"""The last commit at which ``make run`` installed all extras, and its bytes besides PyTorch: x86-64, Python 3.11."""


def extras_of(variable: str) -> list[str]:
    """Return the extras that a variable of the Makefile names.

    Raises:
        ValueError: the Makefile has no such variable.
    """
    found = re.search(rf"(?m)^{variable} := (\S+)$", (REPOSITORY / "Makefile").read_text(encoding="utf-8"))
    if found is None:
        raise ValueError(f"the Makefile has no variable {variable}")
    return found[1].split(",")


def requirements_of(extras: Iterable[str]) -> list[Requirement]:
    """Return the requirements of rlsrl itself and of its extras.

    Raises:
        KeyError: there is no such extra.
    """
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    return [
        Requirement(text) for text in [*project["dependencies"], *(each for name in extras for each in optional[name])]
    ]


def distributions(requirements: Iterable[Requirement]) -> set[str]:
    """Return the names of all distributions that the requirements need here.

    Raises:
        PackageNotFoundError: one is not installed.
    """
    waiting = [(requirement, "") for requirement in requirements]
    seen: set[tuple[str, str]] = set()
    while waiting:
        requirement, of_extra = waiting.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": of_extra}):
            continue
        name = canonicalize_name(requirement.name)
        for extra in ("", *requirement.extras):
            if (name, extra) not in seen:
                seen.add((name, extra))
                waiting += [(Requirement(text), extra) for text in distribution(name).requires or ()]
    return {name for name, _ in seen}


def sizes(extras: Iterable[str]) -> dict[str, int]:
    """Return the bytes of the installed files of each distribution that rlsrl needs with these extras."""
    return {name: _size(name) for name in distributions(requirements_of(extras))}


def _size(name: str) -> int:
    paths = (Path(str(file.locate())) for file in distribution(name).files or ())
    return sum(path.stat().st_size for path in paths if path.is_file())


def besides_pytorch(found: dict[str, int]) -> dict[str, int]:
    """Return the sizes without those of PyTorch's CUDA build."""
    return {name: size for name, size in found.items() if not PYTORCH.fullmatch(name)}


def main() -> None:
    """Print a table of the two targets, and one of what each other extra adds to ``make run``."""
    lines = [f"{'':10}{'distributions':>15}{'besides PyTorch':>18}{'PyTorch':>12}{'together':>12}"]
    run, setup = extras_of("RUN_EXTRAS"), extras_of("EXTRAS")
    for way, extras in (("make run", run), ("make setup", setup)):
        found = sizes(extras)
        together, besides = sum(found.values()), sum(besides_pytorch(found).values())
        figures = f"{_text(besides):>18}{_text(together - besides):>12}{_text(together):>12}"
        lines.append(f"{way:10}{len(found):>15}{figures}")
    lines.append(f"make run at {FORMER_COMMIT}: {_text(FORMER_BYTES)} besides PyTorch\n")
    base = sum(sizes(run).values())
    lines += [f"{name:15}{_text(sum(sizes([*run, name]).values()) - base):>10}" for name in setup if name not in run]
    sys.stdout.write("\n".join(lines) + "\n")


def _text(size: int) -> str:
    return f"{size / 1e9:.3f} GB"


if __name__ == "__main__":
    main()
