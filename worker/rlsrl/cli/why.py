"""``kubectl rlsrl why``: explain why an experiment on the cluster does not train, with the cure."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import UTC, datetime

import click

from rlsrl.api.reasons import PHASES, PROGRESSING, REASONS
from rlsrl.api.status import ExperimentStatus, Phase
from rlsrl.cli.diagnosis import Diagnosis, diagnose, past_events, past_restarts
from rlsrl.cli.kubectl import Kubectl, own_labels
from rlsrl.cli.live import quiet_interrupt
from rlsrl.cli.status_view import read_status
from rlsrl.cli.text import printable, since

KINDS = "pods,deployments,replicasets,statefulsets,persistentvolumeclaims"
WELL, UNWELL = 0, 1
MAX_FINDINGS = 8
"""Findings shown: a hundred actors without an image must not hide the first finding."""


@click.command()
@click.argument("name")
@click.option("-n", "--namespace", metavar="NAME", help="By default the namespace of kubectl's context.")
def why(name: str, namespace: str | None) -> None:
    """Explain why the experiment NAME on the cluster does not train: condition, pod, reason, last output, cure.

    Exit status: 0 without problems, 1 with problems or while it starts, 2 if the cluster cannot be asked.
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
            click.echo(f"{name} has no problems: {printable(_state(status, status.phase, name))}")
            for line in past_restarts(objects):
                click.echo(f"  {line}")
        for line in past_events(status):
            click.echo(printable(line))
    sys.exit(UNWELL if findings else WELL)


def _state(status: ExperimentStatus, phase: Phase, name: str) -> str:
    """Return what an experiment without problems does, with what the user can do, if anything."""
    for each in status.conditions:
        if (each.type, each.reason) == (PROGRESSING, "Paused"):
            paused = REASONS[PROGRESSING]["Paused"]
            return f"Paused: {each.message}. {paused.cure.replace('NAME', name)}"
    text = PHASES[phase]
    cure = [] if text.cure == "Nothing." else [text.cure]
    return f"{phase}: {' '.join([text.meaning, *cure]).replace('NAME', name)}"


def _lines(finding: Diagnosis, name: str, now: datetime) -> Iterator[str]:
    lasting = f", for {since(finding.since, now)}" if finding.since else ""
    yield f"{finding.what}: {finding.reason}{lasting}"
    if finding.message:
        yield f"  {' '.join(finding.message.split())}"
    if finding.last_lines:
        yield "  last output:"
        yield from (f"    {line}" for line in finding.last_lines)
    if finding.event:
        yield f"  event: {finding.event}"
    if finding.explanation is not None:
        yield f"  meaning: {finding.explanation.meaning}"
        yield f"  cure: {finding.explanation.cure.replace('NAME', name)}"
