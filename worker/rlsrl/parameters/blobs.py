"""What a parameter database needs of the place it stores in: named bytes, written whole, and one change at a time.

The database's rules stand once, over this; a folder, memory or an object store only has to keep bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")


class View(Protocol):
    """Bytes by path, ``<policy>/<name>`` or ``<policy>/<folder>/<name>``. Any thread may call anything.

    A view shows the store as it is, or as it was when the view was taken, if the store can hold on to a moment.
    """

    def names(self, folder: str) -> list[str]:
        """What stands directly in the folder; empty if there is no such folder.

        Raises:
            OSError: the store failed; so for the others.
        """

    def size(self, path: str) -> int:
        """Bytes of what stands there.

        Raises:
            FileNotFoundError: nothing has that path.
        """

    def read(self, path: str, limit: int | None = None) -> bytes:
        """The bytes, at most the first ``limit``; a concurrent write gives the old or the new ones, never a mixture.

        Raises:
            FileNotFoundError: nothing has that path, or no longer.
            Corrupt: something should be there and is not.
        """


class Change(View, Protocol):
    """A view that shows its own writes, while nobody else's change happens."""

    def write(self, path: str, data: bytes) -> None:
        """Put these bytes there all at once, whatever was there before.

        Raises:
            OSError: the store failed (disk full, I/O error); what was there before is untouched.
        """

    def confirm(self, path: str) -> None:
        """Make sure that what stands there is durable: its writer may have been killed before it was."""

    def remove(self, paths: Sequence[str]) -> None:
        """Remove these in this order; missing ones are fine."""


class Blobs(Protocol):
    """A store of bytes for any number of policies. Any thread may call anything."""

    def policies(self) -> list[str]:
        """First parts of the paths."""

    def view(self, policy: str) -> View:
        """What there is of that policy."""

    def change(self, policy: str, body: Callable[[Change], T]) -> T:
        """Let ``body`` read and write the policy while no other thread or process changes it, and give what it returns.

        When this returns, all is durable. A death on the way leaves what was written and removed up to some point of
        the order in which it was, or none of it. Waits for other changes, woken when they end or their process dies,
        up to a deadline of the store's own. A store that finds only at the end that another change came first runs
        ``body`` again on what is there then: it must decide everything anew.

        Raises:
            TimeoutError: others have been changing the policy for too long.
            OSError: the store failed.
        """
