"""A consumer to which other threads deliver messages. gRPC's consumer and the in-process test double are built on it.

Messages wait in an inbox until ``receive`` is called. The thread that calls ``receive`` makes every decision, under one
lock, so a transport only moves messages.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from typing_extensions import override

from rlsrl.data.slots import Slot
from rlsrl.streams.consumer_core import ConsumerOptions, CoreConsumer, ProducerConnection, ProducerMessage


class InboxConsumer(CoreConsumer):
    """A ``SampleConsumer`` whose transport calls ``deliver`` for each message.

    Connections, dead producers and time-outs are handled only inside ``receive``: call it in a loop.
    """

    def __init__(self, options: ConsumerOptions, *, changed: threading.Condition) -> None:
        """``changed`` guards the consumer. It is notified of each message and of ``close``."""
        super().__init__(options, changed)
        self._changed = changed
        self._inbox: deque[tuple[ProducerConnection, ProducerMessage]] = deque()

    @override
    def receive(self, max_items: int, timeout: float) -> Sequence[Slot]:
        """Return filled slots; see ``SampleConsumer.receive``. A message, ``close`` or the timeout ends the wait.

        After ``close`` it still returns the slots that were acknowledged before.
        """
        deadline = self._now() + timeout
        with self._changed:
            while not self._closed:
                self._serve()
                if self._core.has_arrivals or (now := self._now()) >= deadline:
                    break
                self._changed.wait(max(0.0, min(deadline, self._core.next_duty) - now))
            return self._core.hand_out(max_items)

    def _serve(self) -> None:
        """Handle the messages that have arrived and do what is due. The lock is held."""
        while self._inbox:
            connection, message = self._inbox.popleft()
            self._core.handle(connection, message)
        self._core.attend(self._now())
        self._core.issue()

    def deliver(self, connection: ProducerConnection, message: ProducerMessage) -> None:
        """Put a message into the inbox. Messages of an ended connection are ignored. Any thread may call it."""
        with self._changed:
            if not connection.has_ended:
                self._inbox.append((connection, message))
                self._changed.notify_all()

    @override
    def close(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = True
            for connection, _ in self._inbox:
                connection.has_ended = True
            self._core.close()
            self._changed.notify_all()
