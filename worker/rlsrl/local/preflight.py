"""Checks of a run before its first process starts: what would otherwise fail, or hang, in each worker."""

from __future__ import annotations

import resource

from rlsrl.runtime.errors import ConfigurationError
from rlsrl.runtime.process import raise_open_files_limit

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
