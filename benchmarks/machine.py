"""Describe the machine, and measure how much the contestants and other programs used its processors. Linux only."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import psutil

REPOSITORY = Path(__file__).parents[1]
TELLING_FLAGS = ("amx_tile", "amx_bf16", "amx_int8", "avx512_bf16", "avx512f", "avx2")
"""Processor flags that matter for the speed of networks."""
TELLING_PACKAGES = ("rlsrl", "torch", "numpy", "gymnasium", "ale-py", "mujoco", "grpcio")
RESULT_FILES = ("docs", "README.md")
"""Files that a measurement itself writes: results, and tables of them."""
WRITTEN_MEMORY = ("Pss_Anon:", "Pss_Shmem:", "SwapPss:")
"""Lines of ``smaps_rollup`` that count memory without a file behind it."""


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Processor seconds of all cores together until a moment."""

    all: float
    busy: float
    """Used by processes, or given to other machines by a hypervisor."""
    own: float
    """Used by this process and all that it started."""

    @classmethod
    def now(cls) -> Self:
        """Return the usage until now."""
        total, busy = processor_seconds(Path("/proc/stat").read_text())
        return cls(all=total, busy=busy, own=sum(_times(tree_of(os.getpid()))))


def shares(before: Usage, after: Usage) -> tuple[float, float]:
    """Return the shares of the machine, 0 to 1, that this process's tree and other programs used between two moments.

    The second share is a difference of two clocks and may be slightly below 0.
    """
    total = after.all - before.all
    if total <= 0.0:
        return 0.0, 0.0
    own = after.own - before.own
    return own / total, (after.busy - before.busy - own) / total


def processor_seconds(stat: str) -> tuple[float, float]:
    """Return the total and the busy seconds of all cores, from the text of ``/proc/stat`` (proc(5))."""
    user, nice, system, idle, iowait, irq, softirq, steal = map(int, stat.split("\n", 1)[0].split()[1:9])
    # Interrupts count as idle: no process is charged for them.
    busy = user + nice + system + steal
    ticks = os.sysconf("SC_CLK_TCK")
    return (busy + idle + iowait + irq + softirq) / ticks, busy / ticks


def tree_of(pid: int) -> list[psutil.Process]:
    """Return the process and all that it started; empty if it has ended."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def megabytes_of(pid: int) -> float:
    """Return the memory of the process and all that it started. Shared memory counts once (PSS)."""
    return sum(_proportional_bytes(process) for process in tree_of(pid)) / 1e6


def written_megabytes_of(pid: int) -> float:
    """Return the memory that the process and all that it started have written. Shared memory counts once.

    Mapped files are left out: their share depends on the other processes of the machine.
    """
    return sum(_written_kilobytes(process) for process in tree_of(pid)) * 1024 / 1e6


def described(repository: Path) -> dict[str, Any]:
    """Return the machine and the versions that a result was measured with."""
    return {
        **processor(Path("/proc/cpuinfo").read_text()),
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in TELLING_PACKAGES},
        **_sources(repository),
    }


def processor(cpuinfo: str) -> dict[str, Any]:
    """Return the model and the flags that matter, from the text of ``/proc/cpuinfo``."""
    pairs = (line.partition(":") for line in cpuinfo.split("\n\n", 1)[0].splitlines())
    fields = {name.strip(): value.strip() for name, _, value in pairs}
    flags = set(fields.get("flags", "").split())
    return {
        "processor": fields.get("model name", "unknown"),
        "flags": [flag for flag in TELLING_FLAGS if flag in flags],
    }


def _times(processes: Iterable[psutil.Process]) -> Iterator[float]:
    """Yield the user and system seconds of each process, with those of its children that have ended."""
    for process in processes:
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue  # it has just ended: its parent counts it
        yield times.user + times.system + times.children_user + times.children_system


def _proportional_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except psutil.Error:
        return 0  # it has just ended


def _written_kilobytes(process: psutil.Process) -> int:
    try:
        rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()  # proc(5)
    except (FileNotFoundError, ProcessLookupError):
        return 0  # it has just ended
    lines = (line.split() for line in rollup.splitlines())
    return sum(int(words[1]) for words in lines if words[0] in WRITTEN_MEMORY)


def _sources(repository: Path) -> dict[str, str]:
    """Return the commit, marked dirty if sources have changed since, and the hash of the package's tree.

    Changed results do not make it dirty. The hash stays the same when a commit is rewritten.
    """

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=repository, capture_output=True, text=True, check=True
        ).stdout.strip()

    sources = (".", *(f":(exclude){written}" for written in RESULT_FILES))
    changes = git("status", "--porcelain", "--untracked-files=no", "--", *sources)
    commit = git("rev-parse", "--short=12", "HEAD") + ("-dirty" if changes else "")
    return {"commit": commit, "worker_tree": git("rev-parse", "--short=12", "HEAD:worker")}
