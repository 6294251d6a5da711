"""The start of a run from the weights of another one: where these are, and whether they exist."""

from __future__ import annotations

import contextlib
from pathlib import Path

from rlsrl.api.role_configs import POLICY_NAME
from rlsrl.api.spec import InitialParameters, RLExperiment
from rlsrl.local.run_folder import RunFolderError, find_run
from rlsrl.runtime.errors import ConfigurationError
from rlsrl.workers.build.initial_weights import FIELD, read_initial_weights
from rlsrl.workers.build.run_database import RESOLVED


def with_located_start(experiment: RLExperiment) -> RLExperiment:
    """Return the experiment with absolute paths in ``parameters.from``, for workers with another current folder.

    A run that is only in runs/ is looked up there. What does not exist keeps its path.
    """
    if (initial := experiment.spec.parameters.from_) is None:
        return experiment
    versions = experiment.spec.parameters.model_copy(update={"from_": _located(initial)})
    return experiment.model_copy(update={"spec": experiment.spec.model_copy(update={"parameters": versions})})


def require_initial_weights(experiment: RLExperiment, run: Path) -> None:
    """Check that what ``parameters.from`` of a new run names exists and is intact.

    Whether it fits the network is for the trainers to say.

    Args:
        experiment: The experiment of the run.
        run: The new run's folder, which is no source.

    Raises:
        ConfigurationError: the run, its version or the file is missing or damaged; the text names what exists.
        OSError: a store cannot be read.
    """
    if (initial := experiment.spec.parameters.from_) is None:
        return
    if (name := initial.run or initial.experiment) is not None:
        field = f"{FIELD}.{'run' if initial.run is not None else 'experiment'}"
        try:
            source = find_run(Path(name), RESOLVED)
        except RunFolderError as error:
            raise ConfigurationError(f"{field}: {error}") from error
        if source.absolute() == run.absolute():
            raise ConfigurationError(f"{field}: {name} is this run itself; allowed: another run")
    read_initial_weights(_located(initial), POLICY_NAME)


def _located(initial: InitialParameters) -> InitialParameters:
    """Return what is named as a path; an experiment is the run of its name."""
    if initial.file is not None:
        return initial.model_copy(update={"file": str(Path(initial.file).absolute())})
    name = initial.run or initial.experiment
    assert name is not None, "validation leaves exactly one"
    run = Path(name)
    with contextlib.suppress(RunFolderError):  # the next reader's error says so
        run = find_run(run, RESOLVED)
    return initial.model_copy(update={"run": str(run.absolute()), "experiment": None})
