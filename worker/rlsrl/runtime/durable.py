"""Writes files that are whole or absent, even after a kill or a power loss.

The order makes it safe: write a hidden file beside the target, flush it to the disk, rename it over the target, flush
the folder. A reader finds the old content or the new, never a part. A writer that is killed leaves only a hidden file
that nobody reads.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

_SUFFIX = ".tmp"


def write_durably(path: Path, data: bytes | bytearray | memoryview) -> None:
    """Replace the file at ``path`` by ``data``; return when a power loss can no longer undo it.

    Raises:
        OSError: the disk failed or is full. The old file is unchanged, unless only the last flush of the folder failed:
            then the new content is in place, and a power loss may restore the old content.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}{_SUFFIX}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        try:
            _write_all(descriptor, memoryview(data).cast("B"))
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
