"""Starts the ranks of a trainer gang on this machine by torchrun: ``python -m rlsrl.workers.gang_launcher --ranks K``.

What follows that goes to each rank's ``rlsrl.workers``. The ranks are one process to whoever started them: it ends when
they have ended, dies when one dies, and takes all of them along. Exit codes are those of ``rlsrl.workers``.

Ranks are forks of the launcher, so that torch is imported once: it is most of what a gang's restart takes. Nothing that
a fork would break is alive by then: no device was asked for, no channel opened, no thread pool begun.

A gang on one machine meets by files that have no name and go with the launcher. torchrun's own way is a server that
listens beyond loopback and whose clients unpickle what it holds. A gang on several machines meets there, at the first
one's address: among pods, whom a NetworkPolicy keeps strangers from.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path

from rlsrl.runtime.errors import CONFIGURATION_ERROR
from rlsrl.runtime.process import PARENT_VARIABLE, die_with_parent, leave
from rlsrl.workers.gang_health import serve_health

SHUTDOWN_SECONDS = 50
"""How long ranks may take for their last checkpoint after SIGTERM; shorter than who started the gang waits for it."""

_ENDS = "torch.distributed.elastic.multiprocessing.api"
"""Who logs how ranks end."""
BARRIER_SECONDS = 5
"""How long this machine's launcher waits, once its ranks have ended, for those of the other machines. torchrun's own
300 s cannot be cut short by SIGTERM, and a launcher that was ended meanwhile never comes."""


def main() -> int:
    """Run the gang to its end; returns the exit code."""
    parser = argparse.ArgumentParser(prog="rlsrl.workers.gang_launcher", description="Run the ranks of a trainer gang.")
    parser.add_argument("--ranks", type=int, required=True, help="number of ranks on this machine")
    parser.add_argument("--machines", type=int, default=1, help="number of machines with so many ranks each")
    parser.add_argument("--machine", type=int, default=0, help="this machine's number, from 0")
    parser.add_argument("--meet-at", default="", metavar="HOST:PORT", help="port of machine 0; for several machines")
    parser.add_argument("--health-at", type=int, metavar="PORT", help="answer /healthz for this machine's ranks there")
    parser.add_argument("--once", type=Path, metavar="FILE", help="start only if the file is not there, and make it")
    arguments, rest = parser.parse_known_args()
    if arguments.health_at is not None:
        serve_health(arguments.health_at, ranks=arguments.ranks)
    if arguments.once is not None and not _is_first(arguments.once):
        sys.stderr.write("rlsrl: this gang has ended; its next attempt begins in a new pod\n")
        threading.Event().wait()
    if (parent := os.environ.get(PARENT_VARIABLE)) is not None:
        die_with_parent(int(parent))
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    meeting = _by_address(arguments) if arguments.machines > 1 else _by_files()
    return _launch([f"--nproc-per-node={arguments.ranks}", *meeting], rest)


def _is_first(path: Path) -> bool:
    """Whether nobody made the file before. A container that is started again in its pod finds it: one rank cannot
    rejoin the others, so it waits for whoever restarts all of them.
    """
    try:
        path.open("x").close()
    except FileExistsError:
        return False
    return True


def _by_files() -> list[str]:
    """How a gang on one machine meets. The files are this process's open ones: whatever ends it leaves none behind."""
    from rlsrl.workers.gang import STORE_VARIABLE

    agents, ranks = (f"/proc/{os.getpid()}/fd/{os.memfd_create(name)}" for name in ("agents", "ranks"))
    os.environ[STORE_VARIABLE] = ranks
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    return ["--rdzv-backend=c10d", "--rdzv-conf=store_type=file", f"--rdzv-endpoint={agents}", "--local-addr=127.0.0.1"]


def _by_address(arguments: argparse.Namespace) -> list[str]:
    host, _, port = arguments.meet_at.rpartition(":")
    place = [f"--nnodes={arguments.machines}", f"--node-rank={arguments.machine}"]
    return ["--rdzv-backend=static", *place, f"--master-addr={host}", f"--master-port={port}"]


def _launch(options: list[str], rest: list[str]) -> int:
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher import api as launcher

    import rlsrl.workers.__main__
    import rlsrl.workers.trainer  # noqa: F401 - for the ranks

    # The ranks log for themselves, and torchrun's folder for it would stay behind after a SIGKILL.
    options += ["--max-restarts=0", f"--log-dir={os.devnull}", "--start-method=fork"]
    options += ["--signals-to-handle=SIGTERM", f"--shutdown-timeout={SHUTDOWN_SECONDS}"]
    # torchrun has no option for it.
    agent = functools.partial(LocalElasticAgent, exit_barrier_timeout=BARRIER_SECONDS)
    launcher.LocalElasticAgent = agent  # type: ignore[attr-defined, assignment]
    arguments = torchrun.parse_args([*options, "-m", "rlsrl.workers", *rest])  # type: ignore[no-untyped-call]
    # torchrun's own ``run`` starts commands; its launcher takes functions, too.
    with _asking_for_no_gpu():
        config, _, _ = torchrun.config_from_args(arguments)
    logging.getLogger(_ENDS).addFilter(_without_traceback)
    try:
        launcher.elastic_launch(config, _rank)(*rest)
    except SignalException:
        return 0
    except ChildFailedError as error:
        codes = {failure.exitcode for failure in error.failures.values()}
        return CONFIGURATION_ERROR if CONFIGURATION_ERROR in codes else 1
    return 0


@contextlib.contextmanager
def _asking_for_no_gpu() -> Iterator[None]:
    """torchrun asks whether there are GPUs, so as to bind ranks to the processors beside theirs. Whoever has asked CUDA
    has it in a state in which no fork can use it.
    """
    import torch

    asked = torch.cuda.is_available
    torch.cuda.is_available = lambda: False
    try:
        yield
    finally:
        torch.cuda.is_available = asked


def _without_traceback(record: logging.LogRecord) -> bool:
    """It says where the launcher waited, and torch formats it by its compiler, which it imports for that: two seconds
    in which nobody learns that a rank has died.
    """
    record.exc_info = None
    return True


def _rank(*arguments: str) -> None:
    """Be one rank. It returns when the work is done, which torchrun waits to be told; any other end is at once."""
    from rlsrl.workers.__main__ import main

    # The launcher's way to end is not a rank's. Whether it was asked to is told by the pipe: nobody waits for it then.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    told, tell = os.pipe2(os.O_NONBLOCK)
    signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    sys.argv = ["rlsrl.workers", *arguments]
    try:
        code = main()
    except Exception:  # noqa: BLE001 - as an interpreter ends: torch would keep what is said for itself, in a file that stays
        traceback.print_exc()
        leave(1)
    # In this order: a signal that comes meanwhile is in the pipe, or ends the process itself.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    with contextlib.suppress(BlockingIOError):
        if signal.SIGTERM in os.read(told, 1024):
            leave(code)
    if code:
        leave(code)


if __name__ == "__main__":
    leave(main())
