"""Reports waits of environments for their server to the coordinator."""

from __future__ import annotations

from rlsrl.workers.context import WorkerContext
from rlsrl.workers.status import SERVER_AWAY_SINCE, SERVER_WAITS


class ServerWaitReport:
    """Reports one worker's environments that wait for their server. Calls come one at a time."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._is_waiting = False

    def __call__(self, number: int, reason: str) -> None:
        """Report how many environments wait now, and why."""
        if number and not self._is_waiting:
            self._context.report_stats({SERVER_AWAY_SINCE: self._context.clock.time()})
        self._is_waiting = number > 0
        self._context.report_failure(SERVER_WAITS, number, reason if number else "")
