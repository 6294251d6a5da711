"""``rlsrl doctor``: check whether this machine can run experiments."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from rlsrl.local.doctor import CHECKS, Check, Finding, examine


@click.command()
def doctor() -> None:
    """Check this machine and show the cure of each problem.

    Exit status: 1 if no experiment can run here, else 0.
    """
    sys.exit(report(CHECKS))


def report(checks: Sequence[Check]) -> int:
    """Make the checks, print each finding at once, and return the exit status."""
    findings = []
    for finding in examine(checks):
        findings.append(finding)
        click.echo(_line(finding))
    fatal = [finding.name for finding in findings if finding.is_fatal]
    if fatal:
        click.echo(f"no experiment can run here: {', '.join(fatal)}", err=True)
        return 1
    problems = sum(not finding.passed for finding in findings)
    click.echo("all checks passed" if not problems else f"experiments can run here; warnings: {problems}")
    return 0


def _line(finding: Finding) -> str:
    mark = "ok     " if finding.passed else "FAILED " if finding.required else "warning"
    cure = f"\n        cure: {finding.cure}" if finding.cure else ""
    return f"{mark} {finding.name}: {finding.text}{cure}"
