"""A fault costs its own step: the step is no transition, its episode is truncated, the other environments go on."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import gymnasium
import numpy as np
import pytest
import structlog
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from numpy.typing import NDArray
from structlog.testing import LogCapture

from rlsrl.api.reasons import ENVIRONMENT_ERRORS, REASONS
from rlsrl.data.slots import rollout_layout
from rlsrl.envs.faults import (
    ERROR_BUDGET,
    ERROR_DECAY_SECONDS,
    REPEAT_SECONDS,
    EnvironmentFaults,
    FleetRow,
    NonFiniteValue,
)
from rlsrl.envs.native import NativeVectorEnv
from rlsrl.envs.threads import EnvironmentThreads
from rlsrl.envs.vector import LoopVectorEnv, VectorEnv
from rlsrl.runtime.errors import ConfigurationError, EnvironmentFailed, EnvironmentFault
from rlsrl.testing.environments import at_any_rank

NAN = float("nan")
Script = list[list[tuple[float, float]]]
"""Episodes of (reward, observation); the first pair is the reset, whose reward does not count."""


class SickEnv(gymnasium.Env[Any, Any]):
    """Plays a script of episodes; after the last it plays the last again. An episode terminates at its end."""

    def __init__(self, script: Script) -> None:
        self.observation_space = spaces.Dict(
            {"place": spaces.Box(-np.inf, np.inf, (2,), np.float32), "count": spaces.Box(0, 9, (1,), np.uint8)}
        )
        self.action_space = spaces.Discrete(2)
        self.steps = 0
        self._script = script
        self._episode, self._taken = -1, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._episode, self._taken = min(self._episode + 1, len(self._script) - 1), 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._taken += 1
        self.steps += 1
        script = self._script[self._episode]
        return self._observe(), script[self._taken][0], self._taken == len(script) - 1, False, {}

    def _observe(self) -> Any:
        return {
            "place": np.array([0, self._script[self._episode][self._taken][1]]),
            "count": np.array([self._taken], np.uint8),
        }


def episode(*steps: tuple[float, float], begins: float = 0.0) -> list[tuple[float, float]]:
    return [(0.0, begins), *steps]


WELL = [episode(*[(1.0, 1.0)] * 99)]
NEVER = [episode((1.0, NAN), begins=NAN)]


def loop(*scripts: Script, faults: EnvironmentFaults | None = None) -> LoopVectorEnv:
    waiting = iter(scripts)
    return LoopVectorEnv(lambda _: SickEnv(next(waiting)), seeds=range(len(scripts)), first_rank=40, faults=faults)


def slot_for(envs: VectorEnv, num_steps: int) -> dict[str, NDArray[Any]]:
    layout = rollout_layout(envs.spec, num_steps=num_steps, num_lanes=envs.num_envs)
    return layout.view(bytearray(b"\x2a" * layout.nbytes))


def fill(envs: VectorEnv, num_steps: int) -> dict[str, NDArray[Any]]:
    """Fill a slot, and check that it is finite after each step."""
    arrays = slot_for(envs, num_steps)
    envs.begin(arrays)
    assert np.isfinite(arrays["observation/place"][0]).all()
    for step in range(num_steps):
        envs.step(arrays, step, np.zeros(envs.num_envs, np.int64))
        assert np.isfinite(arrays["observation/place"][step + 1]).all()
        for name in ("reward", "episode_return"):
            assert np.isfinite(arrays[name][step]).all()
    return arrays


def lane(arrays: dict[str, NDArray[Any]], name: str, number: int = 0) -> list[Any]:
    return arrays[name][:, number].tolist()


@pytest.mark.parametrize("bad", [(NAN, 3.0), (1.0, NAN), (np.inf, 3.0), (1e300, 3.0), (1.0, -np.inf)])
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_a_faulty_transition_becomes_the_reset_and_the_step_before_is_truncated(bad: tuple[float, float]) -> None:
    sick = [episode((1.0, 1.0), (1.0, 2.0), bad, (1.0, 4.0)), episode((5.0, 6.0), (5.0, 7.0))]
    envs = loop(sick, WELL)
    arrays = fill(envs, 5)
    assert lane(arrays, "mask") == [True, True, False, True, True]
    assert lane(arrays, "reward") == [1, 1, 0, 5, 5]
    assert lane(arrays, "truncated") == [False, True, False, False, False]
    assert lane(arrays, "terminated") == [False, False, False, False, True]
    # Frame 2 is the last finite observation, frame 3 the first of the new episode.
    assert arrays["observation/place"][:, 0, 1].tolist() == [0, 1, 2, 0, 6, 7]
    assert arrays["observation/count"][:, 0, 0].tolist() == [0, 1, 2, 0, 1, 2]
    # A cut episode is not reported.
    assert lane(arrays, "episode_return") == [0, 0, 0, 0, 10]
    assert lane(arrays, "episode_length") == [0, 0, 0, 0, 2]
    assert lane(arrays, "mask", 1) == [True] * 5
    assert lane(arrays, "reward", 1) == [1] * 5


@pytest.mark.parametrize("rewards", [(1e300, -1e300), (np.inf, -np.inf)])
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_faulty_rewards_do_not_cancel(rewards: tuple[float, float]) -> None:
    """Neither those of two environments in one step, nor one of a reward and the return before it."""
    arrays = fill(loop(*[[episode((1.0, 1.0), (reward, 2.0), (1.0, 3.0)), WELL[0]] for reward in rewards]), 3)
    assert arrays["mask"].tolist() == [[True, True], [False, False], [True, True]]
    for reward in (4e38, 5e38):
        arrays = fill(loop([episode((-3e38, 1.0), (reward, 2.0), (1.0, 3.0)), WELL[0]]), 3)
        assert lane(arrays, "mask") == [True, False, True]


@pytest.mark.parametrize("bad", [(1.0, NAN), (NAN, 2.0), (1e300, 2.0)])
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_a_fault_of_an_episodes_last_step_cuts_the_episode(bad: tuple[float, float]) -> None:
    arrays = fill(loop([episode((1.0, 1.0), bad), WELL[0]]), 3)
    assert lane(arrays, "mask") == [True, False, True]
    assert lane(arrays, "truncated") == [True, False, False]
    assert lane(arrays, "terminated") == [False] * 3
    assert lane(arrays, "episode_length") == [0] * 3


def test_a_fault_of_a_slots_first_step_leaves_the_slot_before_as_it_was() -> None:
    envs = loop([episode((1.0, 1.0), (1.0, 2.0), (NAN, 3.0)), WELL[0]])
    first = fill(envs, 2)
    before = {name: array.copy() for name, array in first.items()}
    second = fill(envs, 2)
    assert all((first[name] == before[name]).all() for name in first)
    assert lane(second, "mask") == [False, True]
    assert second["observation/place"][:, 0, 1].tolist() == [2, 0, 1]


def test_a_step_after_an_episodes_end_stays_a_reset() -> None:
    arrays = fill(loop([episode((1.0, 1.0)), episode(begins=NAN), WELL[0]]), 4)
    assert lane(arrays, "mask") == [True, False, False, True]
    assert lane(arrays, "terminated") == [True, False, False, False]
    assert lane(arrays, "truncated") == [False] * 4
    # Until a reset gives a finite observation, the last one stands in.
    assert arrays["observation/place"][:, 0, 1].tolist() == [1 - 1, 1, 1, 0, 1]


def test_a_stand_in_lasts_over_slots_until_a_reset_is_finite() -> None:
    envs = loop([episode((1.0, 1.0), (1.0, NAN)), *[episode(begins=NAN)] * 3, WELL[0]])
    first, second, third = fill(envs, 3), fill(envs, 2), fill(envs, 2)
    assert lane(first, "mask") == [True, False, False]
    assert lane(second, "mask") == [False, False]
    assert second["observation/place"][:, 0, 1].tolist() == [1, 1, 0]
    assert lane(third, "mask") == [True, True]
    assert third["observation/place"][:, 0, 1].tolist() == [0, 1, 1]


def test_an_environment_whose_first_observation_is_not_finite_begins_later() -> None:
    arrays = fill(loop([episode(begins=NAN), WELL[0]], WELL), 2)
    assert lane(arrays, "mask") == [False, True]
    assert lane(arrays, "mask", 1) == [True, True]
    assert arrays["observation/place"][:, 0, 1].tolist() == [0, 0, 1]


def test_random_first_steps_that_are_not_finite_leave_no_return() -> None:
    script = [episode(*[(NAN, 1.0)] * 99), *[episode((1.0, 1.0), (1.0, 1.0))] * 9]
    waiting = iter([script] * 16)
    envs = LoopVectorEnv(lambda _: SickEnv(next(waiting)), seeds=range(16), max_decorrelation_steps=9)
    assert set(fill(envs, 8)["episode_return"].ravel().tolist()) <= {0.0, 2.0}


# Counting.


class Recorder:
    def __init__(self, max_non_finite: int | None = None) -> None:
        self.reasons: list[str] = []
        self.now = 0.0
        self.log = LogCapture()
        log = structlog.wrap_logger(None, processors=[self.log])
        self.faults = EnvironmentFaults(
            max_non_finite=max_non_finite, on_fault=self.reasons.append, log=log, now=lambda: self.now
        )


def test_dropped_are_the_steps_that_environments_took_and_the_slots_do_not_have() -> None:
    recorder, made = Recorder(), list[SickEnv]()
    scripts = iter([[episode((1.0, 1.0), (NAN, 1.0))], WELL, NEVER])

    def make() -> SickEnv:
        made.append(SickEnv(next(scripts)))
        return made[-1]

    envs = LoopVectorEnv(at_any_rank(make), seeds=range(3), faults=recorder.faults)
    transitions = sum(int(fill(envs, 7)["mask"].sum()) for _ in range(3))
    assert recorder.faults.take_dropped() == sum(env.steps for env in made) - transitions > 0
    assert recorder.faults.take_dropped() == 0
    assert set(recorder.reasons) == {"non_finite"}


def test_each_environment_is_reported_once_a_minute_with_rank_step_key_and_value() -> None:
    recorder = Recorder()
    envs = loop(WELL, [episode((1.0, 1.0), (1.0, NAN))], [episode((np.inf, 1.0))], faults=recorder.faults)
    fill(envs, 9)
    events = [{name: event[name] for name in ("rank", "step", "key", "value")} for event in recorder.log.entries]
    assert events == [
        {"rank": 42, "step": 1, "key": "reward", "value": "inf"},
        {"rank": 41, "step": 2, "key": "observation/place[1]", "value": "nan"},
    ]
    recorder.now = REPEAT_SECONDS
    fill(envs, 1)
    assert (recorder.log.entries[-1]["rank"], recorder.log.entries[-1]["unlogged"]) == (42, 8)


def test_values_that_are_not_finite_are_reported_with_their_number_and_the_last_one() -> None:
    reports: list[tuple[str, int, str]] = []
    faults = EnvironmentFaults(on_own_fault=lambda *report: reports.append(report))
    fill(loop(WELL, [episode((1.0, 1.0), (1.0, NAN))], [episode((np.inf, 1.0))], faults=faults), 2)
    faults.error(range(3, 4), 1, ValueError("stuck"))
    assert reports == [
        ("non_finite", 1, "environment rank 42: reward is inf at step 1 of its episode"),
        ("non_finite", 2, "environment rank 41: observation/place[1] is nan at step 2 of its episode"),
        ("non_finite", 3, "environment rank 42: reward is inf at step 1 of its episode"),
        ("environment_error", 1, "environment rank 3 raised ValueError: stuck (error 1 of this environment)"),
    ]


def test_only_faults_without_a_finite_transition_between_them_end_the_run() -> None:
    fill(loop(NEVER, WELL, faults=Recorder(max_non_finite=2).faults), 20)
    with pytest.raises(EnvironmentFault) as caught:
        fill(loop(NEVER, [episode(*[(1.0, 1.0)] * 5, (NAN, 1.0)), episode((NAN, 1.0))], faults=Recorder(8).faults), 40)
    assert str(caught.value).startswith("environment rank 4")
    assert "(environment.maxNonFinite)" in str(caught.value)


def test_a_limit_of_one_allows_no_fault_among_environments_that_are_well() -> None:
    with pytest.raises(EnvironmentFault, match=r"rank 40: reward is nan at step 3 of its episode; 1 steps"):
        fill(loop([episode((1.0, 1.0), (1.0, 1.0), (NAN, 1.0))], WELL, faults=Recorder(1).faults), 20)


def test_a_fault_has_its_place_in_its_text() -> None:
    found = NonFiniteValue(rank=3, step=0, key="observation[2]", value=NAN)
    assert str(found) == "environment rank 3: observation[2] is nan at reset"


# Other vectorisations.


def bulk(*scripts: Script, faults: EnvironmentFaults | None = None) -> NativeVectorEnv:
    return bulk_of(*(partial(SickEnv, script) for script in scripts), faults=faults)


def bulk_of(*makers: Callable[[], gymnasium.Env[Any, Any]], faults: EnvironmentFaults | None = None) -> NativeVectorEnv:
    def make() -> SyncVectorEnv:
        return SyncVectorEnv(makers, autoreset_mode=AutoresetMode.NEXT_STEP)

    return NativeVectorEnv(make, seed=0, first_rank=40, faults=faults)


def test_bulk_resets_the_whole_vector_at_the_step_after_a_fault() -> None:
    recorder = Recorder()
    sick = [episode((1.0, 1.0), (1.0, 2.0), (NAN, 3.0), (1.0, 4.0)), WELL[0]]
    envs = bulk(sick, WELL, [episode((1.0, 1.0), (1.0, 2.0), (1.0, 3.0)), WELL[0]], faults=recorder.faults)
    arrays = fill(envs, 5)
    assert lane(arrays, "mask") == [True, True, False, False, True]
    assert lane(arrays, "truncated") == [False, True, False, False, False]
    assert arrays["observation/place"][:, 0, 1].tolist() == [0, 1, 2, 2, 0, 1]
    # The step of the others is fine. It truncates their episodes, unless it ended them anyway.
    assert [lane(arrays, "mask", each) for each in (1, 2)] == [[True, True, True, False, True]] * 2
    assert [lane(arrays, "truncated", each)[2] for each in (1, 2)] == [True, False]
    assert [lane(arrays, "terminated", each)[2] for each in (1, 2)] == [False, True]
    assert arrays["observation/place"][:, 2, 1].tolist() == [0, 1, 2, 3, 0, 1]
    assert [lane(arrays, "episode_length", each) for each in range(3)] == [[0] * 5, [0] * 5, [0, 0, 3, 0, 0]]
    assert sorted(recorder.reasons) == ["non_finite", "vector_reset"]
    assert recorder.faults.take_dropped() == 1
    (event,) = recorder.log.entries
    assert (event["rank"], event["step"], event["key"]) == (40, 3, "reward")


def test_bulk_carries_stand_ins_and_resets_over_slots() -> None:
    envs = bulk([episode((1.0, 1.0), (1.0, NAN)), episode(begins=NAN), WELL[0]], WELL)
    first, second = fill(envs, 2), fill(envs, 3)
    assert lane(first, "mask") == [True, False]
    assert lane(first, "mask", 1) == [True, True]
    assert [lane(second, "mask", each) for each in (0, 1)] == [[False, False, True]] * 2
    assert second["observation/place"][:, 0, 1].tolist() == [1, 1, 0, 1]


def test_bulk_ends_the_run_as_the_loop_does() -> None:
    with pytest.raises(EnvironmentFault, match=r"rank 40: observation/place\[1\] is nan at reset; 9 steps"):
        fill(bulk(NEVER, WELL, faults=Recorder(9).faults), 20)


def test_threads_count_together_and_end_the_run() -> None:
    recorder = Recorder(max_non_finite=40)
    scripts = iter([NEVER, [episode((NAN, 1.0))]])
    envs = EnvironmentThreads(lambda _: SickEnv(next(scripts)), seeds=range(2), first_rank=40, faults=recorder.faults)
    arrays = slot_for(envs, 50)  # type: ignore[arg-type]  # has what it needs

    def work(number: int, single: VectorEnv) -> None:
        lanes = {name: array[:, number : number + 1] for name, array in arrays.items() if array.ndim > 1}
        single.begin(lanes)
        for step in range(50):
            single.step(lanes, step, np.zeros(1, np.int64))

    envs.begin(work)
    with pytest.raises(EnvironmentFault, match=r"^environment rank 4[01]: .*; 40 steps"):
        envs.wait(lambda: envs.num_done == 1, 60.0)
    envs.close()


class Row(FleetRow):
    """A fleet of which the test tells the row."""

    def __init__(self) -> None:
        self.reports: list[tuple[int, int]] = []
        self.known = 0

    def report(self, num_ended: int, length: int) -> None:
        self.reports.append((num_ended, length))

    def length(self, own: int) -> int:
        return self.known


def test_the_row_of_the_fleet_ends_the_run_and_not_that_of_one_actor() -> None:
    row = Row()
    faults = EnvironmentFaults(max_non_finite=3, fleet_row=row)
    bad = NonFiniteValue(rank=3, step=1, key="reward", value=NAN)
    for _ in range(5):
        faults.non_finite(bad)
    faults.finite()
    faults.finite()
    assert row.reports == [(0, 1), (0, 2), (0, 3), (0, 4), (0, 5), (1, 0)], "the last finite transition ended no row"
    row.known = 3
    with pytest.raises(EnvironmentFault, match=r"^environment rank 3: reward is nan at step 1 of its episode; 3 steps"):
        faults.non_finite(bad)


def test_a_limit_of_one_needs_no_look_at_the_fleet() -> None:
    with pytest.raises(EnvironmentFault, match="; 1 steps and resets in a row of all environments"):
        EnvironmentFaults(max_non_finite=1, fleet_row=Row()).non_finite(
            NonFiniteValue(rank=3, step=1, key="reward", value=NAN)
        )


# Environments that raise.


class Factory:
    """Makes environments that count from 1 in each episode and raise in the third step; it keeps all of them."""

    def __init__(
        self,
        *,
        fails_in: Literal["step", "reset", "making", "nothing"] = "step",
        closes: bool = True,
        raises: BaseException | None = None,
    ) -> None:
        self.made: list[Raising] = []
        self.fails_in = fails_in
        self.closes = closes
        self.raises = raises or ValueError("the arm is stuck")

    def __call__(self) -> Raising:
        if self.fails_in == "making" and self.made:
            raise ConnectionError("no licence is left")
        self.made.append(Raising(self))
        return self.made[-1]


class Raising(SickEnv):
    def __init__(self, factory: Factory) -> None:
        super().__init__(WELL)
        self.num_closed = 0
        self.seeds: list[int | None] = []
        self._factory = factory

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.seeds.append(seed)
        if self._factory.fails_in == "reset" and len(self._factory.made) > 1:
            raise ConnectionError("no answer")
        return super().reset(seed=seed)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._taken == 2 and self._factory.fails_in != "nothing":
            raise self._factory.raises
        return super().step(action)

    def close(self) -> None:
        self.num_closed += 1
        if not self._factory.closes:
            raise OSError("and does not close")


def test_an_environment_that_is_made_again_keeps_its_rank() -> None:
    recorder, factory = Recorder(), Factory()
    waiting: list[gymnasium.Env[Any, Any]] = [SickEnv(WELL), factory()]
    ranks: list[int] = []

    def make(rank: int) -> gymnasium.Env[Any, Any]:
        ranks.append(rank)
        return waiting.pop(0) if waiting else factory()

    fill(LoopVectorEnv(make, seeds=range(2), first_rank=40, faults=recorder.faults), 5)
    assert ranks == [40, 41, 41]


def test_an_environment_that_raises_is_made_again_and_the_others_go_on() -> None:
    recorder, factory = Recorder(), Factory(closes=False)
    waiting: list[gymnasium.Env[Any, Any]] = [factory(), SickEnv(WELL)]

    def make() -> gymnasium.Env[Any, Any]:
        return waiting.pop(0) if waiting else factory()

    envs = LoopVectorEnv(at_any_rank(make), seeds=range(2), first_rank=40, faults=recorder.faults)
    arrays = fill(envs, 5)
    assert lane(arrays, "mask") == [True, True, False, True, True]
    assert lane(arrays, "truncated") == [False, True, False, False, False]
    assert lane(arrays, "terminated") == [False] * 5
    assert lane(arrays, "episode_length") == [0] * 5
    # Frame 2 is the last good observation, frame 3 the first of the new environment.
    assert arrays["observation/place"][:, 0, 1].tolist() == [0, 1, 1, 0, 1, 1]
    assert arrays["observation/count"][:, 0, 0].tolist() == [0, 1, 2, 0, 1, 2]
    assert lane(arrays, "mask", 1) == [True] * 5
    assert [env.num_closed for env in factory.made] == [1, 0]
    first, second = (env.seeds[0] for env in factory.made)
    assert second not in (None, first), "not the same episode again"
    assert recorder.reasons == ["environment_error"]
    assert (recorder.faults.num_faults, recorder.faults.take_dropped()) == (1, 0), "the step made no transition"
    (event,) = recorder.log.entries
    assert (event["rank"], event["step"]) == (40, 3)
    assert event["error"] == "environment rank 40 raised ValueError: the arm is stuck"


@pytest.fixture
def ignored_interrupts() -> Iterator[None]:
    """Ignore SIGINT, as workers do."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


EXITS: dict[str, Callable[[], BaseException]] = {
    "SystemExit: 3": partial(SystemExit, 3),
    "SystemExit:": SystemExit,
    "KeyboardInterrupt:": KeyboardInterrupt,
}


@pytest.mark.parametrize("words", EXITS)
@pytest.mark.parametrize("vectorization", ["loop", "bulk"])
@pytest.mark.usefixtures("ignored_interrupts")
def test_an_environment_that_exits_is_made_again_like_any_that_raises(vectorization: str, words: str) -> None:
    factory, recorder = Factory(raises=EXITS[words]()), Recorder()
    envs: VectorEnv = (
        bulk_of(factory, faults=recorder.faults)
        if vectorization == "bulk"
        else LoopVectorEnv(at_any_rank(factory), seeds=[1], first_rank=40, faults=recorder.faults)
    )
    assert lane(fill(envs, 5), "mask") == [True, True, False, True, True]
    (event,) = (each for each in recorder.log.entries if each["reason"] == "environment_error")
    assert event["error"].endswith(f" raised {words}")
    _, frame, *_ = event["traceback"].splitlines()
    assert frame.startswith(f'  File "{__file__}", line '), "the user's line"


@pytest.mark.parametrize("words", EXITS)
@pytest.mark.usefixtures("ignored_interrupts")
def test_an_environment_that_exits_while_it_is_made_cannot_be_made(words: str) -> None:
    raised = EXITS[words]()

    def make() -> SickEnv:
        raise raised

    with pytest.raises(EnvironmentFailed, match=f"^environment rank 40 cannot be made: it raised {words}"):
        LoopVectorEnv(at_any_rank(make), seeds=[1], first_rank=40)


def test_an_interrupt_by_the_user_ends_the_process() -> None:
    """Commands such as ``rlsrl eval`` do not ignore SIGINT."""
    recorder = Recorder()
    envs = LoopVectorEnv(at_any_rank(Factory(raises=KeyboardInterrupt())), seeds=[1], faults=recorder.faults)
    with pytest.raises(KeyboardInterrupt):
        fill(envs, 5)
    assert recorder.reasons == []


def test_the_traceback_of_an_error_begins_with_the_users_own_code() -> None:
    recorder = Recorder()
    with pytest.raises(EnvironmentFailed) as caught:
        fill(LoopVectorEnv(at_any_rank(Factory(fails_in="reset")), seeds=[1], first_rank=40, faults=recorder.faults), 9)
    header, frame, *_, last = caught.value.traceback.splitlines()
    assert header == "Traceback (most recent call last):"
    assert frame.startswith(f'  File "{__file__}", line ')
    assert frame.endswith("in step")
    assert last == "ValueError: the arm is stuck", "the first error, not the later ones"
    assert str(caught.value).startswith("environment rank 40 raised ValueError: the arm is stuck; ")
    assert [event.get("traceback") for event in recorder.log.entries] == [caught.value.traceback] + [
        None
    ] * ERROR_BUDGET


@pytest.mark.parametrize("fails_in", ["step", "reset", "making"])
@pytest.mark.parametrize("vectorization", ["loop", "bulk"])
def test_an_environment_that_raises_again_and_again_fails(
    vectorization: str, fails_in: Literal["step", "reset", "making"]
) -> None:
    factory, recorder = Factory(fails_in=fails_in), Recorder()
    envs: VectorEnv = (
        bulk_of(factory, faults=recorder.faults)
        if vectorization == "bulk"
        else LoopVectorEnv(at_any_rank(factory), seeds=[1], first_rank=40, faults=recorder.faults)
    )
    with pytest.raises(EnvironmentFailed, match="raised ValueError: the arm is stuck") as caught:
        fill(envs, 99)
    assert isinstance(caught.value.__cause__, ValueError if fails_in == "step" else ConnectionError)
    assert recorder.reasons == ["environment_error"] * (ERROR_BUDGET + 1)


def test_the_first_reset_of_an_environment_may_fail_too() -> None:
    class Late(Raising):
        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
            if len(factory.made) < 3:
                raise ConnectionError("no answer yet")
            return super().reset(seed=seed)

    factory = Factory(fails_in="nothing")

    def make() -> Late:
        factory.made.append(Late(factory))
        return factory.made[-1]  # type: ignore[return-value]

    recorder = Recorder()
    arrays = fill(LoopVectorEnv(at_any_rank(make), seeds=[1], first_rank=40, faults=recorder.faults), 3)
    assert lane(arrays, "mask") == [True] * 3
    assert len(recorder.reasons) == 2


def test_errors_are_forgiven_one_after_the_other_and_each_environment_has_its_own() -> None:
    recorder, rare = Recorder(), ValueError("rare")
    for _ in range(3 * ERROR_BUDGET):
        recorder.faults.error(range(3, 4), 1, rare)
        recorder.now += ERROR_DECAY_SECONDS
    for number in range(ERROR_BUDGET):
        recorder.faults.error(range(3, 4), 1, ValueError(str(number)))
    recorder.faults.error(range(4, 5), 1, rare)
    with pytest.raises(EnvironmentFailed, match=r"^environment rank 3 raised ValueError: 0; it is not made again"):
        recorder.faults.error(range(3, 4), 1, ValueError("the last"))


def test_each_error_is_reported_with_its_number_among_those_of_its_environment() -> None:
    reports: list[tuple[int, str]] = []
    faults = EnvironmentFaults(on_own_fault=lambda reason, number, text: reports.append((number, text)))
    faults.error(range(3, 4), 1, ValueError("stuck"))
    faults.error(range(8, 12), 1, OSError("gone"))
    faults.error(range(3, 4), 1, ValueError("stuck\nagain"))
    assert reports == [
        (1, "environment rank 3 raised ValueError: stuck (error 1 of this environment)"),
        (
            2,
            "environment ranks 8 to 11, which step in bulk, raised OSError: gone (error 1 of these environments)",
        ),
        (3, "environment rank 3 raised ValueError: stuck again (error 2 of this environment)"),
    ]


def test_an_environment_that_is_another_after_it_was_made_again_is_refused() -> None:
    waiting = [Factory()(), gymnasium.make("CartPole-v1")]
    envs = LoopVectorEnv(lambda _: waiting.pop(0), seeds=[1], first_rank=40)
    with pytest.raises(ConfigurationError, match=r"rank 40 had .*; made again, it has "):
        fill(envs, 9)


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (("observation", 1.0, False, {}), "a tuple of 4, not (observation, reward, terminated, truncated, info)"),
        (None, "None, not (observation, reward, terminated, truncated, info)"),
        (("observation", None, False, False, {}), "the reward None, not a finite number"),
        (({"place": [0.0]}, 1.0, False, False, {}), "the keys ['place']; the space has the keys ['count', 'place']"),
    ],
)
@pytest.mark.parametrize("decorrelation", [0, 50])
def test_a_result_that_cannot_be_used_is_named_with_the_place_in_the_users_code(
    result: Any, says: str, decorrelation: int
) -> None:
    class Odd(SickEnv):
        def step(self, action: Any) -> Any:
            sound = super().step(action)
            return tuple(sound[0] if part == "observation" else part for part in result) if result else None

    faults = EnvironmentFaults(error_budget=0)
    envs = LoopVectorEnv(
        lambda _: Odd(WELL), seeds=[1], first_rank=40, max_decorrelation_steps=decorrelation, faults=faults
    )
    with pytest.raises(EnvironmentFailed) as caught:
        fill(envs, 60)
    line = Odd.step.__code__.co_firstlineno
    assert str(caught.value).startswith("environment rank 40 breaks Gymnasium's contract: step() returned ")
    assert f"step() returned {says}" in str(caught.value)
    assert f"({__file__}, line {line})" in str(caught.value)
    assert caught.value.traceback == ""


def test_bulk_makes_all_environments_again_after_one_has_raised() -> None:
    recorder, factory = Recorder(), Factory()
    ends = [episode((1.0, 1.0), (1.0, 2.0)), episode((1.0, 3.0)), WELL[0]]
    makers = [factory, partial(SickEnv, WELL), partial(SickEnv, ends)]
    envs = bulk_of(*makers, faults=recorder.faults)
    arrays = fill(envs, 5)
    # The step in which one raised is no transition of any. The third environment only resets there.
    assert [lane(arrays, "mask", each) for each in range(3)] == [[True, True, False, True, True]] * 3
    assert [lane(arrays, "truncated", each) for each in range(2)] == [[False, True, False, False, False]] * 2
    assert lane(arrays, "terminated", 2) == [False, True, False, False, True]
    assert lane(arrays, "truncated", 2) == [False] * 5
    assert arrays["observation/place"][:, 1, 1].tolist() == [0, 1, 1, 0, 1, 1]
    assert arrays["observation/count"][:, 0, 0].tolist() == [0, 1, 2, 0, 1, 2]
    assert lane(arrays, "episode_length", 2) == [0, 2, 0, 0, 2]
    assert recorder.reasons == ["vector_reset", "environment_error"]
    (event,) = recorder.log.entries
    assert event["error"] == ("environment ranks 40 to 42, which step in bulk, raised ValueError: the arm is stuck")
    assert len(factory.made) == 2
    assert factory.made[0].num_closed == 1


def test_threads_make_an_environment_again_and_close_it() -> None:
    recorder, factory = Recorder(), Factory(closes=False)
    envs = EnvironmentThreads(at_any_rank(factory), seeds=range(2), first_rank=40, faults=recorder.faults)
    arrays = slot_for(envs, 5)  # type: ignore[arg-type]  # has what it needs

    def work(number: int, single: VectorEnv) -> None:
        lanes = {name: array[:, number : number + 1] for name, array in arrays.items() if array.ndim > 1}
        single.begin(lanes)
        for step in range(5):
            single.step(lanes, step, np.zeros(1, np.int64))

    envs.begin(work)
    assert envs.wait(lambda: envs.num_done == 1, 60.0)
    assert [lane(arrays, "mask", each) for each in range(2)] == [[True, True, False, True, True]] * 2
    with pytest.raises(OSError, match="and does not close"):
        envs.close()
    assert [env.num_closed for env in factory.made] == [1] * 4
    assert recorder.reasons == ["environment_error"] * 2


def test_the_cure_of_environment_errors_names_the_budget_and_its_decay() -> None:
    assert (ERROR_BUDGET + 1, ERROR_DECAY_SECONDS / 60) == (6, 10)
    cure = REASONS[ENVIRONMENT_ERRORS]["MadeAgain"].cure
    assert "raises six times ends its actor; one of its errors is forgiven every ten minutes" in cure
