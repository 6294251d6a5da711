"""The ratio of training to gathering, with bounds on both sides.

After Reverb's rate limiters (Cassirer et al. 2021, "Reverb: A Framework For Experience Replay", section 3.3). Here both
sides are counted where they are committed: env steps when they are stored, updates when a training step ends. Bounds
follow from the present settings, never from a saved state.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

ROUNDING = 1e-6
"""By so much of an update sums of ratios may be wrong. Without it both sides could wait: 180 x 0.35 is below 63."""


MOST_OUTSTANDING = 1 << 20
"""Lanes granted and not arrived, at most, whatever the bound: more than a rank has environments."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How training and gathering keep pace. It may change while both go on."""

    updates_per_env_step: float
    """The ratio; above 0."""
    bound: float
    """The most updates by which training may be behind, all that is granted counted as stored. At least those of one
    training step and of the env steps of one slot. No effect where the two take turns."""
    most_lanes: int
    """Lanes of the widest slot. It is gathered once as many lanes are granted."""
    lanes_in_turn: int | None = None
    """Lanes that are gathered while training waits, before it trains on all that is due; at least ``most_lanes``. None:
    both go on at once."""


class RatioLimiter:
    """Counts env steps and updates, and says which side must wait. Not thread-safe.

    The first ``start`` env steps need no updates. After them the updates due are the sum of each env step's ratio,
    which may change. Training waits while fewer than ``updates_per_step`` are due and not made. Gathering waits while
    more than the bound would be.

    Both never wait at once: if gathering may not go on, at least a training step's updates are due.
    """

    def __init__(
        self,
        pace: Pace,
        *,
        start: int,
        updates_per_step: int,
        steps_per_lane: int,
    ) -> None:
        """Start with nothing gathered.

        Args:
            pace: Used until ``tune``.
            start: Env steps that are stored before training begins.
            updates_per_step: Updates of a training step.
            steps_per_lane: Env steps of a lane of a slot, at most.

        Raises:
            ValueError: the bound is too small: both sides could wait at once.
        """
        self._start = start
        self._least_fresh = max(start, 1)
        """Env steps of the present store with which training begins: it cannot draw from an empty one."""
        self._updates_per_step = updates_per_step
        self._steps_per_lane = steps_per_lane
        self._left_of_turn = 0
        """Lanes of this turn that are not granted, since the end of the run seems to need none of them."""
        self._pace = self._checked(pace)
        self._stored = 0
        """Env steps that this rank has stored in the whole run."""
        self._fresh = 0
        """Env steps stored in the present store: the start counts anew after a store is lost."""
        self._outstanding = 0
        """Lanes granted that have not arrived."""
        self._end: int | None = None
        """Env steps of this rank in the whole run; None: not known."""
        self._updates = 0
        """Updates made."""
        self._pieces = [_Piece(start, 0.0, pace.updates_per_env_step)]
        """One for each ratio that this object has had, in order."""

    @property
    def bound(self) -> float:
        """The most updates by which training may be behind."""
        return self._pace.bound

    @property
    def ratio(self) -> float:
        """The updates that each further env step of this rank makes due."""
        return self._pace.updates_per_env_step

    @property
    def start_missing(self) -> int:
        """Env steps that the present store lacks until training may begin; 0 from then on."""
        return max(0, self._least_fresh - self._fresh)

    @property
    def takes_turns(self) -> bool:
        """Whether lanes are gathered while training waits, and training goes on while none is gathered."""
        return self._pace.lanes_in_turn is not None

    @property
    def debt(self) -> float:
        """Updates due and not made."""
        return self._due(self._stored) - self._updates

    @property
    def may_train(self) -> bool:
        """Whether a training step may begin."""
        return not self.start_missing and self.debt >= self._updates_per_step - ROUNDING

    def take(self) -> int:
        """Return how many lanes may be granted now, and count them as granted."""
        coming = self._outstanding
        if (in_turn := self._pace.lanes_in_turn) is None:
            counts = range(coming, MOST_OUTSTANDING)
            coming += bisect_left(counts, True, key=lambda lanes: not self._may_grant(lanes))
        else:
            if coming <= 0:
                self._left_of_turn = 0 if self.may_train else in_turn - coming
            while self._left_of_turn > 0 and not self._reaches_end(coming):
                coming, self._left_of_turn = coming + 1, self._left_of_turn - 1
        granted, self._outstanding = coming - self._outstanding, coming
        return granted

    @property
    def outstanding(self) -> int:
        """Lanes granted that have not arrived. Below 0: so many arrived beyond those that were granted."""
        return self._outstanding

    @property
    def room(self) -> int:
        """Lanes beyond those granted that a slot may use, since it is whole.

        In turns that is so after actors were replaced by some with wider slots: of a turn that one has begun fewer
        lanes may be left than a slot has. Then, and at the end of the run, nothing else is granted.
        """
        return self._pace.most_lanes - 1 if self.takes_turns or self.is_complete else 0

    @property
    def is_complete(self) -> bool:
        """Whether all is granted that the run can still use, if no more steps come back without a transition."""
        return self._reaches_end(self._outstanding)

    def expect(self, end: int | None) -> None:
        """Grant no more lanes than ``end`` env steps of this rank need in all; None: as many as the ratio allows."""
        self._end = end

    def env_steps_for(self, steps: int) -> int:
        """Return the env steps of this rank in all after which ``steps`` further training steps can be made."""
        if steps <= 0:
            return self._stored
        piece = self._pieces[-1]
        due = self._updates + steps * self._updates_per_step - piece.due
        until_due = piece.env_steps + max(0, math.ceil(due / piece.ratio))
        return max(until_due, self._stored + self._least_fresh - self._fresh)

    def stored(self, env_steps: int, *, lanes: int, fresh: int | None = None) -> None:
        """Count the env steps of a slot that arrived with so many lanes.

        ``fresh``: by how many the present store has grown; None: by the env steps.
        """
        self._stored += env_steps
        self._fresh += env_steps if fresh is None else fresh
        self._outstanding -= lanes

    def trained(self) -> None:
        """Count a training step."""
        self._updates += self._updates_per_step

    def tune(self, pace: Pace) -> None:
        """Keep another pace from now on: its ratio counts for the env steps that are stored after this call.

        Whether the two take turns stays as it is.

        Raises:
            ValueError: the bound is too small, or the ratio is not above 0.
        """
        if (pace.lanes_in_turn is None) == self.takes_turns:
            pace = replace(pace, lanes_in_turn=self._pace.lanes_in_turn)
        self._pace = self._checked(pace)
        if pace.updates_per_env_step != self._pieces[-1].ratio:
            begins = max(self._stored, self._start)
            self._pieces.append(_Piece(begins, self._due(self._stored), pace.updates_per_env_step))

    def least_bound(self, pace: Pace) -> float:
        """Return the smallest bound with which the two sides never wait for each other at that pace."""
        return self._updates_per_step + self._steps_per_lane * pace.most_lanes * pace.updates_per_env_step

    def state_dict(self, env_steps: int) -> dict[str, Any]:
        """Return the counts that belong to a training step, with the ``env_steps`` that the run's progress contains.

        More may be stored: they have arrived, and count with the next batch.
        """
        return {"stored": env_steps, "due": self._due(env_steps), "updates": self._updates}

    def load_state_dict(self, state: Mapping[str, Any], *, stored: int, held: int) -> None:
        """Continue from a saved state with the present settings, before the first grant.

        ``stored`` and ``held`` are the store's own counts. It may know of env steps that arrived after the state was
        saved, and it may have lost what it held.
        """
        self._updates = int(state["updates"])
        due = float(state["due"])
        # Past its start a run owes all that it stores, also with another start or fewer ranks.
        counted = int(state["stored"]) if due else max(int(state["stored"]), self._start)
        self._pieces = [_Piece(counted, due, self._pace.updates_per_env_step)]
        self._stored = max(stored, int(state["stored"]))
        self._fresh = held

    def _may_grant(self, lanes: int) -> bool:
        """Return whether another lane may be granted after ``lanes`` that have not arrived. If not, not after more."""
        coming = lanes * self._steps_per_lane
        if self._reaches_end(lanes):
            return False
        if self._fresh < self._least_fresh and (self._fresh + coming < self._start or lanes < self._pace.most_lanes):
            return True
        return self._due(self._stored + coming + self._steps_per_lane) - self._updates <= self._pace.bound + ROUNDING

    def _reaches_end(self, lanes: int) -> bool:
        """Return whether ``lanes`` that have not arrived are all that the run can still use."""
        return self._end is not None and self._stored + lanes * self._steps_per_lane >= self._end

    def _due(self, stored: int) -> float:
        piece = next((each for each in reversed(self._pieces) if each.env_steps <= stored), self._pieces[0])
        return piece.due + max(0, stored - piece.env_steps) * piece.ratio

    def _checked(self, pace: Pace) -> Pace:
        if pace.updates_per_env_step <= 0.0:
            raise ValueError(f"updates_per_env_step is {pace.updates_per_env_step}, and must be above 0")
        if pace.bound < (least := self.least_bound(pace)):
            raise ValueError(
                f"the bound is {pace.bound} updates; it must be at least {least}: the {self._updates_per_step} of a "
                f"training step and those of the {self._steps_per_lane * pace.most_lanes} env steps of a slot"
            )
        return pace


class _Piece(NamedTuple):
    """A part of the updates due as a function of the env steps."""

    env_steps: int
    """Where it begins."""
    due: float
    """Updates due there."""
    ratio: float
    """Updates for each further env step."""
