"""Inference stream within one process: the gRPC one's twin, for tests and for an actor beside its policy worker."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import cast

from rlsrl.data.inference import InferenceLayout, RolloutRequest, RolloutResult
from rlsrl.streams.inference import (
    Answer,
    Answers,
    InferenceBatch,
    InferenceFailed,
    OnArrival,
    PendingRequest,
    RequestQueue,
)
from rlsrl.streams.protocols import HandshakeRefused, StreamClosed, StreamError


class InlineInferenceChannel:
    """Where clients find the present server: what its address is to the other transports. Any thread may use it."""

    def __init__(self, name: str) -> None:
        self.name = name
        # Reentrant: a server is prodded while it is asked.
        self._lock = threading.RLock()
        self._server: InlineInferenceServer | None = None
        self._clients: set[InlineInferenceClient] = set()

    def served_by(self, server: InlineInferenceServer | None) -> None:
        """Requests go to that server from now on, and what the former left unanswered goes there again."""
        with self._lock:
            self._server = server
            for client in self._clients:
                client.ask_again(server)

    def is_served_by(self, server: InlineInferenceServer) -> bool:
        """Whether that server was not closed."""
        return self._server is server

    def join(self, client: InlineInferenceClient) -> None:
        """A client asks here from now on."""
        with self._lock:
            self._clients.add(client)

    def leave(self, client: InlineInferenceClient) -> None:
        """That client is gone."""
        with self._lock:
            self._clients.discard(client)
            if self._server is not None:
                self._server.queue.drop(client)

    def alone(self, action: Callable[[], None]) -> None:
        """Do it while nobody else does anything here."""
        with self._lock:
            action()

    def send(self, client: InlineInferenceClient) -> None:
        """Pass on what the client wants to be asked."""
        with self._lock:
            client.ask(self._server)


class InlineInferenceServer:
    """Answers clients of the same process; implements ``InferenceServer``."""

    def __init__(
        self, channel: InlineInferenceChannel, *, layout: InferenceLayout, on_refused: Callable[[str], None]
    ) -> None:
        """Serve the channel's clients, and be its only server until ``close``.

        ``on_refused`` is called with the kind of what was refused: a client of another ``layout``.
        """
        self.layout = layout
        """Of requests and results; clients of another are refused."""
        self.on_refused = on_refused
        self.queue = RequestQueue()
        """What waits; the channel's clients put into it."""
        self._channel = channel
        self._on_arrival: OnArrival | None = None
        channel.served_by(self)

    def next_batch(self, max_size: int, timeout: float) -> InferenceBatch | None:
        """See ``InferenceServer.next_batch``."""
        return self.queue.next_batch(max_size, timeout, self._deliver)

    def call_on_arrival(self, take: Callable[[], None] | None, afterwards: Callable[[], None] = lambda: None) -> None:
        """See ``InferenceServer.call_on_arrival``; the threads are the clients'."""
        on_arrival = None if take is None else OnArrival(take, afterwards)
        self._channel.alone(lambda: setattr(self, "_on_arrival", on_arrival))

    def wake(self) -> None:
        """See ``InferenceServer.wake``; at once."""
        self._channel.alone(self._arrived)

    def _arrived(self) -> None:
        if (on_arrival := self._on_arrival) is not None:
            on_arrival.take()
            on_arrival.afterwards()

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a batch to be taken."""
        return len(self.queue)

    def close(self) -> None:
        """See ``InferenceServer.close``."""
        self._channel.served_by(None)
        self.queue.close()

    def _deliver(self, pending: Sequence[PendingRequest], answers: Answers) -> None:
        if self._channel.is_served_by(self):
            for place, each in enumerate(pending):
                client = cast("InlineInferenceClient", each.client)
                client.settle(each.number, answers if isinstance(answers, Exception) else answers[place])


class InlineInferenceClient:
    """Asks the channel's server; implements ``InferenceClient``."""

    def __init__(self, channel: InlineInferenceChannel, *, layout: InferenceLayout) -> None:
        self._channel = channel
        self._layout = layout
        self._changed = threading.Condition()
        # Guarded by _changed:
        self._held: list[int] = []
        self._asked: dict[int, RolloutRequest] = {}
        self._answers: list[Answer] = []
        self._next_number = 0
        self._failure: StreamError | None = None
        channel.join(self)

    def submit(self, request: RolloutRequest) -> int:
        """See ``InferenceClient.submit``. The arrays are not copied."""
        with self._changed:
            self._check()
            number = self._next_number
            self._asked[number] = request
            self._held.append(number)
            self._next_number += 1
        return number

    def wait(self, timeout: float) -> Sequence[Answer]:
        """See ``InferenceClient.wait``."""
        self._channel.send(self)
        with self._changed:
            self._changed.wait_for(lambda: self._answers or self._failure, timeout)
            self._check()
            answers, self._answers = self._answers, []
        return answers

    def close(self) -> None:
        """See ``InferenceClient.close``."""
        self._channel.leave(self)
        self._fail(StreamClosed("this inference client was closed"))

    def ask(self, server: InlineInferenceServer | None) -> None:
        """The channel's: put what was submitted since the last call into that server's queue."""
        with self._changed:
            numbers, self._held = self._held, []
        self._put(server, numbers)

    def ask_again(self, server: InlineInferenceServer | None) -> None:
        """The channel's: put everything that is not answered into that server's queue."""
        with self._changed:
            numbers, self._held = list(self._asked), []
        self._put(server, numbers)

    def settle(self, number: int, answer: RolloutResult | Exception) -> None:
        """A server's: keep an answer for who waits for it, once."""
        if isinstance(answer, Exception):
            answer = InferenceFailed(f"{type(answer).__name__}: {answer}")
        with self._changed:
            if self._asked.pop(number, None) is not None:
                self._answers.append(Answer(number, answer))
                self._changed.notify_all()

    def _put(self, server: InlineInferenceServer | None, numbers: list[int]) -> None:
        if server is None or not numbers:
            return
        if server.layout.digest != self._layout.digest:
            server.on_refused("layout")
            self._fail(HandshakeRefused(f"({server.layout}) at the server, ({self._layout}) at the client"))
        for number in numbers:
            if (asked := self._asked.get(number)) is not None:
                server.queue.put(self, number, asked)
        server.wake()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _fail(self, error: StreamError) -> None:
        with self._changed:
            if self._failure is None:
                self._failure = error
            self._asked.clear()
            self._answers.clear()
            self._changed.notify_all()
