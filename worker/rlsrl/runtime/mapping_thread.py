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
            PipeClosed: it is closed and empty.
        """

    def close(self) -> None:
        """Return nothing more, and wake the waiting thread. Idempotent."""


class StageFailed(Exception):
    """A stage's function raised an error, which is the cause."""


class MappingThread(Generic[In, Out]):
    """Takes from ``upstream_queue``, calls ``map_fn``, puts the result into ``downstream_queue``.

    ``None`` returned by ``map_fn`` is nothing to hand on. Without a downstream queue results are discarded: the stage
    is a sink. ``initializer`` is called once in the thread before the first item; that is where a stage with a CUDA
    device sets it (``lambda: torch.cuda.set_device(device)``), which keeps torch out of this module.

    A stage waits for an item, woken by ``put`` or ``close`` upstream, and for room, woken by ``get`` or ``close``
    downstream. It ends when

    - upstream was closed and is empty: the normal end, everything was mapped;
    - downstream was closed: nobody wants more;
    - ``stop`` was called: at once, also while it waits, and what is still upstream stays there;
    - ``map_fn`` or ``initializer`` raised: see ``check``.

    However it ends it closes both queues, so neighbours never wait for a stage that is gone.
    """

    def __init__(
        self,
        name: str,
        map_fn: Callable[[In], Out | None],
        *,
        upstream_queue: Upstream[In],
        downstream_queue: Pipe[Out] | None = None,
        initializer: Callable[[], None] | None = None,
    ) -> None:
        self._map_fn = map_fn
        self._upstream = upstream_queue
        self._downstream = downstream_queue
        self._initializer = initializer
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        # Daemonic so that a function which never returns cannot keep a finished process alive; owners join.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def name(self) -> str:
        """The thread's name, also in errors."""
        return self._thread.name

    def start(self) -> None:
        """Start the thread, once."""
        self._thread.start()

    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """End the stage at once, also while it waits at a queue. The item in ``map_fn`` is dropped.

        Does not wait: see ``join``. Idempotent, from any thread, also before ``start``.
        """
        self._stopping.set()
        self._close_queues()

    def join(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds for the thread to end. Returns at once if it was never started.

        Raises:
            TimeoutError: ``map_fn`` has not returned in time.
        """
        if self._thread.ident is None:
            return
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"stage {self.name} is still in its function {timeout} s after the wait began")

    def check(self) -> None:
        """Raise if the stage failed. Owners call it in their loop and after ``join``.

        Raises:
            StageFailed: ``map_fn`` or ``initializer`` raised; the error is the cause.
        """
        if self._error is not None:
            raise StageFailed(f"stage {self.name} failed: {self._error!r}") from self._error

    def _run(self) -> None:
        try:
            if self._initializer is not None:
                self._initializer()
            while self._map_one():
                pass
        except BaseException as error:  # noqa: BLE001 - raised again by check(), in the owner's thread
            self._error = error
        finally:
            self._close_queues()

    def _map_one(self) -> bool:
        """Map one item; return False when the stage must end."""
        try:
            item = self._upstream.get()
        except PipeClosed:
            return False
        if self._stopping.is_set():
            return False
        result = self._map_fn(item)
        if result is None or self._downstream is None:
            return not self._stopping.is_set()
        try:
            self._downstream.put(result)
        except PipeClosed:
            return False
        return True

    def _close_queues(self) -> None:
        self._upstream.close()
        if self._downstream is not None:
            self._downstream.close()
