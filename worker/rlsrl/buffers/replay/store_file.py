"""The file of a replay store, which outlives the process that fills it.

The file is mapped into memory, so the kernel has every stored byte, and a SIGKILL loses none. A loss of power may lose
what the disk does not have yet, in any order. So after the machine has started anew, a store that was not closed is in
doubt, and its checksums say what is left. The same holds on another machine, to which the disk has moved: nothing there
shows whether the former one wrote all that its kernel had.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
from pathlib import Path
from typing import Self

from rlsrl.buffers.replay.layout import ReplayLayout

SUFFIX = ".store"
_MAGIC = b"rlsrlrp1"
_HEADER = struct.Struct("<8s32s36sqqB")
"""Magic, digest of the layout, the machine's boot, the owner's incarnation and the one before, 1 if it was closed."""
_HEADER_BYTES = 4096
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class StoreFile:
    """The memory of one rank's store. The rank's ledger page, which one process has open, guards it."""

    def __init__(
        self, path: Path, memory: mmap.mmap, *, header: bytes, why_empty: str | None, is_in_doubt: bool
    ) -> None:
        """Use ``open``."""
        self.why_empty = why_empty
        """Why nothing is left of an earlier store; None if it is there."""
        self.is_in_doubt = is_in_doubt
        """Whether the disk may lack some of the store: it is to be checked, before ``believe``."""
        self._path = path
        self._memory = memory
        self._header = header

    @classmethod
    def open(cls, path: Path, layout: ReplayLayout, *, former: int | None, owner: int) -> Self:
        """Open the store of the incarnation ``former``, or one that is in doubt, else begin with zeros.

        The owner may change it once the ledger is that of the owner. Until then it stays the former one's, too. A store
        in doubt needs no ledger: nothing in it counts again.

        Args:
            path: The file. Its folder is created.
            layout: What the store keeps. A store with another layout is of no use.
            former: The incarnation up to which the ledger goes; None: it does not know what the store held.
            owner: The incarnation that opens it.

        Raises:
            OSError: the disk has no room for it, for example. What the former one left stays; else no file is left.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        num_bytes = file_bytes(layout)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            why_empty, is_in_doubt = _judged(descriptor, layout, former, num_bytes)
        except OSError:
            os.close(descriptor)
            raise
        try:
            if why_empty is not None:
                os.ftruncate(descriptor, 0)
            os.posix_fallocate(descriptor, 0, num_bytes)  # else a full disk would be a SIGBUS later
            memory = mmap.mmap(descriptor, num_bytes)
        except OSError:
            if why_empty is not None:
                path.unlink()
            raise
        finally:
            os.close(descriptor)
        former = owner if former is None or why_empty else former
        header = _HEADER.pack(_MAGIC, _digest(layout), _boot(), owner, former, False)
        file = cls(path, memory, header=header, why_empty=why_empty, is_in_doubt=is_in_doubt)
        if not is_in_doubt:
            file.believe()
        return file

    @property
    def content(self) -> memoryview:
        """The bytes of the layout."""
        return memoryview(self._memory)[_HEADER_BYTES:]

    def believe(self) -> None:
        """Declare the content to be whole: after a kill, the next owner on this machine uses it as it is."""
        self._memory[: len(self._header)] = self._header
        self._memory.flush(0, _HEADER_BYTES)  # before the owner writes: the disk may not say that it is closed

    def write_back(self) -> None:
        """Wait until the disk has what is there now. Other threads go on meanwhile. No effect on a removed file.

        Raises:
            OSError: the disk failed.
        """
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            os.fdatasync(descriptor)  # as msync, which Python calls with the interpreter lock
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Wait until the disk has all of it: it survives a loss of power then."""
        self.write_back()
        self._memory[_HEADER.size - 1] = True
        self._memory.flush(0, _HEADER_BYTES)

    def remove(self) -> None:
        """Remove the file. What the process has mapped stays usable. Idempotent."""
        self._path.unlink(missing_ok=True)


def file_bytes(layout: ReplayLayout) -> int:
    """Return the bytes of the file of a store with that layout."""
    return _HEADER_BYTES + layout.nbytes


def _judged(descriptor: int, layout: ReplayLayout, former: int | None, num_bytes: int) -> tuple[str | None, bool]:
    """Return ``why_empty`` and ``is_in_doubt`` of what is in the file."""
    header = os.pread(descriptor, _HEADER.size, 0).ljust(_HEADER.size, b"\0")
    if not header.strip(b"\0"):
        return "no store was left", False
    magic, digest, boot, *owners, is_closed = _HEADER.unpack(header)
    if magic != _MAGIC or os.fstat(descriptor).st_size != num_bytes or digest != _digest(layout):
        return "the spec asks for another one", False
    if boot != _boot() and not is_closed:
        return None, True
    return None if former in owners else "the ledger does not know what it held", False


def _boot() -> bytes:
    return _BOOT.read_bytes()[:36]


def _digest(layout: ReplayLayout) -> bytes:
    return hashlib.sha256(repr(layout).encode()).digest()
