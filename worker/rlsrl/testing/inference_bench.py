"""Both ends of an inference stream, driven by tests.

Used by the conformance suite (``inference_streams``) and by the processes that it starts (``inference_stream_end``). It
does not import the test runner, so that the processes start fast.
"""

# ruff: noqa: D102 - names of methods say what they make

from __future__ import annotations

import contextlib
import queue
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
from typing_extensions import override

from rlsrl.data.inference import InferenceLayout, RolloutRequest, RolloutResult
from rlsrl.data.specs import ArraySpec
from rlsrl.data.version import INITIAL, Version
from rlsrl.rpc.in_thread import WaitingLoop
from rlsrl.rpc.tls import Tls, tls_from_environment
from rlsrl.streams.grpc_inference.client import GrpcInferenceClient, InferenceClientOptions
from rlsrl.streams.grpc_inference.server import GrpcInferenceServer
from rlsrl.streams.inference import InferenceBatch, InferenceClient, InferenceServer
from rlsrl.streams.protocols import StreamError
from rlsrl.testing.inline_inference import InlineInferenceChannel, InlineInferenceClient, InlineInferenceServer
from rlsrl.testing.servers import free_address

TOKEN = "token-of-the-tests"
DEADLINE = 60.0
"""Longest wait for an event, in seconds. A passing test never reaches it."""
TICK = 0.005
"""Seconds between two checks of a condition without an event."""
EVERYTHING = 1 << 20
"""More lanes than ever wait."""


class ObservableServer(InferenceServer, Protocol):
    """A server under test."""

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for a batch."""


class InferenceTransport(Protocol):
    """Makes both ends of a stream. The constructor has no arguments: each process makes its own transport."""

    def new_address(self) -> str:
        """Return an unused address."""

    def server(self, address: str, *, layout: InferenceLayout, on_refused: Callable[[str], None]) -> ObservableServer:
        """Return a server at that address."""

    def client(self, addresses: Sequence[str], *, layout: InferenceLayout, **arguments: Any) -> InferenceClient:
        """Return a client of those servers. The arguments are those of ``InferenceClientOptions``."""


class InlineInferenceTransport:
    """The test double within one process, with one server."""

    def __init__(self) -> None:
        self._channels: dict[str, InlineInferenceChannel] = {}

    def _channel(self, address: str) -> InlineInferenceChannel:
        return self._channels.setdefault(address, InlineInferenceChannel(address))

    def new_address(self) -> str:
        return uuid.uuid4().hex

    def server(self, address: str, *, layout: InferenceLayout, on_refused: Callable[[str], None]) -> ObservableServer:
        return InlineInferenceServer(self._channel(address), layout=layout, on_refused=on_refused)

    def client(self, addresses: Sequence[str], *, layout: InferenceLayout, **arguments: Any) -> InferenceClient:
        del arguments
        return InlineInferenceClient(self._channel(addresses[0]), layout=layout)


class UnixInferenceTransport:
    """gRPC over abstract unix sockets."""

    def new_address(self) -> str:
        return f"unix-abstract:rlsrl-test-{uuid.uuid4().hex}"

    def server(self, address: str, *, layout: InferenceLayout, on_refused: Callable[[str], None]) -> ObservableServer:
        return GrpcInferenceServer(address, token=TOKEN, layout=layout, on_refused=on_refused, tls=self.tls())

    def client(self, addresses: Sequence[str], *, layout: InferenceLayout, **arguments: Any) -> InferenceClient:
        options = InferenceClientOptions(layout=layout, **({"token": TOKEN, "tls": self.tls()} | arguments))
        return GrpcInferenceClient(addresses, options)

    def tls(self) -> Tls | None:
        """Return the certificates of both ends."""
        return None


class TcpInferenceTransport(UnixInferenceTransport):
    """gRPC over TCP."""

    @override
    def new_address(self) -> str:
        return free_address()


class TlsInferenceTransport(TcpInferenceTransport):
    """gRPC over TLS, with the certificates that the environment names, as in a worker."""

    @override
    def tls(self) -> Tls | None:
        return tls_from_environment()


def small_layout(*, features: int = 3, state: int = 0) -> InferenceLayout:
    """Return the layout of the tests' requests, with ``state`` numbers of recurrent state."""
    return InferenceLayout(
        observation={"observation": ArraySpec(shape=(features,), dtype="float32")},
        distribution_size=2,
        state={"memory": ArraySpec(shape=(state,), dtype="float32")} if state else {},
    )


def request(value: int, *, num_lanes: int = 2, min_version: Version = INITIAL) -> RolloutRequest:
    """Return a request whose observation is ``value`` everywhere."""
    observation = np.full((num_lanes, 3), value, np.float32)
    return RolloutRequest(observation={"observation": observation}, min_version=min_version)


def value_of(asked: RolloutRequest) -> int:
    """Return the value of a ``request``; fail unless it is the same everywhere."""
    observation = asked.observation["observation"]
    value = int(observation.flat[0])
    assert (observation == value).all()
    return value


def result(value: int, *, num_lanes: int = 2, version: Version = INITIAL) -> RolloutResult:
    """Return the answer to ``request(value)``: the value and each lane's number."""
    distribution = np.empty((num_lanes, 2), np.float32)
    distribution[:, 0], distribution[:, 1] = value, np.arange(num_lanes)
    return RolloutResult(distribution=distribution, version=version)


def answer_of(answer: RolloutResult) -> int:
    """Return the value of a ``result``; fail if a lane is missing or has another value."""
    value = int(answer.distribution[0, 0])
    num_lanes = len(answer.distribution)
    assert np.array_equal(answer.distribution, result(value, num_lanes=num_lanes).distribution)
    return value


def answer(batch: InferenceBatch) -> list[int]:
    """Answer a batch with ``result``; return the values of its requests."""
    values = [value_of(asked) for asked in batch.requests]
    batch.respond(
        [
            result(value, num_lanes=asked.num_lanes, version=asked.min_version)
            for value, asked in zip(values, batch.requests, strict=True)
        ]
    )
    return values


def until(happened: Callable[[], bool]) -> None:
    """Wait until ``happened`` returns True."""
    deadline, pause = time.monotonic() + DEADLINE, threading.Event()
    while not happened():
        assert time.monotonic() < deadline, "the awaited event did not happen"
        pause.wait(TICK)


T = TypeVar("T")


class _Driver:
    """A thread that runs one client after another. They share its event loop, since gRPC keeps every loop for good."""

    _idle: ClassVar[list[_Driver]] = []

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="driver", daemon=True).start()

    @classmethod
    def idle(cls) -> _Driver:
        """Return a driver without work."""
        return cls._idle.pop() if cls._idle else cls()

    def start(self, work: Callable[[], None]) -> Future[None]:
        """Run ``work``. Once the future is done the driver is idle again."""
        done: Future[None] = Future()

        def drive() -> None:
            try:
                work()
            except BaseException as error:
                done.set_exception(error)
                raise
            # Callbacks that are ready would otherwise stay until the next client, and keep gRPC's objects alive.
            WaitingLoop.of_this_thread().run_for(TICK)
            self._idle.append(self)
            done.set_result(None)

        self._work.put(drive)
        return done

    def _run(self) -> None:
        while True:
            self._work.get()()


class DrivenClient:
    """A client with a thread that owns it and always waits for answers, so that futures are set at once."""

    def __init__(self, make: Callable[[], InferenceClient]) -> None:
        self._actions: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._asked: dict[int, Future[RolloutResult]] = {}
        self._is_closed = False
        made: Future[InferenceClient] = Future()
        self._driving = _Driver.idle().start(lambda: self._drive(make, made))
        self._client = made.result(DEADLINE)

    def submit(self, request: RolloutRequest) -> Future[RolloutResult]:
        return self._do(lambda: self._submit(request))

    def submit_all(self, requests: Sequence[RolloutRequest]) -> list[Future[RolloutResult]]:
        """Submit all requests before any is sent."""
        return self._do(lambda: [self._submit(request) for request in requests])

    def close(self) -> None:
        """Close the client. Unanswered requests are dropped."""
        if not self._driving.done():
            self._do(self._close)
        self._driving.result(DEADLINE)

    def _do(self, action: Callable[[], T]) -> T:
        """Run ``action`` in the client's thread, or in this thread after the client's has ended."""
        done: Future[T] = Future()
        self._actions.put(lambda: _resolve(done, action))
        if self._driving.done():
            self._run_actions()
        return done.result(DEADLINE)

    def _submit(self, request: RolloutRequest) -> Future[RolloutResult]:
        future = self._asked[self._client.submit(request)] = Future()
        return future

    def _close(self) -> None:
        self._is_closed = True
        self._client.close()

    def _drive(self, make: Callable[[], InferenceClient], made: Future[InferenceClient]) -> None:
        _resolve(made, make)
        client = made.result()
        while not self._is_closed:
            self._run_actions()
            try:
                answers = client.wait(TICK)
            except StreamError as error:
                for future in self._asked.values():
                    future.set_exception(error)
                self._asked.clear()
                time.sleep(TICK)
                continue
            for number, result in answers:
                future = self._asked.pop(number)
                if isinstance(result, Exception):
                    future.set_exception(result)
                else:
                    future.set_result(result)

    def _run_actions(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._actions.get_nowait()()


def _resolve(future: Future[T], action: Callable[[], T]) -> None:
    try:
        future.set_result(action())
    except Exception as error:  # noqa: BLE001 - the future's reader raises it
        future.set_exception(error)


class InferenceBench:
    """Servers and clients at one address, closed together."""

    def __init__(self, transport: InferenceTransport, *, address: str | None = None) -> None:
        self.transport = transport
        self.address = address or transport.new_address()
        self.refused: Counter[str] = Counter()
        """Number of refused clients by kind."""
        self._ends: list[InferenceServer | InferenceClient | DrivenClient] = []

    def server(self, address: str | None = None, layout: InferenceLayout | None = None) -> ObservableServer:
        server = self.transport.server(
            address or self.address, layout=layout or small_layout(), on_refused=self._count_refused
        )
        self._ends.append(server)
        return server

    def client(self, *addresses: str, **arguments: Any) -> DrivenClient:
        client = DrivenClient(lambda: self._make(*addresses, **arguments))
        self._ends.append(client)
        return client

    def own_client(self, **arguments: Any) -> InferenceClient:
        """Return a client that belongs to the calling thread."""
        client = self._make(**arguments)
        self._ends.append(client)
        return client

    def _make(self, *addresses: str, layout: InferenceLayout | None = None, **arguments: Any) -> InferenceClient:
        return self.transport.client(addresses or (self.address,), layout=layout or small_layout(), **arguments)

    def close(self) -> None:
        for end in reversed(self._ends):
            end.close()

    def _count_refused(self, kind: str) -> None:
        self.refused[kind] += 1


def serve(server: InferenceServer, stop: threading.Event) -> None:
    """Answer every request until ``stop`` is set."""
    while not stop.is_set():
        if (batch := server.next_batch(EVERYTHING, timeout=0.05)) is not None:
            answer(batch)
