"""One stage of a pipeline: a thread that maps items of one pipe to items of the next."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from rlsrl.runtime.pipe import Pipe, PipeClosed

In = TypeVar("In")
Out = TypeVar("Out")
Taken = TypeVar("Taken", covariant=True)


class Upstream(Protocol[Taken]):
    """The source of a stage's items: a ``Pipe``, or another source that can be closed."""

    def get(self) -> Taken:
        """Return the next item. Waits for it.

        Raises:
            PipeClosed: the source is closed and empty.
        """

    def close(self) -> None:
        """Close the source and wake the waiting thread. Idempotent."""


class StageFailed(Exception):
    """A stage's function raised an error, which is the cause."""


class MappingThread(Generic[In, Out]):
    """Takes from ``upstream_queue``, calls ``map_fn``, puts the result into ``downstream_queue``.

    If ``map_fn`` returns None, the stage passes nothing on. Without a downstream queue the stage discards all results.

    A stage waits for an item until ``put`` or ``close`` upstream, and for space until ``get`` or ``close`` downstream.
    It ends when

    - upstream is closed and empty: the normal end, every item was mapped;
    - downstream is closed: no stage needs more results;
    - ``map_fn`` raises: see ``check``.

    At its end it closes both queues in every case, so that the neighbouring stages do not wait forever.
    """

    def __init__(
        self,
        name: str,
        map_fn: Callable[[In], Out | None],
        *,
        upstream_queue: Upstream[In],
        downstream_queue: Pipe[Out] | None = None,
    ) -> None:
        self._map_fn = map_fn
        self._upstream = upstream_queue
        self._downstream = downstream_queue
        self._error: BaseException | None = None
        # A daemon thread, so that a `map_fn` that never returns cannot keep the process alive. Owners call join().
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread, once."""
        self._thread.start()

    def join(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds for the thread to end. Returns at once if the thread was not started.

        Raises:
            TimeoutError: ``map_fn`` did not return within ``timeout``.
        """
        if self._thread.ident is None:
            return
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"stage {self._thread.name}: the function did not return within {timeout} s")

    def check(self) -> None:
        """Raise the stage's failure, if any. Owners call it in their loop and after ``join``.

        Raises:
            StageFailed: ``map_fn`` raised; the error is the cause.
        """
        if self._error is not None:
            raise StageFailed(f"stage {self._thread.name} failed: {self._error!r}") from self._error

    def _run(self) -> None:
        try:
            while self._map_one():
                pass
        except BaseException as error:  # noqa: BLE001 - raised again by check(), in the owner's thread
            self._error = error
        finally:
            self._upstream.close()
            if self._downstream is not None:
                self._downstream.close()

    def _map_one(self) -> bool:
        """Map one item; return False when the stage must end."""
        try:
            item = self._upstream.get()
        except PipeClosed:
            return False
        result = self._map_fn(item)
        if result is None or self._downstream is None:
            return True
        try:
            self._downstream.put(result)
        except PipeClosed:
            return False
        return True
