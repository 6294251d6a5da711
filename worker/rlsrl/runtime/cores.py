"""The processors that this process may use."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from rlsrl.runtime.control_groups import CGROUPS, OWN_GROUPS, control_groups


def usable_cores(*, cgroups: Path = CGROUPS, own: Path = OWN_GROUPS) -> int:
    """Return how many cores this process may use: by its affinity, and by the quota of its control groups.

    A quota of a part of a core counts as one core.
    """
    return max(1, int(min([float(len(os.sched_getaffinity(0))), *_quotas(cgroups, own)])))


def _quotas(cgroups: Path, own: Path) -> Iterator[float]:
    """Yield the quota of the process's group and of each group above it, in cores."""
    for folder in control_groups("cpu", cgroups=cgroups, own=own):
        for files in (["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]):  # versions 2 and 1
            # The root group has no quota, and one may read "max 100000" or -1.
            with contextlib.suppress(OSError, ValueError):
                quota, period = map(float, " ".join((folder / name).read_text() for name in files).split())
                if quota > 0:
                    yield quota / period
