"""Waiting for files of other processes, with inotify instead of polling. Linux."""

from __future__ import annotations

import ctypes
import os
import select
import struct
import time
from collections.abc import Collection
from pathlib import Path

from typing_extensions import override

from rlsrl.testing.closing import ClosedAtExit

_IN_MODIFY = 0x00000002
_IN_MOVED_TO = 0x00000080
_IN_CREATE = 0x00000100
_IN_DELETE = 0x00000200
_CHANGES = _IN_MODIFY | _IN_MOVED_TO | _IN_CREATE | _IN_DELETE
_IN_NONBLOCK = os.O_NONBLOCK
_IN_CLOEXEC = os.O_CLOEXEC
_EVENT = struct.Struct("iIII")
"""Watch, events, cookie, and the length of the name that follows."""


class FolderWatch(ClosedAtExit):
    """Waits for changes below a folder. For one thread; use as a context manager.

    New folders are watched from the next ``wait`` on, so check the awaited condition after every ``wait``; it must not
    become false again. Writes through a memory map go unnoticed.
    """

    def __init__(self, root: Path) -> None:
        """Watch the existing folder ``root`` and everything below it."""
        self._root = root
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = self._libc.inotify_init1(_IN_NONBLOCK | _IN_CLOEXEC)
        if self._descriptor < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1")
        self._watched: set[Path] = set()
        self._watch_new_folders()

    def wait(self, *others: int, timeout: float) -> Collection[str]:
        """Wait for changes; return the names of the changed files, none after ``timeout`` seconds.

        Returns early if one of the descriptors ``others`` is readable. Also returns at once if there are new folders:
        their files may have changed already.
        """
        if self._watch_new_folders():
            return self._read()
        select.select([self._descriptor, *others], [], [], max(0.0, timeout))
        return self._read()

    def wait_for_name(self, part: str, *others: int, timeout: float) -> bool:
        """Wait until a file whose name contains ``part`` is created or changed.

        Returns False after ``timeout`` seconds, or once one of ``others`` is readable.
        """
        deadline = time.monotonic() + timeout
        while (remaining := deadline - time.monotonic()) > 0:
            if any(part in name for name in self.wait(*others, timeout=remaining)):
                return True
            if select.select(others, [], [], 0)[0]:
                return False
        return False

    @override
    def close(self) -> None:
        """Stop watching."""
        os.close(self._descriptor)

    def _watch_new_folders(self) -> bool:
        folders = {self._root, *(Path(where) for where, _, _ in os.walk(self._root))} - self._watched
        for folder in folders:
            # Fails for a folder that was removed meanwhile, which needs no watch.
            self._libc.inotify_add_watch(self._descriptor, os.fsencode(folder), _CHANGES)
        self._watched |= folders
        return bool(folders)

    def _read(self) -> set[str]:
        names: set[str] = set()
        try:
            events = os.read(self._descriptor, 65536)
        except BlockingIOError:
            return names
        while events:
            _, _, _, length = _EVENT.unpack_from(events)
            end = _EVENT.size + length
            names.add(os.fsdecode(events[_EVENT.size : end].rstrip(b"\0")))
            events = events[end:]
        return names
