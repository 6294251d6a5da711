"""A worker's context without a coordinator, for tests that run a worker or its parts in their own process."""

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
    """A fake ``JoinSession`` that records what would be sent on the Join stream. Any thread may call it."""

    reports: list[dict[str, Any]] = field(default_factory=list)
    """The given arguments of each call of ``report``."""
    turns: list[str] = field(default_factory=list)
    """The activities of ``turn_to``, in order."""
    work: list[dict[Stage, float]] = field(default_factory=list)
    """The seconds of each call of ``spent``."""
    rows: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    """Rows of the learning curve: step and scalars."""
    addresses: dict[tuple[str, int], str] = field(default_factory=dict)
    """Addresses of other roles' workers, by role and index."""
    videos: list[tuple[Version, bool, bytes, bytes]] = field(default_factory=list)
    """Videos: the version, whether it is fixed, the mp4 file and the GIF."""
    has_room_for_video: bool = True
    """Whether ``send_video`` takes a video."""
    failure: Exception | None = None
    """The error that ``check`` raises; None for none."""
    ledger_copy: bytes = b""
    """The coordinator's copy of the previous life's ledger page."""
    page: LedgerPage | None = None
    """The ledger page that heartbeats would send."""

    def report(
        self,
        *,
        state: WorkerState | None = None,
        stats: Mapping[str, float] | None = None,
        version: Version | None = None,
        texts: Mapping[str, str] | None = None,
    ) -> None:
        """Record the given arguments."""
        given = {"state": state, "stats": stats, "version": version, "texts": texts}
        self.reports.append({name: value for name, value in given.items() if value is not None})

    def turn_to(self, doing: str) -> None:
        """Record the call."""
        self.turns.append(doing)

    def spent(self, seconds: Mapping[Stage, float]) -> None:
        """Record the call."""
        self.work.append(dict(seconds))

    def send_ledger_page(self, page: LedgerPage) -> None:
        """Record the call."""
        self.page = page

    def address_of(self, role: str, index: int) -> str | None:
        """Return an entry of ``addresses``."""
        return self.addresses.get((role, index))

    def record(self, step: int, scalars: Mapping[str, float]) -> None:
        """Record the call."""
        self.rows.append((step, dict(scalars)))

    def send_video(self, version: Version, *, is_fixed: bool, mp4: bytes, gif: bytes) -> bool:
        """Record the call, if there is room."""
        if self.has_room_for_video:
            self.videos.append((version, is_fixed, mp4, gif))
        return self.has_room_for_video

    def check(self) -> None:
        """Raise ``failure``, if there is one."""
        if self.failure is not None:
            raise self.failure

    def reported(self, what: str) -> list[Any]:
        """Return all reported values of that name, in order."""
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
    """Return the context of a worker with its ledger in ``folder``."""
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
