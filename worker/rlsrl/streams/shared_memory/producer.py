"""The end that fills slots: one connection at a time, made and mended in the calls that wait."""

from __future__ import annotations

import math
import os
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from numpy.typing import NDArray

from rlsrl.data.slots import ProducerId, Slot, SlotLayout
from rlsrl.data.version import Version
from rlsrl.rpc import local
from rlsrl.runtime.clock import Clock, SystemClock
from rlsrl.runtime.ledger import Told
from rlsrl.streams.handshake import Posted, Welcome
from rlsrl.streams.outbox import Outbox
from rlsrl.streams.protocols import ProducerLedger, StreamClosed, StreamError, StreamTimeout
from rlsrl.streams.shared_memory.segment import Segment
from rlsrl.streams.shared_memory.wire import ACK, CREDIT, MESSAGE, POST, PeerGone, receive, send
from rlsrl.streams.wake import Wake

FIRST_BACKOFF_SECONDS = 0.01
"""A producer without a consumer tries again after so long, then after twice as long each time."""


class _SharedMemoryLink:
    """A producer's admitted connection."""

    def __init__(self, connection: socket.socket, segment: Segment) -> None:
        self._socket = connection
        self._segment = segment

    def arrays(self, place: int) -> dict[str, NDArray[Any]]:
        return self._segment.slots[place]

    def post(self, place: int, credit: int, sequence: int, num_transitions: int, total: int) -> None:
        send(self._socket, POST, place, credit, sequence, num_transitions, total)


class SharedMemoryProducer:
    """Fills slots for a consumer of this machine; implements ``SampleProducer``.

    Connects in ``acquire`` and ``flush``, never in the constructor. One thread uses it, except ``close``.
    """

    def __init__(
        self,
        name: str,
        *,
        token: str,
        layout: SlotLayout,
        producer_id: ProducerId,
        ledger: ProducerLedger,
        told: Told = Told(),  # noqa: B008 - frozen
        on_settled: Callable[[], None] = lambda: None,
        sequences: Iterator[int] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Prepare to connect to the consumer that listens on the abstract socket ``name``.

        Args:
            name: see ``SharedMemoryConsumer``.
            token: the experiment's.
            layout: of this producer's slots.
            producer_id: the leased index and incarnation.
            ledger: written before a slot is posted and after it is acknowledged.
            told: this index's account with the consumer, as ``PosterLedger.told`` gives it: the consumer settles what
                former lives left, and counts what it never got as lost.
            on_settled: called once, in the thread of ``acquire`` or ``flush``, when the consumer has done so: the
                entries may be forgotten.
            sequences: where slots get their numbers: rising, from 0 unless given. Producers of one incarnation that
                post to different consumers share one, so that a number names one slot.
            clock: the machine's unless given.
        """
        self._name = name
        self._token = token
        self._layout = layout
        self._now = (clock or SystemClock()).monotonic
        self._outbox = Outbox(
            producer=producer_id,
            layout=layout,
            ledger=ledger,
            told=told,
            on_settled=on_settled,
            sequences=sequences,
        )
        self._socket: socket.socket | None = None
        self._is_admitted = False
        self._backoff = FIRST_BACKOFF_SECONDS
        self._retries_at = -math.inf
        self._progress = _nowhere()
        self._touches = 0
        self._closed = False
        self._owned = threading.Lock()
        self._wake = Wake()
        self._poll = select.epoll()
        self._poll.register(self._wake, select.EPOLLIN)

    def acquire(self, timeout: float) -> Slot:
        """See ``SampleProducer.acquire``."""
        deadline = self._now() + timeout
        with self._owning():
            self._advance()
            while (slot := self._outbox.take_credit()) is None:
                self._wait(deadline, "no credit came")
            return slot

    def post(self, slot: Slot) -> None:
        """See ``SampleProducer.post``.

        Raises:
            ValueError: the slot is not in hand, or has no possible ``num_transitions``.
            StreamClosed: ``close`` was called.
        """
        with self._owning():
            self._outbox.post(slot)

    def touch(self) -> None:
        """See ``SampleProducer.touch``: one store into shared memory."""
        self._touches += 1
        self._progress[0] = self._touches

    def flush(self, timeout: float) -> None:
        """See ``SampleProducer.flush``. Woken by acknowledgements, by ``close``, or by the timeout.

        Raises:
            StreamTimeout: some slots were still unacknowledged.
            StreamClosed, HandshakeRefused: as ``acquire``.
        """
        deadline = self._now() + timeout
        with self._owning():
            self._advance()
            while self._outbox.unacknowledged:
                self._wait(deadline, f"{len(self._outbox.unacknowledged)} slots were not acknowledged")

    @property
    def unacknowledged(self) -> tuple[Posted, ...]:
        """See ``SampleProducer.unacknowledged``."""
        return self._outbox.unacknowledged

    def fileno(self) -> int:
        """A descriptor that is readable when ``acquire`` may get further; see also ``retries_at``."""
        return self._poll.fileno()

    @property
    def retries_at(self) -> float:
        """When ``acquire`` may get further by itself, on the clock's monotonic scale; infinite while connected."""
        return math.inf if self._socket else self._retries_at

    def close(self) -> None:
        """See ``SampleProducer.close``. The end of the connection gives its credits back. Not from a signal handler."""
        self._closed = True
        self._wake.set()
        self._dispose()

    def _dispose(self) -> None:
        """Close everything, unless somebody is in another call, who then does it on leaving."""
        if not self._owned.acquire(blocking=False):
            return
        try:
            self._disconnect()
            self._progress = _nowhere()
            self._wake.close()
            self._poll.close()
        finally:
            self._owned.release()

    @contextmanager
    def _owning(self) -> Iterator[None]:
        try:
            with self._owned:
                self._check_open()
                yield
        finally:
            if self._closed:
                self._dispose()

    def _check_open(self) -> None:
        if self._closed:
            raise StreamClosed(f"this producer of {self._name} was closed")

    def _wait(self, deadline: float, complaint: str) -> None:
        """Wait for the next event until the deadline, and deal with it."""
        now = self._now()
        if now >= deadline:
            state = "connected" if self._is_admitted else "waiting to be admitted" if self._socket else "not connected"
            raise StreamTimeout(f"sample stream {self._name}: {complaint} in time ({state})")
        until = deadline if self._socket else min(deadline, self._retries_at)
        self._poll.poll(max(0.0, until - now))
        self._check_open()
        self._advance()

    def _advance(self) -> None:
        """Do what can be done without waiting: connect, be admitted, read."""
        if self._socket is None and self._now() >= self._retries_at:
            self._connect()
        if self._socket is not None and not self._is_admitted:
            self._be_admitted(self._socket)
        if self._socket is not None and self._is_admitted:
            self._read(self._socket)

    def _connect(self) -> None:
        self._retries_at = self._now() + self._backoff
        self._backoff = min(2 * self._backoff, local.LAST_BACK_OFF_SECONDS)
        try:
            self._socket = local.connect(self._name, timeout=FIRST_BACKOFF_SECONDS)
        except (ConnectionError, BlockingIOError, TimeoutError):
            return  # nobody there, or nobody accepting: tried again after the back-off
        self._socket.setblocking(False)
        self._poll.register(self._socket, select.EPOLLIN)
        try:
            local.send_json(self._socket, self._outbox.hello().to_json(self._token))
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
            raise StreamError(f"sample stream {self._name}: {error}") from error
        try:
            self._begin(connection, Welcome.from_json(message, stream=self._name), fds)
        except BaseException:
            self._disconnect()
            raise
        finally:
            for fd in fds:
                os.close(fd)

    def _begin(self, connection: socket.socket, welcome: Welcome, fds: list[int]) -> None:
        if not fds:
            raise StreamError(f"sample stream {self._name}: the consumer's answer carries no memory")
        segment = Segment(fds.pop(), self._layout, welcome.num_slots)
        segment.close_descriptor()
        self._is_admitted = True
        self._progress = segment.progress
        self._outbox.connected(welcome, _SharedMemoryLink(connection, segment))

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
                raise StreamError(f"sample stream {self._name}: a message of {len(message)} bytes from the consumer")
            self._backoff = FIRST_BACKOFF_SECONDS
            what, first, second, attempt, step, _ = MESSAGE.unpack(message)
            if what == CREDIT:
                self._outbox.credited(first, second, Version(attempt, step))
            elif what == ACK:
                self._outbox.acknowledged(first)

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._poll.unregister(self._socket)
            self._socket.close()
        self._socket = None
        self._is_admitted = False
        self._outbox.disconnected()


def _nowhere() -> memoryview:
    """A word of progress that nobody reads."""
    return memoryview(bytearray(8)).cast("q")
