"""Starts the ranks of a trainer gang on this machine: ``python -m rlsrl.workers.gang_launcher --ranks K``.

Further arguments go to each rank's ``rlsrl.workers``. To its parent the launcher is one process: it ends when all ranks
have ended, dies when one dies, and takes all of them along. Exit codes are those of ``rlsrl.workers``.

Torch's elastic agent, the core of torchrun, starts and watches the ranks. Ranks are forks of the launcher, which saves
the import of torch in each: that import is most of a gang's restart. Before the forks the launcher asks for no device,
opens no channel and starts no thread pool, since forks cannot use them.

A gang on one machine meets by files that have no name and vanish with the launcher. The agent's default is a server
that listens beyond loopback and whose clients unpickle its values. A gang on several machines meets at such a server,
at the first machine's address: between pods, where a NetworkPolicy admits no strangers.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from rlsrl.api.failures import CONFIGURATION_ERROR, KILLED, NOT_STORED, RUN_DAMAGED, TEMPORARY_FAILURE
from rlsrl.runtime.process import PARENT_VARIABLE, die_with_parent, leave
from rlsrl.workers.gang_health import serve_health

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousParameters

SHUTDOWN_SECONDS = 50
"""How long ranks may take for their last checkpoint after SIGTERM. The launcher's parent waits longer."""
RENDEZVOUS_SECONDS = 900
"""How long this machine's launcher waits for those of the other machines before the ranks start."""
BARRIER_SECONDS = 5
"""How long this machine's launcher waits for those of the other machines after its ranks have ended. The agent's
default is 300 s, which SIGTERM does not cut short, and a launcher that was killed never arrives."""

LOST_SECONDS = 2.0
"""How long a rank that lost another one waits before it ends. The launcher looks for ended ranks ten times a second."""

_AGENT_LOG = "torch.distributed.elastic.multiprocessing.api"
"""The logger that reports how ranks end."""


def main() -> int:
    """Run the gang to its end; return the exit code: 128 plus the signal's number if a signal ended a rank."""
    parser = argparse.ArgumentParser(prog="rlsrl.workers.gang_launcher", description="Run the ranks of a trainer gang.")
    parser.add_argument("--ranks", type=int, required=True, help="number of ranks on this machine")
    parser.add_argument("--machines", type=int, default=1, help="number of machines, each with RANKS ranks")
    parser.add_argument("--machine", type=int, default=0, help="this machine's number, from 0")
    parser.add_argument("--meet-at", default="", metavar="HOST:PORT", help="port of machine 0; for several machines")
    parser.add_argument("--health-at", type=int, metavar="PORT", help="answer /healthz for this machine's ranks there")
    parser.add_argument("--once", type=Path, metavar="FILE", help="start only if the file is not there, and make it")
    arguments, rank_arguments = parser.parse_known_args()
    if arguments.health_at is not None:
        serve_health(arguments.health_at, ranks=arguments.ranks)
    if arguments.once is not None and not _is_first(arguments.once):
        sys.stderr.write("rlsrl: this gang has ended; its next attempt starts in a new pod\n")
        threading.Event().wait()
    if (parent := os.environ.get(PARENT_VARIABLE)) is not None:
        die_with_parent(int(parent))
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    rendezvous = _by_address(arguments) if arguments.machines > 1 else _by_files()
    return _launch(rendezvous, arguments.ranks, rank_arguments)


def _is_first(path: Path) -> bool:
    """Make the file; return False if it existed. A restarted container finds the file of the first start.

    A single rank cannot rejoin the others, so the container then waits until the whole gang is restarted.
    """
    try:
        path.open("x").close()
    except FileExistsError:
        return False
    return True


def _by_files() -> RendezvousParameters:
    """Meet by files on one machine. They are open files of this process: whatever ends it leaves none behind."""
    from torch.distributed.elastic.rendezvous import RendezvousParameters

    from rlsrl.workers.gang import STORE_VARIABLE

    agents, ranks = (f"/proc/{os.getpid()}/fd/{os.memfd_create(name)}" for name in ("agents", "ranks"))
    os.environ[STORE_VARIABLE] = ranks
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    return RendezvousParameters(
        backend="c10d",
        endpoint=agents,
        run_id="gang",
        min_nodes=1,
        max_nodes=1,
        local_addr="127.0.0.1",
        store_type="file",
        timeout=RENDEZVOUS_SECONDS,
    )


def _by_address(arguments: argparse.Namespace) -> RendezvousParameters:
    """Meet at the address of machine 0."""
    from torch.distributed.elastic.rendezvous import RendezvousParameters

    return RendezvousParameters(
        backend="static",
        endpoint=arguments.meet_at,
        run_id="gang",
        min_nodes=arguments.machines,
        max_nodes=arguments.machines,
        rank=arguments.machine,
        timeout=RENDEZVOUS_SECONDS,
    )


def _launch(rendezvous: RendezvousParameters, num_ranks: int, rank_arguments: list[str]) -> int:
    """Run the ranks by the elastic agent itself.

    torchrun's own launcher has no option for the barrier's timeout. It also asks CUDA for the number of GPUs, and no
    fork of a process that did can use CUDA.
    """
    from torch.distributed import DistError
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    import rlsrl.workers.__main__
    import rlsrl.workers.trainer  # noqa: F401 - for the ranks

    host, _, port = rendezvous.endpoint.rpartition(":") if rendezvous.backend == "static" else ("", "", "")
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGTERM"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    logging.getLogger(_AGENT_LOG).addFilter(_without_traceback)
    handler = get_rendezvous_handler(rendezvous)
    spec = WorkerSpec(
        role="trainer",
        local_world_size=num_ranks,
        entrypoint=_rank,
        args=tuple(rank_arguments),
        rdzv_handler=handler,
        max_restarts=0,
        master_addr=host or None,
        master_port=int(port) if port else None,
        local_addr=rendezvous.local_addr,
    )
    agent = LocalElasticAgent(
        spec,
        # The ranks log for themselves, and a folder of the agent's would stay behind after a SIGKILL.
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
        start_method="fork",
        exit_barrier_timeout=BARRIER_SECONDS,
        shutdown_timeout=SHUTDOWN_SECONDS,
    )
    try:
        result = agent.run()
    except SignalException:
        return 0
    except (RendezvousError, DistError):  # the other machines did not come, or are gone
        traceback.print_exc()
        return TEMPORARY_FAILURE
    handler.shutdown()
    codes: set[int] = {failure.exitcode for failure in result.failures.values()}
    for code in (CONFIGURATION_ERROR, NOT_STORED, RUN_DAMAGED, TEMPORARY_FAILURE):
        if code in codes:
            return code
    if killed := [code for code in codes if code < 0]:
        return KILLED - max(killed)
    return 1 if result.is_failed() else 0


def _without_traceback(record: logging.LogRecord) -> bool:
    """Drop the traceback of where the launcher waited.

    torch would format it with its compiler's help, and import the compiler for that: two seconds before anybody learns
    that a rank has died.
    """
    record.exc_info = None
    return True


def _rank(*arguments: str) -> None:
    """Run one rank. Return if its work is done, which the agent waits for; any other end is immediate."""
    from rlsrl.workers.__main__ import main

    # A rank does not end as the launcher does. The pipe records a SIGTERM: then nobody waits for the rank to return.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signals, wakeup = os.pipe2(os.O_NONBLOCK)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    sys.argv = ["rlsrl.workers", *arguments]
    try:
        code = main()
    except Exception:  # noqa: BLE001 - the agent would write the traceback to a file that nobody removes
        traceback.print_exc()
        leave(1)
    # In this order, a signal that arrives meanwhile is in the pipe or ends the process.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    with contextlib.suppress(BlockingIOError):
        if signal.SIGTERM in os.read(signals, 1024):
            leave(code)
    if code == TEMPORARY_FAILURE:
        # The agent reports one failed rank and ends the others at once: let it be the rank that failed first.
        threading.Event().wait(LOST_SECONDS)
    if code:
        leave(code)


if __name__ == "__main__":
    leave(main())
