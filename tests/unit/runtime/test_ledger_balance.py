import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rlsrl.runtime.ledger import (
    ACCOUNT_CLOSED,
    Balance,
    LedgerError,
    LedgerPage,
    Mark,
    PageRecord,
    Posted,
    balance,
    key_of,
    read_pages,
    settle_ledger,
)

BUFFER_0 = key_of("buffer", 0)


def actor(index: int = 0, *left: Posted, produced: int, incarnation: int = 0, ended: bool = True) -> PageRecord:
    record = PageRecord(role="actor", index=index, incarnation=incarnation, lives=1, unacknowledged=left)
    record = record.count(produced=produced)
    return as_it_ended(record) if ended else record


def as_it_ended(record: PageRecord) -> PageRecord:
    left = (each._replace(withdrawn=each.incarnation == record.incarnation) for each in record.unacknowledged)
    return replace(record, ended=True, unacknowledged=tuple(left))


def trainer(index: int = 0, *, ended: bool = True, marks: dict[int, Mark] | None = None, **counters: int) -> PageRecord:
    return PageRecord(role="trainer", index=index, ended=ended, lives=1, marks=marks or {}).count(**counters)


def terms(found: Balance) -> dict[str, int]:
    """Return the terms that are not zero, as one flat mapping."""
    value = found.to_json()
    flat = {term: count for term, count in value.items() if isinstance(count, int)}
    for group in ("dropped", "lost"):
        flat |= {f"{group}.{name}": count for name, count in value[group].items()}
    return {term: count for term, count in flat.items() if count}


def test_an_empty_run_is_balanced() -> None:
    found = balance((), ended=True)
    found.check()
    assert terms(found) == {}


def test_pages_are_added_up() -> None:
    pages = [
        actor(0, produced=100),
        actor(1, produced=50),
        trainer(0, trained=90, **{"dropped.stale": 10}),
        trainer(1, trained=30, **{"lost.rolled_back": 20}),
    ]
    found = balance(pages, ended=True)
    found.check()
    assert terms(found) == {
        "produced": 150,
        "trained": 120,
        "dropped.stale": 10,
        "lost.rolled_back": 20,
    }
    json.dumps(found.to_json())


@pytest.mark.parametrize(
    ("mark", "entry", "clean", "expected"),
    [
        pytest.param(Mark(1, 5), Posted(1, 5, 10, 0), True, {}, id="taken, the acknowledgement was lost"),
        pytest.param(Mark(1, 5), Posted(1, 5, 10, 0), False, {}, id="taken, then the producer died"),
        pytest.param(Mark(1, 4), Posted(1, 5, 10, 0), True, {"dropped.end_of_run": 10}, id="not taken, clean end"),
        pytest.param(Mark(1, 4), Posted(1, 5, 10, 0), False, {"lost.producer_died": 10}, id="not taken, died"),
        pytest.param(Mark(0, 99), Posted(1, 5, 10, 0), True, {"dropped.end_of_run": 10}, id="first of its life"),
        pytest.param(None, Posted(1, 5, 10, 0), True, {"dropped.end_of_run": 10}, id="consumer never heard of it"),
        pytest.param(Mark(1, 4), Posted(0, 9, 10, 0), True, {}, id="an older life, whose account is closed"),
        pytest.param(Mark(0, 8), Posted(0, 9, 10, 0), True, {"lost.producer_died": 10}, id="an older life, open"),
        pytest.param(Mark(0, ACCOUNT_CLOSED), Posted(0, 9, 10, 0), True, {}, id="counted, not yet settled"),
        pytest.param(Mark(1, 4), Posted(1, 5, 10, 3), True, {"dropped.end_of_run": 10}, id="for a rank not there"),
    ],
)
def test_slots_left_unacknowledged(mark: Mark | None, entry: Posted, clean: bool, expected: dict[str, int]) -> None:
    produced = 100 + sum(expected.values())
    pages = [
        actor(0, entry, produced=produced, incarnation=1, ended=clean),
        trainer(0, marks={0: mark} if mark else {}, trained=100),
    ]
    found = balance(pages, ended=True)
    found.check()
    assert terms(found) == {"produced": produced, "trained": 100, **expected}


def test_each_rank_is_compared_by_its_own_slots() -> None:
    left = (Posted(0, 6, 1, 0), Posted(0, 7, 10, 1), Posted(0, 8, 100, 0), Posted(0, 9, 1000, 1))
    ranks = [trainer(0, marks={0: Mark(0, 6)}), trainer(1, marks={0: Mark(0, 7), 1: Mark(0, 99)})]
    found = balance([actor(0, *left, produced=1100), *ranks], ended=True)
    found.check()
    assert terms(found) == {"produced": 1100, "dropped.end_of_run": 1100}


def test_slots_in_flight_in_a_live_run_are_unsettled() -> None:
    left = (Posted(0, 0, 10, 0), Posted(0, 1, 20, 0))
    pages = [
        actor(0, *left, produced=30, ended=False),
        trainer(0, ended=False, marks={0: Mark(0, 0)}, in_buffer=10),
    ]
    found = balance(pages, ended=False)
    found.check()
    assert terms(found) == {"produced": 30, "in_buffer": 10, "unsettled": 20}


def test_a_dead_consumers_memory_is_lost_at_the_end() -> None:
    pages = [actor(produced=30), trainer(ended=False, trained=20, in_buffer=10)]
    found = balance(pages, ended=True)
    found.check()
    assert terms(found) == {"produced": 30, "trained": 20, "lost.receiver_died": 10}


@pytest.mark.parametrize("ended", [True, False])
def test_what_outlives_its_consumer_is_held_after_the_end(ended: bool) -> None:
    pages = [actor(produced=30), replace(trainer(ended=ended, trained=20, in_buffer=10), keeps=True)]
    found = balance(pages, ended=True)
    found.check()
    assert terms(found) == {"produced": 30, "trained": 20, "in_buffer": 10}
    with pytest.raises(LedgerError, match="left holding 10 "):
        replace(found, kept=0).check()


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        pytest.param(lambda record: record.count(trained=-10), r"produced 100 is not the 90 .*\(\+10\)", id="lost"),
        pytest.param(lambda record: record.count(trained=10), r"produced 100 is not the 110 .*\(-10\)", id="doubled"),
        pytest.param(lambda record: record.count(trained=10, in_buffer=-10), "left holding -10 ", id="trained twice"),
        pytest.param(
            lambda record: record.count(trained=-10, in_buffer=10), "left holding 10 ", id="vanished from the buffer"
        ),
    ],
)
def test_wrong_ledgers_are_reported(spoil: Callable[[PageRecord], PageRecord], text: str) -> None:
    honest = trainer(0, trained=100)
    balance([actor(produced=100), honest], ended=True).check()
    with pytest.raises(LedgerError, match=text):
        balance([actor(produced=100), spoil(honest)], ended=True).check()


def test_a_slot_lost_before_one_that_arrived_is_detected() -> None:
    pages = [actor(0, Posted(0, 3, 10, 0), produced=100), trainer(marks={0: Mark(0, 4)}, trained=90)]
    with pytest.raises(LedgerError, match=r"produced 100 is not the 90"):
        balance(pages, ended=True).check()


def test_a_negative_buffer_is_detected_in_a_live_run_too() -> None:
    with pytest.raises(LedgerError, match="holding -10"):
        balance([actor(produced=0), trainer(trained=10, in_buffer=-10, ended=False)], ended=False).check()


def write(folder: Path, *records: PageRecord) -> None:
    for record in records:
        with LedgerPage.open(folder / f"{record.role}-{record.index}.page", record.role, record.index) as page:
            page.apply(lambda _, record=record: record)


def test_settling_changes_pages_and_keeps_the_balance(tmp_path: Path) -> None:
    left = (Posted(0, 9, 5, 0), Posted(1, 3, 10, 0), Posted(1, 4, 20, 0))
    write(
        tmp_path,
        actor(0, *left, produced=100, incarnation=1),
        actor(1, Posted(0, 0, 7, 0), produced=7, ended=False),
        trainer(0, trained=58, in_buffer=7, marks={0: Mark(0, 8), 2: Mark(0, 0)}, ended=False),
    )
    (tmp_path / "actor-9.page").write_bytes(b"")
    before = balance(read_pages(tmp_path), ended=True)
    for _ in range(2):
        settle_ledger(tmp_path)
        assert balance(read_pages(tmp_path), ended=True) == before
        assert all(record.unacknowledged == () for record in read_pages(tmp_path))
    zero, one, consumer = read_pages(tmp_path)
    assert (zero.counters["dropped.end_of_run"], zero.counters["lost.producer_died"]) == (30, 5)
    assert one.counters["lost.producer_died"] == 7
    assert consumer.counters["in_buffer"] == 7, "the trainer's own resume accounts for it"


def test_the_ledger_of_a_live_run_is_not_settled(tmp_path: Path) -> None:
    write(tmp_path, actor(0, Posted(0, 0, 7, 0), produced=7), trainer(0))
    with LedgerPage.open(tmp_path / "trainer-0.page", "trainer", 0), pytest.raises(LedgerError, match="writes"):
        settle_ledger(tmp_path)
    assert replace(read_pages(tmp_path)[0], unacknowledged=()) != read_pages(tmp_path)[0]
    settle_ledger(tmp_path)
    assert read_pages(tmp_path)[0].unacknowledged == ()


def buffer(*left: Posted, ended: bool = True, marks: dict[int, Mark] | None = None, **counters: int) -> PageRecord:
    record = PageRecord(role="buffer", index=0, incarnation=0, lives=1, unacknowledged=left, marks=marks or {})
    record = record.count(**counters)
    return as_it_ended(record) if ended else record


@pytest.mark.parametrize(
    ("held", "dropped", "expected"),
    [
        pytest.param(10, 0, {"in_buffer": 10, "unsettled": 28}, id="live"),
        pytest.param(0, 10, {"dropped.end_of_run": 38}, id="ended"),
    ],
)
def test_in_a_chain_each_producer_is_compared_with_its_own_consumer(
    held: int, dropped: int, expected: dict[str, int]
) -> None:
    """The buffer worker took slot 5 of actor 0; the trainer took slot 3 of the buffer worker."""
    marks = {0: Mark(0, 5)}
    pages = [
        actor(0, Posted(0, 5, 10, BUFFER_0), Posted(0, 6, 20, BUFFER_0), produced=100),
        buffer(Posted(0, 3, 40, 0), Posted(0, 4, 8, 0), marks=marks, passed_on=70, in_buffer=held),
        trainer(marks={BUFFER_0: Mark(0, 3)}, trained=62, **{"dropped.end_of_run": dropped}),
    ]
    found = balance(pages, ended=not held)
    found.check()
    assert terms(found) == {"produced": 100, "trained": 62} | expected


def test_slots_that_a_dead_buffer_worker_held_or_posted_are_lost() -> None:
    pages = [
        actor(0, produced=30),
        buffer(Posted(0, 3, 8, 0), ended=False, marks={0: Mark(0, 5)}, in_buffer=22),
        trainer(marks={BUFFER_0: Mark(0, 2)}),
    ]
    found = balance(pages, ended=True)
    found.check()
    assert terms(found) == {"produced": 30, "lost.receiver_died": 22, "lost.producer_died": 8}
