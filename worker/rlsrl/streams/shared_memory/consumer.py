"""The consumer: one listener and one socket for each producer, served by the thread that calls ``receive``."""

from __future__ import annotations

import math
import selectors
import socket
import threading
from collections.abc import Sequence
from typing import Any

import structlog
from numpy.typing import NDArray
from typing_extensions import override

from rlsrl.data.slots import Slot, SlotLayout
from rlsrl.rpc import local
from rlsrl.streams.closable import EventFd
from rlsrl.streams.consumer_core import (
    ConsumerMessage,
    ConsumerOptions,
    CoreConsumer,
    InvalidMessage,
    Post,
    ProducerConnection,
    ProducerMessage,
)
from rlsrl.streams.credits import Credit
from rlsrl.streams.handshake import PeerRefused, Welcome, refusal_to_json
from rlsrl.streams.shared_memory.segment import Segment
from rlsrl.streams.shared_memory.wire import ACK, CREDIT, MESSAGE, POST, PeerGone, receive, send, shut

MAX_PRODUCERS = 256
"""Producers of one consumer. Each costs the consumer two descriptors."""

MAX_NEWCOMERS = 64
"""Connections that have sent no hello yet. Beyond this number the oldest is closed."""

HANDSHAKE_TIMEOUT_SECONDS = 5.0
"""How long a connection may take to send its hello."""

_log = structlog.get_logger(__name__)


class SharedMemoryConsumer(CoreConsumer):
    """Serves producers of this machine.

    Connections, dead producers and time-outs are handled only inside ``receive``: call it in a loop. ``grant`` sends
    its credits at once, in the caller's thread, under the lock. ``receive`` holds the lock only while it works.
    """

    def __init__(self, name: str, options: ConsumerOptions) -> None:
        """Listen on the abstract socket ``name``, for example ``rlsrl-<run uid>-trainer-0``.

        Raises:
            OSError: another consumer listens on that name.
        """
        super().__init__(options, threading.Lock())
        self._newcomers: dict[_SocketConnection, float] = {}
        """Connections without a hello, oldest first, and the time at which each is closed."""
        self._receiving = threading.Lock()
        self._listener = local.listen(name)
        self._wake = EventFd()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake, selectors.EVENT_READ, None)

    @override
    def receive(self, max_items: int, timeout: float) -> Sequence[Slot]:
        """Return filled slots; see ``SampleConsumer.receive``. A message, ``close`` or the timeout ends the wait.

        After ``close`` it still returns the slots that were acknowledged before.
        """
        deadline = self._now() + timeout
        try:
            with self._receiving:
                while not self._closed:
                    self._serve(deadline)
                    if self._core.has_arrivals or self._now() >= deadline:
                        break
                with self._lock:
                    return self._core.hand_out(max_items)
        finally:
            if self._closed:
                self._dispose()

    def _serve(self, deadline: float) -> None:
        """Wait for an event, at most until the deadline, and handle what has happened."""
        until = -math.inf if self._core.has_arrivals else min(deadline, self._next_duty())
        events = self._selector.select(max(0.0, until - self._now()))
        with self._lock:
            for key, _ in events:
                if key.data is not None:
                    key.data()
            now = self._now()
            if self._newcomers:
                self._dismiss_late(now)
            self._core.attend(now)
            self._core.issue()

    def _next_duty(self) -> float:
        duty = self._core.next_duty
        return min(duty, next(iter(self._newcomers.values()))) if self._newcomers else duty

    @override
    def close(self) -> None:
        """Stop serving. Producers see the end of their connection and look for the next consumer.

        Idempotent. Not for use in a signal handler.
        """
        self._closed = True
        self._wake.set()
        self._dispose()

    def _dispose(self) -> None:
        """Close everything, unless another thread is in ``receive``: that thread disposes when it leaves."""
        if not self._receiving.acquire(blocking=False):
            return
        try:
            with self._lock:
                for newcomer in self._newcomers:
                    newcomer.hang_up("closed")
                self._newcomers.clear()
                self._core.close()
                self._selector.close()
                self._listener.close()
                self._wake.close()
        finally:
            self._receiving.release()

    # The lock is held in what follows.

    def _accept(self) -> None:
        try:
            accepted = local.accept(self._listener)
        except (BlockingIOError, ConnectionError):
            return  # the peer has gone again, or belongs to another user
        if len(self._newcomers) >= MAX_NEWCOMERS:
            self._dismiss(next(iter(self._newcomers)), "too_many")
        newcomer = _SocketConnection(accepted, self._selector, self)
        self._newcomers[newcomer] = self._now() + HANDSHAKE_TIMEOUT_SECONDS
        self._selector.register(accepted, selectors.EVENT_READ, lambda: self._read(newcomer))

    def _read(self, connection: _SocketConnection) -> None:
        self._core.read(connection)
        if connection in self._newcomers and (connection.has_ended or connection.number is not None):
            del self._newcomers[connection]

    def _dismiss_late(self, now: float) -> None:
        for newcomer in [newcomer for newcomer, closes_at in self._newcomers.items() if now >= closes_at]:
            self._dismiss(newcomer, "timeout")

    def _dismiss(self, newcomer: _SocketConnection, reason: str) -> None:
        del self._newcomers[newcomer]
        self._core.dismiss(newcomer, reason)

    @property
    def num_producers(self) -> int:
        """Producers that are connected. The lock is held."""
        return len(self._core.producers)


class _SocketConnection(ProducerConnection):
    """A producer's socket, and its shared memory after admission."""

    def __init__(
        self, connection: socket.socket, selector: selectors.BaseSelector, consumer: SharedMemoryConsumer
    ) -> None:
        super().__init__()
        self._socket = connection
        self._selector = selector
        self._consumer = consumer
        self._segment: Segment | None = None

    @override
    def allocate(self, layout: SlotLayout, num_slots: int) -> None:
        if self._consumer.num_producers >= MAX_PRODUCERS:
            raise PeerRefused("capacity", f"the consumer serves at most {MAX_PRODUCERS} producers")
        self._segment = Segment.create(layout, num_slots)

    @override
    def arrays(self, post: Post) -> dict[str, NDArray[Any]]:
        assert self._segment is not None, "admitted"
        return self._segment.slots[post.place]

    @property
    @override
    def progress(self) -> int:
        return 0 if self._segment is None else int(self._segment.progress[0])

    @override
    def read(self) -> tuple[ProducerMessage, ...]:
        if self.number is None:
            return self._read_hello()
        try:
            message = receive(self._socket)
        except PeerGone:
            return (None,)
        if message is None:
            return ()
        if len(message) != MESSAGE.size:
            return (InvalidMessage(f"a message of {len(message)} bytes; the length is {MESSAGE.size}"),)
        kind, place, order, sequence, num_transitions, total = MESSAGE.unpack(message)
        if kind != POST:
            return (InvalidMessage(f"a message of kind {kind}; only {POST} is allowed"),)
        return (Post(place, order, sequence, num_transitions, total),)

    def _read_hello(self) -> tuple[ProducerMessage, ...]:
        try:
            message, _ = local.recv_json(self._socket)
        except BlockingIOError:
            return ()
        except OSError:
            return (None,)
        except ValueError as error:
            return (InvalidMessage(str(error)),)
        return (message,)

    @override
    def send(self, message: ConsumerMessage) -> None:
        if isinstance(message, int):
            send(self._socket, ACK, message, 0, 0, 0, 0)
        elif isinstance(message, Credit):
            send(self._socket, CREDIT, message.slot, message.order, *message.min_version, 0)
        elif isinstance(message, Welcome):
            self._send_welcome(message)
        else:
            try:
                local.send_json(self._socket, refusal_to_json(message))
            except OSError:
                _log.info("refusal_not_delivered", kind=message.kind)

    def _send_welcome(self, welcome: Welcome) -> None:
        assert self._segment is not None, "admitted"
        try:
            local.send_json(self._socket, welcome.to_json(), fds=[self._segment.descriptor])
        except OSError:
            shut(self._socket)
        finally:
            self._segment.close_descriptor()

    @override
    def hang_up(self, reason: str) -> None:
        del reason  # the producer sees only the end of the socket
        self._selector.unregister(self._socket)
        self._socket.close()
