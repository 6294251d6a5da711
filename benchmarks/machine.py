"""What the machine is, and who used its processors: the contestants' own processes, or somebody else. Linux."""

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
"""Of a processor's flags, those that decide how fast networks are."""
TELLING_PACKAGES = ("rlsrl", "torch", "numpy", "gymnasium", "ale-py", "mujoco", "grpcio")
RESULT_FILES = ("docs", "README.md")
"""What measuring writes itself, beside the sources: results, and tables of them."""
WRITTEN_MEMORY = ("Pss_Anon:", "Pss_Shmem:", "SwapPss:")
"""Of ``smaps_rollup``'s lines, those of memory that no file can give back."""


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Processor seconds until a moment, of all cores together."""

    all: float
    busy: float
    """All that processes used, and what a hypervisor gave to other machines."""
    own: float
    """This process's, with all that it started."""

    @classmethod
    def now(cls) -> Self:
        """At this moment."""
        total, busy = processor_seconds(Path("/proc/stat").read_text())
        return cls(all=total, busy=busy, own=sum(_times(tree_of(os.getpid()))))


def shares(before: Usage, after: Usage) -> tuple[float, float]:
    """What this process's tree and what others used between two moments, as shares of the whole machine, 0 to 1.

    What others used is the rest of two figures of different clocks, and comes to a little less than nothing at times.
    """
    total = after.all - before.all
    if total <= 0.0:
        return 0.0, 0.0
    own = after.own - before.own
    return own / total, (after.busy - before.busy - own) / total


def processor_seconds(stat: str) -> tuple[float, float]:
    """All and busy seconds of all cores, from the text of ``/proc/stat`` (proc(5))."""
    user, nice, system, idle, iowait, irq, softirq, steal = map(int, stat.split("\n", 1)[0].split()[1:9])
    # Interrupts are on no process's account: whose packets and blocks they served is not known.
    busy = user + nice + system + steal
    ticks = os.sysconf("SC_CLK_TCK")
    return (busy + idle + iowait + irq + softirq) / ticks, busy / ticks


def tree_of(pid: int) -> list[psutil.Process]:
    """The process and all that it started; none if it is gone."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def megabytes_of(pid: int) -> float:
    """Memory of the process and all that it started; what several share counts once (PSS)."""
    return sum(_proportional_bytes(process) for process in tree_of(pid)) / 1e6


def written_megabytes_of(pid: int) -> float:
    """Memory that the process and all that it started have written, and share with nobody else or count once.

    What is mapped from files is left out: how much of a library is here, and whose it is, is a matter of who else runs.
    """
    return sum(_written_kilobytes(process) for process in tree_of(pid)) * 1024 / 1e6


def described(repository: Path) -> dict[str, Any]:
    """What a result was measured on, and with what."""
    return {
        **processor(Path("/proc/cpuinfo").read_text()),
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in TELLING_PACKAGES},
        **_sources(repository),
    }


def processor(cpuinfo: str) -> dict[str, Any]:
    """Model and telling flags, from the text of ``/proc/cpuinfo``."""
    pairs = (line.partition(":") for line in cpuinfo.split("\n\n", 1)[0].splitlines())
    told = {name.strip(): value.strip() for name, _, value in pairs}
    flags = set(told.get("flags", "").split())
    return {"processor": told.get("model name", "unknown"), "flags": [flag for flag in TELLING_FLAGS if flag in flags]}


def _times(processes: Iterable[psutil.Process]) -> Iterator[float]:
    """User and system seconds of each, and of those that it started and that have ended since."""
    for process in processes:
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue  # it ended this moment: its parent counts it
        yield times.user + times.system + times.children_user + times.children_system


def _proportional_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except psutil.Error:
        return 0  # it ended this moment


def _written_kilobytes(process: psutil.Process) -> int:
    try:
        rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()  # proc(5)
    except (FileNotFoundError, ProcessLookupError):
        return 0  # it ended this moment
    lines = (line.split() for line in rollup.splitlines())
    return sum(int(words[1]) for words in lines if words[0] in WRITTEN_MEMORY)


def _sources(repository: Path) -> dict[str, str]:
    """Its present commit; dirty if the sources have changed since: results that were written meanwhile do not count.

    Beside it the hash of the package's tree, which stays the same where a commit is made anew.
    """

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=repository, capture_output=True, text=True, check=True
        ).stdout.strip()

    sources = (".", *(f":(exclude){written}" for written in RESULT_FILES))
    changes = git("status", "--porcelain", "--untracked-files=no", "--", *sources)
    commit = git("rev-parse", "--short=12", "HEAD") + ("-dirty" if changes else "")
    return {"commit": commit, "worker_tree": git("rev-parse", "--short=12", "HEAD:worker")}
