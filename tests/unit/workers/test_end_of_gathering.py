"""The last credits of a run: never fewer than training needs, never more than it can use."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsrl.buffers.limiter import RateLimiter
from rlsrl.data.episodes import EndedEpisodes
from rlsrl.data.version import Version
from rlsrl.streams.credits import Credit, CreditBook
from rlsrl.workers.progress import Progress, StopConditions

STEPS = 2
"""T: steps of a slot."""


def progress(*, env_steps: int = 0, train_steps: int = 0) -> Progress:
    made = Progress(episodes=1)
    made.env_steps, made.train_steps = env_steps, train_steps
    return made


def stop(*, env_steps: int | None = None, train_steps: int | None = None) -> StopConditions:
    return StopConditions(return_mean=1.0, episodes=1, env_steps=env_steps, train_steps=train_steps, wall_seconds=9.0)


@pytest.mark.parametrize(
    ("made", "conditions", "left"),
    [
        (progress(), stop(), None),
        (progress(train_steps=3), stop(train_steps=10), 7),
        (progress(env_steps=100), stop(env_steps=100 + 3 * 64), 3),
        (progress(env_steps=100), stop(env_steps=101 + 3 * 64), 4),
        (progress(env_steps=100), stop(env_steps=101), 1),
        (progress(env_steps=64, train_steps=1), stop(env_steps=640, train_steps=5), 4),
        (progress(env_steps=64, train_steps=1), stop(env_steps=128, train_steps=5), 1),
        (progress(env_steps=200, train_steps=9), stop(env_steps=128, train_steps=50), 0),
        (progress(train_steps=9), stop(train_steps=8), 0),
    ],
)
def test_the_steps_left_follow_from_the_nearest_limit(
    made: Progress, conditions: StopConditions, left: int | None
) -> None:
    assert made.steps_left(conditions, batch_transitions=64) == left


@dataclass(kw_only=True)
class Run:
    """One trainer and its actors, without processes: the calls are those of ``TrainingThread``."""

    widths: list[int]
    """Lanes of each actor's slots."""
    part: int
    """Lanes of a batch."""
    lag: int
    stop: StopConditions
    random: Random
    short_batches: bool
    """Whether batches may have fewer transitions than entries."""
    kills_left: int
    restarts_left: int
    version: int = 0
    num_trained: int = 0
    """Lanes."""
    num_received: int = 0
    """Lanes, without those that were lost with a trainer."""
    progress: Progress = field(default_factory=progress)
    book: CreditBook = field(default_factory=CreditBook)
    credits: dict[int, Credit] = field(default_factory=dict)
    held: deque[tuple[int, int, int]] = field(default_factory=deque)
    """Order, lanes and version of the received slots that are not trained."""

    def __post_init__(self) -> None:
        self.limiter = RateLimiter(batch_lanes=self.part, max_policy_lag=self.lag)
        self.widths_of: dict[int, int] = {}
        self.connect_all()

    def connect_all(self) -> None:
        for index, width in enumerate(self.widths):
            self.connect(index, index, width)

    def connect(self, connection: int, index: int, width: int) -> None:
        self.widths_of[connection] = width
        self.book.connect(connection, index=index, num_lanes=width, num_slots=2, num_claims=0)

    def go(self) -> None:
        """Train to the end."""
        while True:
            self.look_ahead()
            self.grant()
            if self.progress.stop_reason(self.stop) is not None:
                return
            while not self.try_to_train():
                self.act()

    def look_ahead(self) -> None:
        left = self.progress.steps_left(self.stop, batch_transitions=STEPS * self.part)
        self.limiter.expect(None if left is None else left * self.part)

    def grant(self) -> None:
        self.book.grant(self.limiter.take(), Version(1, self.version), self.limiter.room)
        self.issue()

    def restart(self) -> None:
        """Resume in another trainer from a checkpoint of the last step. What the former one held is lost."""
        self.restarts_left -= 1
        self.num_received -= sum(lanes for _, lanes, _ in self.held)
        self.held.clear()
        self.credits.clear()
        state = self.limiter.state_dict()
        self.limiter = RateLimiter(batch_lanes=self.part, max_policy_lag=self.lag)
        self.limiter.load_state_dict(state)
        self.book = CreditBook()
        self.widths_of.clear()
        self.connect_all()
        self.look_ahead()
        self.grant()

    def issue(self) -> None:
        self.credits |= {credit.order: credit for credit in self.book.issue()}

    def act(self) -> None:
        """Let an actor fill a slot, or kill it or the trainer."""
        if self.restarts_left and self.random.random() < 0.2:
            self.restart()
        assert self.credits, "no actor has a credit, and training waits for a batch: the run hangs"
        credit = self.credits[self.random.choice(sorted(self.credits))]
        if self.kills_left and self.random.random() < 0.3:
            self.kills_left -= 1
            revoked = self.book.disconnect(credit.connection)
            for each in revoked:
                del self.credits[each.order]
            if self.random.random() < 0.5:
                self.issue()  # to others, before the actor is back
            self.connect(max(self.widths_of) + 1, credit.connection % 7, self.widths_of.pop(credit.connection))
        else:
            del self.credits[credit.order]
            self.book.receive(credit.connection, order=credit.order, slot=credit.slot)
            self.book.release(credit.connection, credit.slot)
            self.num_received += credit.num_lanes
            self.held.append((credit.order, credit.num_lanes, credit.min_version.step))
            self.held = deque(sorted(self.held))
        self.issue()

    def try_to_train(self) -> bool:
        """Train a batch in the order of credits, if it is complete."""
        wanted, parts = self.part, list[tuple[int, int, int]]()
        for order, lanes, version in self.held:
            if any(older < order for older in self.credits):
                return False
            parts.append((order, min(lanes, wanted), version))
            wanted -= parts[-1][1]
            if wanted == 0:
                break
        else:
            return False
        for order, lanes, version in parts:
            assert self.version - version <= self.lag, "the policy lag is kept to the end"
            _, available, _ = self.held.popleft()
            if available > lanes:
                self.held.appendleft((order, available - lanes, version))
        self.version += 1
        self.num_trained += self.part
        self.limiter.sampled(self.part)
        self.grant()  # before the progress is known, as the thread does
        transitions = self.random.randint(1, STEPS * self.part) if self.short_batches else STEPS * self.part
        self.progress.gathered(EndedEpisodes(returns=[]), env_steps=transitions)
        self.progress.trained(seconds=0.0, minibatches=1, skipped=0)
        return True


@st.composite
def runs(draw: st.DrawFn) -> Run:
    narrow = draw(st.integers(1, 4))
    widths = draw(st.lists(st.sampled_from([narrow, narrow + draw(st.integers(0, 1))]), min_size=1, max_size=3))
    part = draw(st.integers(1, 8))
    # ExperimentSpec.least_policy_lag
    least_lag = (part - math.gcd(part, *widths) + max(widths) - 1) // part
    limit = draw(st.integers(1, 6))
    return Run(
        widths=widths,
        part=part,
        lag=least_lag + draw(st.integers(0, 3)),
        stop=StopConditions(
            return_mean=None,
            episodes=1,
            env_steps=draw(st.sampled_from([None, limit * STEPS * part, limit * STEPS * part - 1])),
            train_steps=draw(st.integers(1, 8)),
            wall_seconds=None,
        ),
        random=Random(draw(st.integers(0, 1 << 16))),
        short_batches=draw(st.booleans()),
        kills_left=draw(st.sampled_from([0, 0, 1, 3])),
        restarts_left=draw(st.sampled_from([0, 0, 1, 2])),
    )


@settings(max_examples=300, deadline=None)
@given(runs())
def test_training_gets_what_it_needs_and_no_slot_more(run: Run) -> None:
    run.go()
    left_over = run.num_received + sum(credit.num_lanes for credit in run.credits.values()) - run.num_trained
    assert 0 <= left_over < max(run.widths), "at most the rest of the last slot"
    if len(set(run.widths)) == 1 and run.part % run.widths[0] == 0:
        assert left_over == 0
