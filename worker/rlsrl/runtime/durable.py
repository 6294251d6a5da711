"""Files that are there whole or not at all, whoever is killed and whenever the power goes.

The order is the whole point: write a hidden file beside the target, flush it to the disk, rename it over the target,
flush the folder. A reader meets the old content or the new one, never a part; a writer killed on the way leaves only a
hidden file that nobody reads.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

_SUFFIX = ".tmp"


def write_durably(path: Path, data: bytes | bytearray | memoryview) -> None:
    """Put ``data`` in place of the file at ``path``; returns when a power loss could no longer take it.

    Raises:
        OSError: the disk failed or is full. The old file is untouched, unless only the last flush of the folder failed:
            then the new content stands there whole, and a power loss may still bring the old one back.
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
    """Flush which names the folder holds; returns when a power loss could no longer undo a rename or removal in it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Create the folder with its missing parents, durably. Flushes also where it was there already: whoever made it may
    have been killed before the flush.
    """
    parent = folder.parent
    if not parent.is_dir():
        make_folder(parent)
    folder.mkdir(exist_ok=True)
    sync_folder(parent)


def remove_temporaries(folder: Path) -> None:
    """Remove what killed writers left in the folder. Only for whoever knows that nobody is writing there now."""
    for entry in folder.iterdir():
        if entry.name.startswith(".") and entry.name.endswith(_SUFFIX):
            entry.unlink(missing_ok=True)


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
