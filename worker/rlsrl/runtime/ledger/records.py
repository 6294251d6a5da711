"""The record on a ledger page, and its encoding. ``page`` handles the file."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

from rlsrl.api.role_names import ACTOR, BUFFER, TRAINER

DROP_REASONS = ("stale", "old_attempt", "end_of_run", "non_finite", "update_skipped", "evicted")
"""Why a transition was not trained. ``stale``: its weights are older than the policy lag allows. ``old_attempt``: its
weights are of an earlier attempt. ``end_of_run``: it was untrained when its consumer ended, or in transit when its
producer ended cleanly. ``non_finite``: it reached no slot, because its reward or observation is not finite.
``update_skipped``: every minibatch that contained it was skipped, because the loss or the gradient was not finite.
``evicted``: newer ones took its place in the replay store."""
LOSS_CAUSES = ("receiver_died", "producer_died", "rolled_back")
"""Causes of a loss. The consumer that held the transition died; or its producer died before a consumer held it; or
training resumed from a checkpoint that is older than the step that trained it."""

TERMS = (
    "produced",
    "trained",
    "in_buffer",
    "dropped.stale",
    "dropped.old_attempt",
    "dropped.end_of_run",
    "dropped.non_finite",
    *(f"lost.{cause}" for cause in LOSS_CAUSES),
    "passed_on",
    "outlived",
    "dropped.update_skipped",
    "dropped.evicted",
    "outlived.buffer",
)
"""The counters, in transitions, in the order of a page; new ones are appended.

Three of them are not part of the equation: ``passed_on`` (transitions that a buffer worker took and posted again), and
``outlived`` and ``outlived.buffer`` (transitions that a consumer took and that the restored page of the actor, or of
the buffer worker, that posted them does not contain)."""

_BUFFER_KEYS = 2**32
"""The key of buffer worker 0."""


def key_of(role: str, index: int) -> int:
    """Return the key of a producer or a consumer on the pages of its peers.

    Keys of buffer workers differ from those of actors and trainers: an edit that adds or removes ``bufferWorkers``
    leaves both on a page, and each is compared with its own peer alone.
    """
    return index + _BUFFER_KEYS if role == BUFFER else index


def producer_of(key: int) -> tuple[str, int]:
    """Return role and index of the producer with that key."""
    return (BUFFER, key - _BUFFER_KEYS) if key >= _BUFFER_KEYS else (ACTOR, key)


def consumer_of(key: int) -> tuple[str, int]:
    """Return role and index of the consumer with that key."""
    return (BUFFER, key - _BUFFER_KEYS) if key >= _BUFFER_KEYS else (TRAINER, key)


def term_of_untaken(*, withdrawn: bool) -> str:
    """Return the term that counts a slot which its producer posted and no consumer took."""
    return "dropped.end_of_run" if withdrawn else "lost.producer_died"


class LedgerError(Exception):
    """The ledger cannot be written or read, or its equation does not hold."""


class Mark(NamedTuple):
    """The newest slot of one producer index that a consumer has accounted for.

    All earlier slots are accounted for, too. Marks are ordered; a newer incarnation closes the older ones.
    """

    incarnation: int
    sequence: int
    """Highest sequence number of that incarnation that is accounted for."""
    total: int = 0
    """The producer's own count at that slot: all transitions that its index has posted to this consumer."""

    def covers(self, incarnation: int, sequence: int) -> bool:
        """Return whether that slot is accounted for."""
        return (incarnation, sequence) <= (self.incarnation, self.sequence)


NO_MARK = Mark(-1, -1)
"""The mark of a producer that has never connected."""


class Posted(NamedTuple):
    """A slot that its producer has posted and whose acknowledgement it has not received."""

    incarnation: int
    sequence: int
    num_transitions: int
    consumer: int
    """Key of the consumer that the slot was posted to."""
    withdrawn: bool = False
    """True if the producer's life has ended cleanly since. An untaken slot then counts as dropped, not as lost."""


class PostedCount(NamedTuple):
    """How many transitions a producer index has posted to one consumer, in all its lives."""

    inherited: int = 0
    """The count when the producer's newest life began."""
    total: int = 0
    """The count now."""


@dataclass(frozen=True, kw_only=True)
class ProducerProgress:
    """A producer's statement about what it has posted, sent when it connects to a consumer."""

    inherited: int = 0
    """See ``PostedCount``."""
    sequence: int = -1
    """The newest slot of this life that the consumer or a former life of it acknowledged; -1 for none."""
    acknowledged: int = 0
    """``PostedCount.total`` at that slot; ``inherited`` if there is none."""
    left: tuple[tuple[int, int, int, bool], ...] = ()
    """(incarnation, sequence, num_transitions, withdrawn) of former lives' slots that were not acknowledged."""
    restored: bool = False
    """True if the producer's page was restored: its former lives may have posted more than it contains."""


@dataclass(frozen=True, kw_only=True)
class PageRecord:
    """The content of one page at one moment. A change creates a new record, so a page is always complete."""

    role: str
    index: int
    counters: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(TERMS, 0))
    """Transitions by term. Every term of ``TERMS`` is present."""
    lives: int = 0
    """How many lives (processes) have used this page; 0 for a new page."""
    ended: bool = False
    """True if the newest life has ended cleanly."""
    keeps: bool = False
    """True if what this consumer holds outlives its process: it counts as held after the end, too."""
    restored: bool = False
    """True if a life began on an older copy of the page, or on a new page, because the former life's page was lost.

    Then the record may contain less than former lives did. On any other page, such a difference is an error."""
    incarnation: int = -1
    """Incarnation of the newest life; -1 for none."""
    sequence: int = -1
    """Highest sequence number that the newest life produced; -1 for none."""
    marks: Mapping[int, Mark] = field(default_factory=dict)
    """What this consumer has accounted for, by the producer's key."""
    posted_counts: Mapping[int, PostedCount] = field(default_factory=dict)
    """What this producer has posted, by the consumer's key."""
    unacknowledged: tuple[Posted, ...] = ()
    """Slots that this producer has posted and that are not acknowledged, in order."""

    def count(self, **deltas: int) -> Self:
        """Return the record with each named term raised by its number of transitions.

        Raises:
            KeyError: the term is not one of ``TERMS``.
        """
        counters = dict(self.counters)
        for term, delta in deltas.items():
            counters[term] += delta
        return replace(self, counters=counters)

    def encode(self) -> bytes:
        """Return the record as little-endian int64 words. Role and index are not included."""
        words = [len(TERMS), *(self.counters[term] for term in TERMS)]
        words += [self.lives, self.ended | self.keeps << 1, int(self.restored), self.incarnation, self.sequence]
        for table in (self.marks, self.posted_counts):
            words.append(len(table))
            for index, entry in table.items():
                words += (index, *entry)
        words.append(len(self.unacknowledged))
        for posted in self.unacknowledged:
            words += posted
        return struct.pack(f"<{len(words)}q", *words)

    @classmethod
    def decode(cls, payload: bytes, *, role: str, index: int) -> Self:
        """Return the record that ``encode`` wrote.

        Raises:
            LedgerError: the bytes are not an encoded record.
        """
        try:
            return cls._decode(payload, role=role, index=index)
        except (struct.error, StopIteration, RuntimeError, TypeError, ValueError) as error:
            raise LedgerError(f"{len(payload)} bytes are not a ledger page of {role} {index}: {error!r}") from error

    @classmethod
    def _decode(cls, payload: bytes, *, role: str, index: int) -> Self:
        words = iter(struct.unpack(f"<{len(payload) // 8}q", payload))
        # An older page lacks the last terms.
        counted = dict(zip(TERMS, _next_words(words, next(words)), strict=False))
        lives, flags, restored, incarnation, sequence = _next_words(words, 5)
        return cls(
            role=role,
            index=index,
            counters=dict.fromkeys(TERMS, 0) | counted,
            lives=lives,
            ended=bool(flags & 1),
            keeps=bool(flags & 2),
            restored=bool(restored),
            incarnation=incarnation,
            sequence=sequence,
            marks={producer: Mark(*_next_words(words, 3)) for producer in _entries(words)},
            posted_counts={consumer: PostedCount(*_next_words(words, 2)) for consumer in _entries(words)},
            unacknowledged=tuple(_posted(first, *_next_words(words, 4)) for first in _entries(words)),
        )


def _next_words(words: Iterator[int], count: int) -> list[int]:
    return [next(words) for _ in range(count)]


def _posted(incarnation: int, sequence: int, num_transitions: int, consumer: int, withdrawn: int) -> Posted:
    return Posted(incarnation, sequence, num_transitions, consumer, bool(withdrawn))


def _entries(words: Iterator[int]) -> Iterator[int]:
    """Yield the first word of each entry of a list that starts with its length. The caller takes the other words."""
    for _ in range(next(words)):
        yield next(words)
