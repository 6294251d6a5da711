"""The updates of ledger pages. A trainer consumes transitions, an actor produces them, a buffer worker does both.

The other roles have no page: no transition passes them. Each method is one update of the page. A SIGKILL at any point
leaves the page either before or after an update. The classes implement ``ConsumerLedger`` and ``ProducerLedger`` of the
sample streams.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from typing_extensions import override

from rlsrl.api.role_names import ACTOR, BUFFER
from rlsrl.data.slots import ProducerId
from rlsrl.runtime.ledger.page import LedgerPage
from rlsrl.runtime.ledger.records import (
    NO_MARK,
    LedgerError,
    Mark,
    PageRecord,
    Posted,
    PostedCount,
    ProducerProgress,
    key_of,
    term_of_untaken,
)

ACCOUNT_CLOSED = 2**63 - 1
"""The mark of an incarnation that a newer one has replaced: no sequence number is above it, so no slot can be taken."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """Transitions in a trainer's store that outlived its former life."""

    untrained: int
    """Never trained."""
    trained_since: int
    """Trained first after the checkpoint from which the trainer resumes: they are untrained again."""


class ConsumerAccount:
    """A consumer's updates: what it took, dropped and lost. Any thread may call any method."""

    def __init__(self, page: LedgerPage, *, producers: str = ACTOR) -> None:
        """``producers`` is the role whose slots it takes."""
        self._page = page
        self._producers = producers

    def marked_sequence(self, producer: ProducerId) -> int:
        """Return the highest sequence number of that incarnation that is accounted for; -1 for none.

        ``ACCOUNT_CLOSED`` if a newer incarnation has connected: its handshake has settled the older ones.
        """
        return _sequence(self._mark(self._page.record, producer), producer)

    def meet(self, producer: ProducerId, progress: ProducerProgress) -> Mark:
        """Settle the slots of a connecting producer's former lives; return the mark to continue from. Idempotent.

        To settle is to count as dropped or lost: slots that former lives posted and this consumer did not take are lost
        with the producer, or dropped if that life ended cleanly.

        If the page of one side was lost and restored, the producer's count shows what is missing. Transitions that this
        consumer acknowledged but its restored page does not contain are lost with the receiver. Transitions that this
        consumer took but the producer's restored page does not contain count as ``outlived``.

        Raises:
            LedgerError: a newer incarnation of the producer has connected.
        """

        def reconcile(record: PageRecord) -> PageRecord:
            mark = self._mark(record, producer)
            if mark.incarnation > producer.incarnation:
                raise LedgerError(f"{producer} was succeeded by incarnation {mark.incarnation}")
            if mark.incarnation == producer.incarnation:
                missing = _missing_of_same_life(record, mark, progress)
                if not missing:
                    return record
            else:
                missing = _missing_of_new_life(record, self._producers, mark, progress)
            return self._with_mark(record.count(**missing), producer, progress.sequence, progress.acknowledged)

        return self._mark(self._page.apply(reconcile), producer)

    def take(self, producer: ProducerId, sequence: int, num_transitions: int, total: int) -> None:
        """Record a slot as held in memory. Call it before the acknowledgement.

        Sets the producer's mark to ``sequence`` and ``total`` (see ``Mark``), and raises ``in_buffer``.

        Raises:
            LedgerError: the slot was taken before: its sequence number is not above that of the mark.
        """

        def taken(record: PageRecord) -> PageRecord:
            if sequence <= (mark := _sequence(self._mark(record, producer), producer)):
                raise LedgerError(f"slot {sequence} of {producer} was taken before: the mark is {mark}")
            return self._with_mark(record.count(in_buffer=num_transitions), producer, sequence, total)

        self._page.apply(taken)

    def dropped(self, reason: str, num_transitions: int) -> None:
        """Record that transitions left the buffer untrained, for one of ``DROP_REASONS``.

        Raises:
            KeyError: the reason is not one of ``DROP_REASONS``.
        """
        self._page.update(**{f"dropped.{reason}": num_transitions, "in_buffer": -num_transitions})

    def end(self) -> None:
        """Record that this life ends cleanly. Count the buffer's content as dropped first."""
        self._page.apply(_ended)

    def _mark(self, record: PageRecord, producer: ProducerId) -> Mark:
        return record.marks.get(key_of(self._producers, producer.index), NO_MARK)

    def _with_mark(self, record: PageRecord, producer: ProducerId, sequence: int, total: int) -> PageRecord:
        mark = Mark(producer.incarnation, sequence, total)
        return replace(record, marks={**record.marks, key_of(self._producers, producer.index): mark})


class TrainerLedger(ConsumerAccount):
    """The trainer's page: a consumer that trains and resumes from checkpoints."""

    def trained(self, num_transitions: int, *, num_untrained: int = 0) -> None:
        """Record that a step's transitions left the buffer: ``num_transitions`` trained, and ``num_untrained`` others.

        The others are dropped as ``update_skipped``. One update of the page counts both, so no kill separates them.
        """
        self._page.update(
            **{
                "trained": num_transitions,
                "dropped.update_skipped": num_untrained,
                "in_buffer": -num_transitions - num_untrained,
            }
        )

    def snapshot(self) -> dict[str, Any]:
        """Return JSON values for a checkpoint; ``resume`` reads them."""
        record = self._page.record
        return {
            "incarnation": record.incarnation,
            "counters": dict(record.counters),
            "marks": {str(index): list(mark) for index, mark in record.marks.items()},
        }

    def former_life(self, saved: Mapping[str, Any] | None) -> int | None:
        """Return the incarnation whose last word the page has; None if it may have done more than the page says.

        So it is with a page that was lost, or that is older than the checkpoint.
        """
        record = self._page.record
        if self._page.is_new or (saved and _is_older(record, saved)):
            return None
        if saved and saved["counters"]["trained"] > record.counters["trained"]:
            return None  # a later checkpoint, whose training an earlier resumption had undone in the store
        return record.incarnation

    def resume(
        self,
        saved: Mapping[str, Any] | None,
        *,
        incarnation: int = 0,
        held: Held | None = None,
        keeps: bool = False,
    ) -> None:
        """Begin a new life of the trainer from a checkpoint; ``saved`` is None without one. Call once, before ``take``.

        Transitions that were trained after the checkpoint become ``lost.rolled_back``; those in the former life's
        memory become ``lost.receiver_died``. Marks stay, so that resent slots of a former life are recognised.

        Args:
            saved: What ``snapshot`` returned for the checkpoint.
            incarnation: That of the new life.
            held: What the store of ``former_life`` still holds: it is not lost. None: nothing.
            keeps: Whether what this life holds will outlive it.

        Raises:
            LedgerError: the store holds more than the page counts.
        """
        self._page.apply(
            lambda record: replace(resumed_record(record, saved, incarnation=incarnation, held=held), keeps=keeps)
        )

    def roll_back(self, *, held: int, gone: int) -> None:
        """Record that transitions were trained after the checkpoint from which their trainers resume.

        ``held`` of them are in the store, untrained again; ``gone`` were evicted, and are lost.
        """
        self._page.update(trained=-held - gone, in_buffer=held, **{"lost.rolled_back": gone})

    @override
    def end(self) -> None:
        super().end()
        if self._page.record.keeps:
            self._page.sync()


class ProducerAccount(ABC):
    """A producer's updates: what it posted, and what is not acknowledged yet. Any thread may call any method."""

    def __init__(self, page: LedgerPage) -> None:
        self._page = page

    @abstractmethod
    def _count_posted(self, record: PageRecord, num_transitions: int) -> PageRecord:
        """Return the record after the terms that posting changes: the posted transitions' origin."""

    def _close_former_life(self, record: PageRecord) -> PageRecord:
        """Return the record after the losses of the former life's death. An actor loses nothing at this point."""
        return record

    def begin(self, incarnation: int) -> tuple[Posted, ...]:
        """Begin a new life; return the slots that former lives left unacknowledged.

        The handshakes with the consumers settle those slots; ``forget_settled`` removes them afterwards.

        Raises:
            LedgerError: the incarnation is not newer than the page's.
        """

        def begun(record: PageRecord) -> PageRecord:
            if incarnation <= record.incarnation:
                raise LedgerError(
                    f"incarnation {incarnation} of {record.role} {record.index} is not newer than {record.incarnation}"
                )
            return replace(
                self._close_former_life(record),
                posted_counts={
                    consumer: PostedCount(count.total, count.total) for consumer, count in record.posted_counts.items()
                },
                incarnation=incarnation,
                sequence=-1,
                lives=record.lives + 1,
                ended=False,
            )

        return self._page.apply(begun).unacknowledged

    def progress(self, consumer: int = 0) -> ProducerProgress:
        """Return the statement for the handshake with the consumer of a key. Call it between ``begin`` and the first
        post."""
        record = self._page.record
        inherited = record.posted_counts.get(consumer, PostedCount()).inherited
        left = tuple((*each[:3], each.withdrawn) for each in sorted(record.unacknowledged) if each.consumer == consumer)
        return ProducerProgress(inherited=inherited, acknowledged=inherited, left=left, restored=record.restored)

    def forget_settled(self, incarnation: int) -> None:
        """Remove the unacknowledged slots of older incarnations: every consumer has settled them. Idempotent."""
        self._page.apply(
            lambda record: replace(
                record, unacknowledged=tuple(each for each in record.unacknowledged if each.incarnation >= incarnation)
            )
        )

    def produce(self, sequence: int, num_transitions: int, consumer: int = 0) -> int:
        """Record a slot as posted and unacknowledged. Call it before the slot is posted to the consumer of that key.

        Returns:
            All transitions ever posted to that consumer, including this slot.

        Raises:
            LedgerError: ``begin`` was not called, or the sequence number does not rise.
        """

        def produced(record: PageRecord) -> PageRecord:
            if record.incarnation < 0 or sequence <= record.sequence:
                raise LedgerError(f"slot {sequence} does not follow {record.sequence} of life {record.incarnation}")
            posted = Posted(record.incarnation, sequence, num_transitions, consumer)
            count = record.posted_counts.get(consumer, PostedCount())
            return replace(
                self._count_posted(record, num_transitions),
                sequence=sequence,
                posted_counts={**record.posted_counts, consumer: count._replace(total=count.total + num_transitions)},
                unacknowledged=(*record.unacknowledged, posted),
            )

        return self._page.apply(produced).posted_counts[consumer].total

    def acknowledge(self, sequence: int) -> None:
        """Record that the consumer has the slot. Idempotent: a resent slot is acknowledged again."""
        self._page.apply(
            lambda record: replace(
                record,
                unacknowledged=tuple(
                    each for each in record.unacknowledged if each[:2] != (record.incarnation, sequence)
                ),
            )
        )

    def end(self) -> None:
        """Record that this life ends cleanly. Unacknowledged slots stay: only the consumers' marks show their fate."""
        self._page.apply(_ended)


class ActorLedger(ProducerAccount):
    """The actor's page: a producer of new transitions."""

    @override
    def _count_posted(self, record: PageRecord, num_transitions: int) -> PageRecord:
        return record.count(produced=num_transitions)

    def discarded(self, reason: str, num_transitions: int) -> None:
        """Record transitions that were produced and never posted, for one of ``DROP_REASONS``.

        Raises:
            KeyError: the reason is not one of ``DROP_REASONS``.
        """
        self._page.update(produced=num_transitions, **{f"dropped.{reason}": num_transitions})


class BufferLedger(ConsumerAccount, ProducerAccount):
    """The buffer worker's page: it posts the transitions that it took. One update moves them from held to posted."""

    @override
    def _count_posted(self, record: PageRecord, num_transitions: int) -> PageRecord:
        return record.count(in_buffer=-num_transitions, passed_on=num_transitions)

    @override
    def _close_former_life(self, record: PageRecord) -> PageRecord:
        held = record.counters["in_buffer"]
        return record.count(**{"in_buffer": -held, "lost.receiver_died": held})


def starting_record(record: PageRecord, kept: PageRecord | None, *, incarnation: int) -> PageRecord:
    """Return the record on which a new life begins.

    ``record`` is the page that the process has found. ``kept`` is the coordinator's copy of the page of the index's
    last holder. The life begins on ``record`` if a former life wrote it, no other process has held the index since, and
    the page has not lost updates, as in a loss of power; else on ``kept``; else on an empty record. The latter two are
    marked ``restored``, except for the index's first incarnation: the former life may have done more than they contain.
    """
    known = kept if kept is not None and kept.lives else None
    if record.lives and (known is None or _progress(known) <= _progress(record)):
        return record
    return replace(known or record, restored=incarnation > 0)


def _progress(record: PageRecord) -> tuple[int, int]:
    """Return the key that orders the records of an index by time: each slot that a consumer takes raises it.

    What a producer has posted does not count: ``settle_ledger`` takes from it, and the coordinator's copy has it still.
    """
    return record.incarnation, sum(mark.total for mark in record.marks.values())


def resumed_record(
    record: PageRecord, saved: Mapping[str, Any] | None, *, incarnation: int = 0, held: Held | None = None
) -> PageRecord:
    """Return the record of a trainer's new life, from the former life's record, the checkpoint and its store.

    A record that is empty or older than the checkpoint (another pod, a loss of power) is replaced by the checkpoint's.
    The producers' counts will show what the former life took after the checkpoint.

    Transitions that the record has as held and the store has not were on their way into it when the former life ended,
    or just evicted: they were lost with it.
    """
    trained = saved["counters"]["trained"] if saved else 0
    base = record
    if saved and _is_older(record, saved):
        base = replace(
            record,
            counters={**PageRecord(role="", index=0).counters, **saved["counters"]},
            marks={int(index): Mark(*mark) for index, mark in saved["marks"].items()},
            restored=True,
        )
    undone = base.counters["trained"] - trained
    rolled_back, died, kept = undone, base.counters["in_buffer"], 0
    if held is not None:
        rolled_back = max(undone - held.trained_since, 0)
        kept = held.untrained + held.trained_since
        died += undone - rolled_back - kept
        if died < 0:
            raise LedgerError(f"the replay store holds {-died} transitions more than the ledger counts")
    return replace(
        base.count(
            trained=-undone,
            in_buffer=kept - base.counters["in_buffer"],
            **{"lost.rolled_back": rolled_back, "lost.receiver_died": died},
        ),
        lives=record.lives + 1,
        incarnation=incarnation,
        ended=False,
    )


def _is_older(record: PageRecord, saved: Mapping[str, Any]) -> bool:
    """Return whether a trainer's record lacks what its checkpoint has."""
    return record.lives == 0 or _age(record.incarnation, record.counters) < _age(
        saved["incarnation"], saved["counters"]
    )


def _age(incarnation: int, counters: Mapping[str, int]) -> tuple[int, int]:
    """Return the key that orders a trainer's records by time: within a life each step raises the transitions.

    A checkpoint of an older version of rlsrl lacks ``update_skipped``.
    """
    return incarnation, counters["trained"] + counters.get("dropped.update_skipped", 0)


def _missing_of_new_life(record: PageRecord, producers: str, mark: Mark, progress: ProducerProgress) -> dict[str, int]:
    """Return what a consumer counts when a life of a producer, of the role ``producers``, connects for the first time.

    ``record`` is the consumer's, with the producer's ``mark``.
    """
    not_taken = Counter[str]()
    for incarnation, sequence, num_transitions, withdrawn in progress.left:
        if not mark.covers(incarnation, sequence):
            not_taken[term_of_untaken(withdrawn=withdrawn)] += num_transitions
    gap = progress.inherited - not_taken.total() - mark.total
    forgotten = max(gap, 0) + progress.acknowledged - progress.inherited
    return {
        **not_taken,
        "lost.receiver_died": forgotten if record.restored else 0,
        "outlived.buffer" if producers == BUFFER else "outlived": max(-gap, 0) if progress.restored else 0,
    }


def _missing_of_same_life(record: PageRecord, mark: Mark, progress: ProducerProgress) -> dict[str, int]:
    """Return what a consumer counts when a life of a producer connects again; empty if its mark stays."""
    forgotten = progress.acknowledged - mark.total
    return {"lost.receiver_died": forgotten} if forgotten > 0 and record.restored else {}


def _sequence(mark: Mark, producer: ProducerId) -> int:
    if mark.incarnation < producer.incarnation:
        return -1
    return mark.sequence if mark.incarnation == producer.incarnation else ACCOUNT_CLOSED


def _ended(record: PageRecord) -> PageRecord:
    """Return the record as ended, with this life's unacknowledged slots as withdrawn. Other slots do not change."""
    unacknowledged = (
        each._replace(withdrawn=each.withdrawn or each.incarnation == record.incarnation)
        for each in record.unacknowledged
    )
    return replace(record, ended=True, unacknowledged=tuple(unacknowledged))
