"""Counts the non-finite steps and resets in a row over the environments of all actors.

A row is a sequence of such steps and resets without a finite transition in between, of one actor or of the whole fleet.
Each actor with faults reports its own row with its heartbeats. An actor whose environments give nothing else reads the
reports of all from the coordinator's status document, at most once a second, in the thread that steps its environments.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from rlsrl.api.role_names import ACTOR
from rlsrl.envs.faults import FleetRow
from rlsrl.rpc.tls import Tls
from rlsrl.runtime.coordination import CoordinatorClient, CoordinatorUnavailable

LOOK_SECONDS = 1.0
"""Seconds between two reads of the status document."""
ANSWER_SECONDS = 2.0
"""Deadline of one request. Only an actor that has nothing to train waits for it."""
NUM_ENDED, LENGTH = "non_finite_rows", "non_finite_in_a_row"
"""Statistics that actors report: the rows that a finite transition ended, and the length of the present row."""

StatusDocument = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class _Row:
    """One actor's row, from its last heartbeat."""

    incarnation: int
    num_ended: float
    length: float
    """0 if its last transition was finite, or if it has had no fault."""
    heard_at: float
    """Seconds on this process's clock."""


class ReportedFleetRow(FleetRow):
    """The fleet's row, from the reports of all actors. Thread-safe.

    Two reports of an actor with the same number of ended rows have no finite transition between them, if the first was
    within a row. So the fleet's row goes on while that holds for every actor. It is counted from the first document on
    which every actor is within a row; faults before that document do not count.
    """

    def __init__(
        self,
        *,
        report: Callable[[Mapping[str, float]], None],
        status: Callable[[], StatusDocument | None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """``report`` adds statistics to this actor's heartbeats; ``status`` returns the status document, or None."""
        self._report = report
        self._status = status
        self._now = now
        self._lock = threading.Lock()
        self._next_look = 0.0
        self._is_alone = False
        self._begin: Mapping[int, _Row] | None = None
        """Every actor's row, by index, at the beginning of the fleet's row; None between two rows of the fleet."""
        self._begun_at = 0.0

    @override
    def report(self, num_ended: int, length: int) -> None:
        self._report({NUM_ENDED: float(num_ended), LENGTH: float(length)})

    @override
    def length(self, own: int) -> int:
        with self._lock:
            now = self._now()
            if now < self._next_look:
                return own if self._is_alone else 0
            document = self._status()
            self._next_look = self._now() + LOOK_SECONDS
            if document is None:
                return 0
            rows = _rows(document, now)
            self._is_alone = len(rows) == 1
            return own if self._is_alone else self._counted(rows)

    def _counted(self, rows: Mapping[int, _Row]) -> int:
        begin = self._begin
        if begin is None or begin.keys() != rows.keys() or not all(_goes_on(begin[each], rows[each]) for each in rows):
            self._begin = rows if all(row.length for row in rows.values()) else None
            self._begun_at = self._now()  # behind every report of the document
            return 0
        if any(row.heard_at <= self._begun_at for row in rows.values()):
            return 0  # an actor may have had a finite transition since its last heartbeat
        return int(sum(rows[each].length - begin[each].length for each in rows))


def status_reader(address: str, token: str, tls: Tls | None) -> Callable[[], StatusDocument | None]:
    """Return a function that returns the coordinator's status document, or None if it does not answer in time."""

    def read() -> StatusDocument | None:
        # With a channel for each look: looks are rare, and certificates change.
        with closing(CoordinatorClient(address, token, tls)) as client, suppress(CoordinatorUnavailable):
            return client.status(ANSWER_SECONDS)
        return None

    return read


def _rows(document: StatusDocument, now: float) -> dict[int, _Row]:
    return {
        worker["index"]: _Row(
            incarnation=worker["incarnation"],
            num_ended=worker["stats"].get(NUM_ENDED) or 0.0,
            length=worker["stats"].get(LENGTH) or 0.0,
            heard_at=now - worker["age_seconds"],
        )
        for worker in document["roles"].get(ACTOR, ())
    }


def _goes_on(before: _Row, after: _Row) -> bool:
    return (before.incarnation, before.num_ended) == (after.incarnation, after.num_ended)
