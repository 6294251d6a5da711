"""The processors that this process may use, and its control groups."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


def usable_cores(*, cgroups: Path = CGROUPS, own: Path = OWN_GROUPS) -> int:
    """Return how many cores this process may use: by its affinity, and by the quota of its control groups (version 2).

    A quota of a part of a core counts as one core.
    """
    return max(1, int(min([float(len(os.sched_getaffinity(0))), *_quotas(cgroups, own)])))


def control_groups(*, cgroups: Path = CGROUPS, own: Path = OWN_GROUPS) -> Iterator[Path]:
    """Yield the folder of this process's control group (version 2) and of each group above it."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    name = next((line.removeprefix("0::").lstrip("/") for line in lines if line.startswith("0::")), "")
    group = cgroups / name
    for folder in (group, *group.parents):
        if not folder.is_relative_to(cgroups):
            return
        yield folder


def _quotas(cgroups: Path, own: Path) -> Iterator[float]:
    """Yield the quota of the process's group and of each group above it, in cores."""
    for folder in control_groups(cgroups=cgroups, own=own):
        with contextlib.suppress(OSError, ValueError):  # the root group has no quota, and one may read "max 100000"
            quota, period = (folder / "cpu.max").read_text().split()
            yield float(quota) / float(period)
