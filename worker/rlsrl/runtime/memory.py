"""The memory that this process and those it starts may still use."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from mmap import PAGESIZE
from pathlib import Path

from rlsrl.runtime.control_groups import CGROUPS, OWN_GROUPS, control_groups

MEMINFO = Path("/proc/meminfo")
OWN_PAGES = Path("/proc/self/statm")
_FILES = (
    ("memory.max", "memory.current", ("active_file", "inactive_file")),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
)
"""For versions 2 and 1: files with the limit of a group and its use, and the parts of that use which the kernel takes
back when it needs them."""


def available_memory(*, meminfo: Path = MEMINFO, cgroups: Path = CGROUPS, own: Path = OWN_GROUPS) -> int:
    """Return the bytes available on the machine, or left in the fullest control group if those are fewer.

    Raises:
        OSError: the kernel's figures cannot be read.
    """
    return max(0, min([_sizes(meminfo)["MemAvailable"] * 1024, *_left_in_groups(cgroups, own)]))


def anonymous_memory() -> int:
    """Return the bytes that this process has written to memory: without files, and without memory that it shares.

    Raises:
        OSError: the kernel's figures cannot be read.
    """
    _, resident, shared, *_ = map(int, OWN_PAGES.read_text().split())
    return (resident - shared) * PAGESIZE


def _left_in_groups(cgroups: Path, own: Path) -> Iterator[int]:
    for folder in control_groups("memory", cgroups=cgroups, own=own):
        for *numbers, caches in _FILES:
            # The root group has no limit, and one may read "max".
            with contextlib.suppress(OSError, ValueError):
                limit, current = (int((folder / name).read_text()) for name in numbers)
                yield limit - current + _cached(folder / "memory.stat", caches)


def _cached(file: Path, caches: Sequence[str]) -> int:
    """Return what the kernel takes back; 0 where it does not say."""
    try:
        return sum(_sizes(file)[name] for name in caches)
    except (OSError, ValueError, KeyError):
        return 0


def _sizes(file: Path) -> dict[str, int]:
    """Return the numbers of a file with a name and a number in each line."""
    lines = (line.replace(":", " ").split() for line in file.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1}
