"""The sample stream within one process: the twin of the transports, for tests and for programs of one process.

Messages are the same and pass through queues; slots are ordinary memory. Both ends belong to a channel, which stands
for the address: a consumer binds it, a later one can take its place, producers find whoever is bound.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Self

from numpy.typing import NDArray

from rlsrl.data.slots import ProducerId, Slot, SlotLayout
from rlsrl.runtime.clock import Clock, SystemClock
from rlsrl.runtime.ledger import ProducerProgress
from rlsrl.streams.credits import Credit
from rlsrl.streams.handshake import Posted, Welcome, refusal_to_json
from rlsrl.streams.inbox import ConsumerMessage, InboxConsumer, Post, ProducerConnection
from rlsrl.streams.producer_state import ProducerState
from rlsrl.streams.protocols import ConsumerLedger, ProducerLedger, StreamClosed, StreamTimeout


class InlineChannel:
    """Where an ``InlineConsumer`` and its ``InlineProducer``s meet."""

    def __init__(self, name: str = "inline") -> None:
        self.name = name
        self.changed = threading.Condition()
        """Guards both ends; notified of every message, end and binding."""
        self.consumer: InlineConsumer | None = None
        """Whoever serves now."""


class _InlineConnection(ProducerConnection):
    """A connection: its slots, and what is on its way to the producer. The channel's lock guards it."""

    def __init__(self, consumer: InlineConsumer) -> None:
        super().__init__()
        self.consumer = consumer
        self.to_producer: deque[ConsumerMessage] = deque()
        self.touches = 0

    def allocate(self, layout: SlotLayout, num_slots: int) -> Self:
        self.slots = [layout.view(bytearray(layout.nbytes)) for _ in range(num_slots)]
        return self

    def fill(self, post: Post) -> None:
        del post  # it was filled in place

    def emptied(self, place: int) -> None:
        del place  # its arrays stay where they are

    @property
    def progress(self) -> int:
        return self.touches

    def tell(self, answer: ConsumerMessage) -> None:
        self.to_producer.append(answer)
        self.consumer.notify()

    def hang_up(self, reason: str) -> None:
        del reason  # the producer sees that the connection has ended
        self.consumer.notify()

    def arrays(self, place: int) -> dict[str, NDArray[Any]]:
        return self.slots[place]

    def post(self, place: int, credit: int, sequence: int, num_transitions: int, total: int) -> None:
        self.consumer.deliver(self, Post(place, credit, sequence, num_transitions, total))


class InlineConsumer(InboxConsumer):
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
        super().__init__(
            token=token,
            layout_digest=layout_digest,
            ledger=ledger,
            slots_per_producer=slots_per_producer,
            peer_timeout=peer_timeout,
            expected_producers=expected_producers,
            startup_timeout=startup_timeout,
            clock=clock,
            changed=channel.changed,
        )
        self._channel = channel
        with self._changed:
            if channel.consumer is not None:
                raise OSError(f"channel {channel.name} is served already")
            channel.consumer = self
            self._changed.notify_all()

    def notify(self) -> None:
        """Let whoever waits at this channel look again. Its lock is held."""
        self._changed.notify_all()

    def close(self) -> None:
        """See ``SampleConsumer.close``."""
        with self._changed:
            if self._channel.consumer is self:
                self._channel.consumer = None
            super().close()


class InlineProducer:
    """Implements ``SampleProducer``; see ``ConnectingProducer``, whose arguments it shares."""

    def __init__(
        self,
        channel: InlineChannel,
        *,
        token: str,
        layout: SlotLayout,
        producer_id: ProducerId,
        ledger: ProducerLedger,
        progress: ProducerProgress = ProducerProgress(),
        on_settled: Callable[[], None] = lambda: None,
        clock: Clock | None = None,
    ) -> None:
        """Prepare to connect to whoever serves the channel."""
        self._channel = channel
        self._changed = channel.changed
        self._token = token
        self._now = (clock or SystemClock()).monotonic
        self._state = ProducerState(
            producer=producer_id, layout=layout, ledger=ledger, progress=progress, on_settled=on_settled
        )
        self._connection: _InlineConnection | None = None
        self._touches = 0
        self._closed = False

    def acquire(self, timeout: float) -> Slot:
        """See ``SampleProducer.acquire``."""
        deadline = self._now() + timeout
        with self._changed:
            self._advance()
            while (slot := self._state.take_credit()) is None:
                self._wait(deadline, "no credit came")
            return slot

    def post(self, slot: Slot) -> None:
        """See ``SampleProducer.post``."""
        with self._changed:
            self._check_open()
            self._state.post(slot)

    def touch(self) -> None:
        """See ``SampleProducer.touch``."""
        self._touches += 1
        if self._connection is not None:
            self._connection.touches = self._touches

    def flush(self, timeout: float) -> None:
        """See ``SampleProducer.flush``."""
        deadline = self._now() + timeout
        with self._changed:
            self._advance()
            while self._state.unacknowledged:
                self._wait(deadline, f"{len(self._state.unacknowledged)} slots were not acknowledged")

    @property
    def unacknowledged(self) -> tuple[Posted, ...]:
        """See ``SampleProducer.unacknowledged``."""
        return self._state.unacknowledged

    def close(self) -> None:
        """See ``SampleProducer.close``."""
        with self._changed:
            self._closed = True
            if self._connection is not None:
                self._connection.consumer.deliver(self._connection, None)
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
        while self._connection is not None and self._connection.to_producer:
            self._read(self._connection, self._connection.to_producer.popleft())
        if self._connection is not None and self._connection.ended:
            self._disconnect()
        if self._connection is None and self._channel.consumer is not None:
            self._connection = _InlineConnection(self._channel.consumer)
            self._connection.consumer.deliver(self._connection, self._state.hello().to_json(self._token))

    def _read(self, connection: _InlineConnection, answer: ConsumerMessage) -> None:
        if isinstance(answer, Credit):
            self._state.credited(answer.slot, answer.order, answer.min_version)
        elif isinstance(answer, int):
            self._state.acknowledged(answer)
        else:
            message = answer.to_json() if isinstance(answer, Welcome) else refusal_to_json(answer)
            try:
                self._state.connected(Welcome.from_json(message, stream=self._channel.name), connection)
            except BaseException:
                self._disconnect()
                raise

    def _disconnect(self) -> None:
        self._connection = None
        self._state.disconnected()
