"""``kubectl rlsrl retry``: try a failed experiment on the cluster again."""

from __future__ import annotations

import click

from rlsrl.api.retry import FRESH_ANNOTATION, RETRY_ANNOTATION
from rlsrl.cli.errors import UserError
from rlsrl.cli.kubectl import EXPERIMENTS, Kubectl
from rlsrl.cli.live import quiet_interrupt
from rlsrl.cli.status_view import parameter_store, read_status


@click.command()
@click.argument("name")
@click.option("-n", "--namespace", metavar="NAME", help="By default the namespace of kubectl's context.")
@click.option("--fresh", is_flag=True, help="Begin from step 0. All earlier versions stay where they are.")
def retry(name: str, namespace: str | None, fresh: bool) -> None:
    """Try the failed experiment NAME on the cluster again, from its newest intact version.

    The next attempt has a whole restart budget, and uses the present images and settings of the chart. An edit of a
    failed experiment's spec tries it again, too.
    """
    kubectl = Kubectl(namespace)
    with quiet_interrupt():
        experiment = kubectl.experiment(name)
        status = read_status(experiment)
        if status.phase != "Failed" or status.attempt is None:
            raise UserError(
                f"{name} is {status.phase or 'unseen by the operator'}: only a failed experiment can be tried again"
            )
        if experiment["spec"].get("suspend"):
            raise UserError(f"{name} is suspended: set spec.suspend to false, and it is tried again")
        asked, other = (FRESH_ANNOTATION, RETRY_ANNOTATION) if fresh else (RETRY_ANNOTATION, FRESH_ANNOTATION)
        kubectl.ask("annotate", "--overwrite", EXPERIMENTS, name, f"{asked}={status.attempt}", f"{other}-")
    start = "step 0" if fresh else "the newest intact version, or from step 0 if there is none"
    failed = status.attempt
    click.echo(f"attempt {failed + 1} of {name} begins once the pods of attempt {failed} are gone, from {start}")
    if fresh:
        click.echo(f"nothing is deleted: all earlier versions stay on {parameter_store(experiment)}")
    click.echo(f"see: kubectl rlsrl status {name}")
