"""The kernel's control groups of this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


def control_groups(controller: str, *, cgroups: Path = CGROUPS, own: Path = OWN_GROUPS) -> Iterator[Path]:
    """Yield the folder of this process's control group and of each group above it, some of which may be absent.

    The controller is ``memory`` or ``cpu``. Where version 1 of control groups has it, the groups are of version 1.
    Where both versions are mounted, ``unified`` holds version 2. A container may see its own group at the top, without
    the path that the kernel names.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    paths = {name: path for _, names, path in (line.split(":", 2) for line in lines) for name in names.split(",")}
    has_version_1 = controller in paths and (cgroups / controller).is_dir()
    beside = cgroups / "unified"
    top = cgroups / controller if has_version_1 else beside if beside.is_dir() else cgroups
    group = top / paths.get(controller if has_version_1 else "", "/").lstrip("/")
    for folder in (group, *group.parents):
        if not folder.is_relative_to(top):
            return
        yield folder
