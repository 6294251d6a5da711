"""What a buffer worker does: takes slots from producers and posts them to consumers, one for one, as acknowledged FIFO.

Flow stays exact. Each credit that a consumer grants is granted on, for as many lanes and weights as new;
nothing else is. So the credits in hand bound what is held, back-pressure and policy lag reach through, and what comes
finds a credit, first come, first passed on.

Two threads. The owner's receives, copies and releases; the other takes credits and posts what was filled, for
a producer belongs to one thread and ``receive`` and ``acquire`` both wait. Whoever is handed something is woken: by the
upstream consumer, and by a descriptor beside the downstream producer's own.
"""

from __future__ import annotations

import select
import threading
from collections import deque
from typing import Literal, NamedTuple, Protocol

import structlog

from rlsrl.data.slots import Slot
from rlsrl.data.version import INITIAL, Version
from rlsrl.runtime.clock import Clock
from rlsrl.streams.eventfd import EventFd
from rlsrl.streams.protocols import PollableProducer, SampleConsumer, StreamTimeout

MAX_SLOTS_A_POLL = 1024
"""So that the owner never stays away long from what else it watches."""
SHOW_LIFE_SECONDS = 0.5
"""How often consumers are shown that the credits in hand are not forgotten, at least."""
POST_DEADLINE_SECONDS = 30.0
"""How long the other thread may take to end: it never waits for a consumer."""

StaleReason = Literal["stale", "old_attempt"]

_log = structlog.get_logger(__name__)


class Passed(NamedTuple):
    """What was passed on."""

    num_slots: int = 0
    num_transitions: int = 0


class DropLedger(Protocol):
    """Where it is written that a slot was taken and not passed on."""

    def dropped(self, reason: str, num_transitions: int) -> None:
        """Transitions left the buffer for that reason."""


class DownstreamCredits:
    """Slots granted by consumers and not filled yet, and which of them a rollout may fill. Not thread-safe."""

    def __init__(self) -> None:
        self._in_hand: list[Slot] = []
        self._newest = INITIAL

    def __len__(self) -> int:
        return len(self._in_hand)

    @property
    def newest_version(self) -> Version:
        """The newest weights that any credit asked for."""
        return self._newest

    def add(self, credit: Slot) -> None:
        """A consumer granted another."""
        self._in_hand.append(credit)
        self._newest = max(self._newest, credit.min_version)

    def take_for(self, oldest_version: Version) -> Slot | StaleReason:
        """The credit that a rollout acted with weights from ``oldest_version`` on fills, or why it fills none.

        Of the credits that ask for no newer weights it is one that asks for the newest, and of these the first: those
        that ask for less are left to rollouts that are older. As each rollout was granted for weights at least as new
        as those of some credit before it, there is one left for each. Only what a producer brings from before an end
        of this buffer worker, or of its consumer, may find none: it could not be trained without breaking the lag.
        """
        fitting = [credit for credit in self._in_hand if credit.min_version <= oldest_version]
        if not fitting:
            return "stale" if oldest_version.attempt == self._newest.attempt else "old_attempt"
        chosen = max(fitting, key=lambda credit: credit.min_version)
        self._in_hand.remove(chosen)
        return chosen


class Forwarder:
    """Passes slots on. One thread owns it; ``start`` first, ``close`` last."""

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
        """Taken and not passed on: there was no credit for them yet. The owner's."""
        self._lock = threading.Lock()
        # Guarded by _lock:
        self._credits = DownstreamCredits()
        self._filled: deque[Slot] = deque()
        self._polls = 0
        # The other thread's:
        self._polls_seen = -1
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        self._wake = EventFd()
        self._thread = threading.Thread(target=self._run, name="forwarder-credits", daemon=True)

    def start(self) -> None:
        """Begin to take credits."""
        self._thread.start()

    def check(self) -> None:
        """Return if nothing failed.

        Raises:
            StreamError, LedgerError: what ended the other thread, as it was raised there.
        """
        if self._error is not None:
            raise self._error

    @property
    def num_credits(self) -> int:
        """Credits in hand that are not filled."""
        with self._lock:
            return len(self._credits)

    def receive(self, timeout: float) -> None:
        """Wait for slots, at most ``timeout`` seconds."""
        with self._lock:
            self._polls += 1
        self._held.extend(self._upstream.receive(MAX_SLOTS_A_POLL, timeout))

    def pass_on(self) -> Passed:
        """Pass on what was received, as far as there are credits."""
        num_slots = num_transitions = 0
        while self._held and (credit := self._credit_for(self._held[0])) is not None:
            slot = self._held.popleft()
            if isinstance(credit, Slot):
                self._fill(credit, slot)
                num_slots, num_transitions = num_slots + 1, num_transitions + slot.num_transitions
            else:
                self._drop(slot, credit)
        return Passed(num_slots, num_transitions)

    def close(self) -> None:
        """Post what is filled, pass on what can be, count what cannot, and part from both sides."""
        self._stopping.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(POST_DEADLINE_SECONDS)
        self._upstream.close()
        self._held.extend(self._upstream.receive(MAX_SLOTS_A_POLL, timeout=0))
        if self._error is None and not self._thread.is_alive():
            self.pass_on()
            self._post_filled()
        for slot in self._held:
            self._ledger.dropped("end_of_run", slot.num_transitions)
        self._held.clear()
        self._downstream.close()
        self._wake.close()

    # The owner's thread.

    def _credit_for(self, slot: Slot) -> Slot | StaleReason | None:
        """See ``DownstreamCredits.take_for``; None while there is none at all.

        A slot with more or fewer lanes fills none: an actor sends it that was made for another number of environments
        and is there until its successor is.
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
        """Its lanes, all of them, were taken off what was granted, and are granted again."""
        num_lanes = slot.num_lanes
        self._ledger.dropped(reason, slot.num_transitions)
        _log.info("slot_dropped", reason=reason, version=str(slot.oldest_version), num_lanes=num_lanes)
        self._upstream.release(slot)
        with self._lock:
            newest = self._credits.newest_version
        self._upstream.grant(num_lanes, newest)

    # The other thread.

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
        except BaseException as error:  # noqa: BLE001 - raised by check(), in the owner's thread
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
        """On behalf of the owner: one that does not poll is as good as dead."""
        with self._lock:
            polls = self._polls
        if polls != self._polls_seen:
            self._polls_seen = polls
            self._downstream.touch()
