"""Open the parameter database of a run folder, for the controller and for commands that read a run."""

from __future__ import annotations

import json
from pathlib import Path

from rlsrl.api.placement import PARAMETERS
from rlsrl.api.resolved import ParameterStoreConfig
from rlsrl.parameters.database import BlobParameterDB
from rlsrl.runtime.errors import ConfigurationError, damage
from rlsrl.workers.build.parameters import open_blobs

RESOLVED = "resolved.json"
"""Name of the file in the run folder with each role's resolved config."""


def open_run_database(run: Path) -> BlobParameterDB:
    """Return the run's parameter database. If it is inside the run folder, the folder may have been moved.

    Raises:
        ConfigurationError: the folder's file ``resolved.json`` is invalid, or the store cannot be used from here, for
            example without credentials.
    """
    return open_blobs(_store(run))


def _store(run: Path) -> ParameterStoreConfig:
    inside = ParameterStoreConfig(folder=str(run / PARAMETERS))
    try:
        # The coordinator's config has the store itself. Other roles' configs may have the coordinator's address.
        coordinator = json.loads((run / RESOLVED).read_bytes())["coordinator"]
        store = ParameterStoreConfig.from_json(json.dumps(coordinator["parameter_store"]))
    except FileNotFoundError:
        return inside  # No process of the run has started yet.
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{run / RESOLVED} is not a file of this version of rlsrl ({damage(error)}); remove it and call "
            "`rlsrl run` again, which writes the file anew"
        ) from error
    return inside if store.folder is not None else store
