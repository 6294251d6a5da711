"""The ratio of training to gathering over any order of events: within its bounds, and never both sides waiting."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rlsrl.buffers.replay.ratio import Ratio, RatioLimiter

RATIOS = st.sampled_from([0.001, 0.01, 0.25, 0.5, 1.0, 3.0, 17.0, 100.0])
EPSILON = 1e-6
"""Rounding of sums of ratios."""


class RatioMachine(RuleBasedStateMachine):
    """Gathers, trains, loses grants, changes the ratio, crashes and rolls back in any order.

    ``due`` is the sum of the ratios of the env steps that survive, added up one by one.
    """

    @initialize(
        ratio=RATIOS, start=st.integers(0, 50), k=st.integers(1, 20), grant=st.integers(1, 16), slack=st.floats(0, 50)
    )
    def begin(self, ratio: float, start: int, k: int, grant: int, slack: float) -> None:
        self.start, self.k, self.grant, self.slack = start, k, grant, slack
        self.ratio = ratio
        self.limiter = RatioLimiter(self.settings(ratio), start=start, updates_per_step=k, steps_per_grant=grant)
        self.pending: list[int] = []
        self.stored = self.in_store = self.updates = 0
        self.due = 0.0
        self.needs_no_updates = start
        self.saved: tuple[Any, ...] | None = None
        self.was_rolled_back = False
        self.take()

    def settings(self, ratio: float) -> Ratio:
        return Ratio(updates_per_env_step=ratio, bound=self.k + self.grant * ratio + self.slack)

    @property
    def bound(self) -> float:
        return self.k + self.grant * self.ratio + self.slack

    def take(self) -> None:
        granted = self.limiter.take()
        assert granted % self.grant == 0
        self.pending += [self.grant] * (granted // self.grant)

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def arrives(self, data: Any) -> None:
        """Some steps only reset an environment, and are no env steps."""
        granted = self.pending.pop(data.draw(st.integers(0, len(self.pending) - 1)))
        env_steps = data.draw(st.integers(0, granted))
        self.limiter.stored(env_steps, granted=granted)
        self.stored += env_steps
        self.in_store += env_steps
        free = min(env_steps, self.needs_no_updates)
        self.needs_no_updates -= free
        self.due += (env_steps - free) * self.ratio
        self.take()

    @precondition(lambda self: self.pending)
    @rule()
    def is_lost(self) -> None:
        self.limiter.lost(self.pending.pop(0))
        self.take()

    @precondition(lambda self: self.limiter.may_train)
    @rule()
    def trains(self) -> None:
        self.limiter.trained()
        self.updates += self.k
        assert self.in_store >= self.start
        self.take()

    @rule(ratio=RATIOS)
    def is_tuned(self, ratio: float) -> None:
        self.ratio = ratio
        self.limiter.tune(self.settings(ratio))
        self.take()

    @rule()
    def saves(self) -> None:
        self.saved = (self.limiter.state_dict(), self.stored, self.updates, self.due, self.needs_no_updates)

    @precondition(lambda self: self.saved is not None)
    @rule(share=st.floats(0, 1))
    def crashes(self, share: float) -> None:
        """Training goes back to what was saved; the store keeps all that arrived, or loses a share or all of it."""
        assert self.saved is not None
        state, stored, self.updates, self.due, self.needs_no_updates = self.saved
        since = self.stored - stored
        free = min(since, self.needs_no_updates)
        self.needs_no_updates -= free
        self.due += (since - free) * self.ratio
        self.in_store = math.floor(self.in_store * share)
        self.limiter = RatioLimiter(
            self.settings(self.ratio), start=self.start, updates_per_step=self.k, steps_per_grant=self.grant
        )
        self.limiter.load_state_dict(state, stored=self.stored, held=self.in_store)
        self.pending.clear()
        self.was_rolled_back = True
        self.take()

    @invariant()
    def the_debt_is_what_the_surviving_env_steps_say(self) -> None:
        assert self.limiter.debt == pytest.approx(self.due - self.updates, abs=EPSILON * max(1.0, self.due))

    @invariant()
    def training_is_never_ahead(self) -> None:
        assert self.updates <= self.due + EPSILON * max(1.0, self.due)

    @invariant()
    def never_do_both_wait(self) -> None:
        assert self.pending or self.limiter.may_train


class BoundedMachine(RatioMachine):
    """Without changes of the ratio and crashes, and so without a debt that was there before: gathering is bounded."""

    @rule(ratio=RATIOS)
    def is_tuned(self, ratio: float) -> None: ...

    @precondition(lambda self: False)
    @rule(share=st.floats(0, 1))
    def crashes(self, share: float) -> None: ...

    @invariant()
    def gathering_is_ahead_by_the_bound_at_most(self) -> None:
        started_with = self.ratio * self.grant  # the grant with which the start was reached
        assert self.limiter.debt <= max(self.bound, started_with) + EPSILON * max(1.0, self.due)


RatioMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
BoundedMachine.TestCase.settings = RatioMachine.TestCase.settings
TestRatio = RatioMachine.TestCase
TestBounds = BoundedMachine.TestCase


@pytest.mark.parametrize("ratio", [0.001, 0.3, 1.0, 100.0])
def test_in_the_long_run_there_are_as_many_updates_as_the_ratio_says(ratio: float) -> None:
    limiter = RatioLimiter(
        Ratio(updates_per_env_step=ratio, bound=4 + 8 * ratio), start=100, updates_per_step=4, steps_per_grant=8
    )
    stored = updates = 0
    while stored < 100_000 / ratio**0.5:
        while limiter.may_train:
            limiter.trained()
            updates += 4
        granted = limiter.take()
        limiter.stored(granted, granted=granted)
        stored += granted
    while limiter.may_train:
        limiter.trained()
        updates += 4
    assert 0 <= (stored - 100) * ratio - updates < 4


@pytest.mark.parametrize(
    ("ratio", "message"),
    [
        (Ratio(updates_per_env_step=0.0, bound=100.0), "updates_per_env_step is 0.0, and must be above 0"),
        (Ratio(updates_per_env_step=2.0, bound=19.9), "bound is 19.9 updates; it must be at least 20.0: the 4 of a tr"),
    ],
)
def test_ratios_with_which_both_sides_could_wait_are_refused(ratio: Ratio, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RatioLimiter(ratio, start=0, updates_per_step=4, steps_per_grant=8)
    limiter = RatioLimiter(Ratio(updates_per_env_step=1.0, bound=20.0), start=0, updates_per_step=4, steps_per_grant=8)
    with pytest.raises(ValueError, match=message):
        limiter.tune(ratio)
