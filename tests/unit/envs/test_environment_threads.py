"""Environments in threads: each thread makes, steps and closes its own, does jobs in order, and reports failures."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from rlsrl.data.slots import rollout_layout
from rlsrl.data.specs import Arrays
from rlsrl.envs.faults import EnvironmentFaults
from rlsrl.envs.threads import EnvironmentThreads, ThreadedVectorEnv
from rlsrl.envs.vector import LoopVectorEnv, VectorEnv
from rlsrl.runtime.errors import ConfigurationError, EnvironmentFailed
from rlsrl.testing.environments import TogetherEnv, at_any_rank
from rlsrl.testing.waiting import DEADLINE_SECONDS, until


class Witness(gymnasium.Env[Any, Any]):
    """Records the calling threads, and waits in a step while the test holds it."""

    def __init__(self, size: int = 2) -> None:
        self.observation_space = spaces.Box(-1, 1, (size,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.callers = [threading.current_thread().name]
        self.seeds: list[int | None] = []
        self.opened = threading.Event()
        self.opened.set()
        self.entered = threading.Event()
        self.closed = False

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.callers.append(threading.current_thread().name)
        self.seeds.append(seed)
        return np.zeros(self.observation_space.shape or (), np.float32), {}

    def step(self, action: Any) -> Any:
        self.callers.append(threading.current_thread().name)
        self.entered.set()
        assert self.opened.wait(DEADLINE_SECONDS)
        return np.ones(self.observation_space.shape or (), np.float32), 1.0, False, False, {}

    def close(self) -> None:
        self.callers.append(threading.current_thread().name)
        self.closed = True


@pytest.fixture
def made() -> list[Witness]:
    return []


@contextmanager
def witnesses(made: list[Witness], number: int = 3, **options: float) -> Iterator[EnvironmentThreads]:
    """Yield environments that fail at their first error."""

    def make() -> Witness:
        made.append(Witness())
        return made[-1]

    faults = EnvironmentFaults(error_budget=0)
    seeds = range(10, 10 + number)
    envs = EnvironmentThreads(at_any_rank(make), seeds=seeds, first_rank=40, faults=faults, **options)  # type: ignore[arg-type]
    try:
        yield envs
    finally:
        for each in made:
            each.opened.set()
        envs.close()


def arrays_for(envs: EnvironmentThreads) -> Arrays:
    layout = rollout_layout(envs.spec, num_steps=2, num_lanes=1)
    return layout.view(bytearray(layout.nbytes))


def stepping(envs: EnvironmentThreads) -> Callable[[int, VectorEnv], None]:
    """A job of two steps, in arrays that no test reads."""
    arrays = [arrays_for(envs) for _ in range(envs.num_envs)]

    def job(lane: int, env: VectorEnv) -> None:
        env.begin(arrays[lane])
        for step in range(2):
            env.step(arrays[lane], step, np.zeros(1, np.int64))

    return job


def all_done(envs: EnvironmentThreads, number: int = 1) -> None:
    assert envs.wait(lambda: envs.num_done == number, DEADLINE_SECONDS)


def test_each_environment_lives_in_one_thread_from_its_making_to_its_closing(made: list[Witness]) -> None:
    with witnesses(made) as envs:
        for number in (1, 2):
            envs.begin(stepping(envs))
            all_done(envs, number)
    assert [set(each.callers) for each in made] == [{f"environment-{rank}"} for rank in (40, 41, 42)]
    assert [each.seeds for each in made] == [[10], [11], [12]]
    assert all(each.closed for each in made)
    assert not any(thread.name.startswith("environment-") for thread in threading.enumerate())


def test_threads_go_on_to_the_next_job_without_each_other_and_do_them_in_order(made: list[Witness]) -> None:
    done: dict[int, list[str]] = {lane: [] for lane in range(3)}
    with witnesses(made) as envs:

        def job(name: str) -> Callable[[int, VectorEnv], None]:
            steps = stepping(envs)

            def work(lane: int, env: VectorEnv) -> None:
                steps(lane, env)
                done[lane].append(name)

            return work

        made[1].opened.clear()
        envs.begin(job("first"))
        assert envs.wait(lambda: envs.num_done_by_first == 1, DEADLINE_SECONDS)
        envs.begin(job("second"))
        assert envs.wait(lambda: envs.num_done_by_first == 2, DEADLINE_SECONDS)
        until(lambda: len(done[0]) + len(done[2]) == 4, "both others")
        assert (envs.num_done, done[1]) == (0, [])
        assert not envs.wait(lambda: envs.num_done > 0, timeout=0.0)
        made[1].opened.set()
        all_done(envs, 2)
    assert list(done.values()) == [["first", "second"]] * 3


def test_a_failure_is_raised_as_it_was_and_names_the_rank(made: list[Witness]) -> None:
    with witnesses(made) as envs:
        made[0].opened.clear()
        made[2].reset = lambda **_: 1 / 0  # type: ignore[method-assign, assignment, return-value]
        envs.begin(stepping(envs))
        with pytest.raises(EnvironmentFailed, match="rank 42 raised ZeroDivisionError") as caught:
            envs.wait(lambda: envs.num_done == 1, DEADLINE_SECONDS)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert all(each.closed for each in made), "also the one that failed"


@pytest.mark.parametrize("failure", [ConfigurationError("no such robot"), ConnectionError("the simulator is full")])
def test_no_environment_is_left_open_when_a_later_one_cannot_be_made(made: list[Witness], failure: Exception) -> None:
    def make() -> Witness:
        if len(made) == 2:
            raise failure
        made.append(Witness())
        return made[-1]

    with pytest.raises(ConfigurationError if isinstance(failure, ConfigurationError) else EnvironmentFailed) as caught:
        EnvironmentThreads(at_any_rank(make), seeds=range(4))
    assert str(failure) in str(caught.value)
    assert [each.closed for each in made] == [True, True]


def test_environments_that_differ_are_refused_and_closed(made: list[Witness]) -> None:
    def make() -> Witness:
        made.append(Witness(size=2 + len(made)))
        return made[-1]

    with pytest.raises(ConfigurationError, match=r"rank 7 has .*rank 8 "):
        EnvironmentThreads(at_any_rank(make), seeds=[0, 1], first_rank=7)
    assert [each.closed for each in made] == [True, True]


def test_zero_environments_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="at least one"):
        EnvironmentThreads(at_any_rank(Witness), seeds=[])


def test_a_job_that_is_abandoned_within_a_step_does_nothing_after_it(made: list[Witness]) -> None:
    after: list[int] = []
    with witnesses(made) as envs:
        made[1].opened.clear()
        steps = stepping(envs)

        def job(lane: int, env: VectorEnv) -> None:
            steps(lane, env)
            after.append(lane)

        envs.begin(job)
        assert made[1].entered.wait(DEADLINE_SECONDS)
        until(lambda: len(after) == 2, "the others are through")
        envs.abandon()
        made[1].opened.set()
        until(lambda: made[1].closed, "it ends with the step")
        assert sorted(after) == [0, 2]
        envs.begin(job)
        until(lambda: made[0].closed and made[2].closed, "no thread does any more")
    assert sorted(after) == [0, 2]
    assert made[1].callers.count("environment-41") == 4, "made, reset, one step, closed"


def test_closing_waits_no_longer_than_it_should(made: list[Witness]) -> None:
    with witnesses(made, close_seconds=0.1) as envs:
        made[1].opened.clear()
        envs.begin(stepping(envs))
        assert made[1].entered.wait(DEADLINE_SECONDS)
        envs.close()
        assert not made[1].closed
        assert [made[0].closed, made[2].closed] == [True, True]
        made[1].opened.set()
        until(lambda: made[1].closed, "it closes when its step is over")


def test_closing_closes_all_also_after_a_failure(made: list[Witness], monkeypatch: pytest.MonkeyPatch) -> None:
    with witnesses(made) as envs:
        monkeypatch.setattr(made[1], "close", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            envs.close()
        assert [made[0].closed, made[2].closed] == [True, True]
        envs.close()


def test_a_failure_is_told_before_the_environment_is_closed(made: list[Witness]) -> None:
    """An environment that failed in a step may hang in ``close``."""
    closing = threading.Event()
    with witnesses(made) as envs:
        made[0].reset = lambda **_: 1 / 0  # type: ignore[method-assign]
        made[0].close = lambda: closing.wait(DEADLINE_SECONDS)  # type: ignore[method-assign, assignment]
        envs.begin(stepping(envs))
        with pytest.raises(EnvironmentFailed, match="rank 40"):
            envs.wait(lambda: envs.num_done == 1, DEADLINE_SECONDS)
        assert not closing.is_set()
        closing.set()


def test_a_vector_in_threads_writes_what_the_loop_writes() -> None:
    rng = np.random.default_rng(1)
    actions = rng.integers(0, 2, (3, 40, 4))
    written = []
    for kind in (LoopVectorEnv, ThreadedVectorEnv):
        envs: VectorEnv = kind(lambda _: gymnasium.make("CartPole-v1"), seeds=range(4))
        layout = rollout_layout(envs.spec, num_steps=40, num_lanes=4)
        slots = []
        for slot_actions in actions:
            arrays = layout.view(bytearray(layout.nbytes))
            envs.begin(arrays)
            for step, each in enumerate(slot_actions):
                envs.step(arrays, step, each)
            slots.append(arrays)
        envs.close()
        written.append(slots)
    for loop, threaded in zip(*written, strict=True):
        for name, array in loop.items():
            np.testing.assert_array_equal(threaded[name], array, name)
    assert any(arrays["terminated"].any() for arrays in written[0])


def test_a_vector_in_threads_steps_its_environments_side_by_side(tmp_path: Path) -> None:
    envs = ThreadedVectorEnv(at_any_rank(lambda: TogetherEnv(str(tmp_path), 3)), seeds=range(3))
    layout = rollout_layout(envs.spec, num_steps=2, num_lanes=3)
    arrays = layout.view(bytearray(layout.nbytes))
    envs.begin(arrays)
    for step in range(2):
        envs.step(arrays, step, np.zeros(3, np.int64))
    envs.close()
    assert (arrays["reward"] == 1).all()


def test_a_vector_in_threads_raises_the_error_of_an_environment() -> None:
    class Broken(Witness):
        def step(self, action: Any) -> Any:
            raise ConnectionError("the simulator hung up")

    faults = EnvironmentFaults(error_budget=0)
    envs = ThreadedVectorEnv(at_any_rank(Broken), seeds=range(3), first_rank=40, faults=faults)
    layout = rollout_layout(envs.spec, num_steps=2, num_lanes=3)
    arrays = layout.view(bytearray(layout.nbytes))
    envs.begin(arrays)
    with pytest.raises(EnvironmentFailed, match="the simulator hung up"):
        envs.step(arrays, 0, np.zeros(3, np.int64))
    envs.close()
