"""What an inference stream promises on every transport: requests to a server, answers to the client.

Many clients (actors) send requests to few servers (policy workers). The server forms a batch when it takes one, from
all waiting requests, up to a number of lanes. So the batch size follows the load.

Requests are stateless, so a client may send one again. It sends every request that a dead server left unanswered to
another server. Each request gets exactly one answer. A server takes one client's requests in their order. Its owner may
answer those that its weights satisfy before others that ask for newer weights (``InferenceBatch.split``).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from rlsrl.data.inference import RolloutRequest, RolloutResult
from rlsrl.data.version import Version
from rlsrl.streams.protocols import StreamError


class InferenceFailed(StreamError):
    """The server's policy raised an error for this request. The text is that of the error."""


class Answer(NamedTuple):
    """The answer to one request."""

    number: int
    """The number that ``submit`` returned."""
    result: RolloutResult | InferenceFailed


class InferenceClient(Protocol):
    """The end of a stream that sends requests. One thread uses it, and the client has no other thread.

    Without a server requests wait for one without a limit: the owner sets the deadline.
    """

    def submit(self, request: RolloutRequest) -> int:
        """Queue a request for the next ``wait``; return its number. Its arrays must not change before the answer.

        Raises:
            StreamClosed: ``close`` was called.
            HandshakeRefused: a server refused this client.
        """

    def wait(self, timeout: float) -> Sequence[Answer]:
        """Send the submitted requests; return the answers that have arrived since the last call, in any order.

        Returns as soon as there is an answer, and after ``timeout`` seconds or ``wake`` with none.

        Raises:
            StreamClosed, HandshakeRefused: as ``submit``.
        """

    def wake(self) -> None:
        """End the present ``wait``, or the next one, without an answer. Any thread may call this."""

    def close(self) -> None:
        """Drop the unanswered requests and disconnect. Idempotent."""


class InferenceServer(Protocol):
    """The end of a stream that answers. One thread takes batches. Any thread may answer them or call ``close``.

    The owner either waits in ``next_batch`` or registers a callback with ``call_on_arrival``.
    """

    def next_batch(self, max_size: int, timeout: float) -> InferenceBatch | None:
        """Return the waiting requests, oldest first, up to ``max_size`` lanes; at least one, whatever its lanes.

        Waits for the first request. Returns None after ``close``, the timeout (seconds) or ``wake``.
        """

    def call_on_arrival(self, take: Callable[[], None] | None, afterwards: Callable[[], None] = lambda: None) -> None:
        """Register callbacks for arriving requests. Both run in the thread that receives.

        ``take`` is called after all requests that have arrived are queued. It calls ``next_batch`` with timeout 0 and
        answers the batch. ``afterwards`` is called after the answers are sent and before the next ``take``, for work
        that may not delay the answers. A server that closes does not call it.

        While a callback runs no request is received, so both must be fast. They must not raise. ``take=None``
        unregisters the callbacks; a pending ``afterwards`` still runs.
        """

    def wake(self) -> None:
        """Call ``take`` soon, even without a new request, or end the present or next wait of ``next_batch``.

        Any thread may call this, but not inside ``take``.
        """

    def close(self) -> None:
        """Stop serving and wake the waiting thread. Clients connect to another server. Idempotent."""


class OnArrival(NamedTuple):
    """The callbacks of ``InferenceServer.call_on_arrival``."""

    take: Callable[[], None]
    afterwards: Callable[[], None]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PendingRequest:
    """A request that a server has not answered."""

    request: RolloutRequest
    client: Hashable
    """The transport's object for the client; the answer goes there."""
    number: int
    """The client's number of the request."""
    arrived_at: float
    """On the server's monotonic clock."""


Answers = Sequence[RolloutResult] | Exception
"""One result for each request in order, or the error that all of them get."""


class InferenceBatch:
    """Requests that the server took together. Answer, split or join a batch exactly once, from any thread.

    The answer to a client that is gone is dropped, and every answer after the server's ``close``: the client asks
    another server.
    """

    def __init__(
        self,
        pending: Sequence[PendingRequest],
        *,
        taken_at: float,
        deliver: Callable[[Sequence[PendingRequest], Answers], None],
    ) -> None:
        """``deliver`` sends the answers. It is called once, in the thread that answers.

        ``taken_at``: on the server's monotonic clock.
        """
        self.requests: Sequence[RolloutRequest] = tuple(entry.request for entry in pending)
        """The requests, oldest first."""
        self.num_lanes = sum(request.num_lanes for request in self.requests)
        """Sum of the requests' lanes."""
        self.min_version: Version = max(request.min_version for request in self.requests)
        """Oldest weights that may answer all requests."""
        self.least_version: Version = min(request.min_version for request in self.requests)
        """Oldest weights that may answer any of the requests."""
        self.taken_at = taken_at
        """On the server's monotonic clock; of joined batches the mean over requests."""
        self.queueing_seconds = taken_at - sum(entry.arrived_at for entry in pending) / len(pending)
        """Mean time that the requests waited before the server took them."""
        self._pending = tuple(pending)
        self._deliver = deliver
        self._answering = threading.Lock()

    def respond(self, results: Sequence[RolloutResult]) -> None:
        """Send the results, in the order of ``requests``.

        Raises:
            ValueError: the results do not have the lanes of the requests.
            RuntimeError: the batch was answered before.
        """
        requested = [request.num_lanes for request in self.requests]
        given = [len(result.distribution) for result in results]
        if requested != given:
            raise ValueError(f"results of {given} lanes do not answer requests of {requested} lanes")
        self._answer(results)

    def fail(self, error: Exception) -> None:
        """Send every client an ``InferenceFailed`` with this error.

        Raises:
            RuntimeError: the batch was answered before.
        """
        self._answer(error)

    def split(self, version: Version, max_size: int) -> tuple[InferenceBatch | None, InferenceBatch | None]:
        """Return the requests that weights of ``version`` satisfy, and the others; None for no requests.

        The first are up to ``max_size`` lanes, but at least one request. Both keep the order. They replace this batch,
        unless one of them is this batch.

        Raises:
            RuntimeError: the batch was answered, split or joined before.
        """
        if self.least_version > version:
            return None, self
        if self.min_version <= version and (self.num_lanes <= max_size or len(self._pending) == 1):
            return self, None
        self._claim()
        satisfied = [entry for entry in self._pending if entry.request.min_version <= version]
        first = satisfied[: _num_fitting(satisfied, max_size)]
        numbers = {id(entry) for entry in first}
        others = [entry for entry in self._pending if id(entry) not in numbers]
        return self._of(first, self.taken_at), self._of(others, self.taken_at) if others else None

    def joined(self, later: InferenceBatch) -> InferenceBatch:
        """Return one batch with the requests of this batch and then those of a later one of the same server.

        Raises:
            RuntimeError: one of the batches was answered, split or joined before.
        """
        self._claim()
        later._claim()
        pending = (*self._pending, *later._pending)
        own = len(self._pending) / len(pending)
        return self._of(pending, own * self.taken_at + (1 - own) * later.taken_at)

    def _of(self, pending: Sequence[PendingRequest], taken_at: float) -> InferenceBatch:
        return InferenceBatch(pending, taken_at=taken_at, deliver=self._deliver)

    def _answer(self, answers: Answers) -> None:
        self._claim()
        self._deliver(self._pending, answers)

    def _claim(self) -> None:
        """Be answered, split or joined: whatever comes second is an error."""
        if not self._answering.acquire(blocking=False):
            raise RuntimeError("a batch can be answered once only; this batch was answered, split or joined before")


class RequestQueue:
    """A server's waiting requests, between the thread that receives them and the thread that takes batches."""

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._changed = threading.Condition()
        self._waiting: deque[PendingRequest] = deque()
        self._closed = False
        self._woken = False

    def put(self, client: Hashable, number: int, request: RolloutRequest) -> None:
        """Add a request. A closed queue drops it."""
        with self._changed:
            if not self._closed:
                self._waiting.append(
                    PendingRequest(request=request, client=client, number=number, arrived_at=self._now())
                )
                self._changed.notify()

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        with self._changed:
            return len(self._waiting)

    def drop(self, client: Hashable) -> None:
        """Remove the requests of a client that is gone."""
        with self._changed:
            self._waiting = deque(entry for entry in self._waiting if entry.client != client)

    def next_batch(
        self, max_size: int, timeout: float, deliver: Callable[[Sequence[PendingRequest], Answers], None]
    ) -> InferenceBatch | None:
        """Take a batch as ``InferenceServer.next_batch`` does; ``deliver`` will send its answers."""
        with self._changed:
            if timeout > 0:
                self._changed.wait_for(lambda: self._closed or self._woken or self._waiting, timeout)
            self._woken = False
            taken = [self._waiting.popleft() for _ in range(_num_fitting(self._waiting, max_size))]
            return InferenceBatch(taken, taken_at=self._now(), deliver=deliver) if taken else None

    def wake(self) -> None:
        """End the present wait of ``next_batch``, or the next one."""
        with self._changed:
            self._woken = True
            self._changed.notify()

    def close(self) -> None:
        """Drop all requests, accept no more, and wake the waiting thread. Idempotent."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()


def _num_fitting(pending: Iterable[PendingRequest], max_size: int) -> int:
    """Return how many of the oldest requests have up to ``max_size`` lanes together; at least 1 if there are any."""
    number = num_lanes = 0
    for entry in pending:
        num_lanes += entry.request.num_lanes
        if number and num_lanes > max_size:
            break
        number += 1
    return number
