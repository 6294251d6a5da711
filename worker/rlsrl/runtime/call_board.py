"""The call board: the environment call that each thread of this process is in, in memory that another process reads.

A call of an environment may never return, and it may hold the interpreter lock. So a process of its own, the call watch
(``rlsrl.workers.call_watch_process``), reads the board. This module imports little because that process imports it.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

CallName = Literal["step", "reset", "make", "close", "wait", "render"]
"""``wait``: no call of the environment, but the wait for its server, which is away. It has no limit."""
CALL_NAMES: tuple[CallName, ...] = get_args(CallName)

LANE, NUM_CALLS, CALL, FIRST_RANK, SPAN, IS_OPEN = range(6)
"""The words of an entry, each a 64-bit integer.

``LANE``: the lane whose environment is called; ``IDLE`` between calls. ``NUM_CALLS`` rises with each call of the same
lane, so that ``LANE`` and ``NUM_CALLS`` together never stay equal from one call to the next. ``CALL``: the place of the
call in ``CALL_NAMES``; ``STEP`` between calls, so that steps need not write it. ``FIRST_RANK``: the environment rank of
lane 0. ``SPAN``: the number of environments in one call: 1, or all that step in bulk. ``IS_OPEN``: 1 while the entry
has an owner.
"""
IDLE = -1
"""The lane of an entry whose thread is outside environments."""
STEP = CALL_NAMES.index("step")

_Result = TypeVar("_Result")

CallEntry = memoryview | list[int]
"""One thread's words on the board; only this thread writes them. A list: no call watch reads them."""

BOARD_BYTES = 1 << 20
"""The kernel provides only the pages that are written."""
_WORDS = 6
_MAX_ENTRIES = BOARD_BYTES // (8 * _WORDS) - 1
_NUM_ENTRIES = 0
"""The board's first word: how many entries were ever open."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BoardCall:
    """A call that has not returned."""

    first_rank: int
    """The rank of its first environment."""
    num_environments: int
    """The environments of the call: ranks from ``first_rank`` on."""
    name: CallName
    entry: int
    """The number of its entry."""
    mark: tuple[int, int, int]
    """Differs from that of the call before on the same entry."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentCall:
    """A call of one environment, or of several that step in bulk, that has not returned."""

    first_rank: int
    """The rank of its first environment."""
    num_environments: int
    """The environments of the call: ranks from ``first_rank`` on."""
    name: CallName
    seconds: float
    """How long it has lasted."""

    @property
    def environments(self) -> str:
        """The environments of the call in words, by rank."""
        if self.num_environments == 1:
            return f"environment rank {self.first_rank}"
        return f"environment ranks {self.first_rank} to {self.first_rank + self.num_environments - 1}"

    @property
    def text(self) -> str:
        """The call in words."""
        is_one = self.num_environments == 1
        if self.name == "wait":
            has_waited = "has waited for its server" if is_one else "have waited for their server"
            return f"{self.environments} {has_waited} for {self.seconds:.0f} s"
        return f"{self.environments} {'has been' if is_one else 'have been'} in {self.name} for {self.seconds:.0f} s"


class CallBoard:
    """The entries of all threads that step environments. Any thread may open and close entries."""

    def __init__(self, memory: mmap.mmap) -> None:
        """Use ``BOARD_BYTES`` of memory, which the writer and the reader share. New memory holds zeros."""
        self._words = memoryview(memory).cast("q")
        self._lock = threading.Lock()

    def open_entry(self, first_rank: int, *, span: int = 1) -> CallEntry:
        """Return an idle entry for one thread. ``first_rank`` and ``span``: see ``FIRST_RANK`` and ``SPAN``."""
        with self._lock:
            num_entries = self._words[_NUM_ENTRIES]
            number = next((each for each in range(num_entries) if not self._entry(each)[IS_OPEN]), num_entries)
            assert number < _MAX_ENTRIES, "no process has so many threads"
            entry = self._entry(number)
            for word, value in ((LANE, IDLE), (CALL, STEP), (FIRST_RANK, first_rank), (SPAN, span), (IS_OPEN, 1)):
                entry[word] = value
            self._words[_NUM_ENTRIES] = max(num_entries, number + 1)
            return entry

    def calls(self) -> Iterator[BoardCall]:
        """Yield the calls that have not returned. Another process may write meanwhile."""
        for number in range(self._words[_NUM_ENTRIES]):
            lane, num_calls, call, first_rank, span, is_open = self._entry(number)
            if is_open and lane != IDLE:
                yield BoardCall(
                    first_rank=first_rank + lane,
                    num_environments=span,
                    name=CALL_NAMES[call],
                    entry=number,
                    mark=(lane, num_calls, call),
                )

    def _entry(self, number: int) -> memoryview:
        return self._words[_WORDS * (number + 1) : _WORDS * (number + 2)]


class CallClock:
    """Measures how long the calls of a board last, by looking at it again and again."""

    def __init__(self, board: CallBoard) -> None:
        self._board = board
        self._lasting: dict[int, tuple[tuple[int, int, int], float]] = {}
        """By entry: the mark of its call, and the seconds since that call was first seen."""

    def look(self, elapsed: float) -> list[EnvironmentCall]:
        """Return the present calls, longest first. ``elapsed``: seconds since the last look that count."""
        before, self._lasting = self._lasting, {}
        found = []
        for call in self._board.calls():
            mark, seconds = before.get(call.entry, (None, 0.0))
            seconds = seconds + elapsed if mark == call.mark else 0.0
            self._lasting[call.entry] = call.mark, seconds
            found.append(
                EnvironmentCall(
                    first_rank=call.first_rank,
                    num_environments=call.num_environments,
                    name=call.name,
                    seconds=seconds,
                )
            )
        return sorted(found, key=lambda call: -call.seconds)


def private_entry() -> CallEntry:
    """Return an entry on no board."""
    return [IDLE, *[0] * (_WORDS - 1)]


def on_board(
    entry: CallEntry, lane: int, name: CallName, call: Callable[..., _Result], *arguments: Any, **options: Any
) -> _Result:
    """Return the result of ``call``, and show it as that lane's on the board while it lasts.

    Raises:
        What ``call`` raises.
    """
    entry[NUM_CALLS] += 1
    entry[CALL], entry[LANE] = CALL_NAMES.index(name), lane
    try:
        return call(*arguments, **options)
    finally:
        entry[LANE], entry[CALL] = IDLE, STEP


def close_entry(entry: CallEntry) -> None:
    """Give the entry back. Idempotent."""
    entry[LANE] = IDLE
    entry[IS_OPEN] = 0
