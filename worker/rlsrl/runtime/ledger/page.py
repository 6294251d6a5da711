"""A ledger page's file. Each update happens completely or not at all, for readers and after a SIGKILL.

The file is mapped into its writer's memory, so the kernel has every stored byte and the content outlives the process.
The file holds two banks. An update writes the new record and its checksum into the idle bank, then sets one byte that
makes this bank active. A writer that is killed before that byte leaves the old record; after it, the new one. The
checksum protects readers that two updates overtake, and machines that lose power.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from rlsrl.runtime.ledger.records import LedgerError, PageRecord

_MAGIC = b"rlsrlpg3"
_ANY_MAGIC = b"rlsrlpg"
"""The first bytes of pages of all versions."""
_HEADER = struct.Struct("<8sq48s")
_ACTIVE = 2048
"""Offset of the byte that selects the active bank."""
_BANKS = 4096
"""Offset of the first bank. Banks share no memory page with the byte that selects one."""
_BANK_BYTES = 64 * 1024
_BANK_HEAD = struct.Struct("<II")
"""Checksum and length of the record after it."""
_FILE_BYTES = _BANKS + 2 * _BANK_BYTES
_MAX_READS = 1000
"""How often a reader repeats a read that updates have overtaken."""

SUFFIX = ".page"
MAX_RECORD_BYTES = _BANK_BYTES - _BANK_HEAD.size
"""Largest encoded record that fits."""


class LedgerPage:
    """One process's page, open for writing. Any thread may update it; only one process may have it open."""

    def __init__(
        self, path: Path, descriptor: int, memory: mmap.mmap, record: PageRecord, active: int, *, is_new: bool
    ) -> None:
        self._path = path
        self.is_new = is_new
        """Whether there was no page at this path, or it had lost updates: its last life may have done more."""
        self._descriptor = descriptor
        self._memory = memory
        self._record = record
        self._active = active
        self._lock = threading.Lock()

    @classmethod
    def open(cls, path: Path, role: str, index: int) -> Self:
        """Open the page, or create it. Its folder must exist.

        Raises:
            LedgerError: another process has the page open, or it belongs to another worker, or it is damaged.
            OSError: the file cannot be created.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _lock(descriptor, path)
            # A page without the magic was being created when its writer died: nothing was counted on it.
            if is_new := not _is_page(descriptor, path):
                _create(descriptor, PageRecord(role=role, index=index))
            record, active = _recover(descriptor, path)
            if (record.role, record.index) != (role, index):
                raise LedgerError(f"{path} is the page of {record.role} {record.index}, not of {role} {index}")
            memory = mmap.mmap(descriptor, _FILE_BYTES)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(path, descriptor, memory, record, active, is_new=is_new)

    @property
    def record(self) -> PageRecord:
        """The current record."""
        return self._record

    def encode(self) -> bytes:
        """Return the current record, encoded for ``PageRecord.decode``."""
        return self._record.encode()

    def apply(self, change: Callable[[PageRecord], PageRecord]) -> PageRecord:
        """Replace the record by ``change(record)`` in one update; return the new record.

        If ``change`` raises, the page does not change.

        Raises:
            LedgerError: the new record is larger than ``MAX_RECORD_BYTES``.
            ValueError: the page is closed.
        """
        with self._lock:
            record = change(self._record)
            image = _image(record, self._path)
            idle = 1 - self._active
            start = _bank_offset(idle)
            self._memory[start : start + len(image)] = image
            self._memory[_ACTIVE] = idle
            self._active = idle
            self._record = record
            return record

    def update(self, **deltas: int) -> PageRecord:
        """Raise each named term by its number of transitions, in one update; return the new record."""
        return self.apply(lambda record: record.count(**deltas))

    def sync(self) -> None:
        """Wait until the disk has the record: it survives a loss of power then."""
        with self._lock:
            self._memory.flush()

    def close(self) -> None:
        """Close the page, so that another process may open it. Idempotent."""
        with self._lock:
            if not self._memory.closed:
                self._memory.close()
                os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def page_path(folder: Path, role: str, index: int) -> Path:
    """Return the path of a worker's page in the run's ledger folder."""
    return folder / f"{role}-{index}{SUFFIX}"


def read_page(path: Path) -> PageRecord | None:
    """Return the page's current record, also while its process writes it; None if the page is missing or not complete.

    Raises:
        LedgerError: the page is damaged.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        if not _is_page(descriptor, path):
            return None
        for _ in range(_MAX_READS):
            if (record := _read_bank(descriptor, _active_bank(descriptor))) is not None:
                return record
        raise _damaged(path, "the active record fails its checksum")
    finally:
        os.close(descriptor)


def read_pages(folder: Path) -> tuple[PageRecord, ...]:
    """Return all pages of a run's ledger folder, sorted by role and index.

    In a live run each record is complete, but the records are of different moments. Their sum is wrong by what happened
    between the reads.
    """
    records = [record for path in folder.glob(f"*{SUFFIX}") if (record := read_page(path)) is not None]
    return tuple(sorted(records, key=lambda record: (record.role, record.index)))


def _is_page(descriptor: int, path: Path) -> bool:
    """Return whether the file is a page.

    Raises:
        LedgerError: another version of rlsrl wrote the page, or the page is damaged.
    """
    magic = os.pread(descriptor, len(_MAGIC), 0)
    if magic == _MAGIC:
        if (num_bytes := os.fstat(descriptor).st_size) != _FILE_BYTES:
            raise _damaged(path, f"it has {num_bytes} bytes, not {_FILE_BYTES}")
        return True
    if magic.startswith(_ANY_MAGIC):
        raise LedgerError(f"{path} was written by another version of rlsrl: {magic!r}, not {_MAGIC!r}")
    # Until its creation is complete, a page begins with zeros.
    if magic.strip(b"\0"):
        raise _damaged(path, f"it begins with {magic!r}, not {_MAGIC!r}")
    return False


def _damaged(path: Path, why: str) -> LedgerError:
    return LedgerError(f"{path} is damaged: {why}; remove it, and the ledger continues from the last checkpoint")


def _lock(descriptor: int, path: Path) -> None:
    """Lock the page for this process. The kernel releases the lock when the process dies."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise LedgerError(f"another process writes {path}") from error


def _create(descriptor: int, record: PageRecord) -> None:
    """Write an empty page. The magic comes last: it makes the file a page.

    Every byte of the file is written. So a full disk is an error here, and not a SIGBUS during an update.
    """
    role = record.role.encode()
    header = _HEADER.pack(_MAGIC, record.index, role)
    if _HEADER.unpack(header)[2].rstrip(b"\0") != role:
        raise LedgerError(f"the role {record.role!r} is too long for a page")
    image = bytearray(_FILE_BYTES)
    image[len(_MAGIC) : len(header)] = header[len(_MAGIC) :]
    bank = _image(record, Path())
    image[_BANKS : _BANKS + len(bank)] = bank
    os.ftruncate(descriptor, 0)
    _write_all(descriptor, image, 0)
    _write_all(descriptor, _MAGIC, 0)


def _write_all(descriptor: int, data: bytes | bytearray, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def _recover(descriptor: int, path: Path) -> tuple[PageRecord, int]:
    """Return the active record and its bank; the previous record if a loss of power has damaged the active one."""
    active = _active_bank(descriptor)
    for bank in (active, 1 - active):
        if (record := _read_bank(descriptor, bank)) is not None:
            return record, bank
    raise _damaged(path, "both records fail their checksums")


def _active_bank(descriptor: int) -> int:
    return os.pread(descriptor, 1, _ACTIVE)[0] & 1


def _bank_offset(bank: int) -> int:
    return _BANKS + bank * _BANK_BYTES


def _image(record: PageRecord, path: Path) -> bytes:
    payload = record.encode()
    if len(payload) > MAX_RECORD_BYTES:
        raise LedgerError(
            f"{path} is full with {len(record.marks)} marks and {len(record.unacknowledged)} unacknowledged slots"
        )
    return _BANK_HEAD.pack(zlib.crc32(payload), len(payload)) + payload


def _read_bank(descriptor: int, bank: int) -> PageRecord | None:
    """Return the bank's record; None if its checksum fails."""
    offset = _bank_offset(bank)
    checksum, length = _BANK_HEAD.unpack(os.pread(descriptor, _BANK_HEAD.size, offset))
    payload = os.pread(descriptor, min(length, _BANK_BYTES), offset + _BANK_HEAD.size)
    if not payload or zlib.crc32(payload) != checksum:
        return None
    _, index, role = _HEADER.unpack(os.pread(descriptor, _HEADER.size, 0))
    return PageRecord.decode(payload, role=role.rstrip(b"\0").decode(errors="replace"), index=index)
