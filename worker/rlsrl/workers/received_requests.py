"""Requests at a policy worker: it answers those that its weights satisfy before it waits for newer weights."""

from __future__ import annotations

from rlsrl.streams.inference import InferenceBatch, InferenceServer
from rlsrl.workers.latest_parameters import LatestParameters


class ReceivedRequests:
    """Forms batches that the newest weights satisfy. Requests for newer weights wait here, in their order.

    Once weights arrive, the requests that waited for them come first. So newer requests never delay them. A lane waits
    for the answer to its request before it sends the next, so that its own order stays. One thread uses this object.
    """

    def __init__(self, server: InferenceServer, latest: LatestParameters, *, max_batch_size: int) -> None:
        """``max_batch_size``: most lanes of a batch, unless a single request has more."""
        self._server = server
        self._latest = latest
        self._max_batch_size = max_batch_size
        self._waiting: InferenceBatch | None = None

    def __bool__(self) -> bool:
        """Return whether requests wait."""
        return self._waiting is not None

    def receive(self, timeout: float) -> bool:
        """Take a batch from the server, which waits up to ``timeout`` seconds for one; return whether there was one."""
        batch = self._server.next_batch(self._max_batch_size, timeout)
        if batch is None:
            return False
        self._waiting = batch if self._waiting is None else self._waiting.joined(batch)
        return True

    def next_batch(self) -> InferenceBatch | None:
        """Return the oldest requests that the newest weights satisfy, or None. Does not wait.

        If requests need newer weights, the oldest of these are wanted from now on (``LatestParameters.wanted``).

        Raises:
            PipeClosed: no newer weights will come.
        """
        if self._waiting is None:
            return None
        version = self._latest.newest(self._waiting.least_version)
        if version is None:
            return None
        batch, self._waiting = self._waiting.split(version, self._max_batch_size)
        return batch
