"""An evaluation counts exactly its episodes, whichever environment ends first."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rlsrl.data.slots import Slot
from rlsrl.envs.episodes import EpisodeReports
from rlsrl.envs.factory import EnvironmentSource, make_environment
from rlsrl.envs.faults import EnvironmentFaults
from rlsrl.envs.seeds import environment_seed
from rlsrl.envs.vector import LoopVectorEnv
from rlsrl.parameters.protocols import Parameters
from rlsrl.runtime.errors import EnvironmentFailed, EnvironmentFault
from rlsrl.testing.environments import Episode, ScriptedEnv
from rlsrl.workers.evaluation import (
    Evaluation,
    EvaluationResult,
    EvaluationUnfinished,
    evaluation_seeds,
    share_episodes,
)

SHORT_AND_BAD = [Episode(rewards=(1.0,)), Episode(rewards=(2.0,), end="truncated"), Episode(rewards=(4.0,))]
LONG_AND_GOOD = [Episode(rewards=(10.0,) * 9), Episode(rewards=(20.0,) * 9, end="truncated")]


class LeftActor:
    """Always chooses 0."""

    def load(self, parameters: Parameters) -> None:
        raise NotImplementedError

    def begin(self, slot: Slot) -> None:
        self._actions = slot.arrays["action"]

    def act(self, step: int) -> NDArray[Any]:
        self._actions[step] = 0
        actions: NDArray[Any] = self._actions[step]
        return actions

    def finish(self) -> None:
        raise NotImplementedError("an evaluation reads no log-probabilities")


def scripted(*scripts: list[Episode], reports: EpisodeReports | None = None) -> LoopVectorEnv:
    waiting = iter(scripts)
    return LoopVectorEnv(lambda _: ScriptedEnv(next(waiting)), seeds=range(len(scripts)), reports=reports)


@pytest.mark.parametrize("num_steps", [1, 2, 5, 100])
def test_each_environment_plays_equally_many_episodes_however_short_they_are(num_steps: int) -> None:
    envs = scripted(SHORT_AND_BAD, LONG_AND_GOOD)
    result = Evaluation(LeftActor(), envs, num_steps=num_steps, episodes_per_environment=2, max_steps=1000).play()
    assert result.returns == (1, 2, 90, 180)
    assert result.lengths == (1, 1, 9, 9)


NEVER_ENDING = [Episode(rewards=(0.0,) * 1000)]


@pytest.mark.parametrize(("max_steps", "taken"), [(10, 10), (11, 20), (20, 20)])
def test_the_step_limit_keeps_the_episodes_that_ended_and_names_an_environment_without(
    max_steps: int, taken: int
) -> None:
    envs = scripted(SHORT_AND_BAD, NEVER_ENDING)
    result = Evaluation(LeftActor(), envs, num_steps=10, episodes_per_environment=2, max_steps=max_steps).play()
    assert (result.returns, result.lengths, result.num_episodes) == ((1, 2), (1, 1), 2)
    steps = f"2 of 4 episodes ended in {taken} steps of each environment"
    assert result.unfinished.startswith(f"{steps}; environment 1 ended 0 of 2; ")
    assert result.to_json()["unfinished"] == result.unfinished


def test_a_step_limit_before_the_first_end_leaves_no_result() -> None:
    envs = scripted(NEVER_ENDING)
    with pytest.raises(EvaluationUnfinished, match="0 of 2 episodes ended in 10 steps of each environment"):
        Evaluation(LeftActor(), envs, num_steps=10, episodes_per_environment=2, max_steps=10).play()


def test_chosen_values_of_info_are_those_of_the_episodes_that_count() -> None:
    won, lost = (Episode(rewards=(1.0,), info={"won": value}) for value in (True, False))
    envs = scripted([won, lost, lost], [Episode(rewards=(1.0,) * 7), won], reports=EpisodeReports(("won",)))
    evaluation = Evaluation(
        LeftActor(), envs, num_steps=4, episodes_per_environment=2, max_steps=1000, episode_info=("won",)
    )
    result = evaluation.play()
    assert result.info == {"won": [1, 0, 1]}
    assert result.episode_info == {"won": {"mean": pytest.approx(2 / 3), "count": 3}}


def test_the_last_steps_allowed_still_count() -> None:
    envs = scripted([Episode(rewards=(1.0,) * 10)])
    assert Evaluation(LeftActor(), envs, num_steps=5, episodes_per_environment=1, max_steps=10).play().returns == (10,)


class Faulty(ScriptedEnv):
    """Gives NaN, or raises, in the steps of those numbers, from 1 over all episodes."""

    def __init__(self, *, nan: frozenset[int] = frozenset(), raising: frozenset[int] = frozenset()) -> None:
        super().__init__([Episode(rewards=(1.0,) * 3)])
        self._nan, self._raising = nan, raising

    def step(self, action: Any) -> Any:
        observation, reward, *rest = super().step(action)
        if len(self.actions) in self._raising:
            raise ConnectionError("no answer")
        return (observation, np.nan if len(self.actions) in self._nan else reward, *rest)


def evaluation_of(env: ScriptedEnv, faults: EnvironmentFaults, max_steps: int = 10_000) -> Evaluation:
    envs = LoopVectorEnv(lambda _: env, seeds=[1], faults=faults)
    return Evaluation(LeftActor(), envs, num_steps=4, episodes_per_environment=2, max_steps=max_steps, faults=faults)


@pytest.mark.parametrize("kind", ["nan", "raising"])
def test_a_fault_cuts_its_episode_and_is_reported(kind: str) -> None:
    result = evaluation_of(Faulty(**{kind: frozenset({2})}), EnvironmentFaults()).play()
    assert result.returns == (3, 3)
    assert (result.num_faults, result.to_json()["faults"]) == (1, 1)
    assert result.num_steps == 9, "three slots of four, without the failed one and two resets"


def test_an_environment_that_gives_nothing_else_ends_the_evaluation() -> None:
    always = frozenset(range(1, 100_000))
    with pytest.raises(EnvironmentFault, match=r"environment rank 0: reward is nan at step 1 .*; 20 steps"):
        evaluation_of(Faulty(nan=always), EnvironmentFaults(max_non_finite=20)).play()
    with pytest.raises(EnvironmentFailed, match="raised ConnectionError: no answer"):
        evaluation_of(Faulty(raising=always), EnvironmentFaults()).play()


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
def test_a_mean_that_is_not_finite_is_no_result() -> None:
    envs = scripted([Episode(rewards=(3e38,) * 2)])
    with pytest.raises(EvaluationUnfinished, match="the mean return is inf"):
        Evaluation(LeftActor(), envs, num_steps=4, episodes_per_environment=1, max_steps=10).play()


def test_equal_seeds_give_equal_results_and_others_do_not() -> None:
    source = EnvironmentSource(id="CartPole-v1")

    def play(seed: int) -> EvaluationResult:
        envs = LoopVectorEnv(lambda _: make_environment(source), seeds=evaluation_seeds(seed, 3))
        return Evaluation(LeftActor(), envs, num_steps=16, episodes_per_environment=5, max_steps=1000).play()

    assert play(1) == play(1)
    assert play(1).lengths != play(2).lengths


def test_seeds_are_not_those_of_training() -> None:
    assert not set(evaluation_seeds(7, 64)) & {environment_seed(7, rank, 0) for rank in range(64)}


def test_the_summary() -> None:
    result = EvaluationResult(returns=(1.0, 3.0), lengths=(2, 5), num_steps=9)
    assert result.to_json() == {
        "episodes": 2,
        "steps": 9,
        "faults": 0,
        "return_mean": 2.0,
        "return_std": 1.0,
        "return_min": 1.0,
        "return_max": 3.0,
        "length_mean": 3.5,
        "episode_info": {},
    }
    assert result.return_std == np.std(result.returns)


def test_the_summary_has_null_for_what_json_lacks() -> None:
    summary = EvaluationResult(returns=(1.0, float("inf")), lengths=(2, 5)).to_json()
    assert json.loads(json.dumps(summary, allow_nan=False))["return_max"] is None
    assert (summary["return_mean"], summary["return_min"]) == (None, 1.0)


@pytest.mark.parametrize(
    ("episodes", "environments", "shared"),
    [
        (100, 10, (10, 10)),
        (100, 1, (1, 100)),
        (100, 8, (8, 13)),
        (5, 10, (5, 1)),
        (1, 1, (1, 1)),
        (11, 10, (10, 2)),
    ],
)
def test_episodes_are_shared_evenly_and_never_too_few(
    episodes: int, environments: int, shared: tuple[int, int]
) -> None:
    share = share_episodes(episodes, environments)
    assert (share.num_environments, share.episodes_per_environment) == shared
    assert share.num_episodes == shared[0] * shared[1] >= episodes


@pytest.mark.parametrize(("episodes", "environments"), [(0, 1), (1, 0), (-1, 3)])
def test_sharing_no_episodes_is_refused(episodes: int, environments: int) -> None:
    with pytest.raises(ValueError, match="both must be at least 1"):
        share_episodes(episodes, environments)
