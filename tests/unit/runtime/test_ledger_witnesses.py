import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlsrl.data.slots import ProducerId
from rlsrl.runtime.ledger import (
    ACCOUNT_CLOSED,
    ActorLedger,
    BufferLedger,
    LedgerError,
    LedgerPage,
    Posted,
    TrainerLedger,
)
from rlsrl.runtime.ledger.records import Mark, PageRecord
from rlsrl.runtime.ledger.witnesses import resumed
from rlsrl.streams.protocols import ConsumerLedger, ProducerLedger


@pytest.fixture
def trainer_page(tmp_path: Path) -> Iterator[LedgerPage]:
    with LedgerPage.open(tmp_path / "trainer-0.page", "trainer", 0) as page:
        yield page


@pytest.fixture
def actor_page(tmp_path: Path) -> Iterator[LedgerPage]:
    with LedgerPage.open(tmp_path / "actor-0.page", "actor", 0) as page:
        yield page


def figures(page: LedgerPage) -> dict[str, int]:
    """The terms that are not zero."""
    return {term: count for term, count in page.record.counters.items() if count}


def test_they_satisfy_the_streams_protocols(trainer_page: LedgerPage, actor_page: LedgerPage) -> None:
    consumer: ConsumerLedger = TrainerLedger(trainer_page)
    producer: ProducerLedger = ActorLedger(actor_page)
    actor = ActorLedger(actor_page)
    actor.begin(0)
    producer.produce(0, 4)
    consumer.take(ProducerId(0, 0), 0, 4)
    producer.acknowledge(0)
    assert consumer.mark(ProducerId(0, 0)) == 0


def test_marks_are_per_producer_and_incarnation(trainer_page: LedgerPage) -> None:
    ledger = TrainerLedger(trainer_page)
    first, second, other = ProducerId(0, 1), ProducerId(0, 2), ProducerId(1, 1)
    assert ledger.mark(first) == -1
    ledger.take(first, 0, 10)
    ledger.take(first, 5, 10)
    ledger.take(other, 3, 10)
    assert (ledger.mark(first), ledger.mark(second), ledger.mark(other)) == (5, -1, 3)
    ledger.take(second, 0, 10)
    assert (ledger.mark(first), ledger.mark(second), ledger.mark(other)) == (ACCOUNT_CLOSED, 0, 3)
    assert figures(trainer_page) == {"in_buffer": 40}


@pytest.mark.parametrize("sequence", [0, 4, 5])
def test_nothing_is_taken_twice(trainer_page: LedgerPage, sequence: int) -> None:
    ledger = TrainerLedger(trainer_page)
    ledger.take(ProducerId(0, 1), 5, 10)
    with pytest.raises(LedgerError, match="taken before: the mark is 5"):
        ledger.take(ProducerId(0, 1), sequence, 10)
    with pytest.raises(LedgerError, match="taken before"):
        ledger.take(ProducerId(0, 0), 9, 10)
    assert figures(trainer_page) == {"in_buffer": 10}


def test_what_leaves_the_buffer(trainer_page: LedgerPage) -> None:
    ledger = TrainerLedger(trainer_page)
    ledger.take(ProducerId(0, 0), 0, 100)
    ledger.trained(60)
    ledger.dropped("stale", 10)
    ledger.dropped("end_of_run", 5)
    assert figures(trainer_page) == {
        "trained": 60,
        "in_buffer": 25,
        "dropped.stale": 10,
        "dropped.end_of_run": 5,
    }
    with pytest.raises(KeyError, match="whim"):
        ledger.dropped("whim", 1)


def test_a_dead_incarnations_account_is_closed_once(trainer_page: LedgerPage) -> None:
    ledger = TrainerLedger(trainer_page)
    dead = ProducerId(0, 1)
    ledger.take(dead, 3, 10)
    ledger.lost_with_producer(dead, 20)
    assert ledger.mark(dead) == ACCOUNT_CLOSED
    ledger.lost_with_producer(dead, 0)
    with pytest.raises(LedgerError, match="account is closed"):
        ledger.lost_with_producer(dead, 20)
    assert figures(trainer_page) == {"in_buffer": 10, "lost.producer_died": 20}
    assert ledger.mark(ProducerId(0, 2)) == -1


def test_an_actors_first_and_later_lives(actor_page: LedgerPage) -> None:
    ledger = ActorLedger(actor_page)
    assert ledger.begin(4) == ()
    ledger.produce(0, 10)
    ledger.produce(1, 11, consumer=1)
    ledger.produce(2, 12)
    ledger.acknowledge(0)
    ledger.acknowledge(0)
    left = (Posted(4, 1, 11, 1), Posted(4, 2, 12, 0))
    assert ledger.begin(5) == left
    ledger.produce(0, 20)
    ledger.acknowledge(1)
    ledger.acknowledge(2)
    assert actor_page.record.unacknowledged == (*left, Posted(5, 0, 20, 0)), "an acknowledgement is to this life"
    assert ledger.begin(6) == (*left, Posted(5, 0, 20, 0)), "a life that died before settling leaves it to the next"
    ledger.produce(0, 30)
    ledger.settle(6)
    ledger.settle(6)
    assert actor_page.record.unacknowledged == (Posted(6, 0, 30, 0),)
    assert figures(actor_page) == {"produced": 83}
    assert actor_page.record.lives == 3


def test_incarnations_and_sequences_rise(actor_page: LedgerPage) -> None:
    ledger = ActorLedger(actor_page)
    with pytest.raises(LedgerError, match="does not follow"):
        ledger.produce(0, 1)
    ledger.begin(2)
    ledger.produce(3, 1)
    for sequence in (3, 2):
        with pytest.raises(LedgerError, match="does not follow 3"):
            ledger.produce(sequence, 1)
    for incarnation in (2, 1):
        with pytest.raises(LedgerError, match="is not newer than 2"):
            ledger.begin(incarnation)
    assert figures(actor_page) == {"produced": 1}


def test_a_clean_end_is_said_and_a_new_life_unsays_it(trainer_page: LedgerPage, actor_page: LedgerPage) -> None:
    actor, trainer = ActorLedger(actor_page), TrainerLedger(trainer_page)
    actor.begin(0)
    trainer.resume(None)
    assert not actor_page.record.ended
    actor.end()
    trainer.end()
    assert actor_page.record.ended
    assert trainer_page.record.ended
    actor.begin(1)
    trainer.resume(None)
    assert not actor_page.record.ended
    assert not trainer_page.record.ended


def page_of(trained: int = 0, in_buffer: int = 0, *, lives: int = 1, **counters: int) -> PageRecord:
    record = PageRecord(role="trainer", index=0, lives=lives, marks={0: Mark(1, 9)})
    return record.count(trained=trained, in_buffer=in_buffer, **counters)


def saved_at(trained: int, in_buffer: int = 0, marks: dict[str, list[int]] | None = None) -> dict[str, object]:
    return {"counters": {"trained": trained, "in_buffer": in_buffer}, "marks": marks or {}}


@pytest.mark.parametrize(
    ("record", "saved", "expected"),
    [
        pytest.param(page_of(lives=0), None, {}, id="first life"),
        pytest.param(
            page_of(100, 30), None, {"lost.rolled_back": 100, "lost.receiver_died": 30}, id="before any checkpoint"
        ),
        pytest.param(
            page_of(100, 30),
            saved_at(60, 45),
            {"trained": 60, "lost.rolled_back": 40, "lost.receiver_died": 30},
            id="after a checkpoint",
        ),
        pytest.param(page_of(60, 0), saved_at(60, 45), {"trained": 60}, id="nothing since"),
        pytest.param(
            page_of(70, 5, **{"lost.rolled_back": 40, "lost.receiver_died": 30, "dropped.stale": 2}),
            saved_at(60),
            {"trained": 60, "lost.rolled_back": 50, "lost.receiver_died": 35, "dropped.stale": 2},
            id="a second death",
        ),
        pytest.param(
            page_of(lives=0), saved_at(60, 45), {"trained": 60, "lost.receiver_died": 45}, id="page left behind"
        ),
        pytest.param(
            page_of(50, 7), saved_at(60, 45), {"trained": 60, "lost.receiver_died": 45}, id="page older than checkpoint"
        ),
    ],
)
def test_resume(record: PageRecord, saved: dict[str, object] | None, expected: dict[str, int]) -> None:
    after = resumed(record, saved)
    assert {term: count for term, count in after.counters.items() if count} == expected
    assert after.lives == record.lives + 1
    assert after.marks[0] == Mark(1, 9), "what any life took stays known"
    again = resumed(after, saved)
    assert again.counters == after.counters, "a life that did nothing changes nothing"


def test_resume_keeps_the_newer_mark_of_page_and_checkpoint() -> None:
    saved = saved_at(0, marks={"0": [1, 3], "1": [2, 8], "2": [0, 1]})
    record = PageRecord(role="trainer", index=0, lives=1, marks={0: Mark(1, 9), 1: Mark(1, 50)})
    assert resumed(record, saved).marks == {0: Mark(1, 9), 1: Mark(2, 8), 2: Mark(0, 1)}


def test_a_snapshot_goes_through_json(tmp_path: Path, trainer_page: LedgerPage) -> None:
    ledger = TrainerLedger(trainer_page)
    ledger.resume(None)
    ledger.take(ProducerId(3, 1), 6, 100)
    ledger.trained(40)
    saved = json.loads(json.dumps(ledger.snapshot()))
    ledger.trained(60)
    with LedgerPage.open(tmp_path / "elsewhere.page", "trainer", 0) as page:
        elsewhere = TrainerLedger(page)
        elsewhere.resume(saved)
        assert figures(page) == {"trained": 40, "lost.receiver_died": 60}
        assert elsewhere.mark(ProducerId(3, 1)) == 6
    ledger.resume(saved)
    assert figures(trainer_page) == {"trained": 40, "lost.rolled_back": 60}


@pytest.fixture
def buffer_page(tmp_path: Path) -> Iterator[LedgerPage]:
    with LedgerPage.open(tmp_path / "buffer-0.page", "buffer", 0) as page:
        yield page


def test_a_buffer_worker_posts_what_it_took(buffer_page: LedgerPage) -> None:
    ledger = BufferLedger(buffer_page)
    assert ledger.begin(0) == ()
    for sequence in range(3):
        ledger.take(ProducerId(4, 1), sequence, 10)
    assert figures(buffer_page) == {"in_buffer": 30}
    ledger.produce(0, 10, consumer=1)
    assert figures(buffer_page) == {"in_buffer": 20, "passed_on": 10}
    assert buffer_page.record.unacknowledged == (Posted(0, 0, 10, 1),)
    ledger.dropped("end_of_run", 10)
    assert figures(buffer_page) == {"in_buffer": 10, "passed_on": 10, "dropped.end_of_run": 10}
    ledger.acknowledge(0)
    assert buffer_page.record.unacknowledged == ()


def test_what_a_dead_buffer_worker_held_is_lost_with_the_next_life(buffer_page: LedgerPage) -> None:
    ledger = BufferLedger(buffer_page)
    ledger.begin(0)
    ledger.take(ProducerId(4, 1), 0, 10)
    ledger.take(ProducerId(4, 1), 1, 7)
    ledger.produce(0, 10)
    assert ledger.begin(1) == (Posted(0, 0, 10, 0),)
    assert figures(buffer_page) == {"passed_on": 10, "lost.receiver_died": 7}
    assert ledger.mark(ProducerId(4, 1)) == 1, "what was taken is not taken again"
    ledger.settle(1)
    assert buffer_page.record.unacknowledged == ()
