"""The ratio of training to gathering over any order of events: within its bounds, and never both sides waiting."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rlsrl.buffers.replay.ratio import MOST_OUTSTANDING, Pace, RatioLimiter

RATIOS = st.sampled_from([0.001, 0.01, 0.25, 0.35, 0.5, 0.7, 1.0, 3.0, 17.0, 100.0])
EPSILON = 1e-6
"""Rounding of sums of ratios."""


class RatioMachine(RuleBasedStateMachine):
    """Gathers, trains, changes the ratio, crashes and rolls back in any order.

    ``dues`` has the sum of the ratios of the env steps that survive, added up one by one, after each of them.
    """

    @initialize(
        ratio=RATIOS,
        start=st.integers(0, 50),
        k=st.integers(1, 20),
        steps=st.integers(1, 6),
        widest=st.integers(1, 5),
        slack=st.floats(0, 50),
    )
    def begin(self, ratio: float, start: int, k: int, steps: int, widest: int, slack: float) -> None:
        self.start, self.k, self.steps, self.widest, self.slack = start, k, steps, widest, slack
        self.ratio = ratio
        self.limiter = self.made()
        self.granted = 0
        self.in_store = self.updates = 0
        self.dues = [0.0]
        self.counted = 0
        self.saved: tuple[Any, ...] | None = None
        self.steps_left: int | None = None
        self.end_was_known = False
        self.take()

    def made(self) -> RatioLimiter:
        pace = self.pace(self.ratio)
        return RatioLimiter(pace, start=self.start, updates_per_step=self.k, steps_per_lane=self.steps)

    @property
    def lanes_in_turn(self) -> int | None:
        return None

    def pace(self, ratio: float) -> Pace:
        return Pace(
            updates_per_env_step=ratio,
            bound=self.k + self.steps * self.widest * ratio + self.slack,
            most_lanes=self.widest,
            lanes_in_turn=self.lanes_in_turn,
        )

    @property
    def stored(self) -> int:
        return len(self.dues) - 1

    @property
    def due(self) -> float:
        return self.dues[-1]

    def store(self, env_steps: int) -> None:
        for _ in range(env_steps):
            self.dues.append(self.due + (self.ratio if self.stored >= self.start else 0.0))

    @property
    def bound(self) -> float:
        return self.pace(self.ratio).bound

    def take(self) -> None:
        self.limiter.expect(None if self.steps_left is None else self.limiter.env_steps_for(self.steps_left))
        self.granted += self.limiter.take()
        assert self.limiter.room == 0 or self.limiter.is_complete or self.lanes_in_turn

    @precondition(lambda self: self.granted > 0)
    @rule(data=st.data())
    def arrives(self, data: Any) -> None:
        """Some steps only reset an environment, and are no env steps."""
        lanes = data.draw(st.integers(1, min(self.widest, self.granted + self.limiter.room)))
        env_steps = data.draw(st.integers(0, lanes * self.steps))
        self.granted -= lanes
        self.limiter.stored(env_steps, lanes=lanes)
        self.in_store += env_steps
        self.store(env_steps)
        self.take()

    @precondition(lambda self: self.limiter.may_train)
    @rule()
    def trains(self) -> None:
        self.limiter.trained()
        self.updates += self.k
        if self.steps_left:
            self.steps_left -= 1
        assert self.in_store >= max(self.start, 1)
        self.take()

    @rule(ratio=RATIOS, widest=st.integers(1, 5))
    def is_tuned(self, ratio: float, widest: int) -> None:
        """Actors are added, too, or end: those that go on have slots of another width."""
        self.ratio, self.widest = ratio, widest
        self.limiter.tune(self.pace(ratio))
        self.take()

    @rule(steps=st.integers(0, 5) | st.none())
    def has_so_many_steps_left(self, steps: int | None) -> None:
        self.steps_left = steps
        self.end_was_known |= steps is not None
        self.take()

    @rule(data=st.data())
    def saves(self, data: Any) -> None:
        """Some env steps have arrived and come with the next batch only: those that no update was due to."""
        counted = data.draw(st.integers(max(self.counted, self.stored - 30), self.stored))
        if self.dues[counted] >= self.updates:
            self.counted = counted
            self.saved = self.limiter.state_dict(counted), self.dues[: counted + 1], self.updates

    @precondition(lambda self: self.saved is not None)
    @rule(share=st.floats(0, 1))
    def crashes(self, share: float) -> None:
        """Training goes back to what was saved; the store keeps all that arrived, or loses a share or all of it."""
        assert self.saved is not None
        state, dues, self.updates = self.saved
        since, self.dues = self.stored + 1 - len(dues), list(dues)
        self.store(since)
        self.in_store = math.floor(self.in_store * share)
        self.limiter = self.made()
        self.limiter.load_state_dict(state, stored=self.stored, held=self.in_store)
        self.granted = 0
        self.take()

    @precondition(lambda self: self.saved is not None)
    @rule()
    def crashes_with_its_store(self) -> None:
        """Training and the store's count go back to what was saved; the store is empty."""
        assert self.saved is not None
        state, dues, self.updates = self.saved
        self.dues = list(dues)
        self.in_store = self.granted = 0
        self.limiter = self.made()
        self.limiter.load_state_dict(state, stored=0, held=0)
        self.take()

    @invariant()
    def the_debt_is_what_the_surviving_env_steps_say(self) -> None:
        assert self.limiter.debt == pytest.approx(self.due - self.updates, abs=EPSILON * max(1.0, self.due))

    @invariant()
    def training_is_never_ahead(self) -> None:
        assert self.updates <= self.due + EPSILON * max(1.0, self.due)

    @invariant()
    def never_do_both_wait(self) -> None:
        """A slot is gathered once there are grants for its lanes, and room for those of the last one."""
        if self.steps_left != 0:
            assert self.granted + self.limiter.room >= self.widest or self.limiter.may_train


class BoundedMachine(RatioMachine):
    """Without changes of the ratio and crashes, and so without a debt that was there before: gathering is bounded."""

    @rule(ratio=RATIOS, widest=st.integers(1, 5))
    def is_tuned(self, ratio: float, widest: int) -> None: ...

    @precondition(lambda self: False)
    @rule(share=st.floats(0, 1))
    def crashes(self, share: float) -> None: ...

    @precondition(lambda self: False)
    @rule()
    def crashes_with_its_store(self) -> None: ...

    @invariant()
    def gathering_is_ahead_by_the_bound_at_most(self) -> None:
        started_with = self.ratio * self.steps * self.widest  # of the slot with which the start was reached
        # The last slot before an end that was known may have more lanes than are granted.
        last_slot = self.ratio * self.steps * (self.widest - 1) if self.end_was_known else 0.0
        assert self.limiter.debt <= max(self.bound, started_with) + last_slot + EPSILON * max(1.0, self.due)


class TurnsMachine(RatioMachine):
    """Gathering and training take turns."""

    left_of_turn = 0

    @property
    def lanes_in_turn(self) -> int | None:
        return 2 * self.widest

    def take(self) -> None:
        trains, before = self.limiter.may_train, self.granted
        super().take()
        if before <= 0:
            self.left_of_turn = 0 if trains else 2 * self.widest - before
        self.left_of_turn -= self.granted - before
        assert self.left_of_turn >= 0, "granted in its turn only"
        assert self.limiter.outstanding == self.granted

    @invariant()
    def never_do_both_wait(self) -> None:
        """A slot is issued while anything is granted, if it fits into that and the room."""
        if self.steps_left != 0:
            can_gather = self.granted > 0 and self.granted + self.limiter.room >= self.widest
            assert can_gather or self.limiter.may_train


RatioMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
BoundedMachine.TestCase.settings = TurnsMachine.TestCase.settings = RatioMachine.TestCase.settings
TestRatio = RatioMachine.TestCase
TestBounds = BoundedMachine.TestCase
TestTurns = TurnsMachine.TestCase


def gathered(limiter: RatioLimiter, *, steps_of_a_slot: int = 8) -> tuple[int, int]:
    """Train and gather slots of two lanes in turn until neither goes on; return (env steps, updates)."""
    stored = updates = granted = 0
    while True:
        while limiter.may_train:
            limiter.trained()
            updates += 4
        granted += limiter.take()
        if granted + limiter.room < 2:
            return stored, updates
        limiter.stored(steps_of_a_slot, lanes=2)
        stored, granted = stored + steps_of_a_slot, granted - 2


def limiter_of(ratio: float, *, bound: float, lanes_in_turn: int | None = None) -> RatioLimiter:
    pace = pace_of(ratio, bound=bound, lanes_in_turn=lanes_in_turn)
    return RatioLimiter(pace, start=100, updates_per_step=4, steps_per_lane=4)


def pace_of(ratio: float, *, bound: float, lanes_in_turn: int | None = None) -> Pace:
    return Pace(updates_per_env_step=ratio, bound=bound, most_lanes=2, lanes_in_turn=lanes_in_turn)


@pytest.mark.parametrize("ratio", [0.001, 0.3, 1.0, 100.0])
@pytest.mark.parametrize("steps_of_a_slot", [8, 5])
@pytest.mark.parametrize("lanes_in_turn", [None, 6])
def test_in_the_end_there_are_as_many_updates_as_the_ratio_says(
    ratio: float, steps_of_a_slot: int, lanes_in_turn: int | None
) -> None:
    limiter = limiter_of(ratio, bound=4 + 8 * ratio, lanes_in_turn=lanes_in_turn)
    end = round(10_001 / ratio**0.5)
    limiter.expect(end)
    stored, updates = gathered(limiter, steps_of_a_slot=steps_of_a_slot)
    assert end <= stored < end + 8
    assert 0 <= (stored - 100) * ratio - updates < 4


def test_a_turn_that_actors_with_narrower_slots_have_begun_is_gathered_by_wider_ones() -> None:
    """Three of four slots of two lanes have arrived; then two actors with four lanes each take their place."""
    narrow, wide = (Pace(updates_per_env_step=0.5, bound=1000.0, most_lanes=lanes, lanes_in_turn=8) for lanes in (2, 4))
    limiter = RatioLimiter(narrow, start=10_000, updates_per_step=4, steps_per_lane=4)
    assert limiter.take() == 8
    for _ in range(3):
        limiter.stored(8, lanes=2)
    limiter.tune(wide)
    assert (limiter.take(), limiter.outstanding) == (0, 2)
    assert limiter.outstanding + limiter.room >= 4
    limiter.stored(16, lanes=4)
    assert limiter.take() == 10, "the next turn, and what this one had too many"


def test_whether_training_and_gathering_take_turns_does_not_change() -> None:
    for in_turn in (None, 6):
        limiter = limiter_of(1.0, bound=20.0, lanes_in_turn=in_turn)
        limiter.tune(pace_of(0.5, bound=20.0, lanes_in_turn=6 if in_turn is None else None))
        assert limiter.takes_turns == (in_turn is not None)


def test_rounding_does_not_stop_a_run_before_its_last_training_step() -> None:
    """180 x 0.35 is less than 63 in floating point."""
    for ratio, steps in ((0.35, 63), (0.7, 63), (0.35, 70), (0.7, 1001)):
        limiter = RatioLimiter(
            Pace(updates_per_env_step=ratio, bound=2.0, most_lanes=1), start=0, updates_per_step=1, steps_per_lane=1
        )
        made = 0
        while made < steps:
            limiter.expect(limiter.env_steps_for(steps - made))
            if limiter.may_train:
                limiter.trained()
                made += 1
                continue
            granted = limiter.take()
            assert granted, "both sides wait"
            for _ in range(granted):
                limiter.stored(1, lanes=1)


def test_a_bound_without_effect_grants_no_more_lanes_than_anybody_has() -> None:
    pace = Pace(updates_per_env_step=0.001, bound=100_000.0, most_lanes=4)
    limiter = RatioLimiter(pace, start=0, updates_per_step=1, steps_per_lane=16)
    assert limiter.take() == MOST_OUTSTANDING
    assert limiter.take() == 0
    limiter.stored(64, lanes=4)
    assert limiter.take() == 4


def test_what_arrives_after_the_progress_that_is_saved_counts_after_a_restore() -> None:
    limiter = limiter_of(0.5, bound=100.0)
    limiter.stored(140, lanes=limiter.take())
    state = limiter.state_dict(120)
    restored = limiter_of(0.5, bound=100.0)
    restored.load_state_dict(state, stored=0, held=0)
    assert (restored.debt, limiter.debt) == (10.0, 20.0)
    restored.expect(140)
    assert not restored.is_complete, "the 20 that were not saved are gathered anew"


def test_a_run_past_its_start_owes_all_that_it_stores_also_with_a_later_start() -> None:
    state = {"stored": 60, "due": 2.0, "updates": 4}  # of one of two ranks; alone it has twice their start
    limiter = limiter_of(0.5, bound=100.0)
    limiter.load_state_dict(state, stored=0, held=0)
    limiter.stored(25, lanes=0)
    assert limiter.debt == 2.0 + 0.5 * 25 - 4


@pytest.mark.parametrize(
    ("pace", "message"),
    [
        (pace_of(0.0, bound=100.0), "updates_per_env_step is 0.0, and must be above 0"),
        (pace_of(2.0, bound=19.9), "bound is 19.9 updates; it must be at least 20.0: the 4 of a tr"),
    ],
)
def test_paces_with_which_both_sides_could_wait_are_refused(pace: Pace, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        limiter_of(pace.updates_per_env_step, bound=pace.bound)
    limiter = limiter_of(1.0, bound=20.0)
    with pytest.raises(ValueError, match=message):
        limiter.tune(pace)
