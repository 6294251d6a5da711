"""Adds the pages of a run up and says whether they agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlsrl.runtime.ledger.page import SUFFIX, LedgerPage, read_page
from rlsrl.runtime.ledger.records import DROP_REASONS, LOSS_CAUSES, LedgerError, Mark, PageRecord, Posted

CHAIN = ("actor", "buffer", "trainer")
"""The roles that samples pass through, in order; a role of which a run has no page is not in its chain."""


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

    def _terms(self) -> str:
        return (
            f"trained {self.trained}, in_buffer {self.in_buffer}, dropped {dict(self.dropped)}, "
            f"lost {dict(self.lost)}, unsettled {self.unsettled}"
        )


def balance(records: Iterable[PageRecord], *, ended: bool) -> Balance:
    """Add pages up; ``ended`` says that all processes of the run have ended.

    A producer cannot know whether a slot without acknowledgement was taken, but the consumers' marks say. Taken ones
    are on the consumer's page already. Of the others, in an ended run, those of a life that ended cleanly were dropped
    by the end of the run, and those of a life that did not were lost with it; likewise what a dead consumer held.
    """
    records = tuple(records)
    total: Counter[str] = Counter()
    for record in records:
        total.update(record.counters)
        total["unsettled"] += sum(each.num_transitions for each in _not_taken(record, records))
    if ended:
        total["unsettled"] = 0
        for record in records:
            total.update(_left_by_producer(record, records))
            total.update(_left_by_consumer(record))
    return Balance(
        produced=total["produced"],
        trained=total["trained"],
        in_buffer=total["in_buffer"],
        dropped={reason: total[f"dropped.{reason}"] for reason in DROP_REASONS},
        lost={cause: total[f"lost.{cause}"] for cause in LOSS_CAUSES},
        unsettled=total["unsettled"],
        ended=ended,
    )


def close_books(folder: Path) -> None:
    """Settle on the pages of an ended run what its producers left, so that a later life has nothing to ask about.

    For the controller, when no process of the run is alive: after the end and, in case it did not get that far, before
    a resume. Repeating it is fine. The balance of the ended run is the same before and after.

    Raises:
        LedgerError: a process of the run is still alive.
    """
    with ExitStack() as pages:
        opened = [pages.enter_context(page) for page in _open_all(folder)]
        records = tuple(page.record for page in opened)
        for page in opened:
            page.apply(lambda record: replace(record.count(**_left_by_producer(record, records)), unacknowledged=()))


def _open_all(folder: Path) -> Iterable[LedgerPage]:
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        if (record := read_page(path)) is not None:
            yield LedgerPage.open(path, record.role, record.index)


def _left_by_producer(record: PageRecord, records: Sequence[PageRecord]) -> dict[str, int]:
    """What became of the slots that an ended producer posted and nobody took."""
    left: Counter[str] = Counter()
    for each in _not_taken(record, records):
        clean = record.ended and each.incarnation == record.incarnation
        left["dropped.end_of_run" if clean else "lost.producer_died"] += each.num_transitions
    return dict(left)


def _left_by_consumer(record: PageRecord) -> dict[str, int]:
    """What became of the slots that a dead consumer held; one that ended cleanly has emptied its buffer."""
    held = record.counters["in_buffer"]
    return {"in_buffer": -held, "lost.receiver_died": held} if held > 0 and not record.ended else {}


def _not_taken(record: PageRecord, records: Sequence[PageRecord]) -> list[Posted]:
    """The producer's unacknowledged slots that no consumer has accounted for."""
    consumer_role = _consumer_of(record.role, {each.role for each in records})
    marks = {each.index: each.marks.get(record.index) for each in records if each.role == consumer_role}
    return [
        posted
        for posted in record.unacknowledged
        if (marks.get(posted.consumer) or _NOTHING) < Mark(posted.incarnation, posted.sequence)
    ]


def _consumer_of(role: str, present: AbstractSet[str]) -> str | None:
    """Which role takes what a role posts."""
    after = CHAIN[CHAIN.index(role) + 1 :] if role in CHAIN else ()
    return next((each for each in after if each in present), None)


_NOTHING = Mark(-1, -1)
