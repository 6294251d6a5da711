"""Checks of a run before its first process starts: what would otherwise fail, or hang, in each worker."""

from __future__ import annotations

import resource

from rlsrl.api.resolved import CoordinatorConfig, EvaluatorConfig, RoleConfig
from rlsrl.parameters.protocols import ParameterDB
from rlsrl.runtime.errors import ConfigurationError
from rlsrl.runtime.extras import is_installed, pip_install
from rlsrl.runtime.process import raise_open_files_limit
from rlsrl.workers.fixed_version import FixedVersionReader

FILES_OF_A_PROCESS = 32
"""Descriptors of a worker alone, with its libraries."""
FILES_OF_A_PEER = 4
"""Descriptors for each worker of the run: a trainer uses two for each actor, and a server leaves half of all free."""


def require_open_files(num_workers: int) -> None:
    """Raise this process's limit of open files to the hard limit, and check that a run of so many workers fits.

    With fewer descriptors, gRPC's servers accept no connection and the workers wait for each other.

    Raises:
        ConfigurationError: the limit is too low; the text has the limit and the number needed.
    """
    raise_open_files_limit()
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = FILES_OF_A_PROCESS + FILES_OF_A_PEER * num_workers
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise ConfigurationError(
            f"a process may open {limit} files; a run of {num_workers} workers needs {needed}: ulimit -n {needed}"
        )


def require_wandb(coordinator: CoordinatorConfig) -> None:
    """Check that the package of ``tracking.wandb`` is installed, if the experiment has the field.

    Without the check the run would train, and its rows would be missing there: trackers never end a run.

    Raises:
        ConfigurationError: it is not; the text names the extra that installs it.
    """
    if coordinator.wandb is not None and not is_installed("wandb"):
        raise ConfigurationError(
            f"tracking.wandb: the package 'wandb' is not installed: {pip_install('wandb')}, or remove the field"
        )


def require_fixed_version(evaluators: RoleConfig | None, db: ParameterDB) -> None:
    """Check that the version of ``evaluators.parameters`` exists and is intact, if evaluators play one.

    Whether it fits the network and the environment is for the evaluator to say: that makes the environment.

    Args:
        evaluators: The evaluators' config; None without evaluators.
        db: The run's parameter DB.

    Raises:
        ConfigurationError: the version or the file is missing or damaged; the text names what exists.
        OSError: the store cannot be read.
    """
    if isinstance(evaluators, EvaluatorConfig) and evaluators.parameters is not None:
        policy = evaluators.policy_name
        versions = db.versions(policy) if policy in db.policies() else []
        FixedVersionReader(evaluators.parameters, db, policy).read(versions)
