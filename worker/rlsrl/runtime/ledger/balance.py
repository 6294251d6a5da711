"""Adds the pages of a run up and says whether they agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rlsrl.runtime.ledger.page import SUFFIX, LedgerPage, read_page
from rlsrl.runtime.ledger.records import (
    DROP_REASONS,
    LOSS_CAUSES,
    NOTHING,
    Account,
    LedgerError,
    PageRecord,
    Posted,
    fate_of_untaken,
)

CHAIN = ("actor", "buffer", "trainer")
"""The roles that samples pass through, in order; without a page of a buffer worker a run has none between."""


@dataclass(frozen=True, kw_only=True)
class Balance:
    """Where all produced transitions of a run are. All figures in transitions."""

    produced: int
    trained: int
    in_buffer: int
    """Held by consumers; of an ended run 0, unless a consumer that ended cleanly cannot say what became of them."""
    dropped: Mapping[str, int]
    """By reason."""
    lost: Mapping[str, int]
    """By cause."""
    unsettled: int
    """Posted, not taken, and the producer may still be asked; 0 of an ended run."""
    ended: bool
    """Whether it was drawn up after the end of all processes."""

    @property
    def accounted(self) -> int:
        """The sum that must equal ``produced``."""
        return self.trained + self.in_buffer + sum(self.dropped.values()) + sum(self.lost.values()) + self.unsettled

    def check(self) -> None:
        """Return if the books are right. Of a live run they are exact only while nothing moves.

        Raises:
            LedgerError: they are not; the text names both sides.
        """
        if self.produced != self.accounted:
            raise LedgerError(
                f"produced {self.produced} is not the {self.accounted} accounted for "
                f"({self.produced - self.accounted:+d}): {self._terms()}"
            )
        if self.in_buffer < 0 or (self.ended and self.in_buffer):
            raise LedgerError(f"consumers were left holding {self.in_buffer} transitions: {self._terms()}")

    def to_json(self) -> dict[str, Any]:
        """JSON values for a summary."""
        return {
            "produced": self.produced,
            "trained": self.trained,
            "in_buffer": self.in_buffer,
            "dropped": dict(self.dropped),
            "lost": dict(self.lost),
            "unsettled": self.unsettled,
        }

    def judge(self) -> dict[str, Any]:
        """``to_json`` with ``balanced`` and, if it is not, the ``problem``."""
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
    """Add pages up; ``ended`` says that all processes of the run have ended.

    A producer cannot know whether a slot without acknowledgement was taken, but the consumers' marks say. Taken ones
    are on the consumer's page already. Of the others, in an ended run, those of a life that ended cleanly were dropped
    by its end, and those of a life that did not were lost with it; likewise what a dead consumer held.

    ``copies`` says that pages of lives that did not end cleanly may be older than their end. Then, and of pages that
    were restored, the two ends of a stream correct each other: both have the producer's count of what it posted.
    """
    records = tuple(records)
    chain = _chain(records)
    total: Counter[str] = Counter()
    for record in records:
        total.update(record.counters)
        total.update(_outlived(_before(record.role, chain), record.counters["outlived"], "lost.receiver_died"))
        if ended:
            total.update(_left_by_consumer(record))
    gone = "lost.receiver_died" if ended else "unsettled"
    pairs = [*_pairs(records, chain, copies=copies)]
    for pair in pairs:
        total.update(_fates(pair.not_taken) if ended else {"unsettled": _sum(pair.not_taken)})
        total[gone] += pair.forgotten
        total.update(_outlived(pair.giver, pair.outlived, gone))
    if ended:
        overdrawn = max(-_lost_at_buffers(total, records, pairs), 0)
        total.update({"produced": overdrawn, gone: overdrawn})
    return Balance(
        produced=total["produced"],
        trained=total["trained"],
        in_buffer=total["in_buffer"],
        dropped={reason: total[f"dropped.{reason}"] for reason in DROP_REASONS},
        lost={cause: total[f"lost.{cause}"] for cause in LOSS_CAUSES},
        unsettled=total["unsettled"],
        ended=ended,
    )


def settle_ledger(folder: Path) -> None:
    """Settle on the pages of an ended run what its producers left, so that a later life has nothing to ask about.

    For the controller, when no process of the run is alive: after the end and, in case it did not get that far, before
    a resume. Repeating it is fine. The balance of the ended run is the same before and after.

    Raises:
        LedgerError: a process of the run is still alive.
    """
    with ExitStack() as pages:
        opened = {(page.record.role, page.record.index): page for page in map(pages.enter_context, _open_all(folder))}
        records = tuple(page.record for page in opened.values())
        for pair in _pairs(records, _chain(records), copies=False):
            if pair.producer is not None and pair.not_taken:
                page = opened[pair.producer.role, pair.producer.index]
                page.apply(partial(_settled, not_taken=pair.not_taken))
        for page in opened.values():
            page.apply(lambda record: replace(record, unacknowledged=()))


def _chain(records: Sequence[PageRecord]) -> list[str]:
    return [role for role in CHAIN if role != "buffer" or any(record.role == role for record in records)]


def _settled(record: PageRecord, *, not_taken: Sequence[Posted]) -> PageRecord:
    """The producer's page when what nobody took is written down on it: as if it had never been posted."""
    accounts = dict(record.accounts)
    for posted in not_taken:
        inherited, total = accounts.get(posted.consumer, Account())
        former = posted.num_transitions if posted.incarnation < record.incarnation else 0
        accounts[posted.consumer] = Account(inherited - former, total - posted.num_transitions)
    return replace(record.count(**_fates(not_taken)), accounts=accounts)


def _open_all(folder: Path) -> Iterable[LedgerPage]:
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        if (record := read_page(path)) is not None:
            yield LedgerPage.open(path, record.role, record.index)


@dataclass(frozen=True, kw_only=True)
class _Pair:
    """A producer index and a consumer, and where what they say of each other differs. All but slots in transitions."""

    giver: str
    """The producer's role."""
    producer: PageRecord | None
    not_taken: tuple[Posted, ...]
    """The producer's unacknowledged slots that the consumer has not accounted for."""
    forgotten: int
    """Acknowledged, as the producer says, and not on the consumer's page, which may be older."""
    outlived: int
    """Accounted for by the consumer and not on the producer's page, which may be older."""


def _pairs(records: Sequence[PageRecord], chain: Sequence[str], *, copies: bool) -> Iterator[_Pair]:
    """All pairs that have anything to do with each other."""

    def may_be_older(record: PageRecord | None) -> bool:
        return copies if record is None else record.restored or (copies and not record.ended)

    pages = {(record.role, record.index): record for record in records}
    for position, giver in enumerate(chain):
        taker = chain[position + 1] if position + 1 < len(chain) else None
        for index, consumer_index in _acquainted(records, giver, taker):
            producer = pages.get((giver, index))
            consumer = pages.get((taker, consumer_index)) if taker is not None else None
            pair = _compared(giver, producer, index, consumer, consumer_index)
            yield replace(
                pair,
                forgotten=pair.forgotten if may_be_older(consumer) else 0,
                outlived=pair.outlived if may_be_older(producer) else 0,
            )


def _acquainted(records: Sequence[PageRecord], giver: str, taker: str | None) -> list[tuple[int, int]]:
    """(producer's index, consumer's index) of all who heard of each other."""
    givers = [each for each in records if each.role == giver]
    pairs = {(each.index, consumer) for each in givers for consumer in each.accounts}
    pairs |= {(each.index, posted.consumer) for each in givers for posted in each.unacknowledged}
    pairs |= {(producer, each.index) for each in records if each.role == taker for producer in each.marks}
    return sorted(pairs)


def _compared(
    giver: str, producer: PageRecord | None, index: int, consumer: PageRecord | None, consumer_index: int
) -> _Pair:
    """Both have the producer's count of what it posted, each as far as its own memory reaches."""
    mark = consumer.marks.get(index, NOTHING) if consumer is not None else NOTHING
    producer_page = producer if producer is not None else PageRecord(role=giver, index=index)
    account = producer_page.accounts.get(consumer_index, Account())
    not_taken = tuple(
        each
        for each in producer_page.unacknowledged
        if each.consumer == consumer_index and not mark.covers(each.incarnation, each.sequence)
    )
    known_life = mark.incarnation >= producer_page.incarnation
    if known_life:
        gap, since = account.total - _sum(not_taken) - mark.total, 0
    else:
        former = [each for each in not_taken if each.incarnation < producer_page.incarnation]
        gap = account.inherited - _sum(former) - mark.total
        since = account.total - account.inherited - _sum(not_taken) + _sum(former)
    return _Pair(
        giver=giver,
        producer=producer,
        not_taken=not_taken,
        forgotten=max(gap, 0) + since,
        outlived=max(-gap, 0),
    )


def _lost_at_buffers(total: Mapping[str, int], records: Sequence[PageRecord], pairs: Sequence[_Pair]) -> int:
    """What was lost with buffer workers. Less than nothing is what came through them, and of actors, unknown to both:
    their copies are older than that of the trainer who took it.
    """
    if not any(record.role == "buffer" for record in records):
        return 0
    lost = sum(
        record.counters["lost.receiver_died"] + (0 if record.ended else max(record.counters["in_buffer"], 0))
        for record in records
        if record.role == "buffer"
    )
    forgotten = sum(pair.forgotten for pair in pairs if pair.giver == CHAIN[0])
    outlived = total["outlived"] + sum(pair.outlived for pair in pairs if pair.giver == "buffer")
    return lost + forgotten - outlived


def _outlived(giver: str, num_transitions: int, gone: str) -> dict[str, int]:
    """What came from beyond the producer's own page: an actor had produced it, a buffer worker had not lost it."""
    return {"produced": num_transitions} if giver == CHAIN[0] else {gone: -num_transitions}


def _before(role: str, chain: Sequence[str]) -> str:
    """The role whose slots that role takes, if it takes any."""
    return chain[max(chain.index(role) - 1, 0)]


def _fates(not_taken: Iterable[Posted]) -> dict[str, int]:
    """What became of slots that ended producers posted and nobody took."""
    terms: Counter[str] = Counter()
    for each in not_taken:
        terms[fate_of_untaken(withdrawn=each.withdrawn)] += each.num_transitions
    return dict(terms)


def _left_by_consumer(record: PageRecord) -> dict[str, int]:
    """What became of the slots that a dead consumer held; one that ended cleanly has emptied its buffer."""
    held = record.counters["in_buffer"]
    return {"in_buffer": -held, "lost.receiver_died": held} if held > 0 and not record.ended else {}


def _sum(slots: Iterable[Posted]) -> int:
    return sum(each.num_transitions for each in slots)
