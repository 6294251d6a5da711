"""What a parameter database needs of the place it stores in: named bytes, written whole, and one writer at a time.

The database's rules stand once, over this; a folder, memory or an object store only has to keep bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol


class Blobs(Protocol):
    """Bytes by path, ``<policy>/<name>`` or ``<policy>/<folder>/<name>``. Any thread may call anything."""

    def policies(self) -> list[str]:
        """First parts of the paths."""

    def names(self, folder: str) -> list[str]:
        """What stands directly in the folder at one moment; empty if there is no such folder."""

    def size(self, path: str) -> int:
        """Bytes of what stands there.

        Raises:
            FileNotFoundError: nothing has that path.
        """

    def read(self, path: str, limit: int | None = None) -> bytes:
        """The bytes, at most the first ``limit``; a concurrent write gives the old or the new ones, never a mixture.

        Raises:
            FileNotFoundError: nothing has that path.
            OSError: the store failed.
        """

    def write(self, path: str, data: bytes) -> None:
        """Put these bytes there, durably and all at once, whatever was there before. Only within ``exclusive``.

        Raises:
            OSError: the store failed (disk full, I/O error); what was there before is untouched.
        """

    def confirm(self, path: str) -> None:
        """Make sure that what stands there is durable: its writer may have been killed before it was."""

    def remove(self, paths: Sequence[str]) -> None:
        """Remove these in this order; missing ones are fine. Only within ``exclusive``."""

    def exclusive(self, policy: str) -> AbstractContextManager[None]:
        """While it is held no other thread or process is within it for that policy. Let go by the holder's death.

        Waits for the holder, woken when it lets go, up to a deadline of the store's own.

        Raises:
            TimeoutError: the holder did not let go in time.
        """
