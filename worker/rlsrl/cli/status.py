"""``kubectl rlsrl status``: show the state of an experiment on the cluster."""

from __future__ import annotations

from datetime import UTC, datetime

import click

from rlsrl.cli.kubectl import Kubectl, own_labels
from rlsrl.cli.live import quiet_interrupt, show_live
from rlsrl.cli.status_view import is_over, read_status, status_view

WORKLOADS = "deployments,statefulsets"


@click.command()
@click.argument("name")
@click.option("-n", "--namespace", metavar="NAME", help="By default the namespace of kubectl's context.")
@click.option("-w", "--watch", is_flag=True, help="Refresh until the experiment has ended.")
def status(name: str, namespace: str | None, watch: bool) -> None:
    """Show the state of the experiment NAME on the cluster: phase, numbers, roles, conditions, parameter store.

    For programs: `kubectl get rlexperiment NAME --output json`.
    """
    kubectl = Kubectl(namespace)

    def draw() -> tuple[str, bool]:
        text, has_ended = status_text(kubectl, name)
        return text, not watch or has_ended

    with quiet_interrupt():
        show_live(draw)


def status_text(kubectl: Kubectl, name: str) -> tuple[str, bool]:
    """Return the state of an experiment as text, and whether it has ended.

    Raises:
        UserError: the experiment does not exist, or the cluster cannot be asked.
    """
    experiment = kubectl.experiment(name)
    workloads = kubectl.objects(WORKLOADS, own_labels(experiment))
    return status_view(experiment, workloads, datetime.now(UTC)), is_over(read_status(experiment))
