"""Who writes what on a page: the trainer that takes and trains, the actor that produces, the buffer worker between.

Each method is one update of the page, so a SIGKILL at any point leaves it before or behind, never between. They
satisfy ``ConsumerLedger`` and ``ProducerLedger`` of the sample streams.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlsrl.data.slots import ProducerId
from rlsrl.runtime.ledger.page import LedgerPage
from rlsrl.runtime.ledger.records import LedgerError, Mark, PageRecord, Posted

ACCOUNT_CLOSED = 2**63 - 1
"""The mark of an incarnation of which nothing is left to account for: no sequence is above it."""


class TakerLedger:
    """A consumer's side: what it took, dropped and lost. Any thread may call any method."""

    def __init__(self, page: LedgerPage) -> None:
        self._page = page

    def mark(self, producer: ProducerId) -> int:
        """The highest sequence accounted for of that incarnation; -1 for none, ``ACCOUNT_CLOSED`` for all of it.

        An incarnation older than one already heard of is closed: what it had left was settled in the handshake of its
        successor.
        """
        return _sequence(self._page.record, producer)

    def take(self, producer: ProducerId, sequence: int, num_transitions: int) -> None:
        """Record a slot as held in memory, before it is acknowledged: raises the mark and counts ``in_buffer``.

        Raises:
            LedgerError: it is not above the mark: it was taken before.
        """

        def taken(record: PageRecord) -> PageRecord:
            if sequence <= (mark := _sequence(record, producer)):
                raise LedgerError(f"slot {sequence} of {producer} was taken before: the mark is {mark}")
            return _marked(record.count(in_buffer=num_transitions), producer, sequence)

        self._page.apply(taken)

    def lost_with_producer(self, producer: ProducerId, num_transitions: int) -> None:
        """Record all that a dead incarnation had posted here and that never came, and close its account.

        Called once for each incarnation a successor reports, with the sum over all slots above the mark. Should the
        successor die and its own successor report them again, the closed account says that nothing is left.

        Raises:
            LedgerError: the account is closed and there is still something to lose.
        """

        def closed(record: PageRecord) -> PageRecord:
            if _sequence(record, producer) != ACCOUNT_CLOSED:
                return _marked(record.count(**{"lost.producer_died": num_transitions}), producer, ACCOUNT_CLOSED)
            if num_transitions:
                raise LedgerError(f"{num_transitions} transitions lost with {producer}, whose account is closed")
            return record

        self._page.apply(closed)

    def dropped(self, reason: str, num_transitions: int) -> None:
        """Transitions left the buffer untrained, for one of ``DROP_REASONS``.

        Raises:
            KeyError: no such reason.
        """
        self._page.update(**{f"dropped.{reason}": num_transitions, "in_buffer": -num_transitions})

    def end(self) -> None:
        """Say that this life ends cleanly: all that was in the buffer has been counted as dropped."""
        self._page.apply(_ended)


class TrainerLedger(TakerLedger):
    """The trainer's page: also what it trained, and what its checkpoints know of it."""

    def trained(self, num_transitions: int) -> None:
        """Transitions left the buffer and were trained."""
        self._page.update(trained=num_transitions, in_buffer=-num_transitions)

    def snapshot(self) -> dict[str, Any]:
        """JSON values for a checkpoint; ``resume`` reads them."""
        record = self._page.record
        return {
            "counters": dict(record.counters),
            "marks": {str(index): list(mark) for index, mark in record.marks.items()},
        }

    def resume(self, saved: Mapping[str, Any] | None) -> None:
        """Begin a new life of the trainer, from that checkpoint (None: from none). Once, before anything is taken.

        What the page trained beyond the checkpoint is rolled back; what was in the dead life's memory is lost. Marks
        are kept, so that a resent slot that an earlier life took is recognised.
        """
        self._page.apply(lambda record: resumed(record, saved))


class PosterLedger(ABC):
    """A producer's side: what it posted and what it cannot know to have arrived. Any thread may call any method."""

    def __init__(self, page: LedgerPage) -> None:
        self._page = page

    @abstractmethod
    def _posting(self, record: PageRecord, num_transitions: int) -> PageRecord:
        """The record, changed by where what is posted came from."""

    def _succeeding(self, record: PageRecord) -> PageRecord:
        """The record, without what died with the life before."""
        return record

    def begin(self, incarnation: int) -> tuple[Posted, ...]:
        """Begin a new life; what earlier ones left unacknowledged is for the handshakes, and then for ``settle``.

        Raises:
            LedgerError: the incarnation is not newer than the page's.
        """

        def begun(record: PageRecord) -> PageRecord:
            if incarnation <= record.incarnation:
                raise LedgerError(
                    f"incarnation {incarnation} of {record.role} {record.index} is not newer than {record.incarnation}"
                )
            return replace(
                self._succeeding(record), incarnation=incarnation, sequence=-1, lives=record.lives + 1, ended=False
            )

        return self._page.apply(begun).unacknowledged

    def settle(self, incarnation: int) -> None:
        """Every consumer has accounted for what incarnations before this one left: forget it. Idempotent."""
        self._page.apply(
            lambda record: replace(
                record, unacknowledged=tuple(each for each in record.unacknowledged if each.incarnation >= incarnation)
            )
        )

    def produce(self, sequence: int, num_transitions: int, consumer: int = 0) -> None:
        """Count a slot as posted and not yet acknowledged, before it is posted to the consumer of that index.

        Raises:
            LedgerError: ``begin`` was not called, or the sequence does not rise.
        """

        def produced(record: PageRecord) -> PageRecord:
            if record.incarnation < 0 or sequence <= record.sequence:
                raise LedgerError(f"slot {sequence} does not follow {record.sequence} of life {record.incarnation}")
            posted = Posted(record.incarnation, sequence, num_transitions, consumer)
            counted = self._posting(record, num_transitions)
            return replace(counted, sequence=sequence, unacknowledged=(*record.unacknowledged, posted))

        self._page.apply(produced)

    def acknowledge(self, sequence: int) -> None:
        """The consumer has the slot. Repeating it is fine: a resend is acknowledged again."""
        self._page.apply(
            lambda record: replace(
                record,
                unacknowledged=tuple(
                    each for each in record.unacknowledged if each[:2] != (record.incarnation, sequence)
                ),
            )
        )

    def end(self) -> None:
        """Say that this life ends cleanly. What is unacknowledged stays: only the consumers' marks tell its fate."""
        self._page.apply(_ended)


class ActorLedger(PosterLedger):
    """The actor's page: it posts what it made."""

    def _posting(self, record: PageRecord, num_transitions: int) -> PageRecord:
        return record.count(produced=num_transitions)


class BufferLedger(TakerLedger, PosterLedger):
    """The buffer worker's page: it posts what it took. A transition goes from held to posted in one update."""

    def _posting(self, record: PageRecord, num_transitions: int) -> PageRecord:
        return record.count(in_buffer=-num_transitions, passed_on=num_transitions)

    def _succeeding(self, record: PageRecord) -> PageRecord:
        held = record.counters["in_buffer"]
        return record.count(**{"in_buffer": -held, "lost.receiver_died": held})


def resumed(record: PageRecord, saved: Mapping[str, Any] | None) -> PageRecord:
    """The page of a trainer's new life, from the page of the dead one and the checkpoint it resumes from.

    A page that is new (another machine) or older than the checkpoint (a loss of power) gives way to the checkpoint;
    then what the dead life took after it has no witness, and the run's balance will say so.
    """
    counters = {**PageRecord(role="", index=0).counters, **(saved["counters"] if saved else {})}
    saved_marks = {int(index): Mark(*mark) for index, mark in saved["marks"].items()} if saved else {}
    base = record
    if record.lives == 0 or record.counters["trained"] < counters["trained"]:
        base = replace(record, counters=counters)
    rolled_back = base.counters["trained"] - counters["trained"]
    in_memory = base.counters["in_buffer"]
    return replace(
        base.count(
            trained=-rolled_back,
            in_buffer=-in_memory,
            **{"lost.rolled_back": rolled_back, "lost.receiver_died": in_memory},
        ),
        marks=saved_marks | {i: max(mark, saved_marks.get(i, mark)) for i, mark in record.marks.items()},
        lives=record.lives + 1,
        ended=False,
    )


def _sequence(record: PageRecord, producer: ProducerId) -> int:
    mark = record.marks.get(producer.index)
    if mark is None or mark.incarnation < producer.incarnation:
        return -1
    return mark.sequence if mark.incarnation == producer.incarnation else ACCOUNT_CLOSED


def _marked(record: PageRecord, producer: ProducerId, sequence: int) -> PageRecord:
    return replace(record, marks={**record.marks, producer.index: Mark(producer.incarnation, sequence)})


def _ended(record: PageRecord) -> PageRecord:
    return replace(record, ended=True)
