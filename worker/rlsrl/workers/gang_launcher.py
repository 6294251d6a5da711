"""Starts the ranks of a trainer gang on one machine by torchrun: ``python -m rlsrl.workers.gang_launcher --ranks K``.

What follows that goes to each rank's ``rlsrl.workers``. The gang is one process to whoever started it: it ends when its
ranks have ended, dies when one dies, and takes all of them along. Exit codes are those of ``rlsrl.workers``.
"""

from __future__ import annotations

import argparse
import os
import sys

from rlsrl.runtime.errors import CONFIGURATION_ERROR
from rlsrl.runtime.process import PARENT_VARIABLE, die_with_parent

SHUTDOWN_SECONDS = 50
"""How long ranks may take for their last checkpoint after SIGTERM; shorter than who started the gang waits for it."""


def main() -> int:
    """Run the gang to its end; returns the exit code."""
    parser = argparse.ArgumentParser(prog="rlsrl.workers.gang_launcher", description="Run the ranks of a trainer gang.")
    parser.add_argument("--ranks", type=int, required=True, help="number of ranks")
    arguments, rest = parser.parse_known_args()
    if (parent := os.environ.get(PARENT_VARIABLE)) is not None:
        die_with_parent(int(parent))
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    return _launch(arguments.ranks, rest)


def _launch(ranks: int, rest: list[str]) -> int:
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    options = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}", "--max-restarts=0"]
    options += ["--signals-to-handle=SIGTERM", f"--shutdown-timeout={SHUTDOWN_SECONDS}"]
    try:
        arguments = torchrun.parse_args([*options, "-m", "rlsrl.workers", *rest])  # type: ignore[no-untyped-call]
        torchrun.run(arguments)  # type: ignore[no-untyped-call]
    except SignalException:
        return 0
    except ChildFailedError as error:
        codes = {failure.exitcode for failure in error.failures.values()}
        return CONFIGURATION_ERROR if CONFIGURATION_ERROR in codes else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
