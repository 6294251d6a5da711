"""The sample stream within one process: the twin of the transports, for tests and for programs of one process.

Messages are the same and pass through queues; slots are ordinary memory. Both ends belong to a channel, which stands
for the address: a consumer binds it, a later one can take its place, producers find whoever is bound.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from rlsrl.data.slots import ProducerId, Slot, SlotLayout
from rlsrl.data.version import Version
from rlsrl.runtime.clock import Clock, SystemClock
from rlsrl.runtime.ledger import Posted as LedgerEntry
from rlsrl.streams.credits import Credit
from rlsrl.streams.handshake import Posted, Refusal, Welcome, refusal_to_json
from rlsrl.streams.intake import Intake, Violation
from rlsrl.streams.outbox import Outbox
from rlsrl.streams.protocols import ConsumerLedger, ProducerLedger, StreamClosed, StreamTimeout


class InlineChannel:
    """Where an ``InlineConsumer`` and its ``InlineProducer``s meet."""

    def __init__(self, name: str = "inline") -> None:
        self.name = name
        self.changed = threading.Condition()
        """Guards both ends; notified of every message, end and binding."""
        self.consumer: InlineConsumer | None = None
        """Whoever serves now."""


class _Memory:
    """One connection's slots, and its producer's word of progress."""

    def __init__(self, layout: SlotLayout, num_slots: int) -> None:
        self.slots: list[dict[str, NDArray[Any]]] = [layout.view(bytearray(layout.nbytes)) for _ in range(num_slots)]
        self.progress = 0


class _Wire:
    """A connection: what is on its way to the producer, and whether it has ended. The channel's lock guards it."""

    def __init__(self, consumer: InlineConsumer) -> None:
        self.consumer = consumer
        self.number: int | None = None
        self.memory: _Memory | None = None
        self.to_producer: deque[Mapping[str, Any] | Credit | int] = deque()
        """An answer to the handshake, a credit, or a sequence that is acknowledged."""
        self.ended = False

    def arrays(self, place: int) -> dict[str, NDArray[Any]]:
        assert self.memory is not None, "admitted before it is posted over"  # noqa: S101 - an invariant of our own
        return self.memory.slots[place]

    def post(self, place: int, credit: int, sequence: int, num_transitions: int) -> None:
        self.consumer.deliver(self, (place, credit, sequence, num_transitions))


_Message = Mapping[str, Any] | tuple[int, int, int, int] | None
"""To the consumer: a hello, a post (place, credit, sequence, num_transitions), or None for the end."""


class InlineConsumer:
    """Implements ``SampleConsumer``; see ``SharedMemoryConsumer``, whose arguments it shares."""

    def __init__(
        self,
        channel: InlineChannel,
        *,
        token: str,
        layout_digest: str,
        ledger: ConsumerLedger,
        slots_per_producer: int = 2,
        peer_timeout: float = 10.0,
        expected_producers: int = 0,
        startup_timeout: float = 30.0,
        clock: Clock | None = None,
    ) -> None:
        """Bind the channel.

        Raises:
            OSError: another consumer serves it.
        """
        self._channel = channel
        self._changed = channel.changed
        self._now = (clock or SystemClock()).monotonic
        self._intake: Intake[_Memory] = Intake(
            token=token,
            layout_digest=layout_digest,
            ledger=ledger,
            slots_per_producer=slots_per_producer,
            peer_timeout=peer_timeout,
            expected_producers=expected_producers,
            startup_timeout=startup_timeout,
            now=self._now(),
        )
        self._wires: dict[int, _Wire] = {}
        self._inbox: deque[tuple[_Wire, _Message]] = deque()
        self._closed = False
        with self._changed:
            if channel.consumer is not None:
                raise OSError(f"channel {channel.name} is served already")
            channel.consumer = self
            self._changed.notify_all()

    def grant(self, num_lanes: int, min_version: Version) -> None:
        """See ``SampleConsumer.grant``. Any thread; never waits."""
        with self._changed:
            self._intake.grant(num_lanes, min_version)
            self._issue()

    def receive(self, max_items: int, timeout: float) -> Sequence[Slot]:
        """See ``SampleConsumer.receive``."""
        deadline = self._now() + timeout
        with self._changed:
            while not self._closed:
                self._serve()
                if self._intake.has_arrivals or (now := self._now()) >= deadline:
                    break
                self._changed.wait(max(0.0, min(deadline, self._intake.next_duty) - now))
            return self._intake.hand_out(max_items)

    def release(self, slot: Slot) -> None:
        """See ``SampleConsumer.release``."""
        with self._changed:
            self._intake.release(slot)
            self._issue()

    @property
    def outstanding(self) -> tuple[int, ...]:
        """See ``SampleConsumer.outstanding``."""
        with self._changed:
            return self._intake.outstanding

    @property
    def producers(self) -> tuple[ProducerId, ...]:
        """See ``SampleConsumer.producers``."""
        with self._changed:
            return self._intake.producers

    @property
    def counters(self) -> Mapping[str, int]:
        """See ``SharedMemoryConsumer.counters``."""
        with self._changed:
            return dict(self._intake.counters)

    def close(self) -> None:
        """See ``SampleConsumer.close``."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._channel.consumer = None
            for wire, _ in self._inbox:
                wire.ended = True
            for number in [*self._wires]:
                self._drop(number, "closed")
            self._changed.notify_all()

    def deliver(self, wire: _Wire, message: _Message) -> None:
        """Put a producer's message into the inbox; what comes over a wire that has ended goes nowhere."""
        with self._changed:
            if not wire.ended:
                self._inbox.append((wire, message))
                wire.ended = message is None
                self._changed.notify_all()

    # What follows runs under the channel's lock.

    def _serve(self) -> None:
        self._read_inbox()
        for number in self._intake.attend(self._now(), lambda memory: memory.progress):
            self._drop(number, "silent")
        self._issue()

    def _read_inbox(self) -> None:
        while self._inbox:
            wire, message = self._inbox.popleft()
            if isinstance(message, Mapping):
                self._greet(wire, message)
            elif wire.number in self._wires:
                self._read(wire.number, message)

    def _greet(self, wire: _Wire, message: Mapping[str, Any]) -> None:
        try:
            hello, rival = self._intake.read_hello(message)
            if rival is not None:
                self._drop(rival, "replaced")
            wire.memory, wire.number, welcome = self._intake.admit(hello, _Memory)
            self._wires[wire.number] = wire
            self._tell(wire, welcome.to_json())
        except Refusal as refusal:
            self._intake.refused(refusal)
            self._tell(wire, refusal_to_json(refusal))

    def _read(self, number: int, message: tuple[int, int, int, int] | None) -> None:
        if message is None:
            self._drop(number, "gone")
            return
        place, order, sequence, num_transitions = message
        try:
            self._intake.take(number, place=place, order=order, sequence=sequence, num_transitions=num_transitions)
        except Violation:
            self._drop(number, "violation")
        else:
            self._tell(self._wires[number], sequence)

    def _issue(self) -> None:
        for credit in self._intake.issue():
            self._tell(self._wires[credit.connection], credit)

    def _tell(self, wire: _Wire, message: Mapping[str, Any] | Credit | int) -> None:
        wire.to_producer.append(message)
        self._changed.notify_all()

    def _drop(self, number: int, reason: str) -> None:
        self._wires.pop(number).ended = True
        self._intake.drop(number, reason)
        self._changed.notify_all()


class InlineProducer:
    """Implements ``SampleProducer``; see ``SharedMemoryProducer``, whose arguments it shares."""

    def __init__(
        self,
        channel: InlineChannel,
        *,
        token: str,
        layout: SlotLayout,
        producer_id: ProducerId,
        ledger: ProducerLedger,
        previous: Sequence[LedgerEntry] = (),
        on_settled: Callable[[], None] = lambda: None,
        clock: Clock | None = None,
    ) -> None:
        """Prepare to connect to whoever serves the channel."""
        self._channel = channel
        self._changed = channel.changed
        self._token = token
        self._now = (clock or SystemClock()).monotonic
        self._outbox = Outbox(
            producer=producer_id, layout=layout, ledger=ledger, previous=previous, on_settled=on_settled
        )
        self._wire: _Wire | None = None
        self._touches = 0
        self._closed = False

    def acquire(self, timeout: float) -> Slot:
        """See ``SampleProducer.acquire``."""
        deadline = self._now() + timeout
        with self._changed:
            self._advance()
            while (slot := self._outbox.take_credit()) is None:
                self._wait(deadline, "no credit came")
            return slot

    def post(self, slot: Slot) -> None:
        """See ``SampleProducer.post``."""
        with self._changed:
            self._check_open()
            self._outbox.post(slot)

    def touch(self) -> None:
        """See ``SampleProducer.touch``."""
        self._touches += 1
        if self._wire is not None and self._wire.memory is not None:
            self._wire.memory.progress = self._touches

    def flush(self, timeout: float) -> None:
        """See ``SampleProducer.flush``."""
        deadline = self._now() + timeout
        with self._changed:
            self._advance()
            while self._outbox.unacknowledged:
                self._wait(deadline, f"{len(self._outbox.unacknowledged)} slots were not acknowledged")

    @property
    def unacknowledged(self) -> tuple[Posted, ...]:
        """See ``SampleProducer.unacknowledged``."""
        return self._outbox.unacknowledged

    def close(self) -> None:
        """See ``SampleProducer.close``."""
        with self._changed:
            self._closed = True
            if self._wire is not None:
                self._wire.consumer.deliver(self._wire, None)
            self._disconnect()
            self._changed.notify_all()

    # What follows runs under the channel's lock.

    def _check_open(self) -> None:
        if self._closed:
            raise StreamClosed(f"this producer of {self._channel.name} was closed")

    def _wait(self, deadline: float, complaint: str) -> None:
        now = self._now()
        if now >= deadline:
            raise StreamTimeout(f"sample stream {self._channel.name}: {complaint} in time")
        self._changed.wait(deadline - now)
        self._advance()

    def _advance(self) -> None:
        """Do what can be done without waiting: read, be admitted, connect."""
        self._check_open()
        while self._wire is not None and self._wire.to_producer:
            self._read(self._wire, self._wire.to_producer.popleft())
        if self._wire is not None and self._wire.ended:
            self._disconnect()
        if self._wire is None and self._channel.consumer is not None:
            self._wire = _Wire(self._channel.consumer)
            self._wire.consumer.deliver(self._wire, self._outbox.hello().to_json(self._token))

    def _read(self, wire: _Wire, message: Mapping[str, Any] | Credit | int) -> None:
        if isinstance(message, Credit):
            self._outbox.credited(message.slot, message.order, message.min_version)
        elif isinstance(message, int):
            self._outbox.acknowledged(message)
        else:
            try:
                self._outbox.connected(Welcome.from_json(message, stream=self._channel.name), wire)
            except BaseException:
                self._disconnect()
                raise

    def _disconnect(self) -> None:
        self._wire = None
        self._outbox.disconnected()
