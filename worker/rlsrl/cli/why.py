"""``kubectl rlsrl why``: what is wrong with an experiment on the cluster, and the cure."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import UTC, datetime

import click

from rlsrl.api.reasons import PHASES, Explanation
from rlsrl.cli.diagnosis import Finding, diagnose, has_ended_before
from rlsrl.cli.kubectl import Kubectl, own_labels
from rlsrl.cli.live import quiet_interrupt
from rlsrl.cli.story import read_status
from rlsrl.cli.text import printable, since

KINDS = "pods,deployments,replicasets,statefulsets,persistentvolumeclaims"
WELL, UNWELL = 0, 1
MAX_FINDINGS = 8
"""So that a hundred actors without an image do not hide the first."""


@click.command()
@click.argument("name")
@click.option("-n", "--namespace", metavar="NAME", help="By default the one of kubectl's context.")
def why(name: str, namespace: str | None) -> None:
    """Say why the experiment NAME on the cluster does not train: condition, pod, reason, its last words, the cure.

    Ends with 0 if all is well, 1 if something is wrong, 2 if it cannot be asked.
    """
    with quiet_interrupt():
        kubectl = Kubectl(namespace)
        experiment = kubectl.experiment(name)
        objects = kubectl.objects(KINDS, own_labels(experiment))
        status = read_status(experiment)
        now = datetime.now(UTC)
        findings = diagnose(experiment, status, objects, kubectl.warnings(), now=now)
        for finding in findings[:MAX_FINDINGS]:
            click.echo(printable("\n".join(_lines(finding, name, now))))
        if len(findings) > MAX_FINDINGS:
            click.echo(f"and {len(findings) - MAX_FINDINGS} more")
        if not findings and status.phase is not None:
            click.echo(f"all is well with {name}: {status.phase}: {_told(PHASES[status.phase], name)}")
            for line in has_ended_before(objects):
                click.echo(f"  {line}")
    sys.exit(UNWELL if findings else WELL)


def _told(phase: Explanation, name: str) -> str:
    """What a phase means, and what can be done about it, if anything."""
    return " ".join([phase.meaning, *([phase.cure.replace("NAME", name)] if phase.cure != "Nothing." else [])])


def _lines(finding: Finding, name: str, now: datetime) -> Iterator[str]:
    lasting = f", for {since(finding.since, now)}" if finding.since else ""
    yield f"{finding.what}: {finding.reason}{lasting}"
    if finding.message:
        yield f"  {' '.join(finding.message.split())}"
    if finding.said:
        yield "  its last words:"
        yield from (f"    {line}" for line in finding.said)
    if finding.event:
        yield f"  event: {finding.event}"
    if finding.explanation is not None:
        yield f"  meaning: {finding.explanation.meaning}"
        yield f"  cure: {finding.explanation.cure.replace('NAME', name)}"
