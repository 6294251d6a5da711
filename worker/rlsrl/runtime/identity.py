"""Names for processes that tell the living from the dead, even after the system has used a pid again. Linux only."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

POD_VARIABLE = "RLSRL_POD_UID"
"""Environment variable with the uid of the pod whose one worker, or one of whose ranks, this process is."""


def own_process() -> str:
    """This process's name: boot, pid namespace, pid and start time. In a pod the pod's and the rank's: those of the
    process after this one too, since a container is started again only when nothing of it lives.
    """
    if pod := os.environ.get(POD_VARIABLE):
        return f"pod/{pod}/{os.environ.get('LOCAL_RANK', '0')}"
    pid = os.getpid()
    _, started = _stat(pid)
    return f"{_namespace()}/{pid}/{started}"


def is_dead(process: str) -> bool:
    """Whether the process of that name is known to be gone. False for one that lives, or lives where we cannot look.

    A process that has ended and waits for its parent to ask for its exit code is gone.
    """
    place, _, started = process.rpartition("/")
    namespace, _, pid = place.rpartition("/")
    if namespace != _namespace() or not (pid.isascii() and pid.isdigit()):
        return False
    try:
        state, started_now = _stat(int(pid))
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX" or started != started_now


def _stat(pid: int) -> tuple[str, str]:
    """State letter and start time (clock ticks since boot) of a process."""
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    fields = text.rpartition(")")[2].split()  # the name before it may hold anything
    return fields[0], fields[19]


@cache
def _namespace() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
