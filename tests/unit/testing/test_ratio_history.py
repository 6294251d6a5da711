"""Whether a history in which the ratio does not hold is found, and where. The histories come from limiters."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from rlsrl.buffers.replay.ratio import Pace
from rlsrl.testing.ratio_history import (
    CountsSaved,
    LanesGranted,
    LimiterEvent,
    LimiterRestored,
    RatioBroken,
    SlotStored,
    StepTrained,
    check_history,
    read_lives,
)
from rlsrl.testing.ratio_trace import TracedLimiter, open_trace

UPDATES, STEPS, LANES, START = 8, 4, 3, 50
"""Updates of a training step, env steps of a lane, lanes of a slot, and env steps before training."""
Lives = list[list[LimiterEvent]]
_Event = TypeVar("_Event", bound=LimiterEvent)


def pace_of(ratio: float, *, more: float) -> Pace:
    """Return a pace whose bound is ``more`` updates above the least one."""
    return Pace(updates_per_env_step=ratio, bound=UPDATES + STEPS * LANES * ratio + more, most_lanes=LANES)


PACES = (pace_of(0.5, more=10.0), pace_of(2.0, more=0.0), pace_of(0.25, more=40.0))


class TracedRun:
    """Gathers and trains in random order. A kill goes back to the last checkpoint but one; the store survives."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder = folder
        self._random = random.Random(seed)
        self._stored = 0
        self._pace = PACES[0]
        self._begin()
        self._saves: list[Mapping[str, Any]] = []
        self.save()

    def _begin(self) -> None:
        self._limiter = TracedLimiter(
            self._pace,
            start=START,
            updates_per_step=UPDATES,
            steps_per_lane=STEPS,
            on_event=open_trace(self._folder),
        )

    def go_on(self, num_turns: int) -> None:
        for _ in range(num_turns):
            self._limiter.take()
            if self._limiter.may_train and (self._random.random() < 0.2 or not self._slot_is_granted):
                self._limiter.trained()
            else:
                self._gather()

    @property
    def _slot_is_granted(self) -> bool:
        return self._limiter.outstanding + self._limiter.room >= LANES

    def _gather(self, *, event_is_lost: bool = False) -> None:
        """Store a slot. Some of its steps only reset an environment, and are no env steps."""
        env_steps = LANES * STEPS - self._random.randrange(3)
        self._stored += env_steps
        if not event_is_lost:
            self._limiter.stored(env_steps, lanes=LANES)

    def save(self) -> None:
        self._saves.append(self._limiter.state_dict(self._stored))

    def tune(self, pace: Pace) -> None:
        self._pace = pace
        self._limiter.tune(pace)

    def be_killed(self) -> None:
        """One slot is stored whose event is lost. An actor comes back with another one that it was granted before."""
        if self._slot_is_granted:
            self._gather(event_is_lost=True)
        is_claimed = self._slot_is_granted
        self._saves = self._saves[:-1] or self._saves
        self._begin()
        self._limiter.load_state_dict(self._saves[-1], stored=self._stored, held=self._stored)
        if is_claimed:
            self._gather()

    def end(self) -> None:
        self._limiter.expect(self._stored + 200)
        self._limiter.take()
        while self._limiter.may_train or self._limiter.outstanding > 0:
            self.go_on(1)


@pytest.fixture(scope="module", params=range(3))
def lives(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Lives:
    """A good history with kills and changes of the pace."""
    folder = tmp_path_factory.mktemp("trace")
    run = TracedRun(folder, seed=request.param)
    for pace in (None, None, PACES[1], None, PACES[2], None):
        run.go_on(150)
        run.save()
        run.go_on(30)
        run.save()
        run.go_on(10)
        if pace is not None:
            run.tune(pace)
            run.go_on(20)
        run.be_killed()
    run.go_on(30)
    run.end()
    return read_lives(folder)


def last(lives: Lives, life: int, kind: type[_Event]) -> tuple[int, _Event]:
    """Return a life's last event of that class, with its number."""
    return [(number, event) for number, event in enumerate(lives[life]) if isinstance(event, kind)][-1]


def changed(lives: Lives, life: int, number: int, *events: LimiterEvent) -> Lives:
    """Return the lives with other events in the place of one."""
    events_of_life = [*lives[life][:number], *events, *lives[life][number + 1 :]]
    return [*lives[:life], events_of_life, *lives[life + 1 :]]


def assert_broken(lives: Lives, life: int, number: int, why: str) -> None:
    with pytest.raises(RatioBroken, match=why) as found:
        check_history(lives)
    assert (found.value.life, found.value.number) == (life, number)


def test_a_good_history_passes(lives: Lives) -> None:
    report = check_history(lives)
    assert sum(report.events.values()) == sum(len(events) - 1 for events in lives), "all but the starts"
    assert report.events["PaceTuned"] == 2
    assert len(report.restores) == 6
    assert all(each.rolled_back > 0 for each in report.restores)
    assert report.num_in_debt > 0
    assert 0.5 < report.largest_share <= 1
    assert 0 <= report.deficit < UPDATES
    made = UPDATES * report.events["StepTrained"]
    assert report.updates == made - sum(each.rolled_back for each in report.restores)


def test_a_grant_of_one_slot_too_many_is_found(lives: Lives) -> None:
    for life in range(len(lives) - 1):
        number, granted = last(lives, life, LanesGranted)
        more = replace(granted, lanes=granted.lanes + LANES)
        assert_broken(changed(lives, life, number, more), life, number, "gathering may lead by")


def test_a_grant_before_a_debt_is_paid_back_is_found(lives: Lives) -> None:
    number, restored = last(lives, 1, LimiterRestored)
    assert restored.debt > PACES[0].bound
    granted = LanesGranted(debt=restored.debt, lanes=LANES)
    assert_broken(changed(lives, 1, number, restored, granted), 1, number + 1, "gathering may lead by")


@pytest.mark.parametrize("is_counted", [True, False])
def test_a_training_step_too_many_is_found(lives: Lives, is_counted: bool) -> None:
    number, trained = last(lives, -1, StepTrained)
    assert trained.debt < UPDATES
    again = replace(trained, debt=trained.debt - UPDATES * is_counted)
    life = len(lives) - 1
    assert_broken(changed(lives, life, number, trained, again), life, number + 1, "training leads by")


def test_a_training_step_that_the_limiter_does_not_count_is_found(lives: Lives) -> None:
    number, restored = last(lives, 1, LimiterRestored)
    assert restored.debt > UPDATES
    trained = StepTrained(debt=restored.debt)
    assert_broken(changed(lives, 1, number, restored, trained), 1, number + 1, "the surviving history is behind by")


def test_env_steps_that_the_limiter_does_not_count_are_found(lives: Lives) -> None:
    number, stored = last(lives, 0, SlotStored)
    fewer = replace(stored, env_steps=stored.env_steps - 1)
    assert_broken(changed(lives, 0, number, fewer), 0, number, "the surviving history is behind by")


def test_a_slot_that_was_not_granted_is_found(lives: Lives) -> None:
    number, stored = last(lives, 0, SlotStored)
    wider = replace(stored, lanes=stored.lanes + 100)
    assert_broken(changed(lives, 0, number, wider), 0, number, "lanes were granted and had not arrived")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda each: {"due": each.due + UPDATES}, "the checkpoint had"),
        (lambda each: {"updates": each.updates - UPDATES}, "no checkpoint of the surviving history"),
        (lambda each: {"stored": each.stored + 3 * LANES * STEPS}, "at most one slot of 12 without an event"),
        (lambda each: {}, "were rolled back"),
    ],
)
def test_a_restore_with_a_larger_deficit_than_was_rolled_back_is_found(
    lives: Lives, change: Callable[[LimiterRestored], dict[str, Any]], why: str
) -> None:
    for life in range(1, len(lives)):
        number, restored = last(lives, life, LimiterRestored)
        other = replace(restored, debt=restored.debt + 100 * UPDATES, **change(restored))
        assert_broken(changed(lives, life, number, other), life, number, why)


def test_a_life_that_trains_without_a_restore_is_found(lives: Lives) -> None:
    number, _ = last(lives, 1, LimiterRestored)
    assert_broken(changed(lives, 1, number), 1, number, "nothing is restored")


def test_a_checkpoint_with_other_counts_is_found(lives: Lives) -> None:
    number, saved = last(lives, 0, CountsSaved)
    assert_broken(changed(lives, 0, number, replace(saved, due=saved.due + 1)), 0, number, "updates are due for these")


def test_a_line_that_a_kill_has_cut_is_left_out(tmp_path: Path) -> None:
    run = TracedRun(tmp_path, seed=0)
    run.go_on(20)
    (whole,) = read_lives(tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-5])
    assert read_lives(tmp_path) == [whole[:-1]]
