"""``rlsrl top``: show the workers of a run live, on this machine or on the cluster."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rlsrl.cli import is_kubectl
from rlsrl.cli.errors import UserError
from rlsrl.cli.kubectl import Kubectl, NotPermitted, Object
from rlsrl.cli.live import quiet_interrupt, show_live
from rlsrl.cli.on_cluster import ANSWER_SECONDS, coordinator, coordinator_status
from rlsrl.cli.status import status_text
from rlsrl.cli.text import span
from rlsrl.cli.top_table import top_table

if TYPE_CHECKING:
    from rlsrl.runtime.coordination import CoordinatorClient

HERE_SECONDS = 1.0
"""Refresh interval for a run on this machine. Its status file has the same interval."""
WITHOUT_WORKERS = (
    "This is the status of the experiment alone. Its workers' table needs permission to read Secrets and to forward "
    "ports in this namespace, which Kubernetes' role `edit` has and `view` has not."
)


@click.command()
@click.argument("run")
@click.option("-n", "--namespace", metavar="NAME", help="RUN is an experiment on the cluster, in this namespace.")
@click.option("-a", "--all", "whole", is_flag=True, help="Show every worker of large roles.")
def top(run: str, namespace: str | None, whole: bool) -> None:
    """Show the workers of RUN: load, activities, waits and throughput.

    RUN is a run folder, or the name of one in runs/. With --namespace, and in `kubectl rlsrl`, it is an experiment on
    the cluster. BUSY is the share of the last ten seconds without waiting, and WORK its parts. PER SECOND counts
    transitions, for policy workers requests. On a terminal the table refreshes until Ctrl-C or the end of a local run;
    elsewhere it is printed once.
    """
    with quiet_interrupt():
        if namespace is None and not is_kubectl():
            _top_here(run, whole=whole)
        else:
            _top_on_cluster(run, namespace, whole=whole)


def _top_here(run: str, *, whole: bool) -> None:
    from rlsrl.cli.run_status import run_status
    from rlsrl.cli.runs import find_run
    from rlsrl.local.run_names import RECORD

    folder = find_run(Path(run), RECORD)
    if sys.stdout.isatty():
        show_live(lambda: run_status(folder, whole=whole), interval=HERE_SECONDS)
    else:
        click.echo(run_status(folder, whole=whole)[0])


def _top_on_cluster(name: str, namespace: str | None, *, whole: bool) -> None:
    kubectl = Kubectl(namespace)
    try:
        _workers_on_cluster(kubectl, kubectl.experiment(name), whole=whole)
    except NotPermitted:
        show_live(lambda: _without_workers(kubectl, name))


def _without_workers(kubectl: Kubectl, name: str) -> tuple[str, bool]:
    """Return what a user without access to the coordinator may see, and whether it is the last to show."""
    text, has_ended = status_text(kubectl, name)
    return f"{text}\n\n{WITHOUT_WORKERS}", has_ended or not sys.stdout.isatty()


def _workers_on_cluster(kubectl: Kubectl, experiment: Object, *, whole: bool) -> None:
    if not sys.stdout.isatty():
        click.echo(top_table(_judged(coordinator_status(kubectl, experiment), experiment), whole=whole))
        return
    with _StatusReader(kubectl, experiment) as reader:
        show_live(lambda: (reader.shown(whole=whole), False))


def _judged(document: Mapping[str, Any], experiment: Object) -> Mapping[str, Any]:
    """Return the coordinator's status, with the operator's judgement of a failed experiment.

    The coordinator stays to serve the weights, and does not know that no trainer will come back. If one has come since
    ``experiment`` was read, the coordinator is right.
    """
    has_failed = (experiment.get("status") or {}).get("phase") == "Failed"
    return {**document, "phase": "failed"} if has_failed and document.get("phase") == "recovering" else document


class _StatusReader:
    """The coordinator's status over one connection, which is reopened after a failure."""

    def __init__(self, kubectl: Kubectl, experiment: Object) -> None:
        self._kubectl = kubectl
        self._experiment = experiment
        self._connection = ExitStack()
        self._client: CoordinatorClient | None = None
        self._newest: tuple[Mapping[str, Any], float] | None = None

    def __enter__(self) -> _StatusReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def shown(self, *, whole: bool) -> str:
        """Return the table; while the coordinator does not answer, that of its last answer with its age.

        Raises:
            UserError: the coordinator has not answered yet.
        """
        try:
            self._newest = self._ask(), time.monotonic()
        except UserError as error:
            self._disconnect()
            if self._newest is None:
                raise
            document, at = self._newest
            return f"{top_table(document, whole=whole)}\n\n{span(time.monotonic() - at)} old: {error.message}"
        return top_table(self._newest[0], whole=whole)

    def _ask(self) -> Mapping[str, Any]:
        from rlsrl.runtime.coordination import CoordinatorClient, CoordinatorUnavailable

        if self._client is None:
            access = self._connection.enter_context(coordinator(self._kubectl, self._experiment))
            self._client = CoordinatorClient(*access)
            self._connection.callback(self._client.close)
        try:
            return _judged(self._client.status(ANSWER_SECONDS), self._experiment)
        except CoordinatorUnavailable as error:
            raise UserError(f"the coordinator does not answer: {error}") from error

    def _disconnect(self) -> None:
        self._client = None
        self._connection.close()
