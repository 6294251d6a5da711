"""Starts or resumes a run in its folder, and writes its summary: the steps of ``rlsrl run`` from input to result."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from rlsrl.api.resolve import ResolvedExperiment
from rlsrl.api.role_configs import POLICY_NAME
from rlsrl.api.role_names import ACTOR, EVALUATOR
from rlsrl.api.spec import RLExperiment
from rlsrl.local.controller import WORKER_COMMAND, Failed, LaunchOptions, LocalController, RunOutcome
from rlsrl.local.display import LineDisplay, TerminalDisplay, Viewer, open_display
from rlsrl.local.edits import RunEdits, recorded_experiment
from rlsrl.local.environment_check import EnvironmentCheck, is_users_own
from rlsrl.local.folder_check import check_documents_and_pages
from rlsrl.local.metrics_log import fixed_evaluations, read_rows, training_rows
from rlsrl.local.monitor import StatusMonitor
from rlsrl.local.plans import check_and_write, config_path, resolve_locally, run_plan
from rlsrl.local.rendering_check import require_pictures
from rlsrl.local.replay_room import stores_folder
from rlsrl.local.run_folder import RunFolder
from rlsrl.local.status_file import StatusFile
from rlsrl.local.summary import RunFacts, summarize
from rlsrl.local.view import RunView
from rlsrl.rpc.auth import TOKEN_VARIABLE, new_token
from rlsrl.rpc.tls import TLS_FOLDER_VARIABLE
from rlsrl.runtime.coordination import CoordinatorClient
from rlsrl.runtime.durable import write_durably
from rlsrl.runtime.extras import extras_named
from rlsrl.runtime.ledger import balance, read_pages, settle_ledger
from rlsrl.workers.build.store_files import discard_stores

STATUS_INTERVAL_SECONDS = 1.0
"""Seconds between two updates of the run folder's ``status.json``; workers report at the same interval."""


def run_life(
    folder: RunFolder,
    experiment: RLExperiment,
    *,
    modules: Path,
    output: TextIO,
    watch: Callable[[RunView, CoordinatorClient], bool] | None = None,
    command: Sequence[str] = WORKER_COMMAND,
) -> RunOutcome:
    """Start or resume the run, show it, and end it. Main thread only.

    Args:
        folder: the run folder, after ``claim``.
        experiment: the experiment of the run.
        modules: the folder in which Python looks first for the user's own modules.
        output: the stream on which the run is shown.
        watch: looks at the run for the user's own program, see ``rlsrl.local.controller.Watch``.
        command: the command that starts a worker, without its arguments.

    Raises:
        ConfigurationError: the parameter DB refuses the access, a document in the folder is damaged, this process may
            open too few files, or videos cannot be recorded.
        RunFolderError: a document in the folder lacks an entry.
        LedgerError: a ledger page is damaged.
        OSError: a process or file cannot be created, or the parameter DB cannot be reached.
        RecordsLost: the run folder was removed or moved.
    """
    resolved = resolve_locally(experiment, folder.path, folder.record)
    warnings = _prepare(folder, resolved)
    token = new_token()
    variables = child_environment(os.environ, token=token, modules=modules)
    _require_pictures(folder, resolved, variables)
    client = CoordinatorClient(resolved.coordinator.coordinator_address, token)
    status_file = StatusFile(folder.status)
    monitor = StatusMonitor(client, publish=status_file.write)
    viewer = Viewer(experiment, monitor.newest)
    display = open_display(viewer, output)
    for warning in warnings:
        display.note(f"warning: {warning}")
    folder.begin_life(modules=modules)
    status_file.remove()
    monitor.start(interval_seconds=min(display.interval_seconds, STATUS_INTERVAL_SECONDS))
    launch = LaunchOptions(environment=variables, logs=folder.logs, command=command, keep_fds=(folder.lock_fd,))
    outcome: RunOutcome | None = None
    try:
        with _environment_check(folder, experiment, variables, display.note):
            outcome = LocalController(
                plan=run_plan(folder.path, experiment, resolved),
                edits=RunEdits(folder, experiment, note=display.note, on_applied=viewer.adopt),
                journal=folder,
                display=display,
                watch=None if watch is None else partial(_look, watch, viewer, client, display),
                launch=launch,
            ).run()
        return outcome
    finally:
        monitor.close()
        display.close()
        folder.check()
        folder.end_life(failure=outcome.message if isinstance(outcome, Failed) else "")


def _look(
    watch: Callable[[RunView, CoordinatorClient], bool],
    viewer: Viewer,
    client: CoordinatorClient,
    display: LineDisplay | TerminalDisplay,
) -> bool:
    with display.others_print():
        return watch(viewer.view(()), client)


def _prepare(folder: RunFolder, resolved: ResolvedExperiment) -> list[str]:
    """Write the workers' configs and check what the run needs, before any process starts; return the warnings."""
    check_and_write(folder, resolved)
    lost = check_documents_and_pages(folder, resolved.coordinator)
    settle_ledger(folder.ledger)
    return [*resolved.warnings, *lost]


def _require_pictures(folder: RunFolder, resolved: ResolvedExperiment, variables: Mapping[str, str]) -> None:
    """Check before the first attempt that the evaluators can record videos, if they are to."""
    if not folder.record.attempt:
        report = folder.path / "rendering-check.txt"
        try:
            evaluators = resolved.configs.get(EVALUATOR)
            require_pictures(evaluators, config_path(folder.path, EVALUATOR), report, environment=variables)
        finally:
            report.unlink(missing_ok=True)


def _environment_check(
    folder: RunFolder, experiment: RLExperiment, variables: Mapping[str, str], show: Callable[[str], None]
) -> AbstractContextManager[object]:
    """Begin to check an environment of the user's own, before the first attempt. The exit ends the check."""
    if folder.record.attempt or not is_users_own(experiment.spec.environment):
        return nullcontext()
    report = folder.logs / "environment-check.txt"
    return closing(EnvironmentCheck(config_path(folder.path, ACTOR), report, environment=variables, show=show))


def write_summary(folder: RunFolder, experiment: RLExperiment) -> Mapping[str, Any]:
    """Settle the ledger of a run without running processes; write the run's summary and return it."""
    settle_ledger(folder.ledger)
    if folder.terminal() is not None:
        discard_stores(stores_folder(folder.path), folder.ledger)
    rows = read_rows(folder.metrics)
    summary = summarize(
        RunFacts(
            name=experiment.metadata.name,
            seed=experiment.spec.seed,
            record=folder.record,
            terminal=folder.terminal(),
            versions=folder.database.versions(POLICY_NAME),
            rows=training_rows(rows),
            fixed_evaluations=fixed_evaluations(rows),
            stop=recorded_experiment(folder.path).spec.stop,
            ledger=read_ledger(folder.ledger),
        )
    )
    write_durably(folder.summary, json.dumps(summary, indent=2).encode())
    return summary


def draw_curve(folder: RunFolder, experiment: RLExperiment) -> str | None:
    """Draw ``curve.png``. Return the error, or None: a missing picture must not fail the run."""
    try:
        from rlsrl.local.curves import read_curve

        with extras_named():
            from rlsrl.local.plot import DrawnGroup, draw, save
        curve, goal = read_curve(folder.metrics, experiment.metadata.name), experiment.spec.stop.return_mean
        if curve.has_points:
            drawn = [DrawnGroup(label=curve.label, curves=[curve])]
            save(draw(drawn, goals=[] if goal is None else [goal]), folder.curve)
    except (ImportError, OSError, ValueError) as error:
        return str(error)
    return None


def read_ledger(pages: Path) -> dict[str, Any]:
    """Return the balance of an ended run, with ``balanced`` and, if that is false, the ``problem``.

    Raises:
        LedgerError: a ledger page is damaged.
    """
    return balance(read_pages(pages), ended=True).to_checked_json()


def child_environment(base: Mapping[str, str], *, token: str, modules: Path) -> dict[str, str]:
    """Return the environment of the workers: ``base``, the run's token, and ``modules`` first on the module path.

    The certificates' variable is removed. A pod may have it, but workers on one machine use no TLS.
    """
    path = os.pathsep.join(filter(None, (str(modules.absolute()), base.get("PYTHONPATH"))))
    base = {name: value for name, value in base.items() if name != TLS_FOLDER_VARIABLE}
    return {**base, TOKEN_VARIABLE: token, "PYTHONPATH": path}
