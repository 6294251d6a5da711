"""The parameter DB of a run folder, wherever it is: for the controller and for every command that reads a run."""

from __future__ import annotations

import json
from pathlib import Path

from rlsrl.api.placement import PARAMETERS
from rlsrl.api.resolved import ParameterStoreConfig
from rlsrl.parameters.protocols import ParameterDB
from rlsrl.runtime.errors import ConfigurationError
from rlsrl.workers.build.parameters import open_parameter_store

RESOLVED = "resolved.json"
"""What each role was told, in the run folder."""


def open_run_database(run: Path) -> ParameterDB:
    """What the run in that folder stored. A DB inside the folder is found where the folder is now, if it was moved.

    Raises:
        ConfigurationError: the folder does not say where, or the place cannot be used from here (no credentials).
    """
    return open_parameter_store(_store(run))


def _store(run: Path) -> ParameterStoreConfig:
    inside = ParameterStoreConfig(folder=str(run / PARAMETERS))
    try:
        # The coordinator is told of the place itself, others perhaps of the coordinator.
        told = json.loads((run / RESOLVED).read_bytes())["coordinator"]
        store = ParameterStoreConfig.from_json(json.dumps(told["parameter_store"]))
    except FileNotFoundError:
        return inside  # Nothing of the run was started yet.
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(f"{run / RESOLVED} is not what this version of rlsrl writes: {error!r}") from error
    return inside if store.folder is not None else store
