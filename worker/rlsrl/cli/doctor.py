"""``rlsrl doctor``: check whether this machine can run experiments."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from rlsrl.api.load import SpecError, load_with_fewest_actors
from rlsrl.cli.errors import UserError
from rlsrl.local.doctor import CHECKS, Check, Finding, check_replay, examine
from rlsrl.local.replay_room import find_stores, role_of_stores, room_in, stores_folder
from rlsrl.local.run_names import RUNS


@click.command()
@click.argument("file", required=False, type=click.Path(path_type=Path))
def doctor(file: Path | None) -> None:
    """Check this machine and show the cure of each problem; with FILE also that the experiment's replay stores fit.

    Exit status: 1 if no experiment can run here, or not that in FILE; else 0.
    """
    if file is None:
        sys.exit(report(CHECKS))
    try:
        experiment = load_with_fewest_actors(file)
    except SpecError as error:
        raise UserError(str(error)) from error
    folder = stores_folder(RUNS / experiment.metadata.name)
    fits = Check(
        name="replay stores",
        required=True,
        examine=lambda: check_replay(
            lambda: find_stores(experiment.spec, modules=file.absolute().parent),
            lambda: room_in(folder, role_of_stores(experiment.spec)),
        ),
    )
    sys.exit(report((*CHECKS, fits), subject=f"{experiment.metadata.name} cannot"))


def report(checks: Sequence[Check], *, subject: str = "no experiment can") -> int:
    """Make the checks, print each finding at once, and return the exit status."""
    findings = []
    for finding in examine(checks):
        findings.append(finding)
        click.echo(_line(finding))
    fatal = [finding.name for finding in findings if finding.is_fatal]
    if fatal:
        click.echo(f"{subject} run here: {', '.join(fatal)}", err=True)
        return 1
    problems = sum(not finding.passed for finding in findings)
    click.echo("all checks passed" if not problems else f"experiments can run here; warnings: {problems}")
    return 0


def _line(finding: Finding) -> str:
    mark = "ok     " if finding.passed else "FAILED " if finding.required else "warning"
    cure = f"\n        cure: {finding.cure}" if finding.cure else ""
    return f"{mark} {finding.name}: {finding.text}{cure}"
