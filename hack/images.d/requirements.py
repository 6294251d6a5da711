"""Print the dependencies of an image, one a line: ``requirements.py EXTRA[,EXTRA...]``.

The Dockerfiles install these in a layer of their own, which a change of code or of a tool's settings in pyproject.toml
leaves as it is. ``build`` stands for what the project itself is built with.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def main() -> None:
    """Print the dependencies of the project in ``pyproject.toml`` with the extras."""
    document = tomllib.loads(Path("pyproject.toml").read_text())
    project = document["project"]
    allowed = {**project["optional-dependencies"], "build": document["build-system"]["requires"]}
    wanted = list(filter(None, sys.argv[1].split(",")))
    for extra in wanted:
        if extra not in allowed:
            sys.exit(f"requirements: extra: {extra}; allowed: {' '.join(sorted(allowed))}")
    lines = {line for extra in wanted for line in allowed[extra]}
    if wanted != ["build"]:
        lines.update(project["dependencies"])
    sys.stdout.writelines(f"{line}\n" for line in sorted(lines))


if __name__ == "__main__":
    main()
