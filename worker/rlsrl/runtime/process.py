"""Settings of a worker's process. Most need Linux; each function says what it does on other systems."""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import signal
import sys
from collections.abc import Mapping
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_PR_SET_TIMERSLACK = 29
_SWITCH_SECONDS = 0.0005

PARENT_VARIABLE = "RLSRL_PARENT_PID"
"""Environment variable with the pid of the process that started the worker: the worker ends with it. Unset in a pod."""


def die_with_parent(parent_pid: int) -> None:
    """Let the kernel SIGKILL this process when the process that started it ends.

    ``parent_pid`` is the pid of that process. If it has ended before this call, this process kills itself now. The
    kernel watches the parent's THREAD that started this process: start workers from a thread that outlives them. The
    setting ends when the process executes a set-uid program, and children do not inherit it.

    On other systems it does nothing. A worker there notices that its parent ended when its streams end.
    """
    if sys.platform != "linux":
        return
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def raise_open_files_limit() -> None:
    """Raise the limit of open files to the hard limit; container runtimes often start with 1024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def wake_threads_promptly() -> None:
    """Shorten the delays with which threads continue, for a process of many threads that mostly wait.

    A waiting Python thread requests the interpreter lock after 0.5 ms instead of 5 ms. On Linux the kernel delays a
    sleeping thread by at most 1 ns instead of 50 us; this applies to the calling thread and to threads that it starts
    later.
    """
    sys.setswitchinterval(_SWITCH_SECONDS)
    if sys.platform == "linux":
        _prctl(_PR_SET_TIMERSLACK, 1)


def worker_environment(base: Mapping[str, str], role: str | None = None) -> dict[str, str]:
    """Return the environment of a worker that this process starts: ``base`` with the variables of its role.

    Without a role it gets only the variables that every worker needs.
    """
    # Imported here: a call watch uses this module, and the table of roles takes longer to import than all else there.
    from rlsrl.api.process_environment import process_environment

    return {**base, **process_environment(role), PARENT_VARIABLE: str(os.getpid())}


def leave(code: int) -> NoReturn:
    """End the process at once, without the interpreter's finalization. The caller has closed everything.

    Finalization takes a second to unload torch. In that second, threads of gloo have aborted ranks that had finished
    their work.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}, {value}): {os.strerror(code)}")
