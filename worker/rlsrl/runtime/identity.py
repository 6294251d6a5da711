"""Names of processes that stay unique when Linux reuses a pid."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

POD_VARIABLE = "RLSRL_POD_UID"
"""Environment variable with the uid of this process's pod."""


def own_process() -> str:
    """Return this process's name: boot, pid namespace, pid and start time.

    In a pod the name consists of the pod's uid and the rank, so the container's next process has the same name. That is
    safe: kubelet restarts a container only after all its processes have ended.
    """
    if pod := os.environ.get(POD_VARIABLE):
        return f"pod/{pod}/{os.environ.get('LOCAL_RANK', '0')}"
    pid = os.getpid()
    _, started = _stat(pid)
    return f"{_namespace()}/{pid}/{started}"


def is_dead(process: str) -> bool:
    """Return whether the process is known to be dead. False if it lives or belongs to another pid namespace.

    A zombie is dead.
    """
    namespace_and_pid, _, started = process.rpartition("/")
    namespace, _, pid = namespace_and_pid.rpartition("/")
    if namespace != _namespace() or not (pid.isascii() and pid.isdigit()):
        return False
    try:
        state, started_now = _stat(int(pid))
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX" or started != started_now


def _stat(pid: int) -> tuple[str, str]:
    """Return state letter and start time (clock ticks since boot) of a process."""
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    fields = text.rpartition(")")[2].split()  # The command name in parentheses may contain spaces and parentheses.
    return fields[0], fields[19]


@cache
def _namespace() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
