"""The environment calls that last long, as the workers' call watches report them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import structlog
from prometheus_client import Counter
from typing_extensions import override

from rlsrl.runtime.call_board import EnvironmentCall
from rlsrl.workers.leases import Lease

EXPIRE_SECONDS = 10.0
"""Seconds after which a report that is not repeated is dropped: its watch has ended. Watches repeat reports every two
seconds."""


@dataclass(frozen=True, kw_only=True)
class WorkerCall:
    """A call and the worker that is in it."""

    role: str
    index: int
    call: EnvironmentCall

    @override
    def __str__(self) -> str:
        return f"{self.call.text} ({self.role}-{self.index})"


@dataclass(frozen=True, kw_only=True)
class _Report:
    calls: tuple[EnvironmentCall, ...]
    at: float


class LongCalls:
    """The newest report about each worker. The caller passes the time, in seconds."""

    def __init__(self, *, ended: Counter, log: structlog.stdlib.BoundLogger) -> None:
        """``ended`` counts the workers that were ended because a call reached its limit: they cannot count it."""
        self._ended = ended
        self._log = log
        self._reports: dict[tuple[str, int], _Report] = {}

    def put(self, lease: Lease, calls: Sequence[EnvironmentCall], now: float, *, limit: str = "") -> None:
        """Store a report about the lease's worker. ``limit``: see ``CoordinatorClient.report_calls``."""
        self._reports[lease.role, lease.index] = _Report(calls=tuple(calls), at=now)
        if limit and calls:
            self._ended.inc()
            self._log.warning(
                "environment_hang",
                worker=f"{lease.role}-{lease.index}",
                incarnation=lease.incarnation,
                rank=calls[0].first_rank,
                num_environments=calls[0].num_environments,
                call=calls[0].name,
                seconds=round(calls[0].seconds, 1),
                limit=limit,
            )

    def forget(self, lease: Lease) -> None:
        """Drop the report about the lease's worker: its process has ended."""
        self._reports.pop((lease.role, lease.index), None)

    def present(self, now: float) -> list[WorkerCall]:
        """Return the calls that last, longest first, with their present durations."""
        self._reports = {key: each for key, each in self._reports.items() if now - each.at <= EXPIRE_SECONDS}
        found = [
            WorkerCall(role=role, index=index, call=replace(call, seconds=call.seconds + now - report.at))
            for (role, index), report in self._reports.items()
            for call in report.calls
        ]
        return sorted(found, key=lambda each: (-each.call.seconds, each.role, each.index))
