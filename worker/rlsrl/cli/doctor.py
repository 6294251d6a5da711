"""``rlsrl doctor``: whether this machine can run experiments."""

from __future__ import annotations

import sys

import click

from rlsrl.local.doctor import CHECKS, Finding, examine


@click.command()
def doctor() -> None:
    """Check this machine and name the cure of what is wrong.

    Ends with 1 if something is missing without which nothing runs.
    """
    findings = []
    for finding in examine(CHECKS):
        findings.append(finding)
        click.echo(_line(finding))
    fatal = [finding.name for finding in findings if finding.is_fatal]
    if fatal:
        click.echo(f"nothing runs here before this is cured: {', '.join(fatal)}", err=True)
        sys.exit(1)
    unwell = sum(not finding.well for finding in findings)
    click.echo("all is well" if not unwell else f"experiments run here; warnings: {unwell}")


def _line(finding: Finding) -> str:
    mark = "ok     " if finding.well else "FAILED " if finding.required else "warning"
    cure = f"\n        cure: {finding.cure}" if finding.cure else ""
    return f"{mark} {finding.name}: {finding.text}{cure}"
