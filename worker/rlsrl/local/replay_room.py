"""Whether the replay stores of an experiment fit where ``rlsrl run`` keeps them, before a worker starts.

Importing it needs no extra of rlsrl: `rlsrl doctor` works without them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlsrl.api.placement import local_placement
from rlsrl.api.role_names import BUFFER, TRAINER
from rlsrl.api.spec import ExperimentSpec
from rlsrl.local.child import call_in_child
from rlsrl.runtime.errors import ConfigurationError, EnvironmentFailed
from rlsrl.runtime.memory import available_memory

if TYPE_CHECKING:
    from rlsrl.workers.build.replay_stores import ReplayStores

STORES_SECONDS = 60
"""Longest time for making one environment, from whose spaces the size of a store follows."""
MOUNTS = Path("/proc/self/mountinfo")
_MEMORY = ("tmpfs", "ramfs")
_BLOCK_BYTES = 512
"""The unit of ``st_blocks``."""


class StoresUnknown(Exception):
    """The size of the stores is not known, since no environment could be made. The text says why."""


@dataclass(frozen=True, kw_only=True)
class Room:
    """The room for replay stores in a folder."""

    folder: Path
    num_bytes: int
    """Bytes that stores may take, with those that the role's former ones take already."""
    is_memory: bool
    """Whether files there are in memory only, and cannot be larger than that."""
    memory: int
    """Bytes of memory that are available."""

    def shortage(self, stores: ReplayStores) -> str | None:
        """Return why the stores do not fit, with the largest capacity that does; None if they fit."""
        medium = "in memory (tmpfs)" if self.is_memory else "on the disk"
        return stores.shortage(self.num_bytes, f"{medium} at {self.folder}")

    def warning(self, stores: ReplayStores) -> str | None:
        """Return that the stores fit on the disk and not into memory; None if they do. Training works then, slowly."""
        if self.is_memory or stores.num_bytes <= self.memory:
            return None
        from rlsrl.workers.build.replay_stores import shown

        return (
            f"{stores.field}: {stores}, and {shown(self.memory)} of memory are available: draws wait for the disk at "
            f"{self.folder}"
        )


def room_in(
    folder: Path,
    role: str,
    *,
    mounts: Path = MOUNTS,
    free: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free,
    memory: Callable[[], int] = available_memory,
) -> Room:
    """Return the room for a role's stores in a folder, which need not exist yet.

    The role's processes make their stores in the room of their former ones. Stores of another role may stay meanwhile.

    Raises:
        OSError: the disk's or the kernel's figures cannot be read.
    """
    folder = folder.absolute()
    there = next(parent for parent in (folder, *folder.parents) if parent.is_dir())
    is_memory = _file_system(there, mounts) in _MEMORY
    available = memory()
    own = sum(map(_taken, folder.glob(f"{role}-*")))
    room = min(free(there), available) if is_memory else free(there)
    return Room(folder=folder, num_bytes=room + own, is_memory=is_memory, memory=available)


def stores_folder(run_folder: Path) -> Path:
    """Return where a run keeps its stores."""
    return Path(local_placement(run_uid="unknown", run_folder=run_folder.absolute()).replay_folder)


def role_of_stores(spec: ExperimentSpec) -> str:
    """Return the role that keeps the stores of an algorithm that replays."""
    return TRAINER if spec.buffer_workers is None else BUFFER


def find_stores(spec: ExperimentSpec, *, modules: Path) -> ReplayStores | None:
    """Return the stores of an experiment; None if nothing is replayed. Makes one environment, in a process of its own.

    ``modules`` is the folder in which Python looks first for the user's own modules.

    Raises:
        StoresUnknown: the environment cannot be made, or that took longer than ``STORES_SECONDS``.
    """
    if spec.algorithm.chosen.draws_from is None:
        return None
    try:
        return call_in_child(_stores_of, spec, modules=modules, seconds=STORES_SECONDS)
    except (ConfigurationError, EnvironmentFailed) as error:
        raise StoresUnknown(str(error)) from error
    except BrokenProcessPool as error:
        raise StoresUnknown(f"an environment killed its process, or was not made within {STORES_SECONDS} s") from error


def require_room_for_stores(
    spec: ExperimentSpec, run_folder: Path, *, modules: Path, are_new: bool = False
) -> list[str]:
    """Check that the replay stores of a run fit into its folder; return warnings. Stores that exist have their room.

    Args:
        spec: Of the run.
        run_folder: Where the stores are, or will be.
        modules: See ``find_stores``.
        are_new: Whether the stores that exist are of another kind, before an edit.

    Raises:
        ConfigurationError: they do not fit; the text has the arithmetic and the largest capacity that does.
        OSError: the disk's or the kernel's figures cannot be read.
    """
    from rlsrl.workers.build.replay_stores import store_path

    folder, role = stores_folder(run_folder), role_of_stores(spec)
    if not are_new and all(_taken(store_path(folder, role, index)) for index in range(spec.num_replay_stores)):
        return []
    try:
        stores = find_stores(spec, modules=modules)
    except StoresUnknown as error:
        return [f"not known before the trainers start whether the replay stores fit: {error}"]
    if stores is None:
        return []
    room = room_in(folder, role)
    if (shortage := room.shortage(stores)) is not None:
        raise ConfigurationError(shortage)
    return [warning for warning in [room.warning(stores)] if warning is not None]


def require_room_after_edit(
    before: ExperimentSpec, after: ExperimentSpec, run_folder: Path, *, modules: Path
) -> list[str]:
    """Check that the stores fit which an edit makes anew, if it does; return warnings.

    Raises:
        ConfigurationError: as ``require_room_for_stores``.
        OSError: as ``require_room_for_stores``.
    """
    if _kind_of_stores(before) == _kind_of_stores(after):
        return []
    return require_room_for_stores(after, run_folder, modules=modules, are_new=True)


def _kind_of_stores(spec: ExperimentSpec) -> tuple[object, ...]:
    """Return what an edit changes of the stores: the role, their number, and the length of their segments."""
    return role_of_stores(spec), spec.num_replay_stores, spec.actors.rollout_length


def _stores_of(spec: ExperimentSpec) -> ReplayStores | None:
    from rlsrl.envs.factory import environment_spec
    from rlsrl.envs.unreachable import EnvironmentUnreachable
    from rlsrl.workers.build.common import environment_source
    from rlsrl.workers.build.replay_stores import stores_of

    try:
        return stores_of(spec, environment_spec(environment_source(spec.worker_environment)))
    except EnvironmentUnreachable as error:
        raise ConfigurationError(str(error)) from None  # its locks stay in this process


def _taken(file: Path) -> int:
    """Return the bytes of the disk that a file takes; 0 if it does not exist."""
    try:
        return file.stat().st_blocks * _BLOCK_BYTES
    except FileNotFoundError:
        return 0


def _file_system(path: Path, mounts: Path) -> str | None:
    """Return the type of the file system with that path; None if it is not known, as with subvolumes of btrfs."""
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in mounts.read_text().splitlines():
        mount, _, details = line.partition(" - ")
        if mount.split()[2] == number:
            return details.split()[0]
    return None
