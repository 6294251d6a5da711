"""The memory that this process and those it starts may still use."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from rlsrl.runtime.control_groups import CGROUPS, OWN_GROUPS, control_groups

MEMINFO = Path("/proc/meminfo")
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


def _left_in_groups(cgroups: Path, own: Path) -> Iterator[int]:
    for folder in control_groups("memory", cgroups=cgroups, own=own):
        for *numbers, caches in _FILES:
            # The root group has no limit, and one may read "max".
            with contextlib.suppress(OSError, ValueError, KeyError):
                limit, current = (int((folder / name).read_text()) for name in numbers)
                cached = _sizes(folder / "memory.stat")
                yield limit - current + sum(cached[name] for name in caches)


def _sizes(file: Path) -> dict[str, int]:
    """Return the numbers of a file with a name and a number in each line."""
    lines = (line.replace(":", " ").split() for line in file.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1}
