"""``rlsrl edit``: change fields of a run on this machine."""

from __future__ import annotations

import time
from pathlib import Path

import click

from rlsrl.api.edits import FieldEdit
from rlsrl.api.load import SpecError
from rlsrl.cli.errors import UserError
from rlsrl.cli.runs import find_run
from rlsrl.local.edits import AskedEdit, ask, describe, is_pending
from rlsrl.local.run_folder import RunFolderError, is_running, read_record
from rlsrl.local.run_names import RECORD
from rlsrl.runtime.errors import ConfigurationError

WAIT_SECONDS = 30.0
"""How long the command waits until the run has applied the edit."""
POLL_SECONDS = 0.1


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--set", "overrides", metavar="PATH=VALUE", multiple=True, required=True, help="Change a field; can be repeated."
)
def edit(run: Path, overrides: tuple[str, ...]) -> None:
    """Change fields of RUN, a run folder or the name of a run in runs/.

    A run that trains applies the edit at once: some fields while its workers continue (such as `stop` and the learning
    rate), others by new processes of the roles concerned, as on a cluster. `rlsrl explain FIELD` says which. A run that
    does not train applies it when `rlsrl run` resumes it. Fields that make it another experiment cannot change.
    """
    folder = find_run(run, RECORD).absolute()
    try:
        record = read_record(folder)
        assert record is not None, "find_run has found it"
        asked = ask(folder, record, lambda _: overrides)
        if not asked.changes:
            click.echo(f"{run} has these values already")
            return
        show_edit(asked)
        await_edit(folder, run)
    except (SpecError, RunFolderError, ConfigurationError) as error:
        raise UserError(str(error)) from error
    except OSError as error:
        raise click.ClickException(f"the edit cannot be written: {error}") from error


def show_edit(asked: AskedEdit) -> None:
    """Print what an edit changes."""
    for change in asked.changes:
        click.echo(f"{describe(change)}{_effect(change)}")
    if asked.restarted:
        click.echo(f"new processes: {', '.join(asked.restarted)}")
    for text in asked.warnings:
        click.echo(f"warning: {text}")


def _effect(change: FieldEdit) -> str:
    return " (live)" if change.effect == "live" else ""


def await_edit(folder: Path, run: Path) -> bool:
    """Wait until a running run has applied the edit. Return whether it has, and print it.

    Raises:
        click.ClickException: it has not.
    """
    if not is_running(folder):
        click.echo(f"{run} does not train: the edit is applied when `rlsrl run` resumes it")
        return False
    deadline = time.monotonic() + WAIT_SECONDS
    while is_pending(folder):
        if not is_running(folder):
            click.echo(f"{run} has just ended: the edit is applied when `rlsrl run` resumes it")
            return False
        if time.monotonic() >= deadline:
            raise click.ClickException(
                f"the run has not applied the edit within {WAIT_SECONDS:g} s; it shows why. The edit stays"
            )
        time.sleep(POLL_SECONDS)
    click.echo("applied; the run shows what it changes")
    return True
