"""A worker's context without a coordinator, for tests that run a worker, or parts of one, in their own process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import structlog
from prometheus_client import CollectorRegistry

from rlsrl.data.version import Version
from rlsrl.runtime.activity import Stage
from rlsrl.runtime.clock import Clock, SystemClock
from rlsrl.runtime.coordination import WorkerState
from rlsrl.runtime.join_session import JoinSession
from rlsrl.runtime.ledger import LedgerPage
from rlsrl.runtime.metrics import Metrics
from rlsrl.workers.context import WorkerContext

TOKEN = "a-token-for-tests"


@dataclass
class RecordingSession:
    """Stands in for ``JoinSession``: keeps what would go up the Join stream. Any thread may call it."""

    reports: list[dict[str, Any]] = field(default_factory=list)
    """What each call of ``report`` said, without what it left open."""
    turns: list[str] = field(default_factory=list)
    """What it was said to wait for, or to be working, in order."""
    work: list[dict[Stage, float]] = field(default_factory=list)
    """What each call of ``spent`` said."""
    rows: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    """Rows of the learning curve: step and scalars."""
    addresses: dict[tuple[str, int], str] = field(default_factory=dict)
    """Where members of other roles are."""
    failure: Exception | None = None
    """What ``check`` raises from now on; None for nothing."""
    ledger_copy: bytes = b""
    """The ledger page that the coordinator kept of the life before."""
    page: LedgerPage | None = None
    """The ledger page that would be shown to it."""

    def report(
        self,
        *,
        state: WorkerState | None = None,
        stats: Mapping[str, float] | None = None,
        version: Version | None = None,
    ) -> None:
        """Keep it."""
        said = {"state": state, "stats": stats, "version": version}
        self.reports.append({name: value for name, value in said.items() if value is not None})

    def turn_to(self, doing: str) -> None:
        """Keep it."""
        self.turns.append(doing)

    def spent(self, seconds: Mapping[Stage, float]) -> None:
        """Keep it."""
        self.work.append(dict(seconds))

    def show_page(self, page: LedgerPage) -> None:
        """Keep it."""
        self.page = page

    def address_of(self, role: str, index: int) -> str | None:
        """Look it up."""
        return self.addresses.get((role, index))

    def record(self, step: int, scalars: Mapping[str, float]) -> None:
        """Keep it."""
        self.rows.append((step, dict(scalars)))

    def check(self) -> None:
        """Raise ``failure``, if there is one."""
        if self.failure is not None:
            raise self.failure

    def reported(self, what: str) -> list[Any]:
        """Everything that was reported under that name, in order."""
        return [report[what] for report in self.reports if what in report]


def make_context(
    role: str,
    folder: Path,
    *,
    index: int = 0,
    incarnation: int = 0,
    attempt: int = 1,
    join_session: RecordingSession | None = None,
    clock: Clock | None = None,
) -> WorkerContext:
    """The context of a worker whose ledger is in ``folder``."""
    return WorkerContext(
        role=role,
        index=index,
        incarnation=incarnation,
        attempt=attempt,
        token=TOKEN,
        tls=None,
        log=structlog.stdlib.get_logger(role),
        metrics=Metrics(CollectorRegistry()),
        clock=clock or SystemClock(),
        join_session=cast("JoinSession", join_session or RecordingSession()),
        ledger_folder=folder,
    )
