"""Stored versions of a policy: in a run folder, or in a file that ``rlsrl params export`` wrote."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlsrl.api.load import load_with_fewest_actors
from rlsrl.api.placement import local_placement
from rlsrl.api.resolve import ResolvedExperiment, resolve
from rlsrl.api.resolved import TrainerConfig
from rlsrl.data.version import Version
from rlsrl.local.run_folder import RunFolderError, find_run, read_record
from rlsrl.parameters.protocols import Parameters, Ref
from rlsrl.parameters.weights_file import decode_version
from rlsrl.runtime.errors import ConfigurationError
from rlsrl.workers.build.run_database import RESOLVED, open_run_database


@dataclass(frozen=True, kw_only=True)
class StoredVersion:
    """A stored version and the experiment that it belongs to."""

    path: Path
    """The run folder, or the file."""
    config: TrainerConfig
    """Its trainer's config: environment, network, seed."""
    side_by_side: bool
    """Whether evaluations step each environment in a thread of its own."""
    parameters: Parameters
    metadata: Mapping[str, Any]
    """The version's metadata, with the exported actor if the policy has one."""
    created_at: float
    """When it was stored, in Unix seconds."""

    @property
    def name(self) -> str:
        """The name of the run folder, or of the file without its suffix."""
        return self.path.stem if self.path.is_file() else self.path.absolute().name


def open_version(
    run: Path, *, version: str | None = None, tag: str | None = None, experiment: Path | None = None
) -> StoredVersion:
    """Return a version of a run, by default the newest, or the version in a file.

    From then on Python finds the user's own modules: see ``find_modules``.

    Args:
        run: A run folder, the name of one in ``runs/``, or with ``experiment`` a file that ``rlsrl params export``
            wrote.
        version: A version such as ``1.2500``.
        tag: The version with this tag.
        experiment: The experiment file of exported weights.

    Raises:
        RunFolderError: the run does not exist; with the nearest match.
        ConfigurationError: arguments exclude each other, the parameter store cannot be used from here, or the exported
            file cannot be read.
        ParameterError: the version is missing or damaged; with the nearest match.
        SpecError: the experiment file is invalid.
        OSError: the parameter store failed.
    """
    if experiment is not None and (version is not None or tag is not None):
        raise ConfigurationError(
            f"an experiment file goes with an exported file, and {run} contains one version: omit version and tag"
        )
    if experiment is not None:
        find_modules(experiment)
        return load_exported(run, experiment)
    if run.is_file():
        raise ConfigurationError(f"{run} is a file: name the experiment file that it belongs to, too (experiment)")
    ref = ref_of(version, tag)
    folder = find_run(run, RESOLVED)
    find_modules(folder)
    return load_version(folder, ref)


def ref_of(version: str | None, tag: str | None) -> Ref:
    """Return what names a version in the store; without version and tag the newest.

    Raises:
        ConfigurationError: both are given, or the version has another form.
    """
    if version is not None and tag is not None:
        raise ConfigurationError(f"version {version} and tag {tag!r} exclude each other: give one of them")
    if version is None:
        return tag or "latest"
    try:
        return Version.parse(version)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error


def load_version(run: Path, ref: Ref) -> StoredVersion:
    """Return the version ``ref`` of a run folder.

    Raises:
        RunFolderError: the folder is not a run folder, or another version of rlsrl wrote it.
        ConfigurationError: the parameter store cannot be used from here.
        ParameterError: the version is missing or damaged.
        OSError: the parameter store failed.
    """
    resolved = run / RESOLVED
    try:
        experiment = ResolvedExperiment.from_json(resolved.read_bytes())
    except OSError as error:
        raise RunFolderError(f"{run} is not a run folder: cannot read {resolved}: {error.strerror}") from error
    except ValueError as error:
        raise RunFolderError(f"{resolved} has another format than this version of rlsrl writes: {error}") from error
    config = experiment.trainer
    db = open_run_database(run)
    parameters = db.get(config.policy_name, ref)
    assert parameters is not None, "None only where newer_than is given"
    # A run that still trains may prune the version meanwhile. Then torch evaluates it instead of the exported actor.
    found = [info for info in db.versions(config.policy_name) if info.version == parameters.version]
    return StoredVersion(
        path=run,
        config=config,
        side_by_side=_steps_side_by_side(experiment),
        parameters=parameters,
        metadata=found[0].metadata if found else {},
        created_at=found[0].created_at if found else time.time(),
    )


def load_exported(path: Path, experiment: Path) -> StoredVersion:
    """Return the version in a file of ``rlsrl params export``, with the experiment of another file.

    Raises:
        SpecError: the experiment is invalid.
        ConfigurationError: the exported file cannot be read.
        ParameterError: the exported file is damaged.
    """
    resolved = resolve(load_with_fewest_actors(experiment), local_placement(run_uid="exported", run_folder=Path.cwd()))
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from error
    parameters, header = decode_version(data, str(path))
    return StoredVersion(
        path=path,
        config=resolved.trainer,
        side_by_side=_steps_side_by_side(resolved),
        parameters=parameters,
        metadata=header.metadata,
        created_at=header.created_at,
    )


def _steps_side_by_side(experiment: ResolvedExperiment) -> bool:
    """Return whether evaluators of the experiment step environments in threads; it may have no evaluators."""
    return experiment.actor.environment.steps_side_by_side(experiment.actor.vectorization)


def find_modules(run: Path) -> None:
    """Import the user's modules from the experiment file's folder first, then from the current folder.

    ``run`` is a run folder, or the experiment file itself.

    Raises:
        RunFolderError: the run's record is damaged.
    """
    if run.is_file():
        folders = [str(run.absolute().parent)]
    else:
        record = read_record(run)
        folders = [record.modules] if record is not None and record.modules else []
    sys.path[:0] = [folder for folder in (*folders, str(Path.cwd())) if folder not in sys.path]
