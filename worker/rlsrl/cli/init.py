"""``rlsrl init``: create a small project with the user's own environment, network and, if wanted, algorithm."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

import click

from rlsrl.cli.errors import UserError

_SUFFIX = ".template"
_PLACEHOLDER = "my-experiment"
"""The name of the experiment in the templates."""
_LONGEST_NAME = 40
_OWN, _BUILT_IN = "%own|", "%built-in|"
"""Beginnings of lines of the templates: only for a project with an algorithm of its own, or only for one without."""
_ALGORITHM_FILES = ("my_algorithm.py", "test_my_algorithm.py")


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path, file_okay=True))
@click.option("--algorithm", "has_algorithm", is_flag=True, help="Also write an algorithm of your own, with its test.")
def init(folder: Path, has_algorithm: bool) -> None:
    """Create a project in DIR: your own environment and network, an experiment and tests.

    DIR is created if it does not exist. An existing folder must be empty.
    """
    name = experiment_name(folder.resolve().name)
    for path in write_project(folder, name, has_algorithm=has_algorithm):
        click.echo(f"wrote {path}")
    checked = "environment, network and algorithm" if has_algorithm else "the environment, and the network's fit"
    click.echo(
        f"\nNext:\n"
        f"  cd {folder}\n"
        f"  pip install pytest              # for the next command\n"
        f"  python -m pytest                # check {checked}\n"
        f"  rlsrl run experiment.yaml       # train it\n"
        f"  rlsrl eval runs/{name}\n"
        f"README.md explains the files."
    )


def experiment_name(folder_name: str) -> str:
    """Return the valid experiment name nearest to the folder's name.

    >>> experiment_name("My Robot_2")
    'my-robot-2'
    """
    name = re.sub(r"[^a-z0-9]+", "-", folder_name.lower()).lstrip("-0123456789")
    return name[:_LONGEST_NAME].rstrip("-") or _PLACEHOLDER


def write_project(folder: Path, name: str, *, has_algorithm: bool = False) -> list[Path]:
    """Write the project's files, with or without an algorithm, and return their paths.

    Raises:
        UserError: the path is not a folder, or the folder is not empty or not writable.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if present := sorted(entry.name for entry in folder.iterdir()):
            raise UserError(f"{folder} is not empty ({', '.join(present[:3])}); give a new or an empty folder")
        texts = sorted(templates(has_algorithm=has_algorithm).items())
        return [_write(folder / file, text.replace(_PLACEHOLDER, name)) for file, text in texts]
    except FileExistsError as error:
        raise UserError(f"{folder} is a file; give a new or an empty folder") from error
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error}") from error


def _write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def templates(*, has_algorithm: bool) -> dict[str, str]:
    """Return the text of the project's files by name."""
    texts = {
        entry.name.removesuffix(_SUFFIX): entry.read_text(encoding="utf-8")
        for entry in resources.files("rlsrl.cli").joinpath("templates").iterdir()
        if entry.name.endswith(_SUFFIX)
    }
    kept, dropped = (_OWN, _BUILT_IN) if has_algorithm else (_BUILT_IN, _OWN)
    return {
        name: "".join(
            line.removeprefix(kept) for line in text.splitlines(keepends=True) if not line.startswith(dropped)
        )
        for name, text in texts.items()
        if has_algorithm or name not in _ALGORITHM_FILES
    }
