"""The sample stream between processes of one machine: slots in shared memory, words about them over a socket.

A slot's arrays never move: the producer fills them in the memory that the consumer reads. What is said about a slot
(credit, sequence, number of transitions) travels in one socket message of fixed size, so it arrives whole or not at
all, in order, also from a producer that was killed right after sending it; and it is private to the consumer once
received, so a producer cannot change it after it was checked. Only the word of progress is in shared memory: it is
written once a step and says nothing but "alive". A dead peer is the end of the socket.

Producer to consumer: hello, then POST. Consumer to producer: welcome (with the memory's descriptor) or a refusal, then
CREDIT and ACK. See ``handshake`` for the first three.
"""

from __future__ import annotations

import math
import os
import select
import selectors
import socket
import struct
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import structlog
from numpy.typing import NDArray

from rlsrl.data.slots import ProducerId, Slot, SlotLayout
from rlsrl.data.version import Version
from rlsrl.rpc import local
from rlsrl.runtime.clock import Clock, SystemClock
from rlsrl.runtime.ledger import Posted as LedgerEntry
from rlsrl.streams.handshake import Hello, Posted, Refusal, Welcome, refusal_to_json
from rlsrl.streams.intake import Intake, Violation
from rlsrl.streams.outbox import Outbox
from rlsrl.streams.protocols import (
    ConsumerLedger,
    HandshakeRefused,
    ProducerLedger,
    StreamClosed,
    StreamError,
    StreamTimeout,
)
from rlsrl.streams.segment import Segment
from rlsrl.streams.wake import Wake

MAX_PRODUCERS = 256
"""Producers of one consumer; each costs it two descriptors."""

MAX_NEWCOMERS = 64
"""Connections that have not introduced themselves yet; beyond that the oldest is closed."""

HANDSHAKE_TIMEOUT_SECONDS = 5.0
"""How long a connection may take to introduce itself."""

FIRST_BACKOFF_SECONDS = 0.01
LAST_BACKOFF_SECONDS = 1.0
"""A producer without a consumer tries again after the first, then after twice as long each time up to the last."""

_MESSAGE = struct.Struct("<5q")
"""(what, and four integers); what is not used is 0."""
_CREDIT = 1
"""slot, order, attempt and step of min_version"""
_ACK = 2
"""sequence: everything up to it is held"""
_POST = 3
"""slot, order of its credit, sequence, num_transitions"""

_log = structlog.get_logger(__name__)


class _PeerGone(Exception):  # noqa: N818 - named for the fact
    """The socket has ended and everything that was sent before has been read."""


def _receive(connection: socket.socket) -> bytes | None:
    """The next message, None if there is none yet. One byte too many is asked for: so a longer one shows.

    Raises:
        _PeerGone: see there.
    """
    while True:
        try:
            message = connection.recv(_MESSAGE.size + 1)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            # A peer that died without reading all of ours: reported once, and before what it had sent.
            continue
        except OSError as error:
            raise _PeerGone from error
        if not message:
            raise _PeerGone
        return message


def _send(connection: socket.socket, *words: int) -> None:
    """Send one message; a peer that cannot take it is shut off, so that reading from it ends."""
    try:
        connection.send(_MESSAGE.pack(*words))
    except OSError:
        # Gone; or it left unread more than a well-behaved peer could ever be sent.
        _shut(connection)


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # the peer was faster


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Newcomer:
    """A connection that has not introduced itself yet."""

    socket: socket.socket
    deadline: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Peer:
    """An admitted producer's connection."""

    number: int
    socket: socket.socket
    segment: Segment


class SharedMemoryConsumer:
    """Serves producers of this machine; implements ``SampleConsumer``.

    Nothing runs by itself: connections, deaths and time-outs are dealt with in the thread that calls ``receive``, so
    call it again and again. ``grant`` sends its credits at once, from the caller's thread, under the lock that
    ``receive`` holds only while it works, never while it waits.
    """

    def __init__(
        self,
        name: str,
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
        """Listen on the abstract socket ``name``.

        Args:
            name: for example ``rlsrl-<run uid>-samples-0``.
            token: what producers have to show.
            layout_digest: ``SlotLayout.step_digest`` of the slots to come; the number of lanes is each producer's own.
            ledger: written before a slot is acknowledged; asked for marks when a producer connects.
            slots_per_producer: slots of each connection, above those that are filled under an older one.
            peer_timeout: seconds without ``touch`` after which a holder of a credit is given up.
            expected_producers: issue no credit before so many are connected, at most for ``startup_timeout`` seconds:
                a fleet of known size is granted in the order of its indices, whoever connects first.
            startup_timeout: see above.
            clock: the machine's unless given.

        Raises:
            OSError: the name is taken: another consumer is alive.
        """
        self._name = name
        self._token = token
        self._layout_digest = layout_digest
        self._now = (clock or SystemClock()).monotonic
        self._intake = Intake(
            slots_per_producer=slots_per_producer,
            ledger=ledger,
            peer_timeout=peer_timeout,
            expected_producers=expected_producers,
        )
        self._opens_at = self._now() + startup_timeout
        self._looks_at = self._now() + self._intake.look_interval
        self._newcomers: dict[_Newcomer, None] = {}
        self._peers: dict[int, _Peer] = {}
        self._arrived: deque[Slot] = deque()
        self._counters: Counter[str] = Counter()
        self._closed = False
        self._receiving = threading.Lock()
        self._lock = threading.Lock()
        self._listener = local.listen(name)
        self._wake = Wake()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake, selectors.EVENT_READ, None)

    def grant(self, num_lanes: int, min_version: Version) -> None:
        """See ``SampleConsumer.grant``. Any thread; never waits."""
        with self._lock:
            self._intake.grant(num_lanes, min_version)
            self._issue()

    def receive(self, max_items: int, timeout: float) -> Sequence[Slot]:
        """See ``SampleConsumer.receive``. Woken by any message, by ``close``, or by the timeout.

        What was acknowledged before ``close`` is still handed out after it.
        """
        deadline = self._now() + timeout
        try:
            with self._receiving:
                while not self._closed:
                    self._serve(deadline)
                    if self._arrived or self._now() >= deadline:
                        break
                with self._lock:
                    return [self._arrived.popleft() for _ in range(min(max_items, len(self._arrived)))]
        finally:
            if self._closed:
                self._dispose()

    def _serve(self, deadline: float) -> None:
        """Wait until something happens, at most until the deadline, and deal with it."""
        wait = 0.0 if self._arrived else max(0.0, min(deadline, self._next_duty()) - self._now())
        events = self._selector.select(wait)
        with self._lock:
            for key, _ in events:
                if key.data is not None:
                    key.data()
            self._do_duties()
            self._issue()

    def release(self, slot: Slot) -> None:
        """See ``SampleConsumer.release``."""
        connection, place = slot.handle
        with self._lock:
            self._intake.book.release(connection, place)
            self._issue()

    @property
    def outstanding(self) -> tuple[int, ...]:
        """See ``SampleConsumer.outstanding``."""
        with self._lock:
            return tuple(sorted([*self._intake.book.outstanding, *(slot.credit for slot in self._arrived)]))

    @property
    def producers(self) -> tuple[ProducerId, ...]:
        """See ``SampleConsumer.producers``."""
        with self._lock:
            return self._intake.producers

    @property
    def counters(self) -> Mapping[str, int]:
        """What happened so far: ``connected``, ``gone``, ``revoked``, ``dismissed`` (never introduced),
        ``refused_<kind>`` and ``violation_<kind>``.
        """
        with self._lock:
            return dict(self._counters)

    def close(self) -> None:
        """See ``SampleConsumer.close``. Producers see the end of their connection and look for the next consumer.

        Not from a signal handler.
        """
        self._closed = True
        self._wake.set()
        self._dispose()

    def _dispose(self) -> None:
        """Close everything, unless somebody is in ``receive``, who then does it on leaving."""
        if not self._receiving.acquire(blocking=False):
            return
        try:
            with self._lock:
                for newcomer in self._newcomers:
                    newcomer.socket.close()
                for number, peer in self._peers.items():
                    self._intake.drop(number)
                    peer.socket.close()
                self._newcomers.clear()
                self._peers.clear()
                self._selector.close()
                self._listener.close()
                self._wake.close()
        finally:
            self._receiving.release()

    # What follows runs under the lock.

    def _issue(self) -> None:
        for credit in self._intake.book.issue():
            attempt, step = credit.min_version
            _send(self._peers[credit.connection].socket, _CREDIT, credit.slot, credit.order, attempt, step)

    def _next_duty(self) -> float:
        duties = [self._looks_at]
        if not self._intake.book.is_open:
            duties.append(self._opens_at)
        if self._newcomers:
            duties.append(next(iter(self._newcomers)).deadline)
        return min(duties)

    def _do_duties(self) -> None:
        now = self._now()
        if now >= self._opens_at and not self._intake.book.is_open:
            _log.warning("startup_timeout", connected=len(self._peers))
            self._intake.book.open()
        for newcomer in [newcomer for newcomer in self._newcomers if now >= newcomer.deadline]:
            self._dismiss(newcomer, "timeout")
        if now >= self._looks_at:
            self._looks_at = now + self._intake.look_interval
            for number in self._intake.look(now, lambda number: int(self._peers[number].segment.progress[0])):
                self._revoke(self._peers[number])

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return  # it was there and is gone
        connection.setblocking(False)
        if len(self._newcomers) >= MAX_NEWCOMERS:
            self._dismiss(next(iter(self._newcomers)), "too_many")
        newcomer = _Newcomer(socket=connection, deadline=self._now() + HANDSHAKE_TIMEOUT_SECONDS)
        self._newcomers[newcomer] = None
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._greet(newcomer))

    def _dismiss(self, newcomer: _Newcomer, reason: str) -> None:
        """Part from one that never introduced itself."""
        del self._newcomers[newcomer]
        self._hang_up(newcomer.socket)
        self._counters["dismissed"] += 1
        _log.info("producer_never_introduced", reason=reason)

    def _hang_up(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        connection.close()

    def _greet(self, newcomer: _Newcomer) -> None:
        """Read an introduction, if it is there, and admit or refuse."""
        if newcomer not in self._newcomers:
            return  # dismissed earlier in this round
        try:
            message, _ = local.recv_json(newcomer.socket)
            self._admit(newcomer, Hello.from_json(message, token=self._token, layout_digest=self._layout_digest))
        except BlockingIOError:
            return
        except OSError:
            self._dismiss(newcomer, "gone")
        except ValueError as error:
            self._refuse(newcomer, Refusal("malformed", f"malformed handshake: {error}"))
        except Refusal as refusal:
            self._refuse(newcomer, refusal)

    def _refuse(self, newcomer: _Newcomer, refusal: Refusal) -> None:
        _log.warning("producer_refused", kind=refusal.kind, reason=str(refusal))
        self._counters[f"refused_{refusal.kind}"] += 1
        try:
            local.send_json(newcomer.socket, refusal_to_json(refusal))
        except OSError:
            _log.info("refusal_not_delivered", kind=refusal.kind)
        del self._newcomers[newcomer]
        self._hang_up(newcomer.socket)

    def _admit(self, newcomer: _Newcomer, hello: Hello) -> None:
        rival = self._intake.rival(hello.producer)
        if rival is not None:
            self._read(self._peers[rival])
        if rival is not None and rival in self._peers:
            self._drop(self._peers[rival], "replaced")
        if len(self._peers) >= MAX_PRODUCERS:
            raise Refusal("capacity", f"at most {MAX_PRODUCERS} producers here")
        number, welcome = self._intake.admit(hello)
        try:
            segment, fd = Segment.create(hello.layout, welcome.num_slots)
        except OSError as error:
            self._intake.drop(number)
            raise Refusal("capacity", f"no memory for {welcome.num_slots} slots here: {error}") from error
        peer = _Peer(number=number, socket=newcomer.socket, segment=segment)
        del self._newcomers[newcomer]
        self._peers[number] = peer
        self._selector.modify(peer.socket, selectors.EVENT_READ, lambda: self._read(peer))
        try:
            local.send_json(peer.socket, welcome.to_json(), fds=[fd])
        except OSError:
            _shut(peer.socket)
        finally:
            os.close(fd)
        self._counters["connected"] += 1
        _log.info("producer_connected", **_names(hello.producer), num_lanes=hello.layout.num_lanes)

    def _read(self, peer: _Peer) -> None:
        """Take everything that an admitted peer has sent."""
        while peer.number in self._peers:
            try:
                message = _receive(peer.socket)
                if message is None:
                    return
                self._take(peer, message)
            except _PeerGone:
                self._drop(peer, "gone")
            except Violation as violation:
                self._counters[f"violation_{violation.kind}"] += 1
                self._drop(peer, f"violation: {violation}")

    def _take(self, peer: _Peer, message: bytes) -> None:
        if len(message) != _MESSAGE.size:
            raise Violation("message", f"a message of {len(message)} bytes, not {_MESSAGE.size}")
        what, place, order, sequence, num_transitions = _MESSAGE.unpack(message)
        if what != _POST:
            raise Violation("message", f"message {what}, where only posts are known")
        credit = self._intake.take(
            peer.number, slot=place, order=order, sequence=sequence, num_transitions=num_transitions
        )
        slot = Slot(
            arrays=peer.segment.slots[credit.slot],
            min_version=credit.min_version,
            credit=credit.order,
            producer=self._intake.producer_of(peer.number),
            sequence=sequence,
            num_transitions=num_transitions,
            handle=(peer.number, credit.slot),
        )
        self._arrived.append(slot)
        _send(peer.socket, _ACK, sequence, 0, 0, 0)

    def _revoke(self, peer: _Peer) -> None:
        """Give up a holder of credits that shows no life. What it had posted is taken first."""
        self._read(peer)
        if peer.number in self._peers:
            self._counters["revoked"] += 1
            self._drop(peer, "silent")

    def _drop(self, peer: _Peer, reason: str) -> None:
        producer = self._intake.producer_of(peer.number)
        void = self._intake.drop(peer.number)
        del self._peers[peer.number]
        self._hang_up(peer.socket)
        self._counters["gone"] += 1
        _log.info("producer_gone", **_names(producer), reason=reason, void_credits=[credit.order for credit in void])


def _names(producer: ProducerId) -> dict[str, int]:
    return {"producer": producer.index, "incarnation": producer.incarnation}


class _SharedMemoryLink:
    """A producer's admitted connection."""

    def __init__(self, connection: socket.socket, segment: Segment) -> None:
        self._socket = connection
        self._segment = segment

    def arrays(self, place: int) -> dict[str, NDArray[Any]]:
        return self._segment.slots[place]

    def post(self, place: int, credit: int, sequence: int, num_transitions: int) -> None:
        _send(self._socket, _POST, place, credit, sequence, num_transitions)


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
        previous: Sequence[LedgerEntry] = (),
        on_settled: Callable[[], None] = lambda: None,
        clock: Clock | None = None,
    ) -> None:
        """Prepare to connect to the consumer that listens on the abstract socket ``name``.

        Args:
            name: see ``SharedMemoryConsumer``.
            token: the experiment's.
            layout: of this producer's slots.
            producer_id: the leased index and incarnation.
            ledger: written before a slot is posted and after it is acknowledged.
            previous: what dead incarnations of this index posted to this consumer without seeing it acknowledged, as
                ``ActorLedger.begin`` returns it. The consumer counts what it never got as lost.
            on_settled: called once, in the thread of ``acquire`` or ``flush``, when the consumer has done so: the
                entries may be forgotten.
            clock: the machine's unless given.
        """
        self._name = name
        self._token = token
        self._layout = layout
        self._now = (clock or SystemClock()).monotonic
        self._outbox = Outbox(
            producer=producer_id, layout=layout, ledger=ledger, previous=previous, on_settled=on_settled
        )
        self._socket: socket.socket | None = None
        self._is_admitted = False
        self._backoff = FIRST_BACKOFF_SECONDS
        self._retries_at = -math.inf
        self._progress = memoryview(bytearray(8)).cast("q")
        self._touches = 0
        self._closed = False
        self._owned = threading.Lock()
        self._wake = Wake()
        self._poll = select.poll()
        self._poll.register(self._wake, select.POLLIN)

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
            self._wake.close()
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
        self._poll.poll(max(0, math.ceil((until - now) * 1000)))
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
        self._backoff = min(2 * self._backoff, LAST_BACKOFF_SECONDS)
        try:
            self._socket = local.connect(self._name, timeout=FIRST_BACKOFF_SECONDS)
        except (ConnectionError, BlockingIOError, TimeoutError):
            return  # nobody there, or nobody accepting: tried again after the back-off
        self._socket.setblocking(False)
        self._poll.register(self._socket, select.POLLIN)
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
            self._begin(connection, Welcome.from_json(message), fds)
        except BaseException as error:
            self._disconnect()
            if isinstance(error, HandshakeRefused):
                raise HandshakeRefused(f"sample stream {self._name}: {error}") from error
            raise
        finally:
            for fd in fds:
                os.close(fd)

    def _begin(self, connection: socket.socket, welcome: Welcome, fds: list[int]) -> None:
        if not fds:
            raise StreamError(f"sample stream {self._name}: the consumer's answer carries no memory")
        segment = Segment(fds[0], self._layout, welcome.num_slots)
        self._is_admitted = True
        self._progress = segment.progress
        self._outbox.connected(welcome, _SharedMemoryLink(connection, segment))

    def _read(self, connection: socket.socket) -> None:
        """Take everything that the consumer has sent."""
        while True:
            try:
                message = _receive(connection)
            except _PeerGone:
                self._disconnect()
                return
            if message is None:
                return
            if len(message) != _MESSAGE.size:
                self._disconnect()
                raise StreamError(f"sample stream {self._name}: a message of {len(message)} bytes from the consumer")
            self._backoff = FIRST_BACKOFF_SECONDS
            what, first, second, attempt, step = _MESSAGE.unpack(message)
            if what == _CREDIT:
                self._outbox.credited(first, second, Version(attempt, step))
            elif what == _ACK:
                self._outbox.acknowledged(first)

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._poll.unregister(self._socket)
            self._socket.close()
        self._socket = None
        self._is_admitted = False
        self._outbox.disconnected()
