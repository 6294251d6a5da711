"""Commands that need only the spec: ``rlsrl validate``, ``rlsrl schema`` and ``rlsrl explain``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from rlsrl.api.explain import UnknownField
from rlsrl.api.explain import explain as explain_field
from rlsrl.api.load import SpecError, load_with_fewest_actors
from rlsrl.api.schema import json_schema
from rlsrl.cli.errors import UserError
from rlsrl.cli.text import width_of, wrapped


@click.command()
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--set", "overrides", metavar="PATH=VALUE", multiple=True, help="Change a field before; can be repeated.")
def validate(files: tuple[Path, ...], overrides: tuple[str, ...]) -> None:
    """Check experiment files.

    Lists every error with its line, the value, what is allowed and the nearest field.
    """
    num_problems = 0
    for file in files:
        try:
            experiment = load_with_fewest_actors(file, overrides)
        except SpecError as error:
            num_problems += len(error.problems)
            click.echo(wrapped(str(error), width_of(sys.stderr)), err=True)
        else:
            click.echo(f"{file}: valid")
            for warning in experiment.spec.actors.spread.warnings:
                click.echo(f"{file}: warning: {warning}")
    if num_problems:
        raise UserError("1 problem" if num_problems == 1 else f"{num_problems} problems")


@click.command()
def schema() -> None:
    """Print the experiment's JSON schema, for editors that complete and check YAML."""
    click.echo(json.dumps(json_schema(), indent=2))


@click.command()
@click.argument("path", required=False, default="")
def explain(path: str) -> None:
    """Describe the field at PATH, for example spec.actors: type, default, allowed values and members.

    Without PATH, describe the whole document. The prefix `spec.` is optional.
    """
    try:
        click.echo(explain_field(path))
    except UnknownField as error:
        raise UserError(str(error)) from error
