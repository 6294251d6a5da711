"""The end that fills slots: one connection at a time, made and mended in the calls that wait."""

from __future__ import annotations

import math
import os
import select
import socket
from collections.abc import Callable, Iterator
from typing import Any

from numpy.typing import NDArray

from rlsrl.data.slots import ProducerId, SlotLayout
from rlsrl.data.version import Version
from rlsrl.rpc import local
from rlsrl.runtime.clock import Clock
from rlsrl.runtime.ledger import ProducerProgress
from rlsrl.streams.connecting import ConnectingProducer
from rlsrl.streams.handshake import Welcome
from rlsrl.streams.protocols import ProducerLedger, StreamError
from rlsrl.streams.shared_memory.segment import Segment
from rlsrl.streams.shared_memory.wire import ACK, CREDIT, MESSAGE, POST, PeerGone, receive, send

FIRST_BACK_OFF_SECONDS = 0.01
"""How long a consumer that accepts nobody is waited for, too."""


class _SharedMemoryConnection:
    """A producer's admitted connection."""

    def __init__(self, connection: socket.socket, segment: Segment) -> None:
        self._socket = connection
        self._segment = segment

    def arrays(self, place: int) -> dict[str, NDArray[Any]]:
        return self._segment.slots[place]

    def post(self, place: int, credit: int, sequence: int, num_transitions: int, total: int) -> None:
        send(self._socket, POST, place, credit, sequence, num_transitions, total)


class SharedMemoryProducer(ConnectingProducer):
    """Fills slots for a consumer of this machine; implements ``SampleProducer``."""

    def __init__(
        self,
        name: str,
        *,
        token: str,
        layout: SlotLayout,
        producer_id: ProducerId,
        ledger: ProducerLedger,
        progress: ProducerProgress = ProducerProgress(),
        on_settled: Callable[[], None] = lambda: None,
        sequences: Iterator[int] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Prepare to connect to the consumer that listens on the abstract socket ``name`` (see
        ``SharedMemoryConsumer``); the other arguments are those of ``ConnectingProducer``.
        """
        super().__init__(
            name,
            token=token,
            layout=layout,
            producer_id=producer_id,
            ledger=ledger,
            progress=progress,
            on_settled=on_settled,
            sequences=sequences,
            clock=clock,
            back_off_seconds=(FIRST_BACK_OFF_SECONDS, local.LAST_BACK_OFF_SECONDS),
        )
        self._socket: socket.socket | None = None
        self._progress = _nowhere()
        self._poll = select.epoll()
        self._poll.register(self._wake, select.EPOLLIN)

    def touch(self) -> None:
        """See ``SampleProducer.touch``: one store into shared memory."""
        self._touches += 1
        self._progress[0] = self._touches

    def fileno(self) -> int:
        """See ``ConnectingProducer.fileno``."""
        return self._poll.fileno()

    @property
    def retries_at(self) -> float:
        """See ``ConnectingProducer.retries_at``; infinite while connected."""
        return math.inf if self._is_connected else self._retries_at

    @property
    def _is_connected(self) -> bool:
        return self._socket is not None

    def _dispose(self) -> None:
        self._disconnect()
        self._progress = _nowhere()
        self._poll.close()

    def _sleep(self, seconds: float) -> None:
        self._poll.poll(seconds)

    def _advance(self) -> None:
        if self._socket is None and self._now() >= self._retries_at:
            self._connect()
        if self._socket is not None and not self._is_admitted:
            self._be_admitted(self._socket)
        if self._socket is not None and self._is_admitted:
            self._read(self._socket)

    def _connect(self) -> None:
        self._back_away()
        try:
            self._socket = local.connect(self._address, timeout=FIRST_BACK_OFF_SECONDS)
        except (ConnectionError, BlockingIOError, TimeoutError):
            return  # nobody there, or nobody accepting: tried again after the back-off
        self._socket.setblocking(False)
        self._poll.register(self._socket, select.EPOLLIN)
        try:
            local.send_json(self._socket, self._state.hello().to_json(self._token))
        except ConnectionError:
            self._disconnect()

    def _be_admitted(self, connection: socket.socket) -> None:
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

    def _begin(self, connection: socket.socket, welcome: Welcome, fds: list[int]) -> None:
        if not fds:
            raise StreamError(f"sample stream {self._address}: the consumer's answer carries no memory")
        segment = Segment(fds.pop(), self._layout, welcome.num_slots)
        segment.close_descriptor()
        self._is_admitted = True
        self._progress = segment.progress
        self._state.connected(welcome, _SharedMemoryConnection(connection, segment))

    def _read(self, connection: socket.socket) -> None:
        """Take everything that the consumer has sent."""
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
            self._come_back()
            what, first, second, attempt, step, _ = MESSAGE.unpack(message)
            if what == CREDIT:
                self._state.credited(first, second, Version(attempt, step))
            elif what == ACK:
                self._state.acknowledged(first)

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._poll.unregister(self._socket)
            self._socket.close()
        self._socket = None
        self._is_admitted = False
        self._state.disconnected()


def _nowhere() -> memoryview:
    """A word of progress that nobody reads."""
    return memoryview(bytearray(8)).cast("q")
