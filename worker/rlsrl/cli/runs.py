"""Finding a run on this machine, or one of its versions, for commands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from rlsrl.cli.errors import UserError
from rlsrl.local import run_folder


def policy_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add RUN and the options that choose a version of it: the arguments of ``stored_version.open_version``."""
    experiment = click.option(
        "--experiment", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False),
        help="The experiment file, if RUN is a file that `params export` wrote.",
    )  # fmt: skip
    version = click.option("--version", metavar="VERSION", help="A version such as 1.2500; by default the newest.")
    tag = click.option("--tag", metavar="TAG", help="The version with this tag.")
    return click.argument("run", type=click.Path(path_type=Path))(experiment(version(tag(command))))


def find_run(run: Path, *marks: str) -> Path:
    """Return the run folder, as ``run_folder.find_run`` does.

    Raises:
        UserError: the run does not exist; with the nearest match.
    """
    try:
        return run_folder.find_run(run, *marks)
    except run_folder.RunFolderError as error:
        raise UserError(str(error)) from error
