"""``rlsrl init``: a small project with an environment and a network of the user's own, outside the package."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

import click

from rlsrl.cli.errors import UserError

_SUFFIX = ".template"
_PLACEHOLDER = "my-experiment"
"""The experiment's name in the templates."""
_LONGEST_NAME = 40


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path, file_okay=True))
def init(folder: Path) -> None:
    """Begin a project in DIR: an environment and a network of your own, an experiment and tests.

    DIR is made if it is not there; it must be empty.
    """
    name = experiment_name(folder.resolve().name)
    for path in write_project(folder, name):
        click.echo(f"wrote {path}")
    click.echo(
        f"\nNext:\n"
        f"  cd {folder}\n"
        f"  python -m pytest                # is the environment sound, does the network fit it?\n"
        f"  rlsrl run experiment.yaml       # train it\n"
        f"  rlsrl eval runs/{name}\n"
        f"README.md says more."
    )


def experiment_name(folder_name: str) -> str:
    """A name an experiment may have, as near to the folder's as it can be.

    >>> experiment_name("My Robot_2")
    'my-robot-2'
    """
    name = re.sub(r"[^a-z0-9]+", "-", folder_name.lower()).lstrip("-0123456789")
    return name[:_LONGEST_NAME].rstrip("-") or _PLACEHOLDER


def write_project(folder: Path, name: str) -> list[Path]:
    """Write the project's files; returns their paths.

    Raises:
        UserError: the folder is not empty, or is no folder, or cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if present := sorted(entry.name for entry in folder.iterdir()):
            raise UserError(f"{folder} is not empty ({', '.join(present[:3])}); give a new or an empty folder")
        return [_write(folder / file, text.replace(_PLACEHOLDER, name)) for file, text in sorted(templates().items())]
    except FileExistsError as error:
        raise UserError(f"{folder} is a file; give a new or an empty folder") from error
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error}") from error


def _write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def templates() -> dict[str, str]:
    """The project's files, text by name."""
    return {
        entry.name.removesuffix(_SUFFIX): entry.read_text(encoding="utf-8")
        for entry in resources.files("rlsrl.cli").joinpath("templates").iterdir()
        if entry.name.endswith(_SUFFIX)
    }
