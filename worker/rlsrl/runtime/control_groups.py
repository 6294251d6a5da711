"""The kernel's control groups of this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


def control_groups(controller: str, *, cgroups: Path = CGROUPS, own: Path = OWN_GROUPS) -> Iterator[Path]:
    """Yield the folder of this process's control group and of each group above it, some of which may be absent.

    With version 1 of control groups they are those of the controller, ``memory`` or ``cpu``. A container sees its own
    group at the top of them, and is told a path that it does not have.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    paths = {name: path for _, names, path in (line.split(":", 2) for line in lines) for name in names.split(",")}
    if (cgroups / controller).is_dir():
        top, path = cgroups / controller, paths.get(controller, "/")
    else:
        top, path = cgroups, paths.get("", "/")
    group = top / path.lstrip("/")
    for folder in (group, *group.parents):
        if not folder.is_relative_to(top):
            return
        yield folder
