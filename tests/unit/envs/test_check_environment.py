"""The conformance check passes a sound environment and names each breach."""

from __future__ import annotations

import warnings
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from rlsrl.envs.check import check_environment
from rlsrl.runtime.errors import ConfigurationError
from rlsrl.testing.environments import EchoEnv, Episode, ScriptedEnv


class Walk(gymnasium.Env):
    """A sound environment whose results tests replace."""

    observation_space: spaces.Space = spaces.Box(-10, 10, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.resets = 0

    def observe(self) -> Any:
        return self.np_random.uniform(-1, 1, 2).astype(np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.resets += 1
        return self.answers.get("reset", (self.observe(), {}))

    def step(self, action: Any) -> Any:
        sound = {
            "observation": self.observe(),
            "reward": 1.0,
            "terminated": False,
            "truncated": action == 1,
            "info": {},
        }
        return self.answers.get("step", tuple((sound | self.answers)[name] for name in sound))


def test_a_sound_environment_passes_and_shows_what_it_gives_and_takes() -> None:
    env = Walk()
    assert check_environment(env, num_steps=50).action.num_actions == 2
    assert env.resets > 2


def test_a_sound_environment_with_dict_observations_passes() -> None:
    class Repeatable(ScriptedEnv):
        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            self._begun = 0
            return super().reset(seed=seed, options=options)

    check_environment(Repeatable([Episode(rewards=(1, 1))], as_dict=True))


def test_gymnasiums_own_environments_pass() -> None:
    for env_id in ("CartPole-v1", "Pendulum-v1", "FrozenLake-v1", "Taxi-v4", "Blackjack-v1"):
        check_environment(gymnasium.make(env_id, disable_env_checker=True))


@pytest.mark.parametrize("kind", EchoEnv.SPACES)
def test_environments_with_actions_of_several_parts_pass(kind: str) -> None:
    check_environment(EchoEnv(kind))


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ({"reset": np.zeros(2, np.float32)}, r"reset\(\) returned a ndarray, not \(observation, info\)"),
        ({"reset": (np.zeros(2, np.float32), None)}, r"reset\(\) returned a tuple of 2, not \(observation, info\)"),
        (
            {"step": (np.zeros(2, np.float32), 1.0, False, {})},
            r"step\(\) returned a tuple of 4, not \(observation, reward",
        ),
        ({"step": None}, r"step\(\) returned None"),
        ({"observation": np.zeros(3, np.float32)}, r"returned float32\[3\] as observation; its space has float32\[2\]"),
        ({"observation": np.zeros(2)}, r"returned float64\[2\] as observation; its space has float32\[2\]"),
        ({"observation": [0.0, 0.0]}, r"returned a list as observation, not an array of float32\[2\]"),
        ({"observation": np.array([np.nan, 0], np.float32)}, "returned values of observation that are not finite"),
        ({"reward": "1"}, "reward '1', not a finite number"),
        ({"reward": None}, "reward None, not a finite number"),
        ({"reward": float("nan")}, "reward nan, not a finite number"),
        ({"reward": np.zeros(1)}, "reward array.*, not a finite number"),
        ({"terminated": 0}, "returned an int as terminated, not a bool"),
        ({"truncated": None}, "returned None as truncated, not a bool"),
        ({"info": None}, "returned None as info, not a dict"),
    ],
)
def test_each_breach_is_named(answers: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        check_environment(Walk(**answers))


CONSTANT = np.zeros(2, np.float32)


def test_an_observation_that_never_changes_is_a_warning() -> None:
    with pytest.warns(UserWarning, match="the observation was the same in 200 steps with random actions") as caught:
        check_environment(Walk(observation=CONSTANT, reset=(CONSTANT, {})))
    assert caught[0].filename == __file__


class InPlace(Walk):
    """Writes each observation into the same array."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer = np.zeros(2, np.float32)

    def observe(self) -> Any:
        self.buffer[:] = super().observe()
        return self.buffer


@pytest.mark.parametrize(
    "env",
    [
        Walk(),
        InPlace(),
        Walk(reset=(CONSTANT, {})),
        pytest.param(Walk(observation=CONSTANT, reset=(CONSTANT, {}), terminated=True), id="bandit"),
        pytest.param(Walk(observation=CONSTANT), id="changes with resets"),
    ],
)
def test_an_observation_that_changes_or_is_the_only_one_of_each_episode_is_no_warning(env: Walk) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_environment(env)


def test_all_breaches_are_named_at_once_and_each_once() -> None:
    with pytest.raises(ConfigurationError) as caught:
        check_environment(Walk(reward=None, info=None, observation=np.zeros(2)))
    assert str(caught.value).count("\n- ") == 3


def test_an_unseeded_reset_is_named() -> None:
    class Forgetful(Walk):
        def observe(self) -> Any:
            return np.array([self.resets, 0], np.float32)

    with pytest.raises(ConfigurationError, match=r"reset\(seed=5\) gave two different observations"):
        check_environment(Forgetful(), seed=5)


def test_dict_observations_with_other_keys_are_named() -> None:
    class Renamed(ScriptedEnv):
        def _observe(self) -> Any:
            return {"episode": np.zeros(1, np.float32), "stp": np.zeros(1, np.float32)}

    with pytest.raises(ConfigurationError, match=r"returned the keys \['episode', 'stp'\]; the space has the keys"):
        check_environment(Renamed([Episode(rewards=(1,))], as_dict=True))


@pytest.mark.parametrize(
    ("observation", "says"),
    [
        ((1, 10), r"returned 10 as observation/1, which is not in Discrete\(3, start=7\)"),
        ((1, 7, 7), r"returned a tuple of 3; the space is a Tuple of 2"),
        ([1, 7], r"returned a list; the space is a Tuple of 2"),
        ((np.array([0, 4]), 7), r"as observation/0, which is not in MultiDiscrete\(\[2 4\]\)"),
    ],
)
def test_categories_and_tuples_outside_their_space_are_named(observation: Any, says: str) -> None:
    env = Walk(observation=observation, reset=((np.array([1, 3]), 7), {}))
    env.observation_space = spaces.Tuple((spaces.MultiDiscrete([2, 4]), spaces.Discrete(3, start=7)))
    with pytest.raises(ConfigurationError, match=says):
        check_environment(env, num_steps=1)


def test_an_unsupported_space_is_named() -> None:
    env = Walk()
    env.observation_space = spaces.Text(4)
    with pytest.raises(ConfigurationError, match="Text"):
        check_environment(env)
