"""What stands on a ledger page, and its form as bytes. No files here."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

DROP_REASONS = ("stale", "old_attempt", "end_of_run", "non_finite")
"""Why a transition was not trained that reached a consumer, or was on its way when its producer ended cleanly."""
LOSS_CAUSES = ("receiver_died", "producer_died", "rolled_back")
"""What took a transition: the death of who held it, the death of who made it before anybody held it, or a resume from
a checkpoint older than the step that trained it."""

TERMS = (
    "produced",
    "trained",
    "in_buffer",
    *(f"dropped.{reason}" for reason in DROP_REASONS),
    *(f"lost.{cause}" for cause in LOSS_CAUSES),
    "passed_on",
    "outlived",
)
"""The counters, in transitions. Two are beside the sum, not in it: ``passed_on`` (what a buffer worker took and posted
again) and ``outlived`` (what came of producers beyond what is left of their own pages)."""


def fate_of_untaken(*, withdrawn: bool) -> str:
    """The term of a slot that its producer posted and no consumer took."""
    return "dropped.end_of_run" if withdrawn else "lost.producer_died"


class LedgerError(Exception):
    """The ledger cannot be written or read, or does not add up."""


class Mark(NamedTuple):
    """What a consumer has accounted for of one producer index. Ordered: a newer incarnation closes the older ones."""

    incarnation: int
    sequence: int
    """The highest sequence accounted for of that incarnation."""
    total: int = 0
    """The producer's own count at that slot: transitions that its index ever posted to this consumer."""

    def covers(self, incarnation: int, sequence: int) -> bool:
        """Whether that slot is accounted for."""
        return (incarnation, sequence) <= (self.incarnation, self.sequence)


NOTHING = Mark(-1, -1)
"""The mark of a producer that was never heard of."""


class Posted(NamedTuple):
    """A slot that its producer counted and whose acknowledgement it has not seen."""

    incarnation: int
    sequence: int
    num_transitions: int
    consumer: int
    """Index of the consumer it is for."""
    withdrawn: bool = False
    """Whether its life ended cleanly since: unless it was taken, it was dropped then, and nobody died with it."""


class Account(NamedTuple):
    """A producer index's count of what it ever posted to one consumer."""

    inherited: int = 0
    """When its newest life began."""
    total: int = 0
    """Now."""


@dataclass(frozen=True, kw_only=True)
class ProducerProgress:
    """What a producer says of its account when it meets a consumer."""

    inherited: int = 0
    """See ``Account``."""
    sequence: int = -1
    """The newest slot of this life that the consumer, or a life of it before, acknowledged; -1 for none."""
    acknowledged: int = 0
    """The count at that slot; ``inherited`` for none."""
    left: tuple[tuple[int, int, int, bool], ...] = ()
    """(incarnation, sequence, num_transitions, withdrawn) of what former lives posted and saw no acknowledgement of."""
    restored: bool = False
    """Whether the producer's page was restored: former lives may have posted more."""


@dataclass(frozen=True, kw_only=True)
class PageRecord:
    """One page as it stood at one moment. Changes make a new record, so a page goes from whole to whole."""

    role: str
    index: int
    counters: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(TERMS, 0))
    """Transitions by term; every term is there."""
    lives: int = 0
    """How many processes have begun on this page; 0 on a new one."""
    ended: bool = False
    """Whether the newest life said that it ended cleanly."""
    restored: bool = False
    """Whether a life began without the page of the one before, on an older copy or on nothing: what this record says
    of former lives may be less than they did. Of all others a difference is a fault."""
    incarnation: int = -1
    """Of the newest life; -1 for none."""
    sequence: int = -1
    """The highest sequence the newest life produced; -1 for none."""
    marks: Mapping[int, Mark] = field(default_factory=dict)
    """What this consumer accounted for, by producer index."""
    accounts: Mapping[int, Account] = field(default_factory=dict)
    """What this producer posted, by consumer index."""
    unacknowledged: tuple[Posted, ...] = ()
    """What this producer posted and cannot know to have arrived, in order."""

    def count(self, **deltas: int) -> Self:
        """The record with each named term raised by so many transitions.

        Raises:
            KeyError: no such term.
        """
        counters = dict(self.counters)
        for term, delta in deltas.items():
            counters[term] += delta
        return replace(self, counters=counters)

    def encode(self) -> bytes:
        """The record but for role and index, as little-endian int64 words."""
        words = [len(TERMS), *(self.counters[term] for term in TERMS)]
        words += [self.lives, int(self.ended), int(self.restored), self.incarnation, self.sequence]
        for table in (self.marks, self.accounts):
            words.append(len(table))
            for index, entry in table.items():
                words += (index, *entry)
        words.append(len(self.unacknowledged))
        for posted in self.unacknowledged:
            words += posted
        return struct.pack(f"<{len(words)}q", *words)

    @classmethod
    def decode(cls, payload: bytes, *, role: str, index: int) -> Self:
        """Read what ``encode`` wrote.

        Raises:
            LedgerError: it did not write that.
        """
        try:
            return cls._decode(payload, role=role, index=index)
        except (struct.error, StopIteration, RuntimeError, TypeError, ValueError) as error:
            raise LedgerError(f"{len(payload)} bytes are no ledger page of {role} {index}: {error!r}") from error

    @classmethod
    def _decode(cls, payload: bytes, *, role: str, index: int) -> Self:
        words = iter(struct.unpack(f"<{len(payload) // 8}q", payload))
        # Terms are only ever appended to the table, so an older page lacks the last ones.
        counted = dict(zip(TERMS, _take(words, next(words)), strict=False))
        lives, ended, restored, incarnation, sequence = _take(words, 5)
        return cls(
            role=role,
            index=index,
            counters=dict.fromkeys(TERMS, 0) | counted,
            lives=lives,
            ended=bool(ended),
            restored=bool(restored),
            incarnation=incarnation,
            sequence=sequence,
            marks={producer: Mark(*_take(words, 3)) for producer in _each(words)},
            accounts={consumer: Account(*_take(words, 2)) for consumer in _each(words)},
            unacknowledged=tuple(_posted(first, *_take(words, 4)) for first in _each(words)),
        )


def _take(words: Iterator[int], count: int) -> list[int]:
    return [next(words) for _ in range(count)]


def _posted(incarnation: int, sequence: int, num_transitions: int, consumer: int, withdrawn: int) -> Posted:
    return Posted(incarnation, sequence, num_transitions, consumer, bool(withdrawn))


def _each(words: Iterator[int]) -> Iterator[int]:
    """The first word of each entry of a counted list; the caller takes the others."""
    for _ in range(next(words)):
        yield next(words)
