"""``kubectl rlsrl volumes``: list the volume claims on the cluster that no experiment uses."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import click

from rlsrl.api.pods import EXPERIMENT_LABEL
from rlsrl.cli.kubectl import EXPERIMENTS, Kubectl, Object
from rlsrl.cli.live import quiet_interrupt
from rlsrl.cli.text import UNKNOWN, columns, since


@click.command()
@click.option("-n", "--namespace", metavar="NAME", help="By default the namespace of kubectl's context.")
def volumes(namespace: str | None) -> None:
    """List the volume claims that deleted experiments have left, with size and age.

    The claim of an experiment stays when the experiment is deleted, unless its spec says
    `parameters.store.filesystem.whenDeleted: Delete`. A new experiment of the same name uses the claim again.
    """
    kubectl = Kubectl(namespace)
    with quiet_interrupt():
        claims = kubectl.items("persistentvolumeclaims", "--selector", EXPERIMENT_LABEL)
        unused = unused_claims(claims, kubectl.items(EXPERIMENTS))
    if not unused:
        click.echo("no volume claim is unused")
        return
    now = datetime.now(UTC)
    click.echo(columns([("CLAIM", "SIZE", "AGE", "EXPERIMENT"), *(_row(claim, now) for claim in unused)]))
    where = "" if namespace is None else f" --namespace {namespace}"
    click.echo(f"to delete a claim with all versions on its volume: kubectl delete pvc CLAIM{where}")


def unused_claims(claims: Sequence[Object], experiments: Sequence[Object]) -> list[Object]:
    """Return the claims of experiments that do not exist, or that keep their versions in a bucket, by name."""
    using = {each["metadata"]["name"] for each in experiments if _uses_a_volume(each)}
    unused = [claim for claim in claims if claim["metadata"]["labels"][EXPERIMENT_LABEL] not in using]
    return sorted(unused, key=lambda claim: str(claim["metadata"]["name"]))


def _uses_a_volume(experiment: Object) -> bool:
    store = experiment.get("spec", {}).get("parameters", {}).get("store", {})
    return store.get("objectStore") is None


def _row(claim: Object, now: datetime) -> tuple[str, ...]:
    metadata, spec = claim["metadata"], claim.get("spec", {})
    asked = spec.get("resources", {}).get("requests", {}).get("storage", UNKNOWN)
    size = claim.get("status", {}).get("capacity", {}).get("storage", asked)
    age = since(metadata.get("creationTimestamp"), now)
    return metadata["name"], size, age, metadata["labels"][EXPERIMENT_LABEL]
