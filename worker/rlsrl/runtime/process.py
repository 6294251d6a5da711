"""What a worker's process asks of the operating system. Linux; each function says what it does elsewhere."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping

_PR_SET_PDEATHSIG = 1

PARENT_VARIABLE = "RLSRL_PARENT_PID"
"""Environment variable that tells a worker which process started it and should outlive it; unset in a pod."""

_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")


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


def obey_sigterm() -> None:
    """Have SIGTERM end this process until it knows better: the kernel spares the first process of a container, which
    would then be waited for in vain.
    """
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))


def worker_environment(base: Mapping[str, str]) -> dict[str, str]:
    """The environment for a worker that this process starts: ``base``, with what must be set before numpy is imported.

    One intra-op thread a process, because two collapse beside any other busy process: parallelism comes from processes.
    Higher malloc thresholds, because arrays that are mapped and returned for each use fault their pages in each time.
    These override ``base``; other C libraries than glibc ignore the malloc settings.
    """
    return {
        **base,
        **dict.fromkeys(_ONE_THREAD, "1"),
        # 32 MiB is the most that glibc accepts; above it the setting is ignored.
        "MALLOC_MMAP_THRESHOLD_": str(32 * 1024**2),
        "MALLOC_TRIM_THRESHOLD_": str(512 * 1024**2),
        "PYTHONUNBUFFERED": "1",
        PARENT_VARIABLE: str(os.getpid()),
    }


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}, {value}): {os.strerror(code)}")
