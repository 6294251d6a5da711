"""Whether a process that ended is started again, and when. Pure: the controller tells it the time.

Each role has a budget of restarts that comes back with time, one each ``decay_seconds``: a run survives any number of
rare faults, and a process that dies again and again ends the run with its own words instead of restarting for ever.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from rlsrl.runtime.errors import CONFIGURATION_ERROR

FIRST_BACK_OFF_SECONDS = 0.5
"""Wait before the second restart in a row; the first is at once, and each further wait is twice as long."""

MAX_BACK_OFF_SECONDS = 30.0

START_UP_SECONDS = 30.0
"""A process that ends within so many seconds of its start has not been seen to work."""

FUTILE_STARTS = 4
"""Starts of a process, each failing in the same way before it was seen to work, after which the run ends: it would fail
for ever, and whoever waits for it should know."""


@dataclass(frozen=True, kw_only=True)
class RestartLimits:
    """How many restarts a role is given."""

    budget: int
    """Restarts in a row that are forgiven; 0 for none."""
    decay_seconds: float
    """Seconds after which one spent restart is given back."""


@dataclass(frozen=True, kw_only=True)
class Exit:
    """A process ended while its role was still wanted."""

    role: str
    number: int
    """Which of the role's processes, from 0."""
    code: int
    """Exit status; ``-n`` for death by signal n."""
    at: float
    """When, in seconds on the controller's clock."""
    lived_seconds: float
    """Since it was started."""
    last_words: str = ""
    """The last line it printed; empty if it printed nothing."""


@dataclass(frozen=True, kw_only=True)
class Restart:
    """Start the process again."""

    delay_seconds: float
    """Seconds to wait first."""
    used: int
    """The role's restarts spent by now, this one included."""


@dataclass(frozen=True, kw_only=True)
class Fail:
    """End the run."""

    reason: str
    """Why, to follow the process's name and exit code."""


@dataclass(frozen=True, kw_only=True)
class Spent:
    """Restarts of one role, decaying from a moment on."""

    amount: float
    at: float


@dataclass(frozen=True, kw_only=True)
class Starts:
    """What is known of one process's starts."""

    failure: tuple[int, str] | None = None
    """Code and last words, but for its numbers, of the last one that failed early; None for none."""
    count: int = 0
    """How many in a row failed so."""


WORKS = Starts(count=-1)
"""Of a process that was seen to work."""

_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|[0-9]+")
"""What may differ between two reports of the same failure: addresses, ports, process numbers."""


@dataclass(frozen=True, kw_only=True)
class Supervisor:
    """The limits and what was spent of them. Immutable: ``decide`` returns its successor."""

    limits: RestartLimits
    spent: Mapping[str, Spent] = field(default_factory=dict)
    """By role."""
    starts: Mapping[tuple[str, int], Starts] = field(default_factory=dict)
    """By process."""

    def decide(self, ended: Exit) -> tuple[Restart | Fail, Self]:
        """What follows from the end of a process whose role goes on.

        Exit code 0 counts like any other: somebody else told the process to go, and the run still needs it.
        """
        if ended.code == CONFIGURATION_ERROR:
            return Fail(reason="its configuration cannot work"), self
        starts = count_start(self.starts.get((ended.role, ended.number), Starts()), ended)
        if starts.count >= FUTILE_STARTS:
            return Fail(reason=f"it has failed in the same way {starts.count} times, soon after each start"), self
        before = self._spent_at(ended.role, ended.at)
        if before + 1 > self.limits.budget:
            within = f"one comes back every {self.limits.decay_seconds:g} s"
            return Fail(reason=f"all {self.limits.budget} restarts of this role are spent ({within})"), self
        after = Spent(amount=before + 1, at=ended.at)
        restart = Restart(delay_seconds=back_off(before), used=math.ceil(after.amount))
        return restart, replace(
            self,
            spent={**self.spent, ended.role: after},
            starts={**self.starts, (ended.role, ended.number): starts},
        )

    def _spent_at(self, role: str, now: float) -> float:
        spent = self.spent.get(role)
        if spent is None:
            return 0.0
        return max(0.0, spent.amount - (now - spent.at) / self.limits.decay_seconds)


def count_start(before: Starts, ended: Exit) -> Starts:
    """What is known of a process's starts after one more of them ended.

    One that lived long is proof that the process can work: its later failures are faults, which the budget forgives.
    Death by a signal says nothing about that, nor does an end without a word.
    """
    if before == WORKS or ended.lived_seconds >= START_UP_SECONDS:
        return WORKS
    if ended.code <= 0 or not ended.last_words:
        return before
    failure = (ended.code, _NUMBERS.sub("#", ended.last_words))
    return Starts(failure=failure, count=before.count + 1 if failure == before.failure else 1)


def back_off(spent: float) -> float:
    """Seconds to wait when that many restarts are already spent: none after a first fault, then 0.5, 1, 2, ... 30."""
    in_a_row = round(spent)
    if in_a_row < 1:
        return 0.0
    doublings = min(in_a_row - 1, 16)  # Far beyond the longest wait, and no number that overflows.
    return min(MAX_BACK_OFF_SECONDS, FIRST_BACK_OFF_SECONDS * 2.0**doublings)
