"""Who writes what on a page: the trainer that takes and trains, the actor that produces, the buffer worker between.

Each method is one update of the page, so a SIGKILL at any point leaves it before or behind, never between. They
satisfy ``ConsumerLedger`` and ``ProducerLedger`` of the sample streams.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlsrl.data.slots import ProducerId
from rlsrl.runtime.ledger.page import LedgerPage
from rlsrl.runtime.ledger.records import (
    NOTHING,
    Account,
    LedgerError,
    Mark,
    PageRecord,
    Posted,
    ProducerProgress,
    fate_of_untaken,
)

ACCOUNT_CLOSED = 2**63 - 1
"""The mark of an incarnation that was succeeded: nothing is left to account for, no sequence is above it."""


class ConsumerAccount:
    """A consumer's side: what it took, dropped and lost. Any thread may call any method."""

    def __init__(self, page: LedgerPage) -> None:
        self._page = page

    def mark(self, producer: ProducerId) -> int:
        """The highest sequence accounted for of that incarnation; -1 for none, ``ACCOUNT_CLOSED`` for all of it.

        An incarnation older than one already heard of is closed: what it had left was settled in the handshake of its
        successor.
        """
        return _sequence(self._page.record, producer)

    def meet(self, producer: ProducerId, progress: ProducerProgress) -> Mark:
        """A producer has come: settle what its former lives left; returns the mark to go on from. Idempotent.

        What they posted here and nobody took is lost with them, or was dropped if they ended cleanly. Where the page of
        either was lost, the producer's count says what is missing on the other: what was acknowledged here and is
        forgotten is lost with the receiver; what came from beyond the producer's own page has outlived it.

        Raises:
            LedgerError: the producer was succeeded.
        """

        def met(record: PageRecord) -> PageRecord:
            mark = record.marks.get(producer.index, NOTHING)
            if mark.incarnation > producer.incarnation:
                raise LedgerError(f"{producer} was succeeded by incarnation {mark.incarnation}")
            if mark.incarnation == producer.incarnation:
                return _met_again(record, producer, mark, progress)
            return _met_first(record, producer, mark, progress)

        return self._page.apply(met).marks[producer.index]

    def take(self, producer: ProducerId, sequence: int, num_transitions: int, total: int) -> None:
        """Record a slot as held in memory, before it is acknowledged: raises the mark and counts ``in_buffer``.

        ``total`` is the producer's own count (see ``Mark``).

        Raises:
            LedgerError: it is not above the mark: it was taken before.
        """

        def taken(record: PageRecord) -> PageRecord:
            if sequence <= (mark := _sequence(record, producer)):
                raise LedgerError(f"slot {sequence} of {producer} was taken before: the mark is {mark}")
            return _marked(record.count(in_buffer=num_transitions), producer, sequence, total)

        self._page.apply(taken)

    def dropped(self, reason: str, num_transitions: int) -> None:
        """Transitions left the buffer untrained, for one of ``DROP_REASONS``.

        Raises:
            KeyError: no such reason.
        """
        self._page.update(**{f"dropped.{reason}": num_transitions, "in_buffer": -num_transitions})

    def end(self) -> None:
        """Say that this life ends cleanly: all that was in the buffer has been counted as dropped."""
        self._page.apply(_ended)


class TrainerLedger(ConsumerAccount):
    """The trainer's page: also what it trained, and what its checkpoints know of it."""

    def trained(self, num_transitions: int) -> None:
        """Transitions left the buffer and were trained."""
        self._page.update(trained=num_transitions, in_buffer=-num_transitions)

    def snapshot(self) -> dict[str, Any]:
        """JSON values for a checkpoint; ``resume`` reads them."""
        record = self._page.record
        return {
            "incarnation": record.incarnation,
            "counters": dict(record.counters),
            "marks": {str(index): list(mark) for index, mark in record.marks.items()},
        }

    def resume(self, saved: Mapping[str, Any] | None, *, incarnation: int = 0) -> None:
        """Begin a new life of the trainer, from that checkpoint (None: from none). Once, before anything is taken.

        What the page trained beyond the checkpoint is rolled back; what was in the dead life's memory is lost. Marks
        are kept, so that a resent slot that an earlier life took is recognised.
        """
        self._page.apply(lambda record: resumed(record, saved, incarnation=incarnation))


class ProducerAccount(ABC):
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
                self._succeeding(record),
                accounts={consumer: Account(each.total, each.total) for consumer, each in record.accounts.items()},
                incarnation=incarnation,
                sequence=-1,
                lives=record.lives + 1,
                ended=False,
            )

        return self._page.apply(begun).unacknowledged

    def progress(self, consumer: int = 0) -> ProducerProgress:
        """What to say to that consumer at first; after ``begin``, before anything is posted to it."""
        record = self._page.record
        inherited = record.accounts.get(consumer, Account()).inherited
        left = tuple((*each[:3], each.withdrawn) for each in sorted(record.unacknowledged) if each.consumer == consumer)
        return ProducerProgress(inherited=inherited, acknowledged=inherited, left=left, restored=record.restored)

    def settle(self, incarnation: int) -> None:
        """Every consumer has accounted for what incarnations before this one left: forget it. Idempotent."""
        self._page.apply(
            lambda record: replace(
                record, unacknowledged=tuple(each for each in record.unacknowledged if each.incarnation >= incarnation)
            )
        )

    def produce(self, sequence: int, num_transitions: int, consumer: int = 0) -> int:
        """Count a slot as posted and not yet acknowledged, before it is posted to the consumer of that index.

        Returns:
            What was ever posted to that consumer, this slot included.

        Raises:
            LedgerError: ``begin`` was not called, or the sequence does not rise.
        """

        def produced(record: PageRecord) -> PageRecord:
            if record.incarnation < 0 or sequence <= record.sequence:
                raise LedgerError(f"slot {sequence} does not follow {record.sequence} of life {record.incarnation}")
            posted = Posted(record.incarnation, sequence, num_transitions, consumer)
            account = record.accounts.get(consumer, Account())
            return replace(
                self._posting(record, num_transitions),
                sequence=sequence,
                accounts={**record.accounts, consumer: account._replace(total=account.total + num_transitions)},
                unacknowledged=(*record.unacknowledged, posted),
            )

        return self._page.apply(produced).accounts[consumer].total

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


class ActorLedger(ProducerAccount):
    """The actor's page: it posts what it made."""

    def _posting(self, record: PageRecord, num_transitions: int) -> PageRecord:
        return record.count(produced=num_transitions)


class BufferLedger(ConsumerAccount, ProducerAccount):
    """The buffer worker's page: it posts what it took. A transition goes from held to posted in one update."""

    def _posting(self, record: PageRecord, num_transitions: int) -> PageRecord:
        return record.count(in_buffer=-num_transitions, passed_on=num_transitions)

    def _succeeding(self, record: PageRecord) -> PageRecord:
        held = record.counters["in_buffer"]
        return record.count(**{"in_buffer": -held, "lost.receiver_died": held})


def inherited(record: PageRecord, kept: PageRecord | None, *, incarnation: int) -> PageRecord:
    """What a life begins on that found ``record`` on its page, and the coordinator has ``kept`` a copy of another.

    Its own, if a former life wrote it and nobody had the index since; else the copy, else nothing. The latter two may
    be older than the life they are of.
    """
    known = kept if kept is not None and kept.lives else None
    if record.lives and (known is None or known.incarnation <= record.incarnation):
        return record
    return replace(known or record, restored=incarnation > 0)


def resumed(record: PageRecord, saved: Mapping[str, Any] | None, *, incarnation: int = 0) -> PageRecord:
    """The page of a trainer's new life, from the page of the dead one and the checkpoint it resumes from.

    A page that is new or older than the checkpoint (another pod, a loss of power) gives way to the checkpoint; what the
    dead life took after it the producers' counts will say.
    """
    trained = saved["counters"]["trained"] if saved else 0
    base = record
    if saved and (record.lives == 0 or (record.incarnation, record.counters["trained"]) < _age(saved)):
        base = replace(
            record,
            counters={**PageRecord(role="", index=0).counters, **saved["counters"]},
            marks={int(index): Mark(*mark) for index, mark in saved["marks"].items()},
            restored=True,
        )
    rolled_back = base.counters["trained"] - trained
    in_memory = base.counters["in_buffer"]
    return replace(
        base.count(
            trained=-rolled_back,
            in_buffer=-in_memory,
            **{"lost.rolled_back": rolled_back, "lost.receiver_died": in_memory},
        ),
        lives=record.lives + 1,
        incarnation=incarnation,
        ended=False,
    )


def _age(saved: Mapping[str, Any]) -> tuple[int, int]:
    return saved["incarnation"], saved["counters"]["trained"]


def _met_first(record: PageRecord, producer: ProducerId, mark: Mark, progress: ProducerProgress) -> PageRecord:
    """This life of the producer is new here."""
    not_taken = Counter[str]()
    for incarnation, sequence, num_transitions, withdrawn in progress.left:
        if not mark.covers(incarnation, sequence):
            not_taken[fate_of_untaken(withdrawn=withdrawn)] += num_transitions
    gap = progress.inherited - not_taken.total() - mark.total
    forgotten = max(gap, 0) + progress.acknowledged - progress.inherited
    counted = record.count(
        **not_taken,
        **{
            "lost.receiver_died": forgotten if record.restored else 0,
            "outlived": max(-gap, 0) if progress.restored else 0,
        },
    )
    return _marked(counted, producer, progress.sequence, progress.acknowledged)


def _met_again(record: PageRecord, producer: ProducerId, mark: Mark, progress: ProducerProgress) -> PageRecord:
    """This life of the producer was here before."""
    forgotten = progress.acknowledged - mark.total
    if forgotten <= 0 or not record.restored:
        return record
    return _marked(
        record.count(**{"lost.receiver_died": forgotten}), producer, progress.sequence, progress.acknowledged
    )


def _sequence(record: PageRecord, producer: ProducerId) -> int:
    mark = record.marks.get(producer.index)
    if mark is None or mark.incarnation < producer.incarnation:
        return -1
    return mark.sequence if mark.incarnation == producer.incarnation else ACCOUNT_CLOSED


def _marked(record: PageRecord, producer: ProducerId, sequence: int, total: int) -> PageRecord:
    return replace(record, marks={**record.marks, producer.index: Mark(producer.incarnation, sequence, total)})


def _ended(record: PageRecord) -> PageRecord:
    """What this life posted and nobody took is dropped with its end; of its forerunners' nothing changes."""
    unacknowledged = (
        each._replace(withdrawn=each.withdrawn or each.incarnation == record.incarnation)
        for each in record.unacknowledged
    )
    return replace(record, ended=True, unacknowledged=tuple(unacknowledged))
