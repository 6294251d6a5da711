"""Keeps what a process prints until the coordinator has stored it, in bounded memory, without delaying the process.

In a pod, logs go to standard output like everything else that Python code prints. So two streams in the place of
``sys.stdout`` and ``sys.stderr`` see logs, an environment's ``print`` and tracebacks. They do not see what C code and
child processes write to the file descriptors.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TextIO, cast

from rlsrl.rpc.v1 import coordinator_pb2 as pb

HALF_CHARACTERS = 32 * 1024
"""Characters kept of the beginning, and of the end, of what is printed between two heartbeats."""
_PARTS_IN_FLIGHT = 1
_LAST_PARTS = 2


class PrintedText:
    """Collects printed text, and makes parts of it for heartbeats. Thread-safe; no method waits.

    At most one part is unacknowledged, and a second one when the worker leaves. Text printed meanwhile is kept up to
    ``HALF_CHARACTERS`` from its beginning, which often has the cause, and as much from its end. A line in the part
    counts the lines that are missing between them.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew. A forked child calls this: another thread of its parent may have held the lock at the fork."""
        # Reentrant, because a finalizer or a signal handler may print while its thread holds the lock.
        self._lock = threading.RLock()
        self._head: list[str] = []
        self._tail: deque[str] = deque()
        self._head_size = self._tail_size = 0
        self._missing_characters = self._missing_lines = 0
        self._parts: deque[pb.LogPart] = deque()
        self._next_sequence = 0

    def add(self, text: str) -> None:
        """Add printed text, in the order of the calls."""
        if not text:
            return
        with self._lock:
            room = HALF_CHARACTERS - self._head_size
            if room > 0:
                self._head.append(text[:room])
                self._head_size += min(room, len(text))
                text = text[room:]
            if text:
                self._add_to_tail(text)

    def parts(self, *, after: int, is_last: bool) -> list[pb.LogPart]:
        """Return the unacknowledged parts with a sequence above ``after``.

        New text becomes a part if no other part is unacknowledged. ``is_last``: the worker leaves, so its last text
        becomes a part in any case.
        """
        with self._lock:
            limit = _LAST_PARTS if is_last else _PARTS_IN_FLIGHT
            if self._head_size and len(self._parts) < limit:
                self._parts.append(pb.LogPart(sequence=self._next_sequence, text=self._take()))
                self._next_sequence += 1
            return [part for part in self._parts if part.sequence > after]

    def acknowledge(self, sequence: int) -> None:
        """Drop the parts up to this one."""
        with self._lock:
            while self._parts and self._parts[0].sequence <= sequence:
                self._parts.popleft()

    def _add_to_tail(self, text: str) -> None:
        self._miss(text[:-HALF_CHARACTERS])
        self._tail.append(text[-HALF_CHARACTERS:])
        self._tail_size += len(self._tail[-1])
        while self._tail_size - len(self._tail[0]) >= HALF_CHARACTERS:
            oldest = self._tail.popleft()
            self._tail_size -= len(oldest)
            self._miss(oldest)

    def _miss(self, text: str) -> None:
        self._missing_characters += len(text)
        self._missing_lines += text.count("\n")

    def _take(self) -> bytes:
        gap = ""
        if self._missing_characters:
            size = f"{self._missing_lines:,} lines, {self._missing_characters:,} characters"
            gap = f"\n[rlsrl: missing here: {size}]\n"
        text = "".join((*self._head, gap, *self._tail))
        self._head.clear()
        self._tail.clear()
        self._head_size = self._tail_size = self._missing_characters = self._missing_lines = 0
        return text.encode(errors="replace")  # a lone surrogate has no UTF-8


class CopiedStream:
    """A text stream that also passes each text to ``copy``. All else is the stream's own."""

    def __init__(self, stream: TextIO, copy: Callable[[str], None]) -> None:
        self._stream = stream
        self._copy = copy

    def write(self, text: str) -> int:
        """Write the text to the stream, then pass it on."""
        written = self._stream.write(text)
        self._copy(text)
        return written

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each text."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def keep_printed() -> PrintedText:
    """Return the text that this process prints from now on: ``sys.stdout`` and ``sys.stderr`` are replaced."""
    printed = PrintedText()
    sys.stdout = cast("TextIO", CopiedStream(sys.stdout, printed.add))
    sys.stderr = cast("TextIO", CopiedStream(sys.stderr, printed.add))
    os.register_at_fork(after_in_child=printed.forget)
    return printed
