"""``kubectl rlsrl volumes``: list the volume claims on the cluster that no experiment uses."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import click

from rlsrl.api.pods import EXPERIMENT_LABEL, ROLE_LABEL
from rlsrl.cli.kubectl import EXPERIMENTS, Kubectl, Object
from rlsrl.cli.live import quiet_interrupt
from rlsrl.cli.text import since
from rlsrl.runs.text_table import UNKNOWN, columns


@click.command()
@click.option("-n", "--namespace", metavar="NAME", help="By default the namespace of kubectl's context.")
def volumes(namespace: str | None) -> None:
    """List the volume claims that deleted experiments have left, with size and age.

    The claim of an experiment stays when the experiment is deleted, unless its spec says
    `parameters.store.filesystem.whenDeleted: Delete`. Those of its buffer workers go with it, unless it says
    `bufferWorkers.volume.whenDeleted: Retain`. A new experiment of the same name uses claims again.
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
    click.echo(f"to delete a claim with all that is on its volume: kubectl delete pvc CLAIM{where}")


def unused_claims(claims: Sequence[Object], experiments: Sequence[Object]) -> list[Object]:
    """Return the claims of experiments that do not exist, or that keep their versions in a bucket, by name.

    The claims of an existing experiment's buffer workers, which have the label of the role, are in use.
    """
    by_name = {each["metadata"]["name"]: each for each in experiments}

    def is_used(claim: Object) -> bool:
        labels = claim["metadata"]["labels"]
        experiment = by_name.get(labels[EXPERIMENT_LABEL])
        return experiment is not None and (ROLE_LABEL in labels or _keeps_versions_on_a_volume(experiment))

    return sorted((each for each in claims if not is_used(each)), key=lambda each: str(each["metadata"]["name"]))


def _keeps_versions_on_a_volume(experiment: Object) -> bool:
    store = experiment.get("spec", {}).get("parameters", {}).get("store", {})
    return store.get("objectStore") is None


def _row(claim: Object, now: datetime) -> tuple[str, ...]:
    metadata, spec = claim["metadata"], claim.get("spec", {})
    asked = spec.get("resources", {}).get("requests", {}).get("storage", UNKNOWN)
    size = claim.get("status", {}).get("capacity", {}).get("storage", asked)
    age = since(metadata.get("creationTimestamp"), now)
    return metadata["name"], size, age, metadata["labels"][EXPERIMENT_LABEL]
