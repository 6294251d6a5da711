"""What episodes report at their ends, however their environments are stepped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv
from gymnasium.wrappers import RecordEpisodeStatistics, TimeLimit, TransformReward
from gymnasium.wrappers.vector import RecordEpisodeStatistics as RecordVectorStatistics
from gymnasium.wrappers.vector import TransformReward as TransformVectorReward
from structlog.testing import CapturingLogger

from rlsrl.data.episodes import EndedEpisodes
from rlsrl.data.slots import rollout_layout
from rlsrl.data.specs import Arrays
from rlsrl.envs.episodes import PATIENCE_EPISODES, EpisodeReports
from rlsrl.envs.native import NativeVectorEnv
from rlsrl.envs.threads import EnvironmentThreads
from rlsrl.envs.vector import LoopVectorEnv, VectorEnv
from rlsrl.runtime.errors import ConfigurationError, EnvironmentFailed
from rlsrl.testing.environments import Episode, ScriptedEnv, at_any_rank
from rlsrl.testing.waiting import DEADLINE_SECONDS

Make = Callable[[], gymnasium.Env[Any, Any]]
KEYS = ("is_success", "laps")
VALUES = [
    Episode(rewards=(1.0, 1.0), info={"is_success": True, "laps": 3}),
    Episode(rewards=(2.0,), info={"is_success": np.False_, "laps": np.nan, "more": "text"}, end="truncated"),
    Episode(rewards=(3.0,), info={"laps": np.array(2.5)}),
    Episode(rewards=(4.0,), info={"is_success": 1, "laps": np.inf}),
    Episode(rewards=(5.0,), info={"laps": 1e300}),
]
"""Together ten steps, with the four resets between them."""


def looped(make: Make, reports: EpisodeReports) -> VectorEnv:
    return LoopVectorEnv(at_any_rank(make), seeds=[1], first_rank=40, reports=reports)


def in_bulk(make: Make, reports: EpisodeReports) -> VectorEnv:
    """Return Gymnasium's own loop in place of a vectorised form."""
    return NativeVectorEnv(lambda: SyncVectorEnv([make], copy=False), seed=1, first_rank=40, reports=reports)


def slot_for(envs: VectorEnv | EnvironmentThreads, num_steps: int, keys: tuple[str, ...]) -> dict[str, Any]:
    """Return a slot full of garbage, so that fields which are not written show."""
    layout = rollout_layout(envs.spec, num_steps=num_steps, num_lanes=envs.num_envs, episode_info=keys)
    return layout.view(bytearray(b"\x2a" * layout.nbytes))


def fill(envs: VectorEnv, arrays: Arrays) -> None:
    envs.begin(arrays)
    for step in range(len(arrays["mask"])):
        envs.step(arrays, step, np.zeros(envs.num_envs, np.int64))


def ended(make: Make, num_steps: int, *, through: Any = looped, reports: EpisodeReports | None = None) -> EndedEpisodes:
    """Return the episodes that end in the first steps."""
    envs = through(make, reports or EpisodeReports())
    arrays = slot_for(envs, num_steps, () if reports is None else reports.keys)
    fill(envs, arrays)
    envs.close()
    return EndedEpisodes.of(arrays)


def through_threads(make: Make, reports: EpisodeReports) -> EndedEpisodes:
    threads = EnvironmentThreads(at_any_rank(make), seeds=[1], first_rank=40, reports=reports)
    arrays = slot_for(threads, 10, reports.keys)
    try:
        threads.begin(lambda _, envs: fill(envs, arrays))
        assert threads.wait(lambda: threads.num_done == 1, DEADLINE_SECONDS)
    finally:
        threads.close()
    return EndedEpisodes.of(arrays)


@pytest.mark.parametrize("through", [looped, in_bulk])
def test_chosen_values_are_reported_where_an_episode_ends(through: Any) -> None:
    episodes = ended(lambda: ScriptedEnv(VALUES), 10, through=through, reports=EpisodeReports(KEYS))
    assert (episodes.returns, episodes.lengths) == ([2, 2, 3, 4, 5], [2, 1, 1, 1, 1])
    assert episodes.info == {"is_success": [1, 0, 1], "laps": [3, 2.5]}


def test_threads_report_the_same_values() -> None:
    episodes = through_threads(lambda: ScriptedEnv(VALUES), EpisodeReports(KEYS))
    assert episodes.info == {"is_success": [1, 0, 1], "laps": [3, 2.5]}


@pytest.mark.parametrize("value", ["yes", b"1", None, [1.0], np.array([1.0, 2.0]), {"a": 1}, np.array("x")])
def test_a_value_that_is_not_a_number_is_refused_with_its_name(value: Any) -> None:
    script = [Episode(rewards=(1.0,), info={"laps": value})]
    with pytest.raises(ConfigurationError, match=r"episodeInfo: info\['laps'\] of environment rank 40 is .*, of type"):
        ended(lambda: ScriptedEnv(script), 2, reports=EpisodeReports(("laps",)))


@pytest.mark.parametrize("value", ["yes", None])
def test_environments_in_bulk_refuse_it_too(value: Any) -> None:
    script = [Episode(rewards=(1.0,), info={"laps": value})]
    with pytest.raises(ConfigurationError, match=r"info\['laps'\] of environment rank 40 is .*, of type"):
        ended(lambda: ScriptedEnv(script), 2, through=in_bulk, reports=EpisodeReports(("laps",)))


def test_an_integer_beyond_floats_is_no_value() -> None:
    script = [Episode(rewards=(1.0,), info={"laps": 10**400})]
    assert ended(lambda: ScriptedEnv(script), 2, reports=EpisodeReports(("laps",))).info == {"laps": []}


def test_threads_refuse_it_too() -> None:
    script = [Episode(rewards=(1.0,), info={"laps": "many"})]
    with pytest.raises(ConfigurationError, match="is 'many', of type str; allowed are numbers and booleans"):
        through_threads(lambda: ScriptedEnv(script), EpisodeReports(("laps",)))


@pytest.mark.parametrize("through", [looped, in_bulk])
def test_keys_that_no_episode_has_are_named_once_with_those_there_are(through: Any) -> None:
    log = CapturingLogger()
    reports = EpisodeReports(("is_succes", "laps", "never"), log=log)  # type: ignore[arg-type]
    script = [Episode(rewards=(1.0,), info={"is_success": True}), Episode(rewards=(1.0,), info={"laps": 1, "b": 2})]
    ended(lambda: ScriptedEnv(script), 6 * PATIENCE_EPISODES, through=through, reports=reports)
    (call,) = log.calls
    assert (call.method_name, call.args) == ("warning", ("episode_info_missing",))
    assert call.kwargs["keys"] == ["is_succes", "never"]
    assert set(call.kwargs["found"]) == {"b", "laps"}


def test_keys_that_come_in_time_are_not_named() -> None:
    log = CapturingLogger()
    never = [Episode(rewards=(1.0,))] * (PATIENCE_EPISODES - 1)
    script = [*never, Episode(rewards=(1.0,), info={"laps": 1})]
    ended(lambda: ScriptedEnv(script), 4 * PATIENCE_EPISODES, reports=EpisodeReports(("laps",), log=log))  # type: ignore[arg-type]
    assert log.calls == []


def test_an_episode_that_a_fault_cuts_reports_nothing() -> None:
    script = [Episode(rewards=(np.nan,), info={"laps": 7}), Episode(rewards=(1.0,), info={"laps": 8})]
    assert ended(lambda: ScriptedEnv(script), 3, reports=EpisodeReports(("laps",))).info == {"laps": [8]}


GAMES = [Episode(rewards=(1.0, 2.0)), Episode(rewards=(3.0,) * 3, end="truncated")]


def test_a_recorders_statistics_are_those_of_the_raw_rewards_and_count_once() -> None:
    def make() -> gymnasium.Env[Any, Any]:
        return TransformReward(RecordEpisodeStatistics(ScriptedEnv(GAMES)), lambda reward: float(reward) / 100)

    assert ended(make, 7) == EndedEpisodes(returns=[3, 9], lengths=[2, 3])


def test_a_vectors_recorder_is_read_too() -> None:
    def bulk(make: Make, reports: EpisodeReports) -> VectorEnv:
        def make_envs() -> Any:
            recorded = RecordVectorStatistics(SyncVectorEnv([make, make], copy=False))
            return TransformVectorReward(recorded, lambda rewards: rewards / 100)

        return NativeVectorEnv(make_envs, seed=1, reports=reports)

    episodes = ended(lambda: ScriptedEnv(GAMES), 7, through=bulk)
    assert (sorted(episodes.returns), sorted(episodes.lengths)) == ([3, 3, 9, 9], [2, 2, 3, 3])


def test_an_infos_own_episode_is_not_taken_for_statistics() -> None:
    script = [Episode(rewards=(1.0, 1.0), info={"episode": 17})]
    assert ended(lambda: ScriptedEnv(script), 2) == EndedEpisodes(returns=[2], lengths=[2])


class Lives(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Ends an episode after each step of a game, which goes on, as wrappers for Atari's lives do."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self._is_over = True
        self._next: Any = None

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> Any:
        return self.env.reset(seed=seed) if self._is_over else (self._next, {})

    def step(self, action: Any) -> Any:
        self._next, reward, terminated, truncated, info = self.env.step(action)
        self._is_over = terminated or truncated
        return self._next, reward, True, truncated, info


def test_lost_lives_around_a_recorder_report_whole_games_once() -> None:
    # Each step but a game's last is followed by a reset: game 1 takes 3 steps of the slot, game 2 takes 5.
    episodes = ended(lambda: Lives(RecordEpisodeStatistics(ScriptedEnv(GAMES))), 9)
    assert episodes == EndedEpisodes(returns=[3, 9], lengths=[2, 3])


def test_without_a_recorder_each_end_is_an_episode() -> None:
    assert ended(lambda: Lives(ScriptedEnv(GAMES)), 9).returns == [1, 2, 3, 3, 3]


class Stop(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Terminates each episode after its first step. The next reset resets the environment."""

    def step(self, action: Any) -> Any:
        observation, reward, _, _, info = self.env.step(action)
        return observation, reward, True, False, info


def test_a_wrapper_that_ends_episodes_without_the_recorder_is_found_at_the_first_reset() -> None:
    long = [Episode(rewards=(float(number),) * 9) for number in range(1, 6)]
    assert ended(lambda: Stop(RecordEpisodeStatistics(ScriptedEnv(long))), 9).returns == [2, 3, 4, 5]


def test_a_time_limit_around_a_recorder_ends_the_episode() -> None:
    long = [Episode(rewards=(1.0,) * 9)]
    assert ended(lambda: TimeLimit(RecordEpisodeStatistics(ScriptedEnv(long)), 2), 6).returns == [2, 2]


def test_an_environment_that_returns_no_info_still_breaks_the_contract() -> None:
    class Bare(ScriptedEnv):
        def step(self, action: Any) -> Any:
            return (*super().step(action)[:4], None)

    with pytest.raises(EnvironmentFailed, match="step\\(\\) returned None as info, not a dict"):
        ended(lambda: Bare([Episode(rewards=(1.0,))]), 40)
