"""Decides whether and when an ended process is restarted. Pure: the controller passes the time.

Each role has a budget of restarts. The spent restarts fall continuously, by one in ``decay_seconds``, so a run survives
any number of rare faults. A process that fails repeatedly ends the run with its last output. On a cluster the operator
counts the trainers' failures instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from rlsrl.api.failures import CONFIGURATION_ERROR, ENVIRONMENT_FAULT, FUTILE_STARTS, NOT_STORED, RUN_DAMAGED, signature
from rlsrl.runtime.budget import Spent

FIRST_BACK_OFF_SECONDS = 0.5
"""Wait before the second restart in a row. The first is immediate; each further wait is twice as long."""

MAX_BACK_OFF_SECONDS = 30.0

START_UP_SECONDS = 30.0
"""A process that is no trainer and runs this long has proved that it can work."""


@dataclass(frozen=True, kw_only=True)
class RestartLimits:
    """The restart budget of each role."""

    budget: int
    """Largest number of spent restarts; with 0 the first failure ends the run."""
    decay_seconds: float
    """Seconds in which the spent restarts fall by one, continuously."""


@dataclass(frozen=True, kw_only=True)
class Exit:
    """A process ended while its role was still needed."""

    role: str
    number: int
    """Number of the process within its role, from 0."""
    code: int
    """Exit status; ``-n`` for death by signal n."""
    at: float
    """Time of the exit, in seconds on the controller's clock."""
    lived_seconds: float
    """Seconds since its start."""
    lines: tuple[str, ...] = ()
    """The last lines it printed."""
    trained: int | None = None
    """Of trainers: the transitions that training has counted by then; None for other roles."""


@dataclass(frozen=True, kw_only=True)
class Restart:
    """Start the process again."""

    delay_seconds: float
    """Seconds to wait first."""
    used: int
    """The role's spent restarts, this one included."""


@dataclass(frozen=True, kw_only=True)
class Fail:
    """End the run."""

    reason: str
    """The cause; messages put it after the process's name and exit code."""


@dataclass(frozen=True, kw_only=True)
class Starts:
    """One process's starts in a row that failed in the same way, without progress."""

    failure: str = ""
    """The signature of the last such failure; empty without one."""
    count: int = 0
    """Number of such failures in a row."""
    trained: int | None = None
    """Of trainers: the transitions that training had counted at the first of them."""


WORKS = Starts(count=-1)
"""The starts of a process that has proved that it can work."""


@dataclass(frozen=True, kw_only=True)
class Supervisor:
    """The limits and the spent restarts. Immutable: ``decide`` returns its successor."""

    limits: RestartLimits
    spent: Mapping[str, Spent] = field(default_factory=dict)
    """By role."""
    starts: Mapping[tuple[str, int], Starts] = field(default_factory=dict)
    """By process."""

    def decide(self, ended: Exit) -> tuple[Restart | Fail, Self]:
        """Return the decision about an ended process, and the next supervisor.

        Exit code 0 counts like any other: the run still needs the process.
        """
        if ended.code == CONFIGURATION_ERROR:
            return Fail(reason="its configuration is invalid"), self
        if ended.code == ENVIRONMENT_FAULT:
            return Fail(reason="its environments end the run"), self
        if ended.code == RUN_DAMAGED:
            return Fail(reason="what the run has stored is damaged"), self
        if ended.code == NOT_STORED:
            return Fail(reason="it could not store a version that the run needs"), self
        starts = count_start(self.starts.get((ended.role, ended.number), Starts()), ended)
        if starts.count >= FUTILE_STARTS:
            return Fail(reason=f"it failed in the same way after each of {starts.count} starts, without progress"), self
        spent = self.spent.get(ended.role, Spent())
        before = spent.amount_at(ended.at, decay_seconds=self.limits.decay_seconds)
        if before + 1 > self.limits.budget:
            within = f"one is given back every {self.limits.decay_seconds:g} s"
            return Fail(reason=f"all {self.limits.budget} restarts of this role are spent ({within})"), self
        after = Spent(amount=before + 1, at=ended.at)
        restart = Restart(delay_seconds=back_off(before), used=math.ceil(after.amount))
        return restart, replace(
            self,
            spent={**self.spent, ended.role: after},
            starts={**self.starts, (ended.role, ended.number): starts},
        )


def count_start(before: Starts, ended: Exit) -> Starts:
    """Return a process's starts after one more exit.

    A trainer makes progress if training gets further than at its last failure. Another process makes progress by a long
    life: its later failures count against the budget only. A death by signal, a temporary failure and an exit without
    output prove nothing.
    """
    if ended.trained is None and (before == WORKS or ended.lived_seconds >= START_UP_SECONDS):
        return WORKS
    if not (failure := signature(ended.code, ended.lines)):
        return before
    is_further = ended.trained is not None and before.trained is not None and ended.trained > before.trained
    if failure == before.failure and not is_further:
        return replace(before, count=before.count + 1)
    return Starts(failure=failure, count=1, trained=ended.trained)


def back_off(spent: float) -> float:
    """Return the seconds to wait when ``spent`` restarts are spent: 0 for the first, then 0.5, 1, 2, ... 30."""
    in_a_row = round(spent)
    if in_a_row < 1:
        return 0.0
    doublings = min(in_a_row - 1, 16)  # far above the longest wait, far below an overflow
    return min(MAX_BACK_OFF_SECONDS, FIRST_BACK_OFF_SECONDS * 2.0**doublings)
