"""A run of actors and trainers that lose acknowledgements, die at any moment and resume: the books always balance."""

import random
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from rlsrl.data.slots import ProducerId
from rlsrl.runtime.ledger import ActorLedger, LedgerPage, Posted, TrainerLedger, balance, close_books, read_pages

NUM_ACTORS, NUM_RANKS = 3, 2


class Trainer:
    """A rank's memory; its page is what outlives it."""

    def __init__(self, page: LedgerPage, saved: dict[str, Any] | None) -> None:
        self.page = page
        self.ledger = TrainerLedger(page)
        self.ledger.resume(saved)
        self.buffer: deque[int] = deque()

    def receive(self, producer: ProducerId, sequence: int, num_transitions: int) -> None:
        if sequence > self.ledger.mark(producer):
            self.ledger.take(producer, sequence, num_transitions)
            self.buffer.append(num_transitions)

    def handshake(self, index: int, left: Sequence[Posted]) -> None:
        """Account for what the actor's earlier lives had posted to this rank."""
        for incarnation in sorted({each.incarnation for each in left}):
            dead = ProducerId(index, incarnation)
            mark = self.ledger.mark(dead)
            lost = sum(e.num_transitions for e in left if e.incarnation == incarnation and e.sequence > mark)
            self.ledger.lost_with_producer(dead, lost)


class Actor:
    """An actor's memory and its slots under way, each with the rank it is for."""

    def __init__(self, page: LedgerPage, index: int, incarnation: int) -> None:
        self.page = page
        self.me = ProducerId(index, incarnation)
        self.ledger = ActorLedger(page)
        self.left = self.ledger.begin(incarnation)
        self.greeted: set[int] = set()
        self.sequence = 0
        self.under_way: list[deque[tuple[int, int]]] = [deque() for _ in range(NUM_RANKS)]
        self.unacknowledged: list[dict[int, int]] = [{} for _ in range(NUM_RANKS)]

    def post(self, num_transitions: int, *, dies_first: bool) -> None:
        rank = self.sequence % NUM_RANKS
        self.ledger.produce(self.sequence, num_transitions, rank)
        if not dies_first:
            self.under_way[rank].append((self.sequence, num_transitions))
            self.unacknowledged[rank][self.sequence] = num_transitions
        self.sequence += 1

    def greet(self, rank: int, trainer: Trainer) -> None:
        """A handshake; once every rank has heard what earlier lives left it is forgotten."""
        trainer.handshake(self.me.index, [each for each in self.left if each.consumer == rank])
        self.greeted.add(rank)

    def settle(self) -> None:
        if len(self.greeted) == NUM_RANKS:
            self.ledger.settle(self.me.incarnation)

    def deliver(self, rank: int, trainer: Trainer, *, acknowledged: bool) -> None:
        if rank not in self.greeted:
            self.greet(rank, trainer)
            self.settle()
        if self.under_way[rank]:
            sequence, num_transitions = self.under_way[rank].popleft()
            trainer.receive(self.me, sequence, num_transitions)
            if acknowledged:
                self.ledger.acknowledge(sequence)
                self.unacknowledged[rank].pop(sequence, None)

    def reconnect(self, rank: int) -> None:
        """To a rank's next life, or after a broken connection: what is unacknowledged goes again, in order."""
        self.under_way[rank] = deque(sorted(self.unacknowledged[rank].items()))


class Run:
    """One run on pages in a folder, driven by a seeded generator."""

    def __init__(self, folder: Path, rng: random.Random, *, kills: bool) -> None:
        self.folder, self.rng, self.kills = folder, rng, kills
        self.saved: list[dict[str, Any] | None] = [None] * NUM_RANKS
        self.incarnations = [-1] * NUM_ACTORS
        self.num_kills = 0

    def session(self, num_events: int) -> None:
        """The processes live, until a clean end."""
        with ExitStack() as self.pages:
            self.trainers = [self.new_trainer(rank) for rank in range(NUM_RANKS)]
            self.actors = [self.new_actor(index) for index in range(NUM_ACTORS)]
            for _ in range(num_events):
                self.event()
            for actor in self.actors:
                if self.rng.random() < 0.8:
                    for rank in range(NUM_RANKS):
                        actor.deliver(rank, self.trainers[rank], acknowledged=self.rng.random() < 0.7)
                actor.ledger.end()
            for rank, trainer in enumerate(self.trainers):
                self.saved[rank] = trainer.ledger.snapshot()
                trainer.ledger.dropped("end_of_run", sum(trainer.buffer))
                trainer.ledger.end()

    def event(self) -> None:
        rank, index = self.rng.randrange(NUM_RANKS), self.rng.randrange(NUM_ACTORS)
        trainer, actor = self.trainers[rank], self.actors[index]
        kind = self.rng.choices(
            ["post", "deliver", "train", "drop", "save", "reconnect", "kill actor", "kill trainer"],
            [30, 40, 25, 2, 5, 3, 4 * self.kills, 3 * self.kills],
        )[0]
        if kind == "post":
            actor.post(self.rng.randrange(1, 100), dies_first=False)
        elif kind == "deliver":
            actor.deliver(rank, trainer, acknowledged=self.rng.random() < 0.7)
        elif kind == "train" and trainer.buffer:
            trainer.ledger.trained(trainer.buffer.popleft())
        elif kind == "drop" and trainer.buffer:
            trainer.ledger.dropped("stale", trainer.buffer.popleft())
        elif kind == "save":
            self.saved[rank] = trainer.ledger.snapshot()
        elif kind == "reconnect":
            actor.reconnect(rank)
        elif kind == "kill actor":
            self.kill_actor(index)
        elif kind == "kill trainer":
            self.kill_trainer(rank)

    def kill_actor(self, index: int) -> None:
        """Also between counting and posting, and between any two handshakes of its successor."""
        self.num_kills += 1
        if self.rng.random() < 0.5:
            self.actors[index].post(self.rng.randrange(1, 100), dies_first=True)
        if self.rng.random() < 0.5:
            for rank in self.rng.sample(range(NUM_RANKS), self.rng.randrange(NUM_RANKS + 1)):
                self.actors[index].greet(rank, self.trainers[rank])
        self.actors[index].page.close()
        self.actors[index] = self.new_actor(index)

    def kill_trainer(self, rank: int) -> None:
        self.num_kills += 1
        self.trainers[rank].page.close()
        self.trainers[rank] = self.new_trainer(rank)
        for actor in self.actors:
            actor.reconnect(rank)

    def new_trainer(self, rank: int) -> Trainer:
        return Trainer(self.open("trainer", rank), self.saved[rank])

    def new_actor(self, index: int) -> Actor:
        self.incarnations[index] += 1
        return Actor(self.open("actor", index), index, self.incarnations[index])

    def open(self, role: str, index: int) -> LedgerPage:
        return self.pages.enter_context(LedgerPage.open(self.folder / f"{role}-{index}.page", role, index))


@pytest.fixture(params=range(40))
def rng(request: pytest.FixtureRequest) -> random.Random:
    return random.Random(int(request.param))


def test_with_kills_the_books_balance(tmp_path: Path, rng: random.Random) -> None:
    run = Run(tmp_path, rng, kills=True)
    for _ in range(3):
        run.session(rng.randrange(200))
        found = balance(read_pages(tmp_path), ended=True)
        found.check()
        if rng.random() < 0.7:
            close_books(tmp_path)
            assert balance(read_pages(tmp_path), ended=True) == found


def test_without_a_kill_nothing_is_lost(tmp_path: Path, rng: random.Random) -> None:
    run = Run(tmp_path, rng, kills=False)
    for _ in range(2):
        run.session(rng.randrange(200))
        close_books(tmp_path)
    found = balance(read_pages(tmp_path), ended=True)
    found.check()
    assert sum(found.lost.values()) == 0


def test_while_nothing_moves_the_books_of_a_live_run_balance(tmp_path: Path, rng: random.Random) -> None:
    run = Run(tmp_path, rng, kills=True)
    with ExitStack() as run.pages:
        run.trainers = [run.new_trainer(rank) for rank in range(NUM_RANKS)]
        run.actors = [run.new_actor(index) for index in range(NUM_ACTORS)]
        for _ in range(60):
            run.event()
            balance(read_pages(tmp_path), ended=False).check()
