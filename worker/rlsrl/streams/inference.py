"""What an inference stream promises, whatever carries it: requests out, answers back.

Many clients (actors) ask few servers (policy workers). A batch is formed at the moment the server takes it, from all
that waits, up to a number of lanes: so its size follows the load by itself, and nothing that waits is left out.

Requests are stateless, so asking again is harmless. A client asks again whatever a dead server left unanswered; each of
its requests is answered exactly once, and those of one client are served in the order in which it made them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from rlsrl.data.inference import RolloutRequest, RolloutResult
from rlsrl.data.version import Version
from rlsrl.streams.protocols import StreamError


class InferenceFailed(StreamError):
    """The server evaluated the request and its policy raised; the text is its error's."""


class Answer(NamedTuple):
    """What came of a request."""

    number: int
    """As ``submit`` returned it."""
    result: RolloutResult | InferenceFailed


class InferenceClient(Protocol):
    """The end that asks. One thread uses it, and does all that it does: what comes meanwhile is kept until ``wait``.

    While there is no server, requests wait for one, without limit: their owner watches the time.
    """

    def submit(self, request: RolloutRequest) -> int:
        """Ask, as soon as ``wait`` is called; returns the request's number. Its arrays must not change before it is
        answered.

        Raises:
            StreamClosed: ``close`` was called.
            HandshakeRefused: a server was there and would not have us.
        """

    def wait(self, timeout: float) -> Sequence[Answer]:
        """Ask what was submitted, and return the answers that have come and were not returned before, in any order, as
        soon as there is one; after ``timeout`` seconds maybe none.

        Raises:
            StreamClosed, HandshakeRefused: as ``submit``.
        """

    def close(self) -> None:
        """Give up what is not answered. Idempotent."""


class InferenceServer(Protocol):
    """The end that answers. One thread takes batches; any thread may answer them and ``close``.

    Whoever evaluates has a thread that waits in ``next_batch``, or is called where requests are received.
    """

    def next_batch(self, max_size: int, timeout: float) -> InferenceBatch | None:
        """All requests that wait, oldest first, up to ``max_size`` lanes; at least one, however many lanes it has.

        Waits for the first one, woken by its arrival, by ``close``, or by the timeout in seconds: then None.
        """

    def call_on_arrival(self, take: Callable[[], None] | None, afterwards: Callable[[], None] = lambda: None) -> None:
        """From now on ``take`` is called whenever requests have come: after them all, in whatever thread receives.

        It takes and answers batches there, with a timeout of 0. ``afterwards`` is called once its answers are on their
        way, for what need not keep them: in that thread, before ``take`` is called again, not when the server closes
        meanwhile. Only one of the two runs at a time; while one does nothing is received, so both have to be quick, and
        raise nothing. None: nothing is called any more, but for the ``afterwards`` of a ``take`` that was.
        """

    def wake(self) -> None:
        """Have ``take`` called soon though nothing may have come. Any thread may, but not within such a call."""

    def close(self) -> None:
        """Stop serving and wake whoever waits. Clients ask another server. Idempotent."""


class OnArrival(NamedTuple):
    """What a server calls when requests have come, as ``InferenceServer.call_on_arrival`` was given it."""

    take: Callable[[], None]
    afterwards: Callable[[], None]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PendingRequest:
    """A request that a server holds and has not answered."""

    request: RolloutRequest
    client: Hashable
    """Who asks, in the transport's terms; its answers go there."""
    number: int
    """The client's own number of the request."""
    arrived_at: float
    """On the server's monotonic clock."""


Answers = Sequence[RolloutResult] | Exception
"""One result a request, in their order, or why there are none."""


class InferenceBatch:
    """Requests that were taken together. Answer them exactly once, from any thread.

    Answers for a client that is gone, or after the server was closed, go nowhere: the client asks elsewhere.
    """

    def __init__(
        self,
        pending: Sequence[PendingRequest],
        *,
        taken_at: float,
        deliver: Callable[[Sequence[PendingRequest], Answers], None],
    ) -> None:
        """``deliver`` sends the answers; called once, from the thread that answers."""
        self.requests: Sequence[RolloutRequest] = tuple(each.request for each in pending)
        """What is asked, oldest first."""
        self.num_lanes = sum(request.num_lanes for request in self.requests)
        """Lanes of all requests together."""
        self.min_version: Version = max(request.min_version for request in self.requests)
        """The oldest weights that may answer all of them."""
        self.taken_at = taken_at
        """On the server's monotonic clock."""
        self.queueing_seconds = taken_at - sum(each.arrived_at for each in pending) / len(pending)
        """How long its requests had waited when it was taken, on average."""
        self._pending = tuple(pending)
        self._deliver = deliver
        self._answering = threading.Lock()

    def respond(self, results: Sequence[RolloutResult]) -> None:
        """Send each request its result, in the order of ``requests``.

        Raises:
            ValueError: the results are not of these requests.
            RuntimeError: the batch was answered before.
        """
        asked, given = [each.num_lanes for each in self.requests], [len(each.distribution) for each in results]
        if asked != given:
            raise ValueError(f"results of {given} lanes do not answer requests of {asked}")
        self._answer(results)

    def fail(self, error: Exception) -> None:
        """Tell every client that its request could not be evaluated.

        Raises:
            RuntimeError: the batch was answered before.
        """
        self._answer(error)

    def _answer(self, answers: Answers) -> None:
        if not self._answering.acquire(blocking=False):
            raise RuntimeError("a batch is answered once, and this one was before")
        self._deliver(self._pending, answers)


class RequestQueue:
    """The requests that wait at a server, between the thread that receives them and the one that takes batches."""

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._changed = threading.Condition()
        self._waiting: deque[PendingRequest] = deque()
        self._closed = False

    def put(self, client: Hashable, number: int, request: RolloutRequest) -> None:
        """A request came; forgotten if the queue is closed."""
        with self._changed:
            if not self._closed:
                self._waiting.append(
                    PendingRequest(request=request, client=client, number=number, arrived_at=self._now())
                )
                self._changed.notify()

    def __len__(self) -> int:
        """Requests that wait now."""
        with self._changed:
            return len(self._waiting)

    def drop(self, client: Hashable) -> None:
        """That client is gone: what it asked is not worth evaluating."""
        with self._changed:
            self._waiting = deque(each for each in self._waiting if each.client != client)

    def next_batch(
        self, max_size: int, timeout: float, deliver: Callable[[Sequence[PendingRequest], Answers], None]
    ) -> InferenceBatch | None:
        """See ``InferenceServer.next_batch``."""
        with self._changed:
            if timeout > 0:
                self._changed.wait_for(lambda: self._closed or self._waiting, timeout)
            taken = self._take(max_size)
            return InferenceBatch(taken, taken_at=self._now(), deliver=deliver) if taken else None

    def close(self) -> None:
        """Take nothing more, forget what waits and wake whoever waits for more. Idempotent."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()

    def _take(self, max_size: int) -> list[PendingRequest]:
        taken: list[PendingRequest] = []
        num_lanes = 0
        while self._waiting:
            num_lanes += self._waiting[0].request.num_lanes
            if taken and num_lanes > max_size:
                break
            taken.append(self._waiting.popleft())
        return taken
