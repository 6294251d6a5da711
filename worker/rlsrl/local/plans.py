"""What runs for an experiment on this machine: the processes of each role, and the files that they read first."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rlsrl.api.live import name_of, settings_document
from rlsrl.api.placement import SETTINGS, local_placement
from rlsrl.api.resolve import ResolvedExperiment, resolve
from rlsrl.api.role_names import COORDINATOR, EVALUATOR, TRAINER
from rlsrl.api.spec import RLExperiment
from rlsrl.local.controller import GANG_COMMAND, RolePlan, RunPlan
from rlsrl.local.initial_weights import with_located_start
from rlsrl.local.preflight import require_fixed_version, require_open_files, require_wandb
from rlsrl.local.rendering_check import require_ffmpeg
from rlsrl.local.run_folder import CONFIGS, RunFolder
from rlsrl.local.run_record import RunRecord
from rlsrl.local.supervisor import RestartLimits
from rlsrl.runtime.durable import write_durably
from rlsrl.workers.build.run_database import RESOLVED


def resolve_locally(experiment: RLExperiment, path: Path, record: RunRecord) -> ResolvedExperiment:
    """Return the configs of the run in the folder ``path``, which is absolute."""
    return resolve(with_located_start(experiment), local_placement(run_uid=record.run_uid, run_folder=path))


def check_and_write(folder: RunFolder, resolved: ResolvedExperiment) -> None:
    """Check what the processes need, and write their configs and live settings.

    Raises:
        ConfigurationError: this process may open too few files, a package is missing, or a named version does not
            exist.
        OSError: a file cannot be written, or the parameter DB cannot be reached.
    """
    require_open_files(sum(resolved.coordinator.num_workers.values()) + 1)
    require_ffmpeg(resolved.configs.get(EVALUATOR))
    require_wandb(resolved.coordinator)
    document = folder.path / RESOLVED
    if not document.exists():  # It names the parameter DB.
        write_durably(document, resolved.to_json().encode())
    folder.database.policies()  # Fails if the store refuses the access.
    require_fixed_version(resolved.configs.get(EVALUATOR), folder.database)
    write_durably(document, resolved.to_json().encode())
    for role, config in resolved.configs.items():
        write_durably(config_path(folder.path, role), config.to_json().encode())
    write_durably(folder.path / SETTINGS, settings_document(resolved.configs).encode())


def run_plan(path: Path, experiment: RLExperiment, resolved: ResolvedExperiment) -> RunPlan:
    """Return the processes of a run in the folder ``path``, and how often they may fail."""
    restarts = experiment.spec.restarts
    return RunPlan(
        roles=tuple(role_plans(path, resolved)),
        limits=RestartLimits(budget=restarts.budget, decay_seconds=restarts.decay_seconds),
    )


def role_plans(path: Path, resolved: ResolvedExperiment) -> Iterator[RolePlan]:
    """Yield the processes of each role."""
    num_processes = {**resolved.coordinator.num_workers, COORDINATOR: 1, TRAINER: 1}
    ranks = resolved.trainer.num_trainers
    launchers = {TRAINER: (*GANG_COMMAND, "--ranks", str(ranks))} if ranks > 1 else {}
    for role, config in resolved.configs.items():
        yield RolePlan(
            role=role,
            replicas=num_processes[role],
            config=config_path(path, role),
            command=launchers.get(role),
            config_name=name_of(config),
        )


def config_path(path: Path, role: str) -> Path:
    """Return the file with the role's config in a run folder."""
    return path / CONFIGS / f"{role}.json"
