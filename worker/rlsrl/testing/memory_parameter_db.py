"""The parameter database in memory, for tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from typing_extensions import override

from rlsrl.parameters.blobs import BlobChange, Blobs, BlobView, T
from rlsrl.parameters.database import BlobParameterDB
from rlsrl.runtime.clock import Clock, SystemClock

_LOCK_SECONDS = 30.0


class MemoryBlobs(Blobs, BlobChange):
    """``Blobs`` in a dict. Several databases over one object simulate several processes over one store."""

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}
        """The blobs by path."""
        self._writer = threading.Lock()

    @override
    def policies(self) -> list[str]:
        return sorted({path.partition("/")[0] for path in list(self.content)})

    @override
    def view(self, policy: str) -> BlobView:
        return self

    @override
    def change(self, policy: str, body: Callable[[BlobChange], T]) -> T:
        # One lock serves all policies.
        if not self._writer.acquire(timeout=_LOCK_SECONDS):
            raise TimeoutError(f"policy {policy!r}: another thread has held the lock for {_LOCK_SECONDS} seconds")
        try:
            return body(self)
        finally:
            self._writer.release()

    @override
    def names(self, folder: str) -> list[str]:
        prefix = f"{folder}/"
        return [path.removeprefix(prefix) for path in list(self.content) if path.startswith(prefix)]

    @override
    def size(self, path: str) -> int:
        return len(self.read(path))

    @override
    def read(self, path: str, limit: int | None = None) -> bytes:
        try:
            return self.content[path][:limit]
        except KeyError:
            raise FileNotFoundError(path) from None

    @override
    def write(self, path: str, data: bytes) -> None:
        self.content[path] = data

    @override
    def confirm(self, path: str) -> None:
        pass  # nothing outlives the process

    @override
    def remove(self, paths: Sequence[str]) -> None:
        """See ``BlobChange.remove``."""
        for path in paths:
            self.content.pop(path, None)


class MemoryParameterDB(BlobParameterDB):
    """A ``ParameterDB`` that lives as long as its ``blobs``."""

    def __init__(self, blobs: MemoryBlobs | None = None, *, clock: Clock | None = None, keep_states: int = 3) -> None:
        super().__init__(blobs or MemoryBlobs(), clock=clock or SystemClock(), keep_states=keep_states)
