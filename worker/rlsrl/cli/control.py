"""``rlsrl control``: pause, resume or stop a run or some of its workers, or store a version, here or on the cluster."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

import click

from rlsrl.api.control import (
    CONTROLLED_ROLES,
    ControlAction,
    ControlRefused,
    control_changes,
    merge_patch,
    overrides_of,
)
from rlsrl.api.load import SpecError
from rlsrl.api.spec import ExperimentSpec
from rlsrl.cli import is_kubectl
from rlsrl.cli.errors import UserError
from rlsrl.cli.kubectl import EXPERIMENTS, ChangedMeanwhile, Kubectl, Object
from rlsrl.cli.live import quiet_interrupt
from rlsrl.cli.on_cluster import as_experiment, coordinator_status
from rlsrl.cli.status_view import is_over, read_status

STORE_SECONDS = 120.0
"""How long the command waits until a requested version is stored."""
POLL_SECONDS = 0.5
PATCH_TRIES = 5
"""Attempts to change an experiment that others change at the same time."""


@click.command()
@click.argument("run")
@click.argument("action", type=click.Choice(get_args(ControlAction)))
@click.option("--role", type=click.Choice(CONTROLLED_ROLES), help="Only the workers of this role.")
@click.option("--index", type=int, metavar="N", help="Only the worker of the role with this index.")
@click.option("-n", "--namespace", metavar="NAME", help="RUN is an experiment on the cluster, in this namespace.")
def control(run: str, action: ControlAction, role: str | None, index: int | None, namespace: str | None) -> None:
    """Pause, resume or stop RUN, or store a version of its weights now.

    pause: the workers keep their processes and do no work. Actors first fill the rollouts that they have begun, and
    trainers end their step. resume: they go on. Without --role all workers pause or go on. stop: the run ends at the
    next step, as at one of its limits. checkpoint: the trainers store a version at the next step; the command prints
    it.

    RUN is a run folder, or the name of one in runs/. With --namespace, and in `kubectl rlsrl`, it is an experiment on
    the cluster. All of this is a change of the fields spec.paused, spec.stop.now or spec.parameters.storeRequest, so
    it lasts when workers restart.
    """
    now = datetime.now(UTC).isoformat(timespec="microseconds")

    def changes(spec: ExperimentSpec) -> Mapping[str, Any]:
        try:
            return control_changes(spec, action, role=role, index=index, now=now)
        except ControlRefused as error:
            raise UserError(str(error)) from error

    with quiet_interrupt():
        if namespace is None and not is_kubectl():
            _control_here(run, action, changes, now)
        else:
            _control_on_cluster(run, Kubectl(namespace), action, changes, now)


def _control_here(
    run: str, action: ControlAction, changes: Callable[[ExperimentSpec], Mapping[str, Any]], request: str
) -> None:
    from rlsrl.cli.edit import await_edit, show_edit
    from rlsrl.cli.runs import find_run
    from rlsrl.local.edits import ask
    from rlsrl.local.run_folder import STATUS, RunFolderError, is_running, read_record
    from rlsrl.local.run_names import RECORD
    from rlsrl.local.status_file import read_status as read_document
    from rlsrl.runtime.errors import ConfigurationError

    folder = find_run(Path(run), RECORD).absolute()
    try:
        if not is_running(folder):
            _require_unfinished(folder, run, action)
        record = read_record(folder)
        assert record is not None, "find_run has found it"
        asked = ask(folder, record, lambda experiment: overrides_of(changes(experiment.spec)))
        if not asked.changes:
            click.echo(f"{run} is like this already")
            return
        show_edit(asked)
        if not await_edit(folder, Path(run)) or action != "checkpoint":
            return
    except (SpecError, RunFolderError, ConfigurationError) as error:
        raise UserError(str(error)) from error
    except OSError as error:
        raise click.ClickException(f"the change cannot be written: {error}") from error

    def document() -> Mapping[str, Any]:
        if not is_running(folder):
            raise UserError(f"{run} has ended; its last version is stored")
        with contextlib.suppress(OSError, ValueError):
            found = read_document(folder / STATUS)
            return {} if found is None else found[0]
        return {}

    _await_version(document, request)


def _require_unfinished(folder: Path, run: str, action: ControlAction) -> None:
    """Raise UserError for a run that does not go on, where the action would have no effect."""
    from rlsrl.api.role_configs import POLICY_NAME
    from rlsrl.parameters.terminal import terminal_record
    from rlsrl.workers.build.run_database import open_run_database

    if action == "checkpoint":
        raise UserError(f"{run} does not train: its last version is stored. `rlsrl params list {run}` shows it")
    if terminal_record(open_run_database(folder), POLICY_NAME) is not None:
        raise UserError(f"{run} has ended. `rlsrl run` with a further limit in `stop` continues it")


def _control_on_cluster(
    name: str,
    kubectl: Kubectl,
    action: ControlAction,
    changes: Callable[[ExperimentSpec], Mapping[str, Any]],
    request: str,
) -> None:
    experiment, wanted = _change(name, kubectl, changes)
    click.echo("\n".join(f"{path}: {json.dumps(value)}" for path, value in wanted.items()))
    if experiment["spec"].get("suspend"):
        click.echo(f"{name} is suspended: this takes effect once spec.suspend is false")
    elif action != "checkpoint":
        click.echo(f"see: kubectl rlsrl status {name}")
    else:
        _await_version(lambda: _training_status(name, kubectl), request)


def _change(
    name: str, kubectl: Kubectl, changes: Callable[[ExperimentSpec], Mapping[str, Any]]
) -> tuple[Object, Mapping[str, Any]]:
    """Write the new values of an experiment that has not ended. Return the experiment before them, and the values."""
    for _ in range(PATCH_TRIES):
        experiment = kubectl.experiment(name)
        _require_not_over(name, experiment)
        wanted = changes(as_experiment(experiment).spec)
        with contextlib.suppress(ChangedMeanwhile):  # the new values depend on the others' change
            _patch(kubectl, experiment, wanted)
            return experiment, wanted
    raise UserError(f"{name} is not changed: others changed it at the same time, {PATCH_TRIES} times. Try again")


def _require_not_over(name: str, experiment: Object) -> None:
    """Raise UserError for an experiment that has ended, where the action would have no effect."""
    status = read_status(experiment)
    if status.phase == "Failed":
        raise UserError(
            f"{name} has failed: `kubectl rlsrl why {name}` shows the cause, and `kubectl rlsrl retry {name}` tries it "
            "again"
        )
    if is_over(status):
        raise UserError(
            f"{name} has ended, which is final: `kubectl rlsrl params list {name}` shows its stored versions"
        )


def _training_status(name: str, kubectl: Kubectl) -> Mapping[str, Any]:
    """Return the status document of an experiment that has not ended."""
    try:
        experiment = kubectl.experiment(name)
        _require_not_over(name, experiment)
        return coordinator_status(kubectl, experiment)
    except UserError as error:
        raise UserError(f"the version is requested, and cannot be followed from here: {error}") from error


def _patch(kubectl: Kubectl, experiment: Object, wanted: Mapping[str, Any]) -> None:
    """Write the new values, unless another change came first."""
    metadata = experiment["metadata"]
    patch = {"metadata": {"resourceVersion": metadata["resourceVersion"]}, "spec": merge_patch(wanted)}
    kubectl.ask("patch", EXPERIMENTS, metadata["name"], "--type", "merge", "--patch", json.dumps(patch))


def _await_version(document: Callable[[], Mapping[str, Any]], request: str) -> None:
    """Wait until the version of this request is stored, and print it."""
    deadline = time.monotonic() + STORE_SECONDS
    while True:
        totals = document().get("totals") or {}
        stored, _, version = str(totals.get("stored_on_request") or "").rpartition(" ")
        if stored == request:
            click.echo(f"stored version {version}")
            return
        if time.monotonic() >= deadline:
            break
        time.sleep(POLL_SECONDS)
    why = totals.get("unstored_reason") or "the trainers have not answered; `top` shows what they wait for"
    raise click.ClickException(f"no version is stored within {STORE_SECONDS:g} s: {why}. The request stays")
