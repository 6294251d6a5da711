"""Process settings of a worker on Linux. Each function says what it does on other systems."""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import signal
import sys
from collections.abc import Mapping
from typing import NoReturn

from rlsrl.api.process_environment import process_environment

_PR_SET_PDEATHSIG = 1
_PR_SET_TIMERSLACK = 29
_SWITCH_SECONDS = 0.0005

PARENT_VARIABLE = "RLSRL_PARENT_PID"
"""Environment variable with the pid of the process that started the worker and must outlive it; unset in a pod."""


def die_with_parent(parent_pid: int) -> None:
    """Let the kernel SIGKILL this process when the process that started it ends.

    ``parent_pid`` is who is expected to be the parent: if it died before this call, this process ends itself now, as it
    would have a moment later. The kernel watches the parent's THREAD that started this process, so start workers from a
    thread that lives as long as they should. Undone by executing a set-uid program; not inherited by children.
    Elsewhere than on Linux it does nothing, and a worker notices its parent's death by its streams ending.
    """
    if sys.platform != "linux":
        return
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def raise_open_files_limit() -> None:
    """Raise the limit of open files to its maximum; container runtimes often start with 1024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def wake_threads_promptly() -> None:
    """Let each thread continue as soon as it can, in a process of many threads that mostly sleep or wait.

    A thread of Python's asks another for its turn after half a millisecond, not five. The kernel may delay who sleeps
    by 1 ns, not by 50 us (Linux only): this thread, and those that it starts from now on.
    """
    sys.setswitchinterval(_SWITCH_SECONDS)
    if sys.platform == "linux":
        _prctl(_PR_SET_TIMERSLACK, 1)


def worker_environment(base: Mapping[str, str], role: str | None = None) -> dict[str, str]:
    """Return the environment of a worker that this process starts: ``base`` with the variables of its role.

    Without a role it gets only the variables that every worker needs.
    """
    return {**base, **process_environment(role), PARENT_VARIABLE: str(os.getpid())}


def leave(code: int) -> NoReturn:
    """End the process at once, without the interpreter's usual end.

    Everything is closed by now. The usual end takes a second to tear torch down, in which threads of gloo were seen to
    abort a rank that had finished its work.
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
