"""The sample stream within one process: the transports' test double.

The messages are those of the transports and pass through queues. Slots are ordinary memory. Both ends belong to a
channel, which stands for the address: one consumer serves it at a time, and producers connect to that consumer.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from typing import Any

from numpy.typing import NDArray
from typing_extensions import override

from rlsrl.data.slots import SlotLayout
from rlsrl.rpc.back_off import BackOff
from rlsrl.streams.consumer_core import ConsumerMessage, ConsumerOptions, Post, ProducerConnection
from rlsrl.streams.credits import Credit
from rlsrl.streams.grpc_samples.consumer import InboxConsumer
from rlsrl.streams.handshake import Welcome, refusal_to_json
from rlsrl.streams.producer_core import ConnectingProducer, ProducerOptions


class InlineChannel:
    """The address of an ``InlineConsumer`` and its ``InlineProducer``s."""

    def __init__(self, name: str = "inline") -> None:
        self.name = name
        self.changed = threading.Condition()
        """Guards both ends. Notified of each change."""
        self.consumer: InlineConsumer | None = None
        """The consumer that serves the channel now."""
        self.num_changes = 0

    def notify(self) -> None:
        """Wake everything that waits at this channel. The lock is held."""
        self.num_changes += 1
        self.changed.notify_all()


class _InlineConnection(ProducerConnection):
    """A connection with its slots and its messages to the producer. The channel's lock guards it."""

    def __init__(self, channel: InlineChannel, consumer: InlineConsumer) -> None:
        super().__init__()
        self.consumer = consumer
        self.to_producer: deque[ConsumerMessage] = deque()
        self.touches = 0
        self._channel = channel
        self._slots: list[dict[str, NDArray[Any]]] = []

    @override
    def allocate(self, layout: SlotLayout, num_slots: int) -> None:
        self._slots = [layout.view(bytearray(layout.nbytes)) for _ in range(num_slots)]

    @override
    def arrays(self, post: Post | int) -> dict[str, NDArray[Any]]:
        """Return a slot's arrays, for both ends."""
        return self._slots[post if isinstance(post, int) else post.place]

    @property
    @override
    def progress(self) -> int:
        return self.touches

    @override
    def send(self, message: ConsumerMessage) -> None:
        self.to_producer.append(message)
        self._channel.notify()

    @override
    def hang_up(self, reason: str) -> None:
        del reason  # the producer sees that the connection has ended
        self._channel.notify()

    def post(self, place: int, credit: int, sequence: int, num_transitions: int, total: int) -> None:
        """Deliver a post to the consumer."""
        self.consumer.deliver(self, Post(place, credit, sequence, num_transitions, total))


class InlineConsumer(InboxConsumer):
    """Serves the producers of a channel."""

    def __init__(self, channel: InlineChannel, options: ConsumerOptions) -> None:
        """Serve the channel.

        Raises:
            OSError: another consumer serves it.
        """
        super().__init__(options, changed=channel.changed)
        self._channel = channel
        with self._changed:
            if channel.consumer is not None:
                raise OSError(f"channel {channel.name} already has a consumer")
            channel.consumer = self
            channel.notify()

    @override
    def close(self) -> None:
        with self._changed:
            if self._channel.consumer is self:
                self._channel.consumer = None
            super().close()
            self._channel.notify()


class InlineProducer(ConnectingProducer):
    """Fills slots for the consumer of a channel."""

    def __init__(self, channel: InlineChannel, options: ProducerOptions) -> None:
        """Prepare to connect to the consumer that serves the channel."""
        super().__init__(channel.name, options, BackOff())
        self._channel = channel
        self._changed = channel.changed
        self._connection: _InlineConnection | None = None
        self._seen_changes = 0

    @override
    def touch(self) -> None:
        self._touches += 1
        if (connection := self._connection) is not None:
            connection.touches = self._touches

    @override
    def fileno(self) -> int:
        return self._wake.fileno()

    @property
    @override
    def retries_at(self) -> float:
        return math.inf

    @override
    def close(self) -> None:
        super().close()
        with self._changed:
            self._channel.notify()

    @override
    def _dispose(self) -> None:
        self._hang_up()

    @override
    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.consumer.deliver(self._connection, None)
        self._disconnect()

    @override
    def _sleep(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._channel.num_changes != self._seen_changes, seconds)

    @override
    def _advance(self) -> None:
        with self._changed:
            self._seen_changes = self._channel.num_changes
            while self._connection is not None and self._connection.to_producer:
                self._read(self._connection, self._connection.to_producer.popleft())
            if self._connection is not None and self._connection.has_ended:
                self._disconnect()
            if self._connection is None and self._channel.consumer is not None:
                self._connection = _InlineConnection(self._channel, self._channel.consumer)
                self._connection.consumer.deliver(self._connection, self._state.hello().to_json(self._token))

    def _read(self, connection: _InlineConnection, message: ConsumerMessage) -> None:
        if isinstance(message, Credit):
            self._state.credited(message.slot, message.order, message.min_version)
        elif isinstance(message, int):
            self._state.acknowledged(message)
        else:
            answer = message.to_json() if isinstance(message, Welcome) else refusal_to_json(message)
            try:
                self._state.connected(Welcome.from_json(answer, stream=self._channel.name), connection)
            except BaseException:
                self._disconnect()
                raise
