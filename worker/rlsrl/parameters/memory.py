"""The parameter database in memory: the in-process twin of those that last."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from rlsrl.parameters.blobs import Change, T, View
from rlsrl.parameters.database import BlobParameterDB
from rlsrl.runtime.clock import Clock, SystemClock

_LOCK_SECONDS = 30.0


class MemoryBlobs:
    """``Blobs`` in a dict; several databases over one object stand for several processes over one store."""

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}
        """The bytes by path."""
        self._writer = threading.Lock()

    def policies(self) -> list[str]:
        """See ``Blobs``."""
        return sorted({path.partition("/")[0] for path in list(self.content)})

    def view(self, policy: str) -> View:  # noqa: ARG002 - one view serves every policy
        """See ``Blobs``."""
        return self

    def change(self, policy: str, body: Callable[[Change], T]) -> T:
        """See ``Blobs``; one lock serves all policies."""
        if not self._writer.acquire(timeout=_LOCK_SECONDS):
            raise TimeoutError(f"another thread has been writing for {_LOCK_SECONDS} seconds, {policy!r} has to wait")
        try:
            return body(self)
        finally:
            self._writer.release()

    def names(self, folder: str) -> list[str]:
        """See ``View``."""
        prefix = f"{folder}/"
        return [path.removeprefix(prefix) for path in list(self.content) if path.startswith(prefix)]

    def size(self, path: str) -> int:
        """See ``View``."""
        return len(self.read(path))

    def read(self, path: str, limit: int | None = None) -> bytes:
        """See ``View``."""
        try:
            return self.content[path][:limit]
        except KeyError:
            raise FileNotFoundError(path) from None

    def write(self, path: str, data: bytes) -> None:
        """See ``Change``."""
        self.content[path] = data

    def confirm(self, path: str) -> None:
        """See ``Change``: nothing here outlives the process."""

    def remove(self, paths: Sequence[str]) -> None:
        """See ``Change``."""
        for path in paths:
            self.content.pop(path, None)


class MemoryParameterDB(BlobParameterDB):
    """A ``ParameterDB`` that lives as long as its ``blobs``: for tests and for runs that keep nothing."""

    def __init__(self, blobs: MemoryBlobs | None = None, *, clock: Clock | None = None, keep_states: int = 3) -> None:
        super().__init__(blobs or MemoryBlobs(), clock=clock or SystemClock(), keep_states=keep_states)
