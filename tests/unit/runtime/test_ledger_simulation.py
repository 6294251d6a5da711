"""Simulated runs lose acknowledgements, processes and pods, and resume. Their ledger always balances.

A killed process leaves its page. A deleted pod loses its page: its successor begins on an older copy.
"""

from __future__ import annotations

import random
import sys
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rlsrl.api.role_names import ACTOR, BUFFER
from rlsrl.data.slots import ProducerId
from rlsrl.runtime.ledger import (
    LOSS_CAUSES,
    ActorLedger,
    BufferLedger,
    LedgerError,
    LedgerPage,
    PageRecord,
    ProducerProgress,
    TrainerLedger,
    balance,
    key_of,
    read_pages,
    settle_ledger,
    starting_record,
)
from rlsrl.runtime.ledger.records import consumer_of

balance_module = sys.modules["rlsrl.runtime.ledger.balance"]  # the package has a function of that name
NUM_ACTORS, NUM_BUFFERS, NUM_RANKS = 3, 2, 2


class Sent(NamedTuple):
    """A slot in flight."""

    sequence: int
    num_transitions: int
    total: int


class Consumer:
    """The in-memory state of a consumer; only its page survives a kill."""

    def __init__(self, ledger: TrainerLedger | BufferLedger) -> None:
        self.consumer_ledger = ledger
        self.buffer: deque[int] = deque()

    def receive(self, producer: ProducerId, slot: Sent) -> None:
        if slot.sequence > self.consumer_ledger.marked_sequence(producer):
            self.consumer_ledger.take(producer, *slot)
            self.buffer.append(slot.num_transitions)


class Producer:
    """The in-memory state of a producer, and its slots in flight to each consumer, by the consumers' keys."""

    def __init__(self, ledger: ActorLedger | BufferLedger, me: ProducerId, consumers: Sequence[int]) -> None:
        self.producer_ledger = ledger
        self.me = me
        self.consumers = consumers
        left = ledger.begin(me.incarnation)
        self.unsettled = {each.consumer for each in left}
        self.progress: dict[int, ProducerProgress] = {consumer: ledger.progress(consumer) for consumer in consumers}
        self.connected: set[int] = set()
        self.sequence = 0
        self.in_flight: dict[int, deque[Sent]] = {consumer: deque() for consumer in consumers}
        self.unacknowledged: dict[int, dict[int, Sent]] = {consumer: {} for consumer in consumers}

    def post(self, num_transitions: int, *, killed_before_send: bool = False) -> None:
        consumer = self.consumers[self.sequence % len(self.consumers)]
        slot = Sent(
            self.sequence, num_transitions, self.producer_ledger.produce(self.sequence, num_transitions, consumer)
        )
        if not killed_before_send:
            self.in_flight[consumer].append(slot)
            self.unacknowledged[consumer][self.sequence] = slot
        self.sequence += 1

    def meet(self, consumer: int, consumer_state: Consumer) -> None:
        """Perform a handshake; after one with every consumer, settle the slots of earlier incarnations."""
        mark = consumer_state.consumer_ledger.meet(self.me, self.progress[consumer])
        self.connected.add(consumer)
        for sequence in [each for each in self.unacknowledged[consumer] if each <= mark.sequence]:
            self.acknowledged(consumer, sequence)
        self.in_flight[consumer] = deque(slot for _, slot in sorted(self.unacknowledged[consumer].items()))
        if consumer in self.unsettled:
            self.unsettled.remove(consumer)
            self.progress[consumer] = replace(self.progress[consumer], left=())
            if not self.unsettled:
                self.producer_ledger.forget_settled(self.me.incarnation)

    def deliver(self, consumer: int, consumer_state: Consumer, *, acknowledged: bool) -> None:
        if consumer not in self.connected:
            self.meet(consumer, consumer_state)
        if self.in_flight[consumer]:
            slot = self.in_flight[consumer].popleft()
            consumer_state.receive(self.me, slot)
            if acknowledged:
                for sequence in [each for each in self.unacknowledged[consumer] if each <= slot.sequence]:
                    self.acknowledged(consumer, sequence)

    def acknowledged(self, consumer: int, sequence: int) -> None:
        slot = self.unacknowledged[consumer].pop(sequence)
        self.producer_ledger.acknowledge(sequence)
        self.progress[consumer] = replace(self.progress[consumer], sequence=sequence, acknowledged=slot.total)


class Worker(Consumer, Producer):
    """A process of a role, and its ledger page."""

    def __init__(
        self, page: LedgerPage, incarnation: int, saved: dict[str, Any] | None, consumers: list[int], producers: str
    ) -> None:
        self.page = page
        self.role, index = page.record.role, page.record.index
        self.ledger: ActorLedger | BufferLedger | TrainerLedger
        if self.role == "trainer":
            self.ledger = TrainerLedger(page, producers=producers)
            self.ledger.resume(saved, incarnation=incarnation)
        else:
            self.ledger = ActorLedger(page) if self.role == "actor" else BufferLedger(page)
            Producer.__init__(self, self.ledger, ProducerId(index, incarnation), consumers)
        if not isinstance(self.ledger, ActorLedger):
            Consumer.__init__(self, self.ledger)


class Run:
    """A run with its pages in a folder, driven by a seeded generator."""

    def __init__(
        self, folder: Path, rng: random.Random, *, buffers: bool = False, kills: bool = False, deletes: bool = False
    ) -> None:
        """Workers always end and restart cleanly; ``kills`` and ``deletes`` add unclean ends."""
        self.folder, self.rng, self.kills, self.deletes = folder, rng, kills, deletes
        self.saved: list[dict[str, Any] | None] = [None] * NUM_RANKS
        self.incarnations: Counter[tuple[str, int]] = Counter()
        self.copies: dict[tuple[str, int], PageRecord] = {}
        self.edit(buffers=buffers)

    def edit(self, *, buffers: bool) -> None:
        """Begin the next session with buffer workers, or without."""
        self.sizes = {"actor": NUM_ACTORS, "buffer": NUM_BUFFERS * buffers, "trainer": NUM_RANKS}
        self.chain = [role for role, size in self.sizes.items() if size]
        self.members = [(role, index) for role, size in self.sizes.items() for index in range(size)]

    def session(self, num_events: int) -> None:
        """Run all processes for some events, then end them cleanly."""
        with ExitStack() as self.pages:
            self.begin()
            for _ in range(num_events):
                self.event()
            self.end()

    def begin(self) -> None:
        self.workers: dict[tuple[str, int], Worker] = {}
        for member in self.members:
            self.workers[member] = self.new(*member)

    def end(self) -> None:
        for worker in self.workers.values():
            if worker.role != "trainer" and self.rng.random() < 0.8:
                for consumer in worker.consumers:
                    worker.deliver(consumer, self.consumer_of(consumer), acknowledged=self.rng.random() < 0.7)
        for (_, index), worker in self.workers.items():
            self.leave(worker, index)

    def leave(self, worker: Worker, index: int) -> None:
        """End a worker cleanly."""
        if isinstance(worker.ledger, TrainerLedger):
            self.saved[index] = worker.ledger.snapshot()
        if not isinstance(worker.ledger, ActorLedger):
            worker.ledger.dropped("end_of_run", sum(worker.buffer))
        worker.ledger.end()

    def event(self) -> None:
        member = self.rng.choice(self.members)
        worker, (role, index) = self.workers[member], member
        kind = self.rng.choices(
            ["work", "deliver", "drop", "save", "reconnect", "keep", "replace", "kill", "delete"],
            [30, 60, 2, 5, 3, 5, 3, 3 * self.kills, 3 * self.deletes],
        )[0]
        if kind == "work":
            self.work(worker)
        elif kind == "deliver" and role != "trainer":
            consumer = self.rng.choice(worker.consumers)
            worker.deliver(consumer, self.consumer_of(consumer), acknowledged=self.rng.random() < 0.7)
        elif kind == "drop" and not isinstance(worker.ledger, ActorLedger) and worker.buffer:
            worker.ledger.dropped("stale", worker.buffer.popleft())
        elif kind == "save" and isinstance(worker.ledger, TrainerLedger):
            self.saved[index] = worker.ledger.snapshot()
        elif kind == "reconnect" and role != "trainer":
            worker.connected.clear()
        elif kind == "keep":
            self.copies[member] = worker.page.record
        elif kind == "replace":
            self.leave(worker, index)
            self.replace_worker(member, deletes=False)
        elif kind in ("kill", "delete"):
            self.kill(member, deletes=kind == "delete")

    def work(self, worker: Worker, *, killed_before_send: bool = False) -> None:
        if isinstance(worker.ledger, ActorLedger):
            worker.post(self.rng.randrange(1, 100), killed_before_send=killed_before_send)
        elif worker.buffer and isinstance(worker.ledger, TrainerLedger):
            num_transitions = worker.buffer.popleft()
            num_untrained = self.rng.choice([0, 0, num_transitions // 2, num_transitions])
            worker.ledger.trained(num_transitions - num_untrained, num_untrained=num_untrained)
        elif worker.buffer:
            worker.post(worker.buffer.popleft(), killed_before_send=killed_before_send)

    def kill(self, member: tuple[str, int], *, deletes: bool) -> None:
        """Kill a worker, also between counting and posting or between two handshakes of its successor."""
        worker, role = self.workers[member], member[0]
        if role != "trainer" and self.rng.random() < 0.5:
            self.work(worker, killed_before_send=True)
        if role != "trainer" and self.rng.random() < 0.5:
            for consumer in self.rng.sample(worker.consumers, self.rng.randrange(len(worker.consumers) + 1)):
                worker.meet(consumer, self.consumer_of(consumer))
        self.replace_worker(member, deletes=deletes)

    def replace_worker(self, member: tuple[str, int], *, deletes: bool) -> None:
        worker, (role, index) = self.workers[member], member
        worker.page.close()
        if deletes:
            self.path(role, index).unlink()
        self.workers[member] = self.new(role, index)
        for producer in self.workers.values():
            if producer.role != "trainer" and self.consumer_role(producer.role) == role:
                producer.connected.discard(key_of(role, index))

    def consumer_role(self, role: str) -> str:
        return self.chain[self.chain.index(role) + 1]

    def consumer_of(self, key: int) -> Worker:
        return self.workers[consumer_of(key)]

    def new(self, role: str, index: int) -> Worker:
        member = role, index
        incarnation = self.incarnations[member]
        self.incarnations[member] += 1
        page = self.pages.enter_context(LedgerPage.open(self.path(role, index), role, index))
        page.apply(lambda record: starting_record(record, self.copies.get(member), incarnation=incarnation))
        saved = self.saved[index] if role == "trainer" else None
        consumers: list[int] = []
        if role != "trainer":
            num_consumers = self.sizes[self.consumer_role(role)]
            chosen = [index % num_consumers] if self.consumer_role(role) == BUFFER else range(num_consumers)
            consumers = [key_of(self.consumer_role(role), each) for each in chosen]
        return Worker(page, incarnation, saved, consumers, producers=BUFFER if self.sizes[BUFFER] else ACTOR)

    def path(self, role: str, index: int) -> Path:
        return self.folder / f"{role}-{index}.page"


@pytest.fixture(params=range(40))
def rng(request: pytest.FixtureRequest) -> random.Random:
    return random.Random(int(request.param))


@pytest.mark.parametrize("buffers", [False, True])
@pytest.mark.parametrize("deletes", [False, True])
def test_with_kills_and_deletions_the_ledger_balances(
    tmp_path: Path, rng: random.Random, buffers: bool, deletes: bool
) -> None:
    run = Run(tmp_path, rng, buffers=buffers, kills=True, deletes=deletes)
    for _ in range(3):
        run.session(rng.randrange(300))
        found = balance(read_pages(tmp_path), ended=True)
        found.check()
        assert min(found.lost.values()) >= 0, found
        if rng.random() < 0.7:
            settle_ledger(tmp_path)
            assert balance(read_pages(tmp_path), ended=True) == found


def test_without_a_kill_nothing_is_lost(tmp_path: Path, rng: random.Random) -> None:
    run = Run(tmp_path, rng, buffers=True)
    for _ in range(2):
        run.session(rng.randrange(200))
        settle_ledger(tmp_path)
    found = balance(read_pages(tmp_path), ended=True)
    found.check()
    assert sum(found.lost.values()) == 0


@pytest.mark.parametrize("deletes", [False, True])
def test_the_ledger_of_a_live_run_at_rest_balances(tmp_path: Path, rng: random.Random, deletes: bool) -> None:
    run = Run(tmp_path, rng, buffers=True, kills=True, deletes=deletes)
    with ExitStack() as run.pages:
        run.begin()
        for _ in range(100):
            run.event()
            balance(read_pages(tmp_path), ended=False).check()


@pytest.mark.parametrize("buffers", [False, True])
def test_copies_of_pages_balance_however_old_each_is(tmp_path: Path, rng: random.Random, buffers: bool) -> None:
    run = Run(tmp_path, rng, buffers=buffers, kills=True, deletes=True)
    run.copies = {(role, index): PageRecord(role=role, index=index) for role, index in run.members}
    with ExitStack() as run.pages:
        run.begin()
        for _ in range(200):
            run.event()
            for ended in (False, True):
                found = balance(run.copies.values(), ended=ended, copies=True)
                found.check()
            assert min(found.lost.values()) >= 0, found


@pytest.mark.parametrize("deletes", [False, True])
def test_edits_that_add_and_remove_buffer_workers_keep_the_balance(
    tmp_path: Path, rng: random.Random, deletes: bool
) -> None:
    run = Run(tmp_path, rng, kills=True, deletes=deletes)
    copies = {
        (role, index): PageRecord(role=role, index=index) for role, index in Run(tmp_path, rng, buffers=True).members
    }
    run.copies = copies if deletes else {}
    for buffers in (True, False, True, False):
        run.edit(buffers=buffers)
        run.session(150)
        balance(run.copies.values(), ended=True, copies=True).check()
        found = balance(read_pages(tmp_path), ended=True)
        found.check()
        assert min(found.lost.values()) >= 0, found


def check_run(folder: Path, seed: int) -> None:
    """Run with deletions to the end; check the pages and their copies.

    Raises:
        LedgerError: the ledger does not balance.
    """
    run = Run(folder, random.Random(seed), buffers=seed % 2 == 0, kills=True, deletes=True)
    run.copies = {(role, index): PageRecord(role=role, index=index) for role, index in run.members}
    run.session(200)
    balance(run.copies.values(), ended=True, copies=True).check()
    balance(read_pages(folder), ended=True).check()


@pytest.mark.parametrize(
    "term", ["produced", "trained", "in_buffer", *(f"lost.{cause}" for cause in LOSS_CAUSES), "outlived", "passed_on"]
)
def test_a_term_that_is_not_counted_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, term: str) -> None:
    count = PageRecord.count
    monkeypatch.setattr(
        PageRecord, "count", lambda self, **deltas: count(self, **{t: n for t, n in deltas.items() if t != term})
    )
    for seed in range(20):
        (folder := tmp_path / str(seed)).mkdir()
        try:
            check_run(folder, seed)
        except LedgerError:
            assert term != "passed_on", "passed_on is no term of the sum"
            return
    assert term == "passed_on", "no missing term was detected"


@pytest.mark.parametrize("part", ["not_taken", "forgotten", "outlived"])
def test_the_handshake_reports_are_necessary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    compared = balance_module._compare
    nothing = () if part == "not_taken" else 0
    monkeypatch.setattr(balance_module, "_compare", lambda *arguments: replace(compared(*arguments), **{part: nothing}))
    with pytest.raises(LedgerError):  # noqa: PT012 - any of the runs may raise
        for seed in range(20):
            (folder := tmp_path / str(seed)).mkdir()
            check_run(folder, seed)
