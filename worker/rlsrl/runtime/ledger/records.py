"""What stands on a ledger page, and its form as bytes. No files here."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

DROP_REASONS = ("stale", "old_attempt", "end_of_run", "non_finite")
"""Why a transition that reached a consumer, or was still on its way at a clean end, was not trained."""
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
)
"""The counters, in transitions. ``passed_on`` (what a buffer worker took and posted again) is beside the sum, not in
it."""


class LedgerError(Exception):
    """The ledger cannot be written or read, or does not add up."""


class Mark(NamedTuple):
    """What a consumer has accounted for of one producer index. Ordered: a newer incarnation closes the older ones."""

    incarnation: int
    sequence: int
    """The highest sequence accounted for of that incarnation."""


class Posted(NamedTuple):
    """A slot that its producer counted and whose acknowledgement it has not seen."""

    incarnation: int
    sequence: int
    num_transitions: int
    consumer: int
    """Index of the consumer it is for."""


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
    incarnation: int = -1
    """Of the newest life, if it produces; -1 for none."""
    sequence: int = -1
    """The highest sequence the newest life produced; -1 for none."""
    marks: Mapping[int, Mark] = field(default_factory=dict)
    """What this consumer accounted for, by producer index."""
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
        words += [self.lives, int(self.ended), self.incarnation, self.sequence]
        words.append(len(self.marks))
        for index, mark in self.marks.items():
            words += (index, *mark)
        words.append(len(self.unacknowledged))
        for posted in self.unacknowledged:
            words += posted
        return struct.pack(f"<{len(words)}q", *words)

    @classmethod
    def decode(cls, payload: bytes, *, role: str, index: int) -> Self:
        """Read what ``encode`` wrote."""
        words = iter(struct.unpack(f"<{len(payload) // 8}q", payload))
        # Terms are only ever appended to the table, so an older page lacks the last ones.
        counted = dict(zip(TERMS, _take(words, next(words)), strict=False))
        lives, ended, incarnation, sequence = _take(words, 4)
        marks = {producer: Mark(*_take(words, 2)) for producer in _each(words)}
        return cls(
            role=role,
            index=index,
            counters=dict.fromkeys(TERMS, 0) | counted,
            lives=lives,
            ended=bool(ended),
            incarnation=incarnation,
            sequence=sequence,
            marks=marks,
            unacknowledged=tuple(Posted(first, *_take(words, 3)) for first in _each(words)),
        )


def _take(words: Iterator[int], count: int) -> list[int]:
    return [next(words) for _ in range(count)]


def _each(words: Iterator[int]) -> Iterator[int]:
    """The first word of each entry of a counted list; the caller takes the others."""
    for _ in range(next(words)):
        yield next(words)
