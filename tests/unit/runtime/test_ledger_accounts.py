import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlsrl.api.role_names import ACTOR, BUFFER
from rlsrl.data.slots import ProducerId
from rlsrl.runtime.ledger import (
    ACCOUNT_CLOSED,
    ActorLedger,
    BufferLedger,
    Held,
    LedgerError,
    LedgerPage,
    Posted,
    ProducerProgress,
    TrainerLedger,
    starting_record,
)
from rlsrl.runtime.ledger.accounts import resumed_record
from rlsrl.runtime.ledger.records import Mark, PageRecord
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
    """Return the terms that are not zero."""
    return {term: count for term, count in page.record.counters.items() if count}


def test_the_accounts_satisfy_the_streams_protocols(trainer_page: LedgerPage, actor_page: LedgerPage) -> None:
    consumer: ConsumerLedger = TrainerLedger(trainer_page)
    producer: ProducerLedger = ActorLedger(actor_page)
    actor = ActorLedger(actor_page)
    actor.begin(0)
    assert producer.produce(0, 4) == 4
    consumer.take(ProducerId(0, 0), 0, 4, 4)
    producer.acknowledge(0)
    assert consumer.marked_sequence(ProducerId(0, 0)) == 0


def test_marks_are_per_producer_and_incarnation(trainer_page: LedgerPage) -> None:
    ledger = TrainerLedger(trainer_page)
    first, second, other = ProducerId(0, 1), ProducerId(0, 2), ProducerId(1, 1)
    assert ledger.marked_sequence(first) == -1
    ledger.take(first, 0, 10, 1000)
    ledger.take(first, 5, 10, 1000)
    ledger.take(other, 3, 10, 1000)
    assert [*map(ledger.marked_sequence, (first, second, other))] == [5, -1, 3]
    ledger.take(second, 0, 10, 1000)
    assert [*map(ledger.marked_sequence, (first, second, other))] == [ACCOUNT_CLOSED, 0, 3]
    assert figures(trainer_page) == {"in_buffer": 40}


@pytest.mark.parametrize("sequence", [0, 4, 5])
def test_no_slot_is_taken_twice(trainer_page: LedgerPage, sequence: int) -> None:
    ledger = TrainerLedger(trainer_page)
    ledger.take(ProducerId(0, 1), 5, 10, 1000)
    with pytest.raises(LedgerError, match="taken before: the mark is 5"):
        ledger.take(ProducerId(0, 1), sequence, 10, 1000)
    with pytest.raises(LedgerError, match="taken before"):
        ledger.take(ProducerId(0, 0), 9, 10, 1000)
    assert figures(trainer_page) == {"in_buffer": 10}


def test_slots_that_leave_the_buffer_are_counted(trainer_page: LedgerPage) -> None:
    ledger = TrainerLedger(trainer_page)
    ledger.take(ProducerId(0, 0), 0, 100, 1000)
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


def test_transitions_that_no_slot_holds_are_produced_and_dropped_in_one_update(actor_page: LedgerPage) -> None:
    ledger = ActorLedger(actor_page)
    ledger.begin(0)
    ledger.produce(0, 10)
    ledger.discarded("non_finite", 3)
    assert {name: figures(actor_page)[name] for name in ("produced", "dropped.non_finite")} == {
        "produced": 13,
        "dropped.non_finite": 3,
    }
    assert ledger.progress().inherited == 0, "no consumer hears of them"
    with pytest.raises(KeyError, match="whim"):
        ledger.discarded("whim", 1)


def test_slots_of_a_dead_incarnation_are_counted_once(trainer_page: LedgerPage) -> None:
    ledger = TrainerLedger(trainer_page)
    ledger.meet(ProducerId(0, 1), ProducerProgress())
    ledger.take(ProducerId(0, 1), 3, 10, 10)
    progress = ProducerProgress(inherited=30, acknowledged=30, left=((1, 3, 10, False), (1, 4, 20, False)))
    for successor in (ProducerId(0, 2), ProducerId(0, 2), ProducerId(0, 3)):
        assert ledger.meet(successor, progress) == Mark(successor.incarnation, -1, 30)
    assert ledger.marked_sequence(ProducerId(0, 1)) == ACCOUNT_CLOSED
    assert figures(trainer_page) == {"in_buffer": 10, "lost.producer_died": 20}
    with pytest.raises(LedgerError, match="was succeeded by incarnation 3"):
        ledger.meet(ProducerId(0, 2), progress)


def test_the_first_and_later_incarnations_of_an_actor(actor_page: LedgerPage) -> None:
    ledger = ActorLedger(actor_page)
    assert ledger.begin(4) == ()
    assert [ledger.produce(0, 10), ledger.produce(1, 11, consumer=1), ledger.produce(2, 12)] == [10, 11, 22]
    ledger.acknowledge(0)
    ledger.acknowledge(0)
    left = (Posted(4, 1, 11, 1), Posted(4, 2, 12, 0))
    assert ledger.begin(5) == left
    assert ledger.progress(0) == ProducerProgress(inherited=22, acknowledged=22, left=((4, 2, 12, False),))
    assert ledger.progress(1) == ProducerProgress(inherited=11, acknowledged=11, left=((4, 1, 11, False),))
    assert ledger.progress(2) == ProducerProgress()
    ledger.produce(0, 20)
    ledger.acknowledge(1)
    ledger.acknowledge(2)
    assert actor_page.record.unacknowledged == (*left, Posted(5, 0, 20, 0)), (
        "an acknowledgement is to this actor_record"
    )
    assert ledger.begin(6) == (*left, Posted(5, 0, 20, 0)), (
        "a actor_record that died before settling leaves it to the next"
    )
    ledger.produce(0, 30)
    ledger.forget_settled(6)
    ledger.forget_settled(6)
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


def test_a_clean_end_is_recorded_and_a_new_incarnation_clears_it(
    trainer_page: LedgerPage, actor_page: LedgerPage
) -> None:
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


PAGE, CHECKPOINT = Mark(1, 9, 500), Mark(1, 7, 400)


def page_of(
    trained: int = 0, in_buffer: int = 0, *, lives: int = 1, incarnation: int = 0, **counters: int
) -> PageRecord:
    record = PageRecord(role="trainer", index=0, lives=lives, incarnation=incarnation, marks={0: PAGE})
    return record.count(trained=trained, in_buffer=in_buffer, **counters)


def saved_at(trained: int, in_buffer: int = 0, incarnation: int = 0) -> dict[str, Any]:
    counters = {"trained": trained, "in_buffer": in_buffer}
    return {"incarnation": incarnation, "counters": counters, "marks": {"0": [*CHECKPOINT]}}


@pytest.mark.parametrize(
    ("record", "saved", "expected"),
    [
        pytest.param(page_of(lives=0), None, {}, id="first actor_record"),
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
    ],
)
def test_resume(record: PageRecord, saved: dict[str, Any] | None, expected: dict[str, int]) -> None:
    after = resumed_record(record, saved, incarnation=3)
    assert {term: count for term, count in after.counters.items() if count} == expected
    assert (after.lives, after.incarnation, after.restored) == (record.lives + 1, 3, False)
    assert after.marks[0] == PAGE, "what any actor_record took stays known"
    again = resumed_record(after, saved, incarnation=4)
    assert again.counters == after.counters, "a actor_record that did nothing changes nothing"


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        pytest.param(Held(untrained=30, trained_since=40), {"in_buffer": 70}, id="all"),
        pytest.param(Held(untrained=27, trained_since=40), {"in_buffer": 67, "lost.receiver_died": 3}, id="on the way"),
        pytest.param(
            Held(untrained=30, trained_since=25), {"in_buffer": 55, "lost.rolled_back": 15}, id="evicted since"
        ),
        pytest.param(
            Held(untrained=20, trained_since=50), {"in_buffer": 70}, id="killed before the ledger knew of a step"
        ),
        pytest.param(
            Held(untrained=0, trained_since=0), {"lost.rolled_back": 40, "lost.receiver_died": 30}, id="nothing"
        ),
    ],
)
def test_what_a_store_still_holds_is_not_lost(held: Held, expected: dict[str, int]) -> None:
    after = resumed_record(page_of(100, 30), saved_at(60), incarnation=3, held=held)
    assert {term: count for term, count in after.counters.items() if count} == {"trained": 60, **expected}


def test_a_version_that_is_readable_again_takes_back_what_was_rolled_back() -> None:
    """Version 80 cannot be read, and training resumes from 50; then it dies, and 80 is there again."""
    at_50 = resumed_record(page_of(800, 100), saved_at(500), incarnation=2)
    assert at_50.counters["lost.rolled_back"] == 300
    at_80 = resumed_record(at_50, saved_at(800), incarnation=3)
    assert {term: count for term, count in at_80.counters.items() if count} == {
        "trained": 800,
        "lost.receiver_died": 100,
    }


def test_a_store_that_holds_more_than_the_ledger_counts_is_refused() -> None:
    with pytest.raises(LedgerError, match="holds 1 transitions more than the ledger counts"):
        resumed_record(page_of(100, 30), saved_at(60), held=Held(untrained=31, trained_since=40))


@pytest.mark.parametrize(
    ("saved", "expected"),
    [
        (None, 2),
        (saved_at(40, incarnation=2), 2),
        (saved_at(41, incarnation=2), None),
        (saved_at(41, incarnation=1), None),
    ],
    ids=["no checkpoint", "an older checkpoint", "a newer checkpoint", "a checkpoint that was rolled back"],
)
def test_whether_the_page_knows_all_that_the_former_life_did(
    tmp_path: Path, saved: dict[str, Any] | None, expected: int | None
) -> None:
    path = tmp_path / "trainer-0.page"
    with LedgerPage.open(path, "trainer", 0) as page:
        ledger = TrainerLedger(page)
        assert ledger.former_life(saved) is None, "the page was lost"
        ledger.resume(None, incarnation=2, keeps=True)
        ledger.take(ProducerId(3, 1), 6, 100, 1000)
        ledger.trained(40)
        assert page.record.keeps
    with LedgerPage.open(path, "trainer", 0) as page:
        assert TrainerLedger(page).former_life(saved) == expected


@pytest.mark.parametrize(
    "record",
    [
        pytest.param(page_of(lives=0), id="page left behind"),
        pytest.param(page_of(50, 7, **{"dropped.stale": 9}), id="page older than checkpoint"),
        pytest.param(page_of(60, 7), id="page older by steps whose updates were skipped"),
        pytest.param(
            page_of(90, 7, incarnation=-1), id="page of an earlier actor_record, whose training was rolled back"
        ),
    ],
)
def test_the_checkpoint_replaces_an_older_page(record: PageRecord) -> None:
    saved = saved_at(60, 45)
    saved["counters"]["dropped.update_skipped"] = 8
    after = resumed_record(record, saved, incarnation=3)
    expected = {"trained": 60, "dropped.update_skipped": 8, "lost.receiver_died": 45}
    assert {term: count for term, count in after.counters.items() if count} == expected
    assert after.marks == {0: CHECKPOINT}, "marks and counters are of one moment"
    assert after.restored


def test_a_snapshot_goes_through_json(tmp_path: Path, trainer_page: LedgerPage) -> None:
    ledger = TrainerLedger(trainer_page)
    ledger.resume(None, incarnation=2)
    ledger.take(ProducerId(3, 1), 6, 100, 1000)
    ledger.trained(40)
    saved = json.loads(json.dumps(ledger.snapshot()))
    ledger.trained(60)
    with LedgerPage.open(tmp_path / "elsewhere.page", "trainer", 0) as page:
        elsewhere = TrainerLedger(page)
        elsewhere.resume(saved, incarnation=3)
        assert figures(page) == {"trained": 40, "lost.receiver_died": 60}
        assert elsewhere.marked_sequence(ProducerId(3, 1)) == 6
    ledger.resume(saved, incarnation=3)
    assert figures(trainer_page) == {"trained": 40, "lost.rolled_back": 60}


def test_skipped_updates_stay_dropped_when_training_is_rolled_back(trainer_page: LedgerPage) -> None:
    ledger = TrainerLedger(trainer_page)
    ledger.resume(None, incarnation=2)
    ledger.take(ProducerId(3, 1), 6, 100, 1000)
    ledger.trained(30, num_untrained=10)
    saved = ledger.snapshot()
    ledger.trained(40, num_untrained=20)
    assert figures(trainer_page) == {"trained": 70, "dropped.update_skipped": 30}
    ledger.resume(saved, incarnation=3)
    assert figures(trainer_page) == {"trained": 30, "dropped.update_skipped": 30, "lost.rolled_back": 40}


@pytest.fixture
def buffer_page(tmp_path: Path) -> Iterator[LedgerPage]:
    with LedgerPage.open(tmp_path / "buffer-0.page", "buffer", 0) as page:
        yield page


def test_a_buffer_worker_posts_the_slots_it_took(buffer_page: LedgerPage) -> None:
    ledger = BufferLedger(buffer_page)
    assert ledger.begin(0) == ()
    for sequence in range(3):
        ledger.take(ProducerId(4, 1), sequence, 10, 1000)
    assert figures(buffer_page) == {"in_buffer": 30}
    ledger.produce(0, 10, consumer=1)
    assert figures(buffer_page) == {"in_buffer": 20, "passed_on": 10}
    assert buffer_page.record.unacknowledged == (Posted(0, 0, 10, 1),)
    ledger.dropped("end_of_run", 10)
    assert figures(buffer_page) == {"in_buffer": 10, "passed_on": 10, "dropped.end_of_run": 10}
    ledger.acknowledge(0)
    assert buffer_page.record.unacknowledged == ()


def test_unacknowledged_slots_of_an_ended_incarnation_are_withdrawn_once(buffer_page: LedgerPage) -> None:
    ledger = BufferLedger(buffer_page)
    for incarnation in range(3):
        ledger.begin(incarnation)
        ledger.take(ProducerId(4, 1), incarnation, 10, 1000)
        ledger.produce(0, 10)
        if incarnation == 1:
            ledger.end()
    ledger.end()
    left = tuple(Posted(incarnation, 0, 10, 0, withdrawn=incarnation > 0) for incarnation in range(3))
    assert buffer_page.record.unacknowledged == left
    assert ledger.begin(3) == left
    assert ledger.progress().left == ((0, 0, 10, False), (1, 0, 10, True), (2, 0, 10, True))


def test_slots_held_by_a_dead_buffer_worker_are_lost_at_its_next_start(buffer_page: LedgerPage) -> None:
    ledger = BufferLedger(buffer_page)
    ledger.begin(0)
    ledger.take(ProducerId(4, 1), 0, 10, 1000)
    ledger.take(ProducerId(4, 1), 1, 7, 1000)
    ledger.produce(0, 10)
    assert ledger.begin(1) == (Posted(0, 0, 10, 0),)
    assert figures(buffer_page) == {"passed_on": 10, "lost.receiver_died": 7}
    assert ledger.marked_sequence(ProducerId(4, 1)) == 1, "no slot is taken twice"
    ledger.forget_settled(1)
    assert buffer_page.record.unacknowledged == ()


@pytest.mark.parametrize(
    ("restored", "progress", "expected"),
    [
        pytest.param(True, ProducerProgress(inherited=100, acknowledged=100), {}, id="no loss"),
        pytest.param(
            True, ProducerProgress(inherited=130, acknowledged=130), {"lost.receiver_died": 30}, id="consumer lost some"
        ),
        pytest.param(
            True,
            ProducerProgress(inherited=130, acknowledged=130, left=((1, 8, 5, False), (1, 9, 7, False))),
            {"lost.receiver_died": 18, "lost.producer_died": 12},
            id="consumer lost some and never received the rest",
        ),
        pytest.param(
            True,
            ProducerProgress(inherited=130, acknowledged=130, left=((1, 8, 5, True), (1, 9, 7, False))),
            {"lost.receiver_died": 18, "dropped.end_of_run": 5, "lost.producer_died": 7},
            id="consumer lost some, some was withdrawn, the rest is lost",
        ),
        pytest.param(
            True,
            ProducerProgress(inherited=100, acknowledged=140),
            {"lost.receiver_died": 40},
            id="consumer lost this incarnation",
        ),
        pytest.param(
            True,
            ProducerProgress(inherited=60, acknowledged=60, restored=True),
            {"outlived": 40},
            id="producer lost some",
        ),
        pytest.param(
            True,
            ProducerProgress(inherited=60, acknowledged=90, restored=True),
            {"outlived": 40, "lost.receiver_died": 30},
            id="both lost some",
        ),
        pytest.param(True, ProducerProgress(restored=True), {"outlived": 100}, id="producer lost all"),
        pytest.param(
            False, ProducerProgress(inherited=130, acknowledged=130), {}, id="unexplained difference: consumer"
        ),
        pytest.param(True, ProducerProgress(inherited=60, acknowledged=60), {}, id="unexplained difference: producer"),
    ],
)
def test_each_end_reports_what_the_other_lost(
    trainer_page: LedgerPage, restored: bool, progress: ProducerProgress, expected: dict[str, int]
) -> None:
    ledger = TrainerLedger(trainer_page)
    ledger.meet(ProducerId(0, 1), ProducerProgress())
    ledger.take(ProducerId(0, 1), 7, 100, 100)
    trainer_page.apply(lambda record: replace(record.count(in_buffer=-100), restored=restored))
    for _ in range(2):
        assert ledger.meet(ProducerId(0, 2), progress) == Mark(2, -1, progress.acknowledged)
    assert figures(trainer_page) == expected


def test_what_a_restored_buffer_worker_lacks_was_not_produced_by_it(trainer_page: LedgerPage) -> None:
    ledger = TrainerLedger(trainer_page, producers=BUFFER)
    ledger.take(ProducerId(0, 1), 7, 100, 100)
    ledger.meet(ProducerId(0, 2), ProducerProgress(inherited=60, acknowledged=60, restored=True))
    assert figures(trainer_page) == {"in_buffer": 100, "outlived.buffer": 40}


@pytest.mark.parametrize(("former", "later"), [(BUFFER, ACTOR), (ACTOR, BUFFER)])
def test_after_an_edit_the_producers_of_another_role_begin_with_nothing(
    trainer_page: LedgerPage, former: str, later: str
) -> None:
    """Their indices are the same. Those of the former role have started more often, and posted more."""
    TrainerLedger(trainer_page, producers=former).take(ProducerId(0, 3), 7, 100, 100)
    trainer_page.apply(lambda record: replace(record, restored=True))
    ledger, producer = TrainerLedger(trainer_page, producers=later), ProducerId(0, 1)
    assert ledger.meet(producer, ProducerProgress(restored=True)) == Mark(1, -1, 0)
    ledger.take(producer, 0, 10, 10)
    assert figures(trainer_page) == {"in_buffer": 110}
    assert TrainerLedger(trainer_page, producers=former).marked_sequence(ProducerId(0, 3)) == 7


def test_acknowledgements_of_this_incarnation_that_the_consumer_lost(trainer_page: LedgerPage) -> None:
    ledger = TrainerLedger(trainer_page)
    me = ProducerId(0, 1)
    ledger.meet(me, ProducerProgress())
    ledger.take(me, 7, 100, 100)
    progress = ProducerProgress(sequence=9, acknowledged=150)
    assert ledger.meet(me, progress) == Mark(1, 7, 100), "without a restored page the difference stays"
    trainer_page.apply(lambda record: replace(record, restored=True))
    for _ in range(2):
        assert ledger.meet(me, progress) == Mark(1, 9, 150)
    assert ledger.meet(me, ProducerProgress(sequence=8, acknowledged=120)) == Mark(1, 9, 150), (
        "an acknowledgement was lost"
    )
    assert figures(trainer_page) == {"in_buffer": 100, "lost.receiver_died": 50}


def actor_record(incarnation: int, lives: int = 1, produced: int = 0) -> PageRecord:
    return PageRecord(role="actor", index=0, incarnation=incarnation, lives=lives).count(produced=produced)


def trainer_record(incarnation: int, *, taken: int) -> PageRecord:
    mark = Mark(incarnation=0, sequence=taken, total=taken)
    return PageRecord(role="trainer", index=0, incarnation=incarnation, lives=1, marks={0: mark}).count(in_buffer=taken)


@pytest.mark.parametrize(
    ("own", "kept", "incarnation", "expected"),
    [
        pytest.param(actor_record(-1, 0), None, 0, actor_record(-1, 0), id="first incarnation"),
        pytest.param(
            actor_record(2, 3, 9),
            actor_record(2, 3, 5),
            3,
            actor_record(2, 3, 9),
            id="restarted container: its own page is newer",
        ),
        pytest.param(
            actor_record(-1, 0),
            actor_record(2, 3, 5),
            3,
            replace(actor_record(2, 3, 5), restored=True),
            id="new pod: begins on the copy",
        ),
        pytest.param(
            actor_record(2, 3, 9),
            actor_record(4, 5, 7),
            5,
            replace(actor_record(4, 5, 7), restored=True),
            id="other pods had the index meanwhile",
        ),
        pytest.param(
            actor_record(-1, 0), None, 1, replace(actor_record(-1, 0), restored=True), id="unknown earlier incarnation"
        ),
        pytest.param(
            actor_record(-1, 0),
            actor_record(-1, 0),
            1,
            replace(actor_record(-1, 0), restored=True),
            id="earlier incarnation without a record",
        ),
        pytest.param(
            trainer_record(3, taken=90),
            trainer_record(3, taken=60),
            4,
            trainer_record(3, taken=90),
            id="its own page is newer than the last heartbeat",
        ),
        pytest.param(
            trainer_record(3, taken=60),
            trainer_record(3, taken=90),
            4,
            replace(trainer_record(3, taken=90), restored=True),
            id="its own page lost updates with the node",
        ),
    ],
)
def test_the_page_on_which_an_incarnation_begins(
    own: PageRecord, kept: PageRecord | None, incarnation: int, expected: PageRecord
) -> None:
    assert starting_record(own, kept, incarnation=incarnation) == expected
