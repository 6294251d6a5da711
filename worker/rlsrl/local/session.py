"""Starts or resumes a run in its folder, and writes its summary: the steps of ``rlsrl run`` from input to result."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any, TextIO

from rlsrl.api.edits import FieldEdit, edits
from rlsrl.api.load import SpecError, dump, load_text
from rlsrl.api.placement import local_placement
from rlsrl.api.resolve import ResolvedExperiment, resolve
from rlsrl.api.role_configs import POLICY_NAME
from rlsrl.api.role_names import ACTOR, COORDINATOR, EVALUATOR, TRAINER
from rlsrl.api.spec import RLExperiment
from rlsrl.local.controller import (
    GANG_COMMAND,
    WORKER_COMMAND,
    LaunchOptions,
    LocalController,
    RolePlan,
    RunOutcome,
)
from rlsrl.local.display import Viewer, open_display
from rlsrl.local.environment_check import EnvironmentCheck, is_users_own
from rlsrl.local.folder_check import check_documents_and_pages
from rlsrl.local.metrics_log import fixed_evaluations, read_rows, training_rows
from rlsrl.local.monitor import StatusMonitor
from rlsrl.local.preflight import require_fixed_version, require_open_files
from rlsrl.local.run_folder import RESOLVED_EXPERIMENT, RunFolder, RunFolderError
from rlsrl.local.status_file import StatusFile
from rlsrl.local.summary import RunFacts, summarize
from rlsrl.local.supervisor import RestartLimits
from rlsrl.rpc.auth import TOKEN_VARIABLE, new_token
from rlsrl.rpc.tls import TLS_FOLDER_VARIABLE
from rlsrl.runtime.coordination import CoordinatorClient
from rlsrl.runtime.durable import write_durably
from rlsrl.runtime.ledger import balance, read_pages, settle_ledger
from rlsrl.workers.build.run_database import RESOLVED

STATUS_INTERVAL_SECONDS = 1.0
"""Seconds between two updates of the run folder's ``status.json``; workers report at the same interval."""


def claim(folder: RunFolder, experiment: RLExperiment, *, as_given: bytes) -> None:
    """Write the experiment into an empty folder, or check that the folder holds a run of this experiment.

    Evaluators may differ: training does not depend on them. The folder then gets the experiment with the new ones.

    Raises:
        RunFolderError: the folder holds a run of another experiment; the text lists every field that differs.
    """
    if not folder.holds_run:
        folder.create(as_given=as_given, resolved=dump(experiment).encode(), package_version=installed_version("rlsrl"))
        return
    found = changes(recorded_experiment(folder), experiment)
    if other := [change for change in found if not change.path.startswith(_FREE)]:
        listed = "\n".join(f"  {change.path}: {_show(change.before)} -> {_show(change.after)}" for change in other)
        raise RunFolderError(f"{folder.path} holds a run of another experiment:\n{listed}\n{_ADVICE}")
    if found and not folder.is_finished():
        folder.write_experiment(as_given=as_given, resolved=dump(experiment).encode())


def recorded_experiment(folder: RunFolder) -> RLExperiment:
    """Return the experiment of the run in the folder, with every default written out.

    Raises:
        RunFolderError: it cannot be read.
    """
    try:
        return load_text((folder.path / RESOLVED_EXPERIMENT).read_bytes(), source=RESOLVED_EXPERIMENT)
    except (OSError, SpecError) as error:
        raise RunFolderError(
            f"{folder.path} holds a run whose {RESOLVED_EXPERIMENT} cannot be read by this version: {error}\n{_ADVICE}"
        ) from error


_FREE = ("spec.evaluators", "spec.environment.egress")
"""Fields that may change when a run resumes, also those below them."""
_ADVICE = (
    "To resume the run, give the same experiment; only evaluators and environment.egress may differ. "
    "To start a new run, use --fresh, which moves the old run aside, or --run-dir with another folder."
)


def changes(recorded: RLExperiment, asked: RLExperiment) -> list[FieldEdit]:
    """Return the differences that make it another run: the name and the fields of the spec.

    A default equals its written value.
    """
    before, after = recorded.metadata.name, asked.metadata.name
    renamed = FieldEdit(path="metadata.name", effect="refuse", before=before, after=after)
    return [*([renamed] if before != after else []), *edits(recorded, asked)]


def run_life(
    folder: RunFolder,
    experiment: RLExperiment,
    *,
    modules: Path,
    output: TextIO,
    command: Sequence[str] = WORKER_COMMAND,
) -> RunOutcome:
    """Start or resume the run, show it, and end it. Main thread only.

    Args:
        folder: the run folder, after ``claim``.
        experiment: the experiment of the run.
        modules: the folder in which Python looks first for the user's own modules.
        output: the stream on which the run is shown.
        command: the command that starts a worker, without its arguments.

    Raises:
        ConfigurationError: the parameter DB refuses the access, a document in the folder is damaged, or this process
            may open too few files.
        RunFolderError: a document in the folder lacks an entry.
        LedgerError: a ledger page is damaged.
        OSError: a process or file cannot be created, or the parameter DB cannot be reached.
        RecordsLost: the run folder was removed or moved.
    """
    resolved = resolve(experiment, local_placement(run_uid=folder.record.run_uid, run_folder=folder.path))
    warnings = _prepare(folder, resolved)
    token = new_token()
    client = CoordinatorClient(resolved.coordinator.coordinator_address, token)
    status_file = StatusFile(folder.status)
    monitor = StatusMonitor(client, publish=status_file.write)
    display = open_display(Viewer(experiment, monitor.newest), output)
    for warning in warnings:
        display.note(f"warning: {warning}")
    folder.begin_life(modules=modules)
    status_file.remove()
    monitor.start(interval_seconds=min(display.interval_seconds, STATUS_INTERVAL_SECONDS))
    variables = child_environment(os.environ, token=token, modules=modules)
    restarts = experiment.spec.restarts
    try:
        with _environment_check(folder, experiment, variables, display.note):
            return LocalController(
                plans=_plans(folder, resolved),
                limits=RestartLimits(budget=restarts.budget, decay_seconds=restarts.decay_seconds),
                journal=folder,
                display=display,
                launch=LaunchOptions(
                    environment=variables,
                    logs=folder.logs,
                    command=command,
                    keep_fds=(folder.lock_fd,),
                ),
            ).run()
    finally:
        monitor.close()
        display.close()
        folder.check()
        folder.end_life()


def _prepare(folder: RunFolder, resolved: ResolvedExperiment) -> list[str]:
    """Write the workers' configs and check what the run needs, before any process starts; return the warnings."""
    require_open_files(sum(resolved.coordinator.num_workers.values()) + 1)
    _write_configs(folder, resolved)
    folder.database.policies()  # Fails if the store refuses the access.
    require_fixed_version(resolved.configs.get(EVALUATOR), folder.database)
    lost = check_documents_and_pages(folder, resolved.coordinator)
    settle_ledger(folder.ledger)
    return [*resolved.warnings, *lost]


def _environment_check(
    folder: RunFolder, experiment: RLExperiment, variables: Mapping[str, str], show: Callable[[str], None]
) -> AbstractContextManager[object]:
    """Begin to check an environment of the user's own, before the first attempt. The exit ends the check."""
    if folder.record.attempt or not is_users_own(experiment.spec.environment):
        return nullcontext()
    report = folder.logs / "environment-check.txt"
    return closing(EnvironmentCheck(_config(folder, ACTOR), report, environment=variables, show=show))


def write_summary(folder: RunFolder, experiment: RLExperiment) -> Mapping[str, Any]:
    """Settle the ledger of a run without running processes; write the run's summary and return it."""
    settle_ledger(folder.ledger)
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
            ledger=read_ledger(folder.ledger),
        )
    )
    write_durably(folder.summary, json.dumps(summary, indent=2).encode())
    return summary


def draw_curve(folder: RunFolder, experiment: RLExperiment) -> str | None:
    """Draw ``curve.png``. Return the error, or None: a missing picture must not fail the run."""
    try:
        from rlsrl.local.plot import read_curve, save

        curve = read_curve(folder.metrics, experiment.metadata.name)
        if curve.has_points:
            save([curve], folder.curve)
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


def _plans(folder: RunFolder, resolved: ResolvedExperiment) -> list[RolePlan]:
    num_processes = {**resolved.coordinator.num_workers, COORDINATOR: 1, TRAINER: 1}
    ranks = resolved.trainer.num_trainers
    launchers = {TRAINER: (*GANG_COMMAND, "--ranks", str(ranks))} if ranks > 1 else {}
    return [
        RolePlan(role=role, replicas=num_processes[role], config=_config(folder, role), command=launchers.get(role))
        for role in resolved.configs
    ]


def _write_configs(folder: RunFolder, resolved: ResolvedExperiment) -> None:
    write_durably(folder.path / RESOLVED, resolved.to_json().encode())
    for role, config in resolved.configs.items():
        _config(folder, role).write_text(config.to_json())


def _config(folder: RunFolder, role: str) -> Path:
    return folder.configs / f"{role}.json"


def _show(value: Any) -> str:
    return "not set" if value is None else json.dumps(value)
