"""Errors of commands. What the user can correct: one clear message, exit code 2, no traceback."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rlsrl.runtime.errors import EnvironmentFailed


SIGNALLED = 128
"""The exit status of a command that a signal ended, less the signal's number."""


class UserError(click.ClickException):
    """The user can correct this. The message says what and how."""

    exit_code = 2


def require_free(output: Path, *, force: bool) -> None:
    """Refuse to write a file that exists, unless ``force``, or one in a folder that does not.

    Raises:
        UserError: as said.
    """
    if output.exists() and not force:
        raise UserError(f"{output} exists; --force replaces it")
    if not output.parent.is_dir():
        raise UserError(f"the folder {output.parent} does not exist")


def environment_failed(error: EnvironmentFailed) -> click.ClickException:
    """Print the traceback of the environment's own code, and return the error to raise."""
    click.echo(error.traceback, err=True, nl=False)
    return click.ClickException(str(error))
