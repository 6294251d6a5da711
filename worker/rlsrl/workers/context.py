"""The context of a worker process: its identity in the experiment, and the objects that every worker uses."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import structlog
from prometheus_client import Counter

from rlsrl.data.version import Version
from rlsrl.rpc.tls import Tls
from rlsrl.runtime.activity import WORKING, Stage
from rlsrl.runtime.addresses import Directory
from rlsrl.runtime.call_board import CallBoard
from rlsrl.runtime.clock import Clock
from rlsrl.runtime.join_session import JoinSession
from rlsrl.runtime.ledger import LedgerPage, PageRecord, page_path, starting_record
from rlsrl.runtime.metrics import LedgerCollector, Metrics


@dataclass(frozen=True, kw_only=True)
class WorkerContext:
    """Passed to each worker by the entry point, ``rlsrl.workers.__main__``."""

    role: str
    index: int
    """The leased index; for trainers the rank."""
    incarnation: int
    """How often the index was leased before."""
    attempt: int
    """The number of the trainer gang's current attempt; 0 for other roles."""
    token: str
    tls: Tls | None
    """Certificates, where workers talk over TLS."""
    log: structlog.stdlib.BoundLogger
    metrics: Metrics
    clock: Clock
    join_session: JoinSession
    ledger_folder: Path
    call_board: CallBoard | None = None
    """Shows the environments' calls to the call watch; None: no call watch runs."""
    _waiting_seconds: dict[str, Counter] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The counters by reason. The lookup of a label takes longer than many waits."""

    @property
    def directory(self) -> Directory:
        """Finds the current addresses of the workers to which this worker connects."""
        return Directory(self.join_session.address_of)

    def open_ledger_page(self) -> LedgerPage:
        """Open this worker's ledger page, and add it to the metrics and the heartbeats.

        If the page of the previous incarnation is lost, the page starts from the coordinator's copy.

        Raises:
            LedgerError: another process writes the page, or the page is damaged.
        """
        self.ledger_folder.mkdir(parents=True, exist_ok=True)
        page = LedgerPage.open(page_path(self.ledger_folder, self.role, self.index), self.role, self.index)
        payload = self.join_session.ledger_copy
        kept = PageRecord.decode(payload, role=self.role, index=self.index) if payload else None
        found = page.record
        page.apply(lambda record: starting_record(record, kept, incarnation=self.incarnation))
        page.is_new = page.record is not found
        self.join_session.send_ledger_page(page)
        LedgerCollector(lambda: page.record, self.metrics.registry)
        return page

    def count_unauthenticated(self) -> None:
        """Count a refused gRPC call without a valid token."""
        self.metrics.strangers_refused.labels(kind="call").inc()

    def report_stats(self, stats: Mapping[str, float]) -> None:
        """Send the newest statistics to the coordinator."""
        self.join_session.report(stats=stats)

    def report_text(self, name: str, text: str) -> None:
        """Send a text for the status document to the coordinator. An empty text removes it."""
        self.join_session.report(texts={name: text})

    def report_failure(self, name: str, number: int, last: str) -> None:
        """Send the number of failures of one kind, and a text about the last. See ``rlsrl.workers.status.FAILURES``."""
        self.join_session.report(stats={name: float(number)}, texts={name: last})

    def report_version(self, version: Version) -> None:
        """Report the version that this worker made or uses."""
        self.join_session.report(version=version)
        self.metrics.version_attempt.set(version.attempt)
        self.metrics.version_step.set(version.step)

    def spent(self, seconds: Mapping[Stage, float]) -> None:
        """Attribute seconds of completed work to stages."""
        self.join_session.spent(seconds)
        for stage, spent in seconds.items():
            self.metrics.working_seconds.labels(stage=stage).inc(spent)

    def waiting(self, reason: str) -> AbstractContextManager[None]:
        """Count the time of the body as waiting for ``reason``, and report the wait meanwhile."""
        counter = self._waiting_seconds.get(reason)
        if counter is None:
            counter = self._waiting_seconds[reason] = self.metrics.waiting_seconds.labels(reason=reason)
        return _Wait(reason, self.join_session, self.clock, counter)


class _Wait:
    """One wait. Actors wait thousands of times a second, and ``contextlib.contextmanager`` takes twice as long."""

    __slots__ = ("_began", "_clock", "_counter", "_join_session", "_reason")

    def __init__(self, reason: str, join_session: JoinSession, clock: Clock, counter: Counter) -> None:
        self._reason = reason
        self._join_session = join_session
        self._clock = clock
        self._counter = counter

    def __enter__(self) -> None:
        self._began = self._clock.monotonic()
        self._join_session.turn_to(self._reason)

    def __exit__(self, *_: object) -> None:
        self._join_session.turn_to(WORKING)
        self._counter.inc(self._clock.monotonic() - self._began)
