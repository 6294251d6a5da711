"""Add up the pages of a run and check the ledger's equation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rlsrl.api.role_names import ACTOR, BUFFER, TRAINER
from rlsrl.runtime.ledger.page import SUFFIX, LedgerPage, read_page
from rlsrl.runtime.ledger.records import (
    DROP_REASONS,
    LOSS_CAUSES,
    NO_MARK,
    LedgerError,
    PageRecord,
    Posted,
    PostedCount,
    consumer_of,
    key_of,
    producer_of,
    term_of_untaken,
)

CHAIN = (ACTOR, BUFFER, TRAINER)
"""The roles that samples pass, in order. A run without a buffer worker's page has only the other two."""


@dataclass(frozen=True, kw_only=True)
class Balance:
    """Where all produced transitions of a run are. All numbers are transitions."""

    produced: int
    trained: int
    in_buffer: int
    """Held by consumers. ``check`` demands ``kept`` of an ended run: a consumer that ends cleanly counts its buffer's
    content as dropped, and the content that a dead one held is lost."""
    kept: int
    """Those of ``in_buffer`` that outlive their process, in a replay store's file."""
    dropped: Mapping[str, int]
    """By reason."""
    lost: Mapping[str, int]
    """By cause."""
    unsettled: int
    """Posted and not taken. The consumer may still take them, or count them as dropped or lost when the producer's next
    life connects. 0 in an ended run."""
    ended: bool
    """True if all processes of the run had ended."""

    @property
    def accounted(self) -> int:
        """The sum of all terms except ``produced``, which it must equal; ``unsettled`` is one of them."""
        return self.trained + self.in_buffer + sum(self.dropped.values()) + sum(self.lost.values()) + self.unsettled

    def check(self) -> None:
        """Check the equation. In a live run it holds exactly only while no sample is in transit.

        Raises:
            LedgerError: the equation does not hold; the text gives both sides.
        """
        if self.produced != self.accounted:
            raise LedgerError(
                f"produced {self.produced} is not the {self.accounted} accounted for "
                f"({self.produced - self.accounted:+d}): {self._terms()}"
            )
        left = self.in_buffer - self.kept
        if left < 0 or (self.ended and left):
            raise LedgerError(f"consumers were left holding {left} transitions: {self._terms()}")

    def to_json(self) -> dict[str, Any]:
        """Return the terms as JSON values."""
        return {
            "produced": self.produced,
            "trained": self.trained,
            "in_buffer": self.in_buffer,
            "dropped": dict(self.dropped),
            "lost": dict(self.lost),
            "unsettled": self.unsettled,
        }

    def to_checked_json(self) -> dict[str, Any]:
        """Return ``to_json`` with the result of ``check``: ``balanced``, and ``problem`` if it is false."""
        try:
            self.check()
        except LedgerError as error:
            return {**self.to_json(), "balanced": False, "problem": str(error)}
        return {**self.to_json(), "balanced": True}

    def _terms(self) -> str:
        return (
            f"trained {self.trained}, in_buffer {self.in_buffer}, dropped {dict(self.dropped)}, "
            f"lost {dict(self.lost)}, unsettled {self.unsettled}"
        )


def balance(records: Iterable[PageRecord], *, ended: bool, copies: bool = False) -> Balance:
    """Add up the pages of a run.

    A producer does not know whether an unacknowledged slot was taken; the consumer's mark shows it. Taken slots are on
    the consumer's page. In an ended run, the other slots were dropped if their producer's life ended cleanly, and lost
    with the producer if not. What a dead consumer held was lost with it.

    Args:
        records: the pages.
        ended: all processes of the run have ended.
        copies: the pages of lives that did not end cleanly may be older than the end of the life. Then, and for
            restored pages, the two ends of a stream correct each other: both have the producer's count.
    """
    records = tuple(records)
    total: Counter[str] = Counter()
    for record in records:
        total.update(record.counters)
        total.update(_outlived(ACTOR, record.counters["outlived"], "lost.receiver_died"))
        total.update(_outlived(BUFFER, record.counters["outlived.buffer"], "lost.receiver_died"))
        if ended:
            total.update(_held_by_dead(record))
    gone = "lost.receiver_died" if ended else "unsettled"
    pairs = [*_pairs(records, copies=copies)]
    for pair in pairs:
        total.update(_untaken_terms(pair.not_taken) if ended else {"unsettled": _num_transitions(pair.not_taken)})
        total[gone] += pair.forgotten
        total.update(_outlived(pair.producer.role, pair.outlived, gone))
    if ended:
        missing = _missing_on_actors_pages(total, records, pairs)
        total.update({"produced": missing, gone: missing})
    return Balance(
        produced=total["produced"],
        trained=total["trained"],
        in_buffer=total["in_buffer"],
        kept=sum(record.counters["in_buffer"] for record in records if record.keeps),
        dropped={reason: total[f"dropped.{reason}"] for reason in DROP_REASONS},
        lost={cause: total[f"lost.{cause}"] for cause in LOSS_CAUSES},
        unsettled=total["unsettled"],
        ended=ended,
    )


def settle_ledger(folder: Path) -> None:
    """Settle the unacknowledged slots of an ended run: count the untaken ones as dropped or lost, and remove all.

    So later lives start without any. The controller calls this when no process of the run is alive: after the end, and
    again before a resume in case the controller died before. Idempotent. It changes no term of ``balance`` of an ended
    run, which already counts untaken slots so: afterwards the producers' pages count them.

    Raises:
        LedgerError: a process of the run is still alive.
    """
    with ExitStack() as pages:
        opened = {(page.record.role, page.record.index): page for page in map(pages.enter_context, _open_all(folder))}
        records = tuple(page.record for page in opened.values())
        for pair in _pairs(records, copies=False):
            if pair.not_taken:
                page = opened[pair.producer.role, pair.producer.index]
                page.apply(partial(_settled, not_taken=pair.not_taken))
        for page in opened.values():
            page.apply(lambda record: replace(record, unacknowledged=()))


def _settled(record: PageRecord, *, not_taken: Sequence[Posted]) -> PageRecord:
    """Return a producer's record that counts its untaken slots as dropped or lost.

    The slots leave its posted counts, which compare with the consumers' marks: no mark contains them.
    """
    posted_counts = dict(record.posted_counts)
    for posted in not_taken:
        inherited, total = posted_counts.get(posted.consumer, PostedCount())
        former = posted.num_transitions if posted.incarnation < record.incarnation else 0
        posted_counts[posted.consumer] = PostedCount(inherited - former, total - posted.num_transitions)
    return replace(record.count(**_untaken_terms(not_taken)), posted_counts=posted_counts)


def _open_all(folder: Path) -> Iterable[LedgerPage]:
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        if (record := read_page(path)) is not None:
            yield LedgerPage.open(path, record.role, record.index)


@dataclass(frozen=True, kw_only=True)
class _Pair:
    """A producer and a consumer, and the differences between their pages, in transitions."""

    producer: PageRecord
    """Empty if it has no page."""
    not_taken: tuple[Posted, ...]
    """The producer's unacknowledged slots that the consumer has not accounted for."""
    forgotten: int
    """Acknowledged according to the producer, but not on the consumer's page, which may be older."""
    outlived: int
    """Accounted for by the consumer, but not on the producer's page, which may be older."""


def _pairs(records: Sequence[PageRecord], *, copies: bool) -> Iterator[_Pair]:
    """Yield all pairs of a producer and a consumer that have a connection on record."""

    def may_be_older(record: PageRecord | None) -> bool:
        return copies if record is None else record.restored or (copies and not record.ended)

    pages = {(record.role, record.index): record for record in records}
    for one, other in _connected(records):
        producer, consumer = pages.get(one), pages.get(other)
        pair = _compare(producer or PageRecord(role=one[0], index=one[1]), consumer, key_of(*other))
        yield replace(
            pair,
            forgotten=pair.forgotten if may_be_older(consumer) else 0,
            outlived=pair.outlived if may_be_older(producer) else 0,
        )


def _connected(records: Sequence[PageRecord]) -> list[tuple[tuple[str, int], tuple[str, int]]]:
    """Return ((role, index) of the producer, of the consumer) of all pairs that either page mentions."""
    pairs = {((each.role, each.index), consumer_of(key)) for each in records for key in each.posted_counts}
    pairs |= {
        ((each.role, each.index), consumer_of(posted.consumer)) for each in records for posted in each.unacknowledged
    }
    pairs |= {(producer_of(key), (each.role, each.index)) for each in records for key in each.marks}
    return sorted(pairs)


def _compare(producer: PageRecord, consumer: PageRecord | None, consumer_key: int) -> _Pair:
    """Compare the two pages of a pair. Both have the producer's count, each as far as its page goes."""
    producer_key = key_of(producer.role, producer.index)
    mark = consumer.marks.get(producer_key, NO_MARK) if consumer is not None else NO_MARK
    count = producer.posted_counts.get(consumer_key, PostedCount())
    not_taken = tuple(
        each
        for each in producer.unacknowledged
        if each.consumer == consumer_key and not mark.covers(each.incarnation, each.sequence)
    )
    knows_this_life = mark.incarnation >= producer.incarnation
    if knows_this_life:
        gap, since = count.total - _num_transitions(not_taken) - mark.total, 0
    else:
        former = [each for each in not_taken if each.incarnation < producer.incarnation]
        gap = count.inherited - _num_transitions(former) - mark.total
        since = count.total - count.inherited - _num_transitions(not_taken) + _num_transitions(former)
    return _Pair(
        producer=producer,
        not_taken=not_taken,
        forgotten=max(gap, 0) + since,
        outlived=max(-gap, 0),
    )


def _missing_on_actors_pages(total: Mapping[str, int], records: Sequence[PageRecord], pairs: Sequence[_Pair]) -> int:
    """Return the transitions of an ended run that trainers took and that no actor's page contains.

    0 without buffer workers. 0 also unless pages are copies: those of actors and buffer workers may be older than the
    trainers'. Transitions that trainers took and that a buffer worker's page lacks count first against the losses with
    buffer workers (``_outlived``). Actors produced the others after the copies of their pages.
    """
    if not any(record.role == BUFFER for record in records):
        return 0
    lost = sum(
        record.counters["lost.receiver_died"] + (0 if record.ended else max(record.counters["in_buffer"], 0))
        for record in records
        if record.role == BUFFER
    )
    forgotten = sum(pair.forgotten for pair in pairs if pair.producer.role == ACTOR)
    outlived = total["outlived.buffer"] + sum(pair.outlived for pair in pairs if pair.producer.role == BUFFER)
    return max(outlived - forgotten - lost, 0)


def _outlived(producer_role: str, num_transitions: int, gone: str) -> dict[str, int]:
    """Return the terms of transitions that the producer's page lacks.

    If the producer was an actor, it had produced them; if it was a buffer worker, it had not lost them.
    """
    return {"produced": num_transitions} if producer_role == ACTOR else {gone: -num_transitions}


def _untaken_terms(not_taken: Iterable[Posted]) -> dict[str, int]:
    """Return the terms that count slots which ended producers posted and no consumer took."""
    terms: Counter[str] = Counter()
    for each in not_taken:
        terms[term_of_untaken(withdrawn=each.withdrawn)] += each.num_transitions
    return dict(terms)


def _held_by_dead(record: PageRecord) -> dict[str, int]:
    """Return the terms of the transitions that a dead consumer held.

    A consumer that ended cleanly should hold none. If it does, ``Balance.check`` reports it.
    """
    held = record.counters["in_buffer"]
    return {"in_buffer": -held, "lost.receiver_died": held} if held > 0 and not (record.ended or record.keeps) else {}


def _num_transitions(slots: Iterable[Posted]) -> int:
    return sum(each.num_transitions for each in slots)
