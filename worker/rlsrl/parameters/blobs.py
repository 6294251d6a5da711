"""The storage protocol under the parameter database: bytes by path, written as a whole, one change at a time.

``BlobParameterDB`` implements the database's rules once, on top of this protocol. A folder, memory or an object store
only has to store bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")


class BlobView(Protocol):
    """Reads blobs by path, ``<policy>/<name>`` or ``<policy>/<folder>/<name>``. Any thread may call any method.

    Depending on the store, a view shows either the current content, or the content at the time the view was made.
    """

    def names(self, folder: str) -> list[str]:
        """Return the names directly in the folder; none if the folder does not exist.

        Raises:
            OSError: the store failed. All methods may raise this.
        """

    def size(self, path: str) -> int:
        """Return the blob's size in bytes.

        Raises:
            FileNotFoundError: the path has no blob.
        """

    def read(self, path: str, limit: int | None = None) -> bytes:
        """Return the blob's bytes, at most the first ``limit``.

        During a write the result is the old or the new content, never a mixture.

        Raises:
            FileNotFoundError: the path has no blob, or no longer has one.
            Corrupt: the store refers to a blob that it does not have.
        """


class BlobChange(BlobView, Protocol):
    """A view inside one change: it shows the change's own writes, and no other writer's changes."""

    def write(self, path: str, data: bytes) -> None:
        """Create or replace the blob as a whole.

        Raises:
            OSError: the store failed (disk full, I/O error). The previous blob is unchanged.
        """

    def confirm(self, path: str) -> None:
        """Make the existing blob durable: its writer may have been killed before it was."""

    def remove(self, paths: Sequence[str]) -> None:
        """Remove the blobs in this order. Missing ones are ignored."""


class Blobs(Protocol):
    """A store of blobs for any number of policies. Any thread may call any method."""

    def policies(self) -> list[str]:
        """Return the names of the policies that may have blobs: the paths' first parts."""

    def view(self, policy: str) -> BlobView:
        """Return a view of that policy's blobs."""

    def change(self, policy: str, body: Callable[[BlobChange], T]) -> T:
        """Run ``body``, which may read and write the policy, and return its result.

        No other thread or process changes the policy meanwhile. After the return everything is durable. A kill on the
        way leaves the writes and removals up to some point of their order, or none of them.

        It waits for other changes, until they end, their process dies, or the store's own deadline passes. A store may
        find out at the end that another change came first. It then runs ``body`` again on the new content: ``body``
        must base every decision on what it reads in that run.

        Raises:
            TimeoutError: other changes have kept this one waiting for too long.
            OSError: the store failed.
        """
