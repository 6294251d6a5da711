"""An inference stream within one process: the test double of the gRPC stream."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import cast

from typing_extensions import override

from rlsrl.data.inference import InferenceLayout, RolloutRequest, RolloutResult
from rlsrl.streams.inference import (
    Answer,
    Answers,
    InferenceBatch,
    InferenceClient,
    InferenceFailed,
    InferenceServer,
    OnArrival,
    PendingRequest,
    RequestQueue,
)
from rlsrl.streams.protocols import HandshakeRefused, StreamClosed, StreamError


class InlineInferenceChannel:
    """Connects clients with the present server, as an address does for the other transports. Any thread may use it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lock = threading.RLock()
        """Guards ``server`` and ``clients``. Reentrant: a client wakes the server while it puts requests."""
        self.server: InlineInferenceServer | None = None
        """The present server."""
        self.clients: set[InlineInferenceClient] = set()

    def served_by(self, server: InlineInferenceServer | None) -> None:
        """Send requests to that server from now on, including those that the server before did not answer."""
        with self.lock:
            self.server = server
            for client in self.clients:
                client.resubmit(server)


class InlineInferenceServer(InferenceServer):
    """Answers clients of the same process. Its callbacks run in the clients' threads."""

    def __init__(
        self, channel: InlineInferenceChannel, *, layout: InferenceLayout, on_refused: Callable[[str], None]
    ) -> None:
        """Serve the channel's clients, and be its only server until ``close``.

        ``on_refused`` is called with the kind of each refusal: a client of another ``layout``.
        """
        self.layout = layout
        """The layout of requests and results; clients of another layout are refused."""
        self.on_refused = on_refused
        self.queue = RequestQueue()
        """The waiting requests. The channel's clients put them here."""
        self._channel = channel
        self._on_arrival: OnArrival | None = None
        channel.served_by(self)

    @override
    def next_batch(self, max_size: int, timeout: float) -> InferenceBatch | None:
        return self.queue.next_batch(max_size, timeout, self._deliver)

    @override
    def call_on_arrival(self, take: Callable[[], None] | None, afterwards: Callable[[], None] = lambda: None) -> None:
        with self._channel.lock:
            self._on_arrival = None if take is None else OnArrival(take, afterwards)

    @override
    def wake(self) -> None:
        self.queue.wake()
        with self._channel.lock:
            if (on_arrival := self._on_arrival) is not None:
                on_arrival.take()
                on_arrival.afterwards()

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a batch to be taken."""
        return len(self.queue)

    @override
    def close(self) -> None:
        self._channel.served_by(None)
        self.queue.close()

    def _deliver(self, pending: Sequence[PendingRequest], answers: Answers) -> None:
        if self._channel.server is self:
            for place, entry in enumerate(pending):
                client = cast("InlineInferenceClient", entry.client)
                client.receive(entry.number, answers if isinstance(answers, Exception) else answers[place])


class InlineInferenceClient(InferenceClient):
    """Sends requests to the channel's server."""

    def __init__(self, channel: InlineInferenceChannel, *, layout: InferenceLayout) -> None:
        self._channel = channel
        self._layout = layout
        self._changed = threading.Condition()
        # Guarded by _changed:
        self._unsent: list[int] = []
        self._unanswered: dict[int, RolloutRequest] = {}
        self._answers: list[Answer] = []
        self._next_number = 0
        self._failure: StreamError | None = None
        self._woken = False
        with channel.lock:
            channel.clients.add(self)

    @override
    def submit(self, request: RolloutRequest) -> int:
        with self._changed:
            self._check()
            number = self._next_number
            self._unanswered[number] = request
            self._unsent.append(number)
            self._next_number += 1
        return number

    @override
    def wait(self, timeout: float) -> Sequence[Answer]:
        with self._channel.lock:
            self.send(self._channel.server)
        with self._changed:
            self._changed.wait_for(lambda: self._answers or self._failure or self._woken, timeout)
            self._woken = False
            self._check()
            answers, self._answers = self._answers, []
        return answers

    @override
    def wake(self) -> None:
        with self._changed:
            self._woken = True
            self._changed.notify()

    @override
    def close(self) -> None:
        with self._channel.lock:
            self._channel.clients.discard(self)
            if self._channel.server is not None:
                self._channel.server.queue.drop(self)
        self._fail(StreamClosed("this inference client was closed"))

    def send(self, server: InlineInferenceServer | None) -> None:
        """Put the requests since the last call into that server's queue. The channel's lock is held."""
        with self._changed:
            numbers, self._unsent = self._unsent, []
        self._put(server, numbers)

    def resubmit(self, server: InlineInferenceServer | None) -> None:
        """Put all unanswered requests into that server's queue. The channel calls it."""
        with self._changed:
            numbers, self._unsent = list(self._unanswered), []
        self._put(server, numbers)

    def receive(self, number: int, answer: RolloutResult | Exception) -> None:
        """Keep the first answer to a request for ``wait``. The server calls it."""
        if isinstance(answer, Exception):
            answer = InferenceFailed(f"{type(answer).__name__}: {answer}")
        with self._changed:
            if self._unanswered.pop(number, None) is not None:
                self._answers.append(Answer(number, answer))
                self._changed.notify_all()

    def _put(self, server: InlineInferenceServer | None, numbers: list[int]) -> None:
        if server is None or not numbers:
            return
        if server.layout.digest != self._layout.digest:
            server.on_refused("layout")
            self._fail(HandshakeRefused(f"({server.layout}) at the server, ({self._layout}) at the client"))
        for number in numbers:
            if (request := self._unanswered.get(number)) is not None:
                server.queue.put(self, number, request)
        server.wake()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _fail(self, error: StreamError) -> None:
        with self._changed:
            if self._failure is None:
                self._failure = error
            self._unanswered.clear()
            self._answers.clear()
            self._changed.notify_all()
