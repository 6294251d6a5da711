"""``kubectl rlsrl status``: how an experiment on the cluster is."""

from __future__ import annotations

from datetime import UTC, datetime

import click

from rlsrl.cli.kubectl import Kubectl, own_labels
from rlsrl.cli.live import quiet_interrupt, show_live
from rlsrl.cli.story import is_over, read_status, story

WORKLOADS = "deployments,statefulsets"


@click.command()
@click.argument("name")
@click.option("-n", "--namespace", metavar="NAME", help="By default the one of kubectl's context.")
@click.option("-w", "--watch", is_flag=True, help="Go on showing it until the experiment is over.")
def status(name: str, namespace: str | None, watch: bool) -> None:
    """Tell the story of the experiment NAME on the cluster: phase, numbers, roles, conditions, where its weights are.

    Programs read `kubectl get rlexperiment NAME --output json`.
    """
    kubectl = Kubectl(namespace)

    def draw() -> tuple[str, bool]:
        experiment = kubectl.experiment(name)
        workloads = kubectl.objects(WORKLOADS, own_labels(experiment))
        return story(experiment, workloads, datetime.now(UTC)), not watch or is_over(read_status(experiment))

    with quiet_interrupt():
        show_live(draw)
