"""The end that grants: one thread over a listener and a socket per producer."""

from __future__ import annotations

import math
import selectors
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from rlsrl.data.slots import ProducerId, Slot
from rlsrl.data.version import Version
from rlsrl.rpc import local
from rlsrl.runtime.clock import Clock, SystemClock
from rlsrl.streams.consumer_core import ConsumerCore, ProtocolViolation
from rlsrl.streams.eventfd import EventFd
from rlsrl.streams.handshake import PeerRefused, refusal_to_json
from rlsrl.streams.protocols import ConsumerLedger
from rlsrl.streams.shared_memory.segment import Segment
from rlsrl.streams.shared_memory.wire import ACK, CREDIT, MESSAGE, POST, PeerGone, receive, send, shut

MAX_PRODUCERS = 256
"""Producers of one consumer; each costs it two descriptors."""

MAX_NEWCOMERS = 64
"""Connections that have not introduced themselves yet; beyond that the oldest is closed."""

HANDSHAKE_TIMEOUT_SECONDS = 5.0
"""How long a connection may take to introduce itself."""

_log = structlog.get_logger(__name__)


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
            name: for example ``rlsrl-<run uid>-samples-trainer-0``.
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
            ValueError: an argument is out of range.
        """
        self._now = (clock or SystemClock()).monotonic
        self._core: ConsumerCore[Segment] = ConsumerCore(
            token=token,
            layout_digest=layout_digest,
            ledger=ledger,
            slots_per_producer=slots_per_producer,
            peer_timeout=peer_timeout,
            expected_producers=expected_producers,
            startup_timeout=startup_timeout,
            now=self._now(),
        )
        self._newcomers: dict[_Newcomer, None] = {}
        self._peers: dict[int, _Peer] = {}
        self._closed = False
        self._receiving = threading.Lock()
        self._lock = threading.Lock()
        self._listener = local.listen(name)
        self._wake = EventFd()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake, selectors.EVENT_READ, None)

    def grant(self, num_lanes: int, min_version: Version) -> None:
        """See ``SampleConsumer.grant``. Any thread; never waits."""
        with self._lock:
            self._core.grant(num_lanes, min_version)
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
                    if self._core.has_arrivals or self._now() >= deadline:
                        break
                with self._lock:
                    return self._core.hand_out(max_items)
        finally:
            if self._closed:
                self._dispose()

    def _serve(self, deadline: float) -> None:
        """Wait until something happens, at most until the deadline, and deal with it."""
        until = -math.inf if self._core.has_arrivals else min(deadline, self._next_duty())
        wait = max(0.0, until - self._now())
        events = self._selector.select(wait)
        with self._lock:
            for key, _ in events:
                if key.data is not None:
                    key.data()
            self._do_duties()
            self._issue()

    def release(self, slot: Slot) -> None:
        """See ``SampleConsumer.release``."""
        with self._lock:
            self._core.release(slot)
            self._issue()

    @property
    def outstanding(self) -> tuple[int, ...]:
        """See ``SampleConsumer.outstanding``."""
        with self._lock:
            return self._core.outstanding

    @property
    def producers(self) -> tuple[ProducerId, ...]:
        """See ``SampleConsumer.producers``."""
        with self._lock:
            return self._core.producers

    @property
    def counters(self) -> Mapping[str, int]:
        """What happened so far: ``connected``, ``gone``, ``revoked``, ``dismissed`` (never introduced),
        ``refused_<kind>`` and ``violation_<kind>``.
        """
        with self._lock:
            return dict(self._core.counters)

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
                for peer in self._peers.values():
                    self._core.drop(peer.number, "closed")
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
        for credit in self._core.issue():
            attempt, step = credit.min_version
            send(self._peers[credit.connection].socket, CREDIT, credit.slot, credit.order, attempt, step, 0)

    def _next_duty(self) -> float:
        oldest = next(iter(self._newcomers), None)
        return self._core.next_duty if oldest is None else min(self._core.next_duty, oldest.deadline)

    def _do_duties(self) -> None:
        now = self._now()
        for newcomer in [newcomer for newcomer in self._newcomers if now >= newcomer.deadline]:
            self._dismiss(newcomer, "timeout")
        for number in self._core.attend(now, lambda segment: int(segment.progress[0])):
            self._give_up(self._peers[number], "silent")

    def _accept(self) -> None:
        try:
            connection = local.accept(self._listener)
        except (BlockingIOError, ConnectionError):
            return  # it was there and is gone, or is another user's
        if len(self._newcomers) >= MAX_NEWCOMERS:
            self._dismiss(next(iter(self._newcomers)), "too_many")
        newcomer = _Newcomer(socket=connection, deadline=self._now() + HANDSHAKE_TIMEOUT_SECONDS)
        self._newcomers[newcomer] = None
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._greet(newcomer))

    def _dismiss(self, newcomer: _Newcomer, reason: str) -> None:
        """Part from one that never introduced itself."""
        del self._newcomers[newcomer]
        self._hang_up(newcomer.socket)
        self._core.counters["dismissed"] += 1
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
        except BlockingIOError:
            return
        except OSError:
            self._dismiss(newcomer, "gone")
            return
        except ValueError as error:
            self._refuse(newcomer, PeerRefused("malformed", f"malformed handshake: {error}"))
            return
        try:
            self._admit(newcomer, message)
        except PeerRefused as refusal:
            self._refuse(newcomer, refusal)

    def _refuse(self, newcomer: _Newcomer, refusal: PeerRefused) -> None:
        self._core.refused(refusal)
        try:
            local.send_json(newcomer.socket, refusal_to_json(refusal))
        except OSError:
            _log.info("refusal_not_delivered", kind=refusal.kind)
        del self._newcomers[newcomer]
        self._hang_up(newcomer.socket)

    def _admit(self, newcomer: _Newcomer, message: Mapping[str, Any]) -> None:
        hello, rival = self._core.read_hello(message)
        if rival is not None:
            self._give_up(self._peers[rival], "replaced")
        if len(self._peers) >= MAX_PRODUCERS:
            raise PeerRefused("capacity", f"at most {MAX_PRODUCERS} producers here")
        segment, number, welcome = self._core.admit(hello, Segment.create)
        peer = _Peer(number=number, socket=newcomer.socket)
        del self._newcomers[newcomer]
        self._peers[number] = peer
        self._selector.modify(peer.socket, selectors.EVENT_READ, lambda: self._read(peer))
        try:
            local.send_json(peer.socket, welcome.to_json(), fds=[segment.descriptor])
        except OSError:
            shut(peer.socket)
        finally:
            segment.close_descriptor()

    def _read(self, peer: _Peer) -> None:
        """Take everything that an admitted peer has sent."""
        while peer.number in self._peers:
            try:
                message = receive(peer.socket)
                if message is None:
                    return
                self._take(peer, message)
            except PeerGone:
                self._drop(peer, "gone")
            except ProtocolViolation:
                self._drop(peer, "violation")

    def _take(self, peer: _Peer, message: bytes) -> None:
        if len(message) != MESSAGE.size:
            raise self._core.violation("message", f"a message of {len(message)} bytes, not {MESSAGE.size}")
        what, place, order, sequence, num_transitions, total = MESSAGE.unpack(message)
        if what != POST:
            raise self._core.violation("message", f"message {what}, where only posts are known")
        self._core.take(
            peer.number, place=place, order=order, sequence=sequence, num_transitions=num_transitions, total=total
        )
        send(peer.socket, ACK, sequence, 0, 0, 0, 0)

    def _give_up(self, peer: _Peer, reason: str) -> None:
        """Part from a peer that may be alive, after taking what it has posted."""
        self._read(peer)
        self._drop(peer, reason)

    def _drop(self, peer: _Peer, reason: str) -> None:
        """Part from a peer; nothing happens if that was done before."""
        if self._peers.pop(peer.number, None) is not None:
            self._core.drop(peer.number, reason)
            self._hang_up(peer.socket)
