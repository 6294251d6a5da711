"""The parameter database in a folder: on a disk, or on a volume that several machines mount.

Readers open files and need no permission to write. Writers of all processes take turns by ``flock`` on a file beside
the versions, which the kernel lets go when its holder dies.
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

from rlsrl.parameters.blobs import Change, T, View
from rlsrl.parameters.database import BlobParameterDB
from rlsrl.runtime.clock import Clock, SystemClock
from rlsrl.runtime.durable import make_folder, remove_temporaries, sync_folder, write_durably

_FOLDERS = ("versions", "states", "tags")
_LOCK_RECHECK_SECONDS = 0.01


class FilesystemParameterDB(BlobParameterDB):
    """A ``ParameterDB`` whose versions are files under ``root``; nothing is created before the first push."""

    def __init__(
        self,
        root: Path,
        *,
        clock: Clock | None = None,
        keep_states: int = 3,
        lock_seconds: float = 30.0,
    ) -> None:
        """``lock_seconds`` is how long a write waits for another process that is writing before it fails."""
        super().__init__(
            FolderBlobs(root, lock_seconds=lock_seconds), clock=clock or SystemClock(), keep_states=keep_states
        )


class FolderBlobs:
    """``Blobs`` as files of the same path under ``root``; its views show what is there now."""

    def __init__(self, root: Path, *, lock_seconds: float) -> None:
        self._root = root
        self._lock_seconds = lock_seconds
        self._prepared: set[str] = set()
        self._never = threading.Event()

    def policies(self) -> list[str]:
        """See ``Blobs``."""
        with contextlib.suppress(FileNotFoundError):
            return [entry.name for entry in os.scandir(self._root) if entry.is_dir()]
        return []

    def view(self, policy: str) -> View:  # noqa: ARG002 - one view serves every policy
        """See ``Blobs``."""
        return self

    def change(self, policy: str, body: Callable[[Change], T]) -> T:
        """See ``Blobs``. Every write and removal is durable before the next."""
        with self._exclusive(policy):
            return body(self)

    def names(self, folder: str) -> list[str]:
        """See ``View``; hidden files, which are being written, are left out."""
        with contextlib.suppress(FileNotFoundError):
            return [name for name in os.listdir(self._root / folder) if not name.startswith(".")]
        return []

    def size(self, path: str) -> int:
        """See ``View``."""
        return (self._root / path).stat().st_size

    def read(self, path: str, limit: int | None = None) -> bytes:
        """See ``View``."""
        with (self._root / path).open("rb") as file:
            return file.read(-1 if limit is None else limit)

    def write(self, path: str, data: bytes) -> None:
        """See ``Change``."""
        write_durably(self._root / path, data)

    def confirm(self, path: str) -> None:
        """See ``Change``: the file was flushed before it had its name; whether the name was is not known."""
        sync_folder((self._root / path).parent)

    def remove(self, paths: Sequence[str]) -> None:
        """See ``Change``. What goes from one folder is gone for good before anything goes from the next."""
        for folder, names in itertools.groupby((self._root / path for path in paths), lambda path: path.parent):
            if [name for name in names if _unlink(name)]:
                sync_folder(folder)

    @contextlib.contextmanager
    def _exclusive(self, policy: str) -> Iterator[None]:
        """While it is held no other thread or process is within it; every use has a descriptor of its own.

        Only its holder writes under the policy, so hidden files found then are leftovers of killed writers.
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
        """Take the lock; a holder in another process tells nobody when it lets go, so this looks again."""
        deadline = time.monotonic() + self._lock_seconds
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            if time.monotonic() >= deadline:
                raise TimeoutError(f"another writer has held {folder} for {self._lock_seconds} seconds")
            self._never.wait(_LOCK_RECHECK_SECONDS)


def _unlink(path: Path) -> bool:
    """Remove the file; whether there was one."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True
