"""What the coordinator knows of a run's progress: its speed, the calls that last long, and whether it stands still."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import structlog

from rlsrl.api.role_names import TRAINER
from rlsrl.runtime.ledger import PageRecord
from rlsrl.runtime.metrics import Metrics
from rlsrl.workers.leases import Claim
from rlsrl.workers.ledger_copies import LedgerCopies
from rlsrl.workers.long_calls import LongCalls
from rlsrl.workers.members import Members
from rlsrl.workers.recent_rate import RecentRate
from rlsrl.workers.stalls import StepClock, judge
from rlsrl.workers.status import ExperimentInfo, MemberReport, Stall, build_status, paused_roles, server_waits

JUDGE_SECONDS = 5.0
"""The longest time between two judgements of the run."""


class RunProgress:
    """The progress of one run. The caller passes the time, in seconds on the coordinator's monotonic clock.

    ``capacity`` is the number of workers that the experiment asks for, by role.
    """

    def __init__(self, members: Members, *, metrics: Metrics, log: structlog.stdlib.BoundLogger, now: float) -> None:
        self.long_calls = LongCalls(ended=metrics.environment_faults.labels(reason="hang"), log=log)
        """The environment calls that the workers' call watches report."""
        self._members = members
        self._env_steps = RecentRate()
        self._step_clock = StepClock(now)
        self._stalled_seconds = metrics.stalled_seconds
        self._paused = metrics.paused
        self._server_waits = metrics.environment_server_waits
        self._judged_at = now

    def note(self, claim: Claim, report: MemberReport, page: PageRecord | None, now: float) -> None:
        """Note the heartbeat of the worker with that claim, and its ledger page if it has one."""
        if (claim.role, claim.index) == (TRAINER, 0) and "env_steps" in report.stats:
            self._env_steps.note(now, report.stats["env_steps"])
        self._step_clock.note(claim.role, claim.index or 0, report, page, now)

    def rest(self, now: float) -> None:
        """Do not count the time until now: the coordinator itself was stopped."""
        self._step_clock.rest(now)

    def status(
        self, experiment: ExperimentInfo, copies: LedgerCopies, now: float, *, capacity: Mapping[str, int]
    ) -> dict[str, Any]:
        """Return the status document."""
        return build_status(
            experiment,
            self._members.for_status(),
            copies,
            now,
            env_steps_per_second=self._env_steps.per_second(now),
            long_calls=self.long_calls.present(now),
            stall=self._judge(experiment, now, capacity),
        )

    def judge_if_due(self, experiment: ExperimentInfo, now: float, *, capacity: Mapping[str, int]) -> None:
        """Judge whether the run stands still, and set the metrics, if that was ``JUDGE_SECONDS`` ago."""
        if now - self._judged_at > JUDGE_SECONDS:
            self._judge(experiment, now, capacity)

    def _judge(self, experiment: ExperimentInfo, now: float, capacity: Mapping[str, int]) -> Stall | None:
        self._judged_at = now
        members, calls = self._members.for_status(), self.long_calls.present(now)
        stall = judge(members, calls, self._step_clock, now, experiment=experiment, capacity=capacity)
        self._stalled_seconds.set(0.0 if stall is None else stall.seconds)
        present = [each for each in members if each.present]
        self._paused.set(not experiment.done and bool(paused_roles(present)))
        waits = server_waits(present)
        self._server_waits.set(0 if waits is None else waits["number"])
        return stall
