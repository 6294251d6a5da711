"""The producer: one connection at a time, made and repaired inside ``acquire`` and ``flush``."""

from __future__ import annotations

import math
import os
import select
import socket
from typing import Any

from numpy.typing import NDArray
from typing_extensions import override

from rlsrl.data.version import Version
from rlsrl.rpc import local
from rlsrl.rpc.back_off import BackOff
from rlsrl.streams.handshake import Welcome
from rlsrl.streams.producer_core import ConnectingProducer, ProducerOptions
from rlsrl.streams.protocols import StreamError
from rlsrl.streams.shared_memory.segment import Segment
from rlsrl.streams.shared_memory.wire import ACK, CREDIT, MESSAGE, POST, PeerGone, receive, send

FIRST_BACK_OFF_SECONDS = 0.01
"""Delay after the first failed attempt, and how long an attempt waits for a consumer with a full backlog."""


class _SharedMemoryConnection:
    """A producer's admitted connection: a ``ConsumerConnection``."""

    def __init__(self, connection: socket.socket, segment: Segment) -> None:
        self._socket = connection
        self._segment = segment

    def arrays(self, place: int) -> dict[str, NDArray[Any]]:
        return self._segment.slots[place]

    def post(self, place: int, credit: int, sequence: int, num_transitions: int, total: int) -> None:
        send(self._socket, POST, place, credit, sequence, num_transitions, total)


class SharedMemoryProducer(ConnectingProducer):
    """Fills slots for a consumer of this machine."""

    def __init__(self, name: str, options: ProducerOptions) -> None:
        """Prepare to connect to the ``SharedMemoryConsumer`` that listens on the abstract socket ``name``."""
        back_off = BackOff(first_seconds=FIRST_BACK_OFF_SECONDS, max_seconds=local.MAX_BACK_OFF_SECONDS)
        super().__init__(name, options, back_off)
        self._connection: socket.socket | None = None
        self._progress = _unread_progress()
        self._poll = select.epoll()
        self._poll.register(self._wake, select.EPOLLIN)

    @override
    def touch(self) -> None:
        """Show life: one store into shared memory."""
        self._touches += 1
        self._progress[0] = self._touches

    @override
    def fileno(self) -> int:
        return self._poll.fileno()

    @property
    @override
    def retries_at(self) -> float:
        return self._retries_at if self._connection is None else math.inf

    @override
    def _dispose(self) -> None:
        self._disconnect()
        self._progress = _unread_progress()
        self._poll.close()

    @override
    def _sleep(self, seconds: float) -> None:
        self._poll.poll(seconds)

    @override
    def _advance(self) -> None:
        if self._connection is None and self._now() >= self._retries_at:
            self._connect()
        if self._connection is not None:
            (self._read if self._state.is_admitted else self._read_welcome)(self._connection)

    def _connect(self) -> None:
        self._begin_attempt()
        try:
            self._connection = local.connect(self._address, timeout=FIRST_BACK_OFF_SECONDS)
        except (ConnectionError, BlockingIOError, TimeoutError):
            return  # no consumer, or a full backlog: ``retries_at`` is the time of the next attempt
        self._connection.setblocking(False)
        self._poll.register(self._connection, select.EPOLLIN)
        try:
            local.send_json(self._connection, self._state.hello().to_json(self._token))
        except ConnectionError:
            self._disconnect()

    def _read_welcome(self, connection: socket.socket) -> None:
        try:
            message, fds = local.recv_json(connection, max_fds=1)
        except BlockingIOError:
            return
        except ConnectionError:
            self._disconnect()
            return
        except ValueError as error:
            self._disconnect()
            raise StreamError(f"sample stream {self._address}: {error}") from error
        try:
            self._begin(connection, Welcome.from_json(message, stream=self._address), fds)
        except BaseException:
            self._disconnect()
            raise
        finally:
            for fd in fds:
                os.close(fd)
        self._read(connection)

    def _begin(self, connection: socket.socket, welcome: Welcome, fds: list[int]) -> None:
        if not fds:
            raise StreamError(f"sample stream {self._address}: the consumer's answer carries no memory")
        segment = Segment(fds.pop(), self._layout, welcome.num_slots)
        segment.close_descriptor()
        self._back_off.reset()
        self._progress = segment.progress
        self._state.connected(welcome, _SharedMemoryConnection(connection, segment))

    def _read(self, connection: socket.socket) -> None:
        """Handle every message that the consumer has sent."""
        while True:
            try:
                message = receive(connection)
            except PeerGone:
                self._disconnect()
                return
            if message is None:
                return
            if len(message) != MESSAGE.size:
                self._disconnect()
                raise StreamError(f"sample stream {self._address}: a message of {len(message)} bytes from the consumer")
            kind, first, second, attempt, step, _ = MESSAGE.unpack(message)
            if kind == CREDIT:
                self._state.credited(first, second, Version(attempt, step))
            elif kind == ACK:
                self._state.acknowledged(first)

    @override
    def _disconnect(self) -> None:
        if self._connection is not None:
            self._poll.unregister(self._connection)
            self._connection.close()
        super()._disconnect()


def _unread_progress() -> memoryview:
    """Return a progress counter for the time without a connection. No consumer reads it."""
    return memoryview(bytearray(8)).cast("q")
