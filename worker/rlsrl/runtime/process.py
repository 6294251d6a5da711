"""What a worker's process asks of the operating system. Linux; each function says what it does elsewhere."""

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
"""Environment variable that tells a worker which process started it and should outlive it; unset in a pod."""


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel SIGKILL this process when the process that started it dies, however that dies.

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
    """Allow this process as many open files as it may have; container runtimes often begin with 1024 of them."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def wake_threads_promptly() -> None:
    """For a process of many threads that sleep or wait most of the time: let each go on as soon as it can.

    A thread of Python's asks another for its turn after half a millisecond, not five. The kernel may delay who sleeps
    by 1 ns, not by 50 us (Linux only): this thread, and those that it starts from now on.
    """
    sys.setswitchinterval(_SWITCH_SECONDS)
    if sys.platform == "linux":
        _prctl(_PR_SET_TIMERSLACK, 1)


def worker_environment(base: Mapping[str, str], role: str | None = None) -> dict[str, str]:
    """The environment for a worker that this process starts: ``base``, overridden by what all of its role have; None:
    what workers of any role have."""
    return {**base, **process_environment(role), PARENT_VARIABLE: str(os.getpid())}


def leave(code: int) -> NoReturn:
    """End the process at once. All that matters is closed by now; the rest of an interpreter's usual end is a second
    of tearing torch down, in which threads of gloo were seen to abort a rank that had done its work.
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
