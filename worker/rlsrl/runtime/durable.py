"""Writes files that are whole or absent, even after a kill or a power loss.

The order makes it safe: write a hidden file beside the target, flush it to the disk, rename it over the target, flush
the folder. A reader finds the old content or the new, never a part. A writer that is killed leaves only a hidden file
that nobody reads.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from typing_extensions import override

_SUFFIX = ".tmp"
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""The disk is full, or a quota or the limit of a file's size is reached."""


class NoRoom(OSError):
    """A disk has no room for a write. The text names the path, the bytes that the write needs, and those to free."""

    def __init__(self, code: int, path: Path, num_bytes: int) -> None:
        """``num_bytes`` is the size of the write to ``path``. The free bytes are measured now."""
        super().__init__(code, os.strerror(code), str(path))
        self.num_bytes = num_bytes
        self.num_free = _free_bytes(path.parent) if code == errno.ENOSPC else None
        """Free bytes; None if another limit than the disk's size is reached."""

    @override
    def __str__(self) -> str:
        text = f"{super().__str__()} needs {self.num_bytes:,} bytes"
        if self.num_free is None:
            return text
        # With enough bytes, the disk lacks inodes, or another process took the room for a moment.
        return f"{text}, {self.num_free:,} are free: free {max(0, self.num_bytes - self.num_free):,} more"

    def of(self, path: Path, num_bytes: int) -> Self:
        """Return the same error for the whole to which the failed write belongs."""
        assert self.errno is not None, "the constructor has set it"
        return type(self)(self.errno, path, num_bytes)


def write_durably(path: Path, data: bytes | bytearray | memoryview) -> None:
    """Replace the file at ``path`` by ``data``; return when a power loss can no longer undo it.

    Raises:
        OSError: the disk failed. It names a path. The old file is unchanged, unless only the last flush of the folder
            failed: then the new content is in place, and a power loss may restore the old content.
        NoRoom: the disk is full. The old file is unchanged.
    """
    view = memoryview(data).cast("B")
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}{_SUFFIX}")
    with _named_errors(path, view.nbytes):
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            try:
                _write_all(descriptor, view)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Flush the names in the folder; return when a power loss can no longer undo a rename or removal in it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Create the folder and its missing parents, durably.

    An existing folder is flushed too, because its maker may have been killed before the flush.
    """
    parent = folder.parent
    if not parent.is_dir():
        make_folder(parent)
    folder.mkdir(exist_ok=True)
    sync_folder(parent)


def remove_temporaries(folder: Path) -> None:
    """Remove the hidden files of killed writers. Call it only while no other process writes to the folder."""
    for entry in folder.iterdir():
        if entry.name.startswith(".") and entry.name.endswith(_SUFFIX):
            entry.unlink(missing_ok=True)


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


@contextlib.contextmanager
def _named_errors(path: Path, num_bytes: int) -> Iterator[None]:
    """Let errors of writing ``num_bytes`` bytes to ``path`` name the path: those of a descriptor do not."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM:
            raise NoRoom(error.errno, path, num_bytes) from error
        error.filename = error.filename or str(path)
        raise


def _free_bytes(folder: Path) -> int | None:
    try:
        stats = os.statvfs(folder)
    except OSError:
        return None
    return stats.f_bavail * stats.f_frsize
