"""The parameter database in a folder: on a disk, or on a volume that several machines mount.

Readers only open files and need no write permission. Writers of all processes take turns: each holds a ``flock`` on a
file in the policy's folder, which the kernel releases when the process dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from typing_extensions import override

from rlsrl.parameters.blobs import BlobChange, Blobs, BlobView, T
from rlsrl.parameters.database import BlobParameterDB
from rlsrl.runtime.clock import Clock, SystemClock
from rlsrl.runtime.durable import make_folder, remove_temporaries, sync_folder, write_durably

_FOLDERS = ("versions", "states", "tags")
_LOCK_RECHECK_SECONDS = 0.01


class FilesystemParameterDB(BlobParameterDB):
    """A ``ParameterDB`` whose versions are files under ``root``. The first push creates the folder."""

    def __init__(
        self,
        root: Path,
        *,
        clock: Clock | None = None,
        keep_states: int = 3,
        lock_seconds: float = 30.0,
    ) -> None:
        """``lock_seconds`` is how long a write waits for other writers before it fails."""
        super().__init__(
            FolderBlobs(root, lock_seconds=lock_seconds), clock=clock or SystemClock(), keep_states=keep_states
        )


class FolderBlobs(Blobs, BlobChange):
    """``Blobs`` as files of the same path under ``root``. Its views show the current content."""

    def __init__(self, root: Path, *, lock_seconds: float) -> None:
        self._root = root
        self._lock_seconds = lock_seconds
        self._prepared: set[str] = set()
        self._never_set = threading.Event()

    @override
    def policies(self) -> list[str]:
        with contextlib.suppress(FileNotFoundError):
            return [entry.name for entry in os.scandir(self._root) if entry.is_dir()]
        return []

    @override
    def view(self, policy: str) -> BlobView:
        return self

    @override
    def change(self, policy: str, body: Callable[[BlobChange], T]) -> T:
        # Every write and removal is durable before the next begins.
        with self._exclusive(policy):
            return body(self)

    @override
    def names(self, folder: str) -> list[str]:
        # Hidden files are left out: they are being written.
        with contextlib.suppress(FileNotFoundError):
            return [name for name in os.listdir(self._root / folder) if not name.startswith(".")]
        return []

    @override
    def size(self, path: str) -> int:
        return (self._root / path).stat().st_size

    @override
    def read(self, path: str, limit: int | None = None) -> bytes:
        with (self._root / path).open("rb") as file:
            return file.read(-1 if limit is None else limit)

    @override
    def write(self, path: str, data: bytes) -> None:
        write_durably(self._root / path, data)

    @override
    def confirm(self, path: str) -> None:
        # The file was flushed before it got its name. Only the name may not be durable yet.
        sync_folder((self._root / path).parent)

    @override
    def remove(self, paths: Sequence[str]) -> None:
        # Removals from one folder are durable before those from the next folder begin.
        for folder, names in itertools.groupby((self._root / path for path in paths), lambda path: path.parent):
            if [name for name in names if _unlink(name)]:
                sync_folder(folder)

    @contextlib.contextmanager
    def _exclusive(self, policy: str) -> Iterator[None]:
        """Hold the policy's lock: no other thread or process holds it meanwhile.

        Each use opens its own descriptor, so the lock excludes threads, too. Only the holder writes under the policy,
        so any hidden files are leftovers of killed writers, and are removed.
        """
        folder = self._root / policy
        parts = [folder / part for part in _FOLDERS]
        if policy not in self._prepared:
            for part in parts:
                make_folder(part)
        descriptor = os.open(folder / "writer.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            self._lock(descriptor, folder)
            if policy not in self._prepared:
                for part in (folder, *parts):
                    remove_temporaries(part)
                self._prepared.add(policy)
            yield
        finally:
            os.close(descriptor)

    def _lock(self, descriptor: int, folder: Path) -> None:
        """Take the lock. Polling with a deadline is needed: a blocking ``flock`` has no timeout."""
        deadline = time.monotonic() + self._lock_seconds
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            if time.monotonic() >= deadline:
                raise TimeoutError(f"another writer has held {folder} for {self._lock_seconds} seconds")
            self._never_set.wait(_LOCK_RECHECK_SECONDS)


def _unlink(path: Path) -> bool:
    """Remove the file; return whether it existed."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True
