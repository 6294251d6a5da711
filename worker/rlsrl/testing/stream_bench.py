"""Both ends of a sample stream with their ledgers, driven from one thread.

Used by the conformance suite (``sample_streams``) and by the processes that it starts (``sample_stream_end``). It does
not import the test runner, so that the processes start fast.
"""

# ruff: noqa: D102 - methods make what they are called; what is asserted are the tests' own claims

from __future__ import annotations

import math
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from typing_extensions import override

from rlsrl.data.slots import ProducerId, Slot, SlotLayout, rollout_layout
from rlsrl.data.specs import ActionSpec, ArraySpec, EnvSpec
from rlsrl.data.version import Version
from rlsrl.rpc.tls import tls_from_environment
from rlsrl.runtime.clock import SystemClock
from rlsrl.runtime.ledger import ActorLedger, Balance, LedgerPage, TrainerLedger, balance, read_pages
from rlsrl.streams.consumer_core import ConsumerOptions
from rlsrl.streams.grpc_samples.consumer import GrpcSampleConsumer
from rlsrl.streams.grpc_samples.producer import GrpcSampleProducer
from rlsrl.streams.producer_core import ProducerOptions
from rlsrl.streams.protocols import SampleConsumer, SampleProducer, StreamTimeout
from rlsrl.streams.shared_memory.consumer import SharedMemoryConsumer
from rlsrl.streams.shared_memory.producer import SharedMemoryProducer
from rlsrl.testing.clock import ManualClock
from rlsrl.testing.inline_samples import InlineChannel, InlineConsumer, InlineProducer
from rlsrl.testing.servers import free_address

TOKEN = "token-of-the-tests"
V1 = Version(1, 1)
NUM_STEPS = 3
NUM_LANES = 2
TRANSITIONS = NUM_STEPS * NUM_LANES
"""Transitions of one full slot with ``NUM_LANES`` lanes."""
DEADLINE = 60.0
"""Longest wait for an event, in seconds. A passing test never reaches it."""


class ObservableConsumer(SampleConsumer, Protocol):
    """A consumer under test."""

    @property
    def counters(self) -> Mapping[str, int]:
        """See ``ConsumerCore.counters``."""


class Transport(Protocol):
    """Makes both ends of a stream. The constructor has no arguments: each process makes its own transport."""

    posts_outlive_producers: bool
    """Whether a posted slot has left its producer when ``post`` returns, so that a kill cannot lose it."""
    delay: float
    """Seconds between two checks for messages in transit, in tests with a clock that stands still."""

    def new_address(self) -> str:
        """Return an unused address."""

    def consumer(self, address: str, options: ConsumerOptions) -> ObservableConsumer:
        """Return a consumer that serves ``address``."""

    def producer(self, address: str, options: ProducerOptions) -> SampleProducer:
        """Return a producer for the consumer at ``address``."""

    def has_heard(self, consumer: ObservableConsumer, producer: SampleProducer, name: ProducerId) -> bool:
        """Return whether the producer's last touch has reached the consumer."""

    def has_lost(self, producer: SampleProducer) -> bool:
        """Return whether the producer has noticed that its consumer is gone."""


class _ByName:
    """A transport with names as addresses, whose ends share memory."""

    posts_outlive_producers = True
    delay = 0.0

    def new_address(self) -> str:
        return f"rlsrl-test-{uuid.uuid4().hex}"

    def has_heard(self, consumer: ObservableConsumer, producer: SampleProducer, name: ProducerId) -> bool:
        del consumer, producer, name
        return True

    def has_lost(self, producer: SampleProducer) -> bool:
        del producer
        return True


class InlineTransport(_ByName):
    """The test double within one process."""

    def __init__(self) -> None:
        self._channels: dict[str, InlineChannel] = {}

    def _channel(self, address: str) -> InlineChannel:
        return self._channels.setdefault(address, InlineChannel(address))

    def consumer(self, address: str, options: ConsumerOptions) -> ObservableConsumer:
        return InlineConsumer(self._channel(address), options)

    def producer(self, address: str, options: ProducerOptions) -> SampleProducer:
        return InlineProducer(self._channel(address), options)


class SharedMemoryTransport(_ByName):
    """Shared memory between processes of one machine."""

    def consumer(self, address: str, options: ConsumerOptions) -> ObservableConsumer:
        return SharedMemoryConsumer(address, options)

    def producer(self, address: str, options: ProducerOptions) -> SampleProducer:
        return SharedMemoryProducer(address, options)


class UnixTransport:
    """gRPC over abstract unix sockets."""

    posts_outlive_producers = False
    delay = 0.001

    def new_address(self) -> str:
        return f"unix-abstract:rlsrl-test-{uuid.uuid4().hex}"

    def consumer(self, address: str, options: ConsumerOptions) -> ObservableConsumer:
        return GrpcSampleConsumer(address, options)

    def producer(self, address: str, options: ProducerOptions) -> SampleProducer:
        return GrpcSampleProducer(address, options)

    def has_heard(self, consumer: ObservableConsumer, producer: SampleProducer, name: ProducerId) -> bool:
        assert isinstance(consumer, GrpcSampleConsumer)
        assert isinstance(producer, GrpcSampleProducer)
        return consumer.touches.get(name) == producer.touches

    def has_lost(self, producer: SampleProducer) -> bool:
        assert isinstance(producer, GrpcSampleProducer)
        return producer.retries_at < math.inf


class TcpTransport(UnixTransport):
    """gRPC over TCP."""

    @override
    def new_address(self) -> str:
        return free_address()


class TlsTransport(TcpTransport):
    """gRPC over TLS, with the certificates that the environment names, as in a worker."""

    @override
    def consumer(self, address: str, options: ConsumerOptions) -> ObservableConsumer:
        return GrpcSampleConsumer(address, options, tls=tls_from_environment())

    @override
    def producer(self, address: str, options: ProducerOptions) -> SampleProducer:
        return GrpcSampleProducer(address, options, tls=tls_from_environment())


def small_layout(*, num_lanes: int = NUM_LANES, num_steps: int = NUM_STEPS, observation: int = 4) -> SlotLayout:
    """Return the layout of the tests' slots."""
    env = EnvSpec(
        observation={"observation": ArraySpec(shape=(observation,), dtype="float32")},
        action=ActionSpec(kind="discrete", array=ArraySpec(shape=(), dtype="int64"), num_actions=2),
    )
    return rollout_layout(env, num_steps=num_steps, num_lanes=num_lanes)


def fill(slot: Slot, value: int) -> Slot:
    """Write ``value`` into every array, make every step a transition, and set ``num_transitions``."""
    for name, array in slot.arrays.items():
        array[...] = True if array.dtype == bool else value
        assert name == "mask" or array.dtype != object
    slot.num_transitions = int(slot.arrays["mask"].sum())
    return slot


def value_of(slot: Slot) -> int:
    """Return the value that ``fill`` wrote; fail unless every array holds it."""
    value = int(slot.arrays["reward"].flat[0])
    for name, array in slot.arrays.items():
        assert (array == (True if array.dtype == bool else value)).all(), f"{name} is not {value} everywhere"
    return value


def _tries(complaint: str) -> Iterator[None]:
    """Yield until the deadline, then fail with the complaint."""
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline:
        yield
    raise AssertionError(complaint)


class StreamBench:
    """Both ends of one stream with their ledgers in a folder, driven from one thread."""

    def __init__(
        self, transport: Transport, folder: Path, *, address: str | None = None, clock: ManualClock | None = None
    ) -> None:
        self.address = address or transport.new_address()
        self.clock = clock
        self.received: list[Slot] = []
        self._transport = transport
        self._folder = folder
        self._pages: dict[str, LedgerPage] = {}
        self._ends: list[SampleConsumer | SampleProducer] = []
        self._names: dict[SampleProducer, ProducerId] = {}
        self._kept_alive: list[SampleProducer] = []
        self._pause = threading.Event()
        # With a clock that stands still a call with a timeout above 0 never returns.
        self._tick = 0.002 if clock is None else 0.0

    def trainer_page(self) -> LedgerPage:
        """Return the consumer's ledger page."""
        return self._page("trainer", 0)

    def trainer_ledger(self) -> TrainerLedger:
        """Return the consumer's ledger."""
        return TrainerLedger(self.trainer_page())

    def actor_page(self, index: int) -> LedgerPage:
        """Return a producer's ledger page."""
        return self._page("actor", index)

    def actor_ledger(self, index: int) -> ActorLedger:
        """Return a producer's ledger."""
        return ActorLedger(self.actor_page(index))

    def _page(self, role: str, index: int) -> LedgerPage:
        name = f"{role}-{index}.page"
        if name not in self._pages:
            self._pages[name] = LedgerPage.open(self._folder / name, role, index)
        return self._pages[name]

    def consumer(self, *, granted: int = 0, **arguments: Any) -> ObservableConsumer:
        """Return a new consumer that has granted slots of version ``V1``; further arguments are ``ConsumerOptions``."""
        defaults: dict[str, Any] = {
            "token": TOKEN,
            "layout_digest": small_layout().step_digest,
            "ledger": self.trainer_ledger(),
            "clock": self.clock or SystemClock(),
        }
        consumer = self._transport.consumer(self.address, ConsumerOptions(**(defaults | arguments)))
        self._ends.append(consumer)
        if granted:
            consumer.grant(granted * NUM_LANES, V1)
        return consumer

    def producer(
        self, index: int = 0, incarnation: int = 0, *, num_lanes: int = NUM_LANES, **arguments: Any
    ) -> SampleProducer:
        defaults: dict[str, Any] = {
            "token": TOKEN,
            "layout": small_layout(num_lanes=num_lanes),
            "producer_id": ProducerId(index, incarnation),
            "clock": self.clock or SystemClock(),
        }
        if "ledger" not in arguments:
            ledger = self.actor_ledger(index)
            ledger.begin(incarnation)
            defaults |= {
                "ledger": ledger,
                "progress": ledger.progress(),
                "on_settled": lambda: ledger.forget_settled(incarnation),
            }
        producer = self._transport.producer(self.address, ProducerOptions(**(defaults | arguments)))
        self._names[producer] = ProducerId(index, incarnation)
        self._ends.append(producer)
        return producer

    def touch(self, consumer: ObservableConsumer, producer: SampleProducer) -> None:
        """Touch the producer, and serve until the touch has reached the consumer."""
        producer.touch()
        self.until(consumer, lambda: self._transport.has_heard(consumer, producer, self._names[producer]))

    def keep_alive(self, producer: SampleProducer) -> None:
        """Touch the producer at each ``serve``, so that a slow machine does not make it look silent."""
        self._kept_alive.append(producer)

    def serve(self, consumer: SampleConsumer) -> None:
        """Let the consumer handle the messages that have arrived."""
        for producer in self._kept_alive:
            producer.touch()
        self.received += consumer.receive(64, self._tick)
        if self.clock is not None and self._transport.delay:
            self._pause.wait(self._transport.delay)

    def until(self, consumer: SampleConsumer, happened: Callable[[], bool]) -> None:
        """Serve until ``happened`` returns True."""
        tries = _tries("the awaited event did not happen")
        while not happened():
            next(tries)
            self.serve(consumer)

    def take(self, consumer: SampleConsumer, count: int) -> list[Slot]:
        """Serve until ``count`` slots have arrived, and return them."""
        self.until(consumer, lambda: len(self.received) >= count)
        taken, self.received = self.received[:count], self.received[count:]
        return taken

    def try_acquire(self, consumer: SampleConsumer, producer: SampleProducer) -> Slot | None:
        """Return a slot, or None if the producer gets no credit."""
        for _ in range(8):
            self.serve(consumer)
            with suppress(StreamTimeout):
                return producer.acquire(self._tick)
        return None

    def acquire(self, consumer: SampleConsumer, producer: SampleProducer) -> Slot:
        """Serve until the producer has a credit; return its slot."""
        return next(slot for _ in _tries("no credit came") if (slot := self.try_acquire(consumer, producer)))

    def connect(self, consumer: SampleConsumer, *producers: SampleProducer) -> None:
        """Connect producers for which there are no credits yet."""
        for producer in producers:
            before, tries = consumer.producers, _tries("the producer did not connect")
            while consumer.producers == before:
                assert self.try_acquire(consumer, producer) is None
                next(tries)

    def lose(self, producer: SampleProducer) -> None:
        """Wait until a producer notices that its consumer is gone. Until then it could still use its credits."""
        tries = _tries("the producer did not notice")
        producer.flush(0.0)  # no slot is unacknowledged, so this only reads messages
        while not self._transport.has_lost(producer):
            next(tries)
            self._pause.wait(0.001)
            producer.flush(0.0)

    def flush(self, consumer: SampleConsumer, producer: SampleProducer) -> None:
        """Serve until every posted slot is acknowledged."""
        tries = _tries("no acknowledgement came")
        while producer.unacknowledged:
            next(tries)
            self.serve(consumer)
            with suppress(StreamTimeout):
                producer.flush(self._tick)

    def until_settled(
        self, consumer: SampleConsumer, producer: SampleProducer, settled: Callable[[], bool] | None = None
    ) -> None:
        """Serve until the slots of former incarnations are settled, or until ``settled`` returns True."""
        done = settled or (lambda: self.balance().unsettled == 0)
        tries = _tries("the former incarnations were not settled")
        while not done():
            next(tries)
            self.try_acquire(consumer, producer)

    def balance(self, *, ended: bool = False) -> Balance:
        """Return the balance of all ledgers; fail if it does not add up."""
        books = balance(read_pages(self._folder), ended=ended)
        books.check()
        return books

    def close(self) -> None:
        """Close every end and ledger page."""
        for end in reversed(self._ends):
            end.close()
        for page in self._pages.values():
            page.close()
