"""The core of a buffer worker: forward slots from producers to consumers, one for one, as an acknowledged FIFO.

Each credit that a downstream consumer grants is granted to the upstream producers, with the same lanes and the same
``min_version``. Nothing else is granted upstream. So the credits in hand bound the slots in memory, and back-pressure
and policy lag reach from trainers to actors. Each arriving slot finds a credit and is forwarded in order of arrival.

A producer belongs to one thread, and both ``receive`` and ``acquire`` wait, so the forwarder has two threads. The
owner's thread receives, copies and releases slots. The credit thread takes credits and posts filled slots. It waits
for the downstream producer and for an ``EventFd`` that the owner sets.
"""

from __future__ import annotations

import select
import threading
from collections import deque
from typing import Literal, NamedTuple, Protocol

import structlog
from typing_extensions import override

from rlsrl.data.slots import Slot
from rlsrl.data.version import INITIAL, Version
from rlsrl.runtime.clock import Clock
from rlsrl.streams.closable import EventFd
from rlsrl.streams.protocols import PollableProducer, SampleConsumer, StreamTimeout

MAX_SLOTS_A_POLL = 1024
"""Most slots of one ``receive``, so that the owner soon returns to its other duties."""
SHOW_LIFE_SECONDS = 0.5
"""Longest time between two signs of life to the consumers."""
POST_DEADLINE_SECONDS = 30.0
"""How long the credit thread may take to end. It never waits for a consumer."""

StaleReason = Literal["stale", "old_attempt"]

_log = structlog.get_logger(__name__)


class Forwarded(NamedTuple):
    """The slots of one ``forward``."""

    num_slots: int = 0
    num_transitions: int = 0


class BufferCore(Protocol):
    """What a buffer worker does with slots. One thread owns it: it calls ``start`` first and ``close`` last."""

    def start(self) -> None:
        """Begin."""

    def check(self) -> None:
        """Raise the error that ended a thread or a stream. Call it periodically: nothing else reports it."""

    @property
    def has_credits(self) -> bool:
        """Whether producers may fill slots."""

    def receive(self, timeout: float) -> None:
        """Receive slots; wait for them at most ``timeout`` seconds."""

    def forward(self) -> Forwarded:
        """Do what is due with the received slots."""

    def close(self) -> None:
        """Do the last of it, count what is left, and end all streams."""

    def sync(self) -> None:
        """Make durable what a later life uses, after the ledger has ended."""


class DropLedger(Protocol):
    """The ledger that records slots which were taken and not forwarded."""

    def dropped(self, reason: str, num_transitions: int) -> None:
        """Count transitions that left the buffer for that reason."""


class DownstreamCredits:
    """Unfilled downstream slots, and the choice of the slot that a rollout fills. Not thread-safe."""

    def __init__(self) -> None:
        self._in_hand: list[Slot] = []
        self._newest = INITIAL

    def __len__(self) -> int:
        return len(self._in_hand)

    @property
    def newest_version(self) -> Version:
        """Newest ``min_version`` of any credit so far."""
        return self._newest

    def add(self, credit: Slot) -> None:
        """Add a credit of a consumer."""
        self._in_hand.append(credit)
        self._newest = max(self._newest, credit.min_version)

    def take_for(self, oldest_version: Version) -> Slot | StaleReason:
        """Return the credit for a rollout whose oldest action used ``oldest_version``, or why there is none.

        Of the credits that allow this version the one with the newest ``min_version`` is taken, and of equal ones the
        first. The others stay for older rollouts. Each rollout was granted for a credit at least as old, so each finds
        one. Only a rollout from before a restart of this buffer worker, or of its consumer, may find none: training on
        it would break the policy lag.
        """
        fitting = [credit for credit in self._in_hand if credit.min_version <= oldest_version]
        if not fitting:
            return "stale" if oldest_version.attempt == self._newest.attempt else "old_attempt"
        chosen = max(fitting, key=lambda credit: credit.min_version)
        self._in_hand.remove(chosen)
        return chosen


class Forwarder(BufferCore):
    """Forwards slots. One thread owns it: it calls ``start`` first and ``close`` last."""

    def __init__(
        self,
        *,
        upstream: SampleConsumer,
        downstream: PollableProducer,
        num_lanes: int,
        ledger: DropLedger,
        clock: Clock,
    ) -> None:
        """Forward slots of ``num_lanes`` lanes. The forwarder owns both streams and closes them."""
        self._upstream = upstream
        self._downstream = downstream
        self._num_lanes = num_lanes
        self._ledger = ledger
        self._now = clock.monotonic
        self._held: deque[Slot] = deque()
        """Received slots without a credit. Only the owner's thread uses them."""
        self._lock = threading.Lock()
        # Guarded by _lock, down to _polls:
        self._credits = DownstreamCredits()
        self._filled: deque[Slot] = deque()
        self._polls = 0
        # Only the credit thread uses this:
        self._polls_seen = -1
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        self._wake = EventFd()
        self._thread = threading.Thread(target=self._run, name="forwarder-credits", daemon=True)

    @override
    def start(self) -> None:
        """Start the credit thread."""
        self._thread.start()

    @override
    def check(self) -> None:
        """Raise the error that ended the credit thread. Call it periodically: nothing else reports it.

        Raises:
            StreamError, LedgerError: as the credit thread raised it.
        """
        if self._error is not None:
            raise self._error

    @property
    def num_credits(self) -> int:
        """Number of unfilled credits."""
        with self._lock:
            return len(self._credits)

    @property
    @override
    def has_credits(self) -> bool:
        return self.num_credits > 0

    @override
    def receive(self, timeout: float) -> None:
        """Receive slots; wait for them at most ``timeout`` seconds."""
        with self._lock:
            self._polls += 1
        self._held.extend(self._upstream.receive(MAX_SLOTS_A_POLL, timeout))

    @override
    def forward(self) -> Forwarded:
        """Forward the received slots for which there are credits; drop those that no credit allows."""
        num_slots = num_transitions = 0
        while self._held and (credit := self._credit_for(self._held[0])) is not None:
            slot = self._held.popleft()
            if isinstance(credit, Slot):
                self._fill(credit, slot)
                num_slots, num_transitions = num_slots + 1, num_transitions + slot.num_transitions
            else:
                self._drop(slot, credit)
        return Forwarded(num_slots, num_transitions)

    @override
    def close(self) -> None:
        """Forward the slots for which there are credits, count the others as dropped, and close both streams."""
        self._stopping.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(POST_DEADLINE_SECONDS)
        self._upstream.close()
        self._held.extend(self._upstream.receive(MAX_SLOTS_A_POLL, timeout=0))
        if self._error is None and not self._thread.is_alive():
            self.forward()
            self._post_filled()
        for slot in self._held:
            self._ledger.dropped("end_of_run", slot.num_transitions)
        self._held.clear()
        self._downstream.close()
        self._wake.close()

    @override
    def sync(self) -> None:
        """Nothing is left for a later life."""

    # What follows runs in the owner's thread.

    def _credit_for(self, slot: Slot) -> Slot | StaleReason | None:
        """Return a credit for the slot, or why no credit allows it, or None while there is no credit at all.

        A slot with another number of lanes comes from an actor of an older spec, which runs until it is replaced.
        """
        if slot.num_lanes != self._num_lanes:
            return "old_attempt"
        with self._lock:
            return self._credits.take_for(slot.oldest_version) if len(self._credits) else None

    def _fill(self, credit: Slot, slot: Slot) -> None:
        for name, array in slot.arrays.items():
            credit.arrays[name][...] = array
        credit.num_transitions = slot.num_transitions
        self._upstream.release(slot)
        with self._lock:
            self._filled.append(credit)
        self._wake.set()

    def _drop(self, slot: Slot, reason: StaleReason) -> None:
        num_lanes = slot.num_lanes
        self._ledger.dropped(reason, slot.num_transitions)
        _log.info("slot_dropped", reason=reason, version=str(slot.oldest_version), num_lanes=num_lanes)
        self._upstream.release(slot)
        # The slot used up granted lanes: grant them again, all that the slot has.
        with self._lock:
            newest = self._credits.newest_version
        self._upstream.grant(num_lanes, newest)

    # What follows runs in the credit thread.

    def _run(self) -> None:
        poll = select.poll()
        for descriptor in (self._downstream.fileno(), self._wake.fileno()):
            poll.register(descriptor, select.POLLIN)
        try:
            while not self._stopping.is_set():
                self._wake.clear()
                self._post_filled()
                self._take_credits()
                self._show_life()
                until = min(SHOW_LIFE_SECONDS, self._downstream.retries_at - self._now())
                poll.poll(max(0.0, until * 1000))
            self._post_filled()
        except BaseException as error:  # noqa: BLE001 - ``check`` raises it in the owner's thread
            self._error = error

    def _post_filled(self) -> None:
        while True:
            with self._lock:
                if not self._filled:
                    return
                credit = self._filled.popleft()
            self._downstream.post(credit)

    def _take_credits(self) -> None:
        while True:
            try:
                credit = self._downstream.acquire(timeout=0)
            except StreamTimeout:
                return
            with self._lock:
                self._credits.add(credit)
            self._upstream.grant(self._num_lanes, credit.min_version)

    def _show_life(self) -> None:
        """Show life downstream, but only if the owner has polled since: an owner that does not poll counts as dead."""
        with self._lock:
            polls = self._polls
        if polls != self._polls_seen:
            self._polls_seen = polls
            self._downstream.touch()
