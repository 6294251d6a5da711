"""Action masks in the observation, and episodes that end with a life."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from rlsrl.data.slots import rollout_layout
from rlsrl.data.specs import ArraySpec
from rlsrl.envs.check import check_environment
from rlsrl.envs.factory import EnvironmentSource, environment_spec, make_environment
from rlsrl.envs.faults import EnvironmentFaults
from rlsrl.envs.interface import EnvironmentInterface
from rlsrl.envs.vector import LoopVectorEnv
from rlsrl.envs.wrappers import ActionMask, EpisodicLife
from rlsrl.runtime.errors import ConfigurationError, EnvironmentFailed
from rlsrl.testing.environments import EchoEnv, Episode, MaskedEnv, ScriptedEnv, at_any_rank
from rlsrl.testing.rollouts import joint_action

MASKED = "rlsrl.testing.environments:MaskedEnv"


def filled(envs: LoopVectorEnv, num_steps: int, actions: Any) -> dict[str, np.ndarray]:
    layout = rollout_layout(envs.spec, num_steps=num_steps, num_lanes=envs.num_envs)
    arrays = layout.view(bytearray(layout.nbytes))
    envs.begin(arrays)
    for step in range(num_steps):
        envs.step(arrays, step, actions(arrays, step))
    return arrays


def last_legal(arrays: dict[str, np.ndarray], step: int) -> np.ndarray:
    mask = arrays["observation/action_mask"][step]
    return mask.shape[1] - 1 - mask[:, ::-1].argmax(axis=1)


@pytest.mark.parametrize("in_info", [False, True])
def test_a_mask_is_part_of_the_observation_wherever_the_environment_has_it(in_info: bool) -> None:
    source = EnvironmentSource(factory=MASKED, kwargs={"in_info": in_info}, action_mask="action_mask")
    spec = environment_spec(source)
    assert spec.action.mask == "observation/action_mask"
    assert spec.observation == {
        "observation/state/legal": ArraySpec(shape=(4,), dtype="float32"),
        "observation/state/step": ArraySpec(shape=(1,), dtype="float32"),
        "observation/action_mask": ArraySpec(shape=(4,), dtype="int8"),
    }
    assert list(spec.unmasked.observation) == ["observation/state/legal", "observation/state/step"]
    assert spec.unmasked.action.mask is None

    envs = LoopVectorEnv(lambda _: make_environment(source), seeds=[1, 2])
    arrays = filled(envs, 40, last_legal)
    np.testing.assert_array_equal(arrays["observation/action_mask"], arrays["observation/state/legal"])
    assert (arrays["reward"] == arrays["mask"]).all(), "the last legal action each time"
    assert not arrays["mask"].all(), "some episodes ended"


def test_without_the_field_a_mask_is_an_observation_like_others() -> None:
    spec = environment_spec(EnvironmentSource(factory=MASKED))
    assert spec.action.mask is None
    assert "observation/action_mask" in spec.unmasked.observation


def test_a_mask_in_info_joins_an_observation_that_is_no_dict() -> None:
    class Told(ScriptedEnv):
        def reset(self, **arguments: Any) -> Any:
            observation, _ = super().reset(**arguments)
            return observation, {"legal": np.array([0, 2])}

        def step(self, action: Any) -> Any:
            *result, _ = super().step(action)
            return (*result, {"legal": [True, False]} if self._taken < 2 else {})

    env = ActionMask(Told([Episode(rewards=(1, 1))]), "legal")
    assert EnvironmentInterface.of(env).spec.observation == {
        "observation/observation": ArraySpec(shape=(2,), dtype="float32"),
        "observation/legal": ArraySpec(shape=(2,), dtype="int8"),
    }
    observation, _ = env.reset(seed=0)
    assert observation["observation"].tolist() == [0, 0]
    assert observation["legal"].tolist() == [0, 1]
    assert env.step(0)[0]["legal"].tolist() == [1, 0]
    assert env.step(0)[0]["legal"].tolist() == [0, 0], "the final observation needs no mask"


@pytest.mark.parametrize("in_info", [False, True])
def test_the_check_of_an_environment_takes_legal_actions_only(in_info: bool) -> None:
    check_environment(ActionMask(MaskedEnv(in_info=in_info), "action_mask"))
    with pytest.raises(RuntimeError, match="is illegal"):
        check_environment(MaskedEnv(in_info=in_info))


@pytest.mark.parametrize("as_one_array", [False, True])
def test_a_mask_of_several_choices_has_those_of_each_entry_in_turn(as_one_array: bool) -> None:
    class Echo(EchoEnv):
        def _info(self) -> dict[str, Any]:
            return {"action_mask": np.concatenate(self._legal) if as_one_array else self._legal}

    env = ActionMask(Echo("choices", masked=True), "action_mask")
    check_environment(env)
    spec = EnvironmentInterface.of(env).spec
    assert spec.action == replace(joint_action(("categorical", 3), ("categorical", 4)), mask="observation/action_mask")
    assert spec.observation == {
        "observation/observation": ArraySpec(shape=(2,), dtype="int64", categories=((0, 3), (-1, 4))),
        "observation/action_mask": ArraySpec(shape=(7,), dtype="int8"),
    }
    observation, _ = env.reset(seed=1)
    np.testing.assert_array_equal(observation["action_mask"], np.concatenate(env.unwrapped._legal))
    with pytest.raises(RuntimeError, match="is illegal"):
        check_environment(Echo("choices", masked=True))


def test_each_entry_of_an_action_needs_a_legal_choice() -> None:
    env = ActionMask(EchoEnv("choices", masked=True), "action_mask")
    env.reset(seed=0)
    says = "the action mask 'action_mask' is all 0 for entry 1 of the action; at least one of 4 actions must be legal"
    with pytest.raises(ValueError, match=says):
        env._with_mask({}, {"action_mask": np.array([1, 0, 0, 0, 0, 0, 0])}, is_final=False)
    with pytest.raises(ValueError, match="where 7 entries are needed"):
        env._with_mask({}, {"action_mask": (np.ones(4), np.ones(3))}, is_final=False)


class NoneLegal(MaskedEnv):
    """Has no legal action from the third step on."""

    def _draw(self) -> None:
        super()._draw()
        if self._taken == 3:
            self.legal[:] = 0


@pytest.mark.parametrize("in_info", [False, True])
def test_a_mask_that_allows_nothing_is_refused_with_the_environments_rank(in_info: bool) -> None:
    def make() -> ActionMask:
        return ActionMask(NoneLegal(in_info=in_info), "action_mask")

    envs = LoopVectorEnv(at_any_rank(make), seeds=[1], first_rank=5, faults=EnvironmentFaults(error_budget=0))
    says = "environment rank 5 .* the action mask 'action_mask' is all 0; at least one of 4 actions must be legal"
    with pytest.raises(EnvironmentFailed, match=says):
        filled(envs, 5, last_legal)


@pytest.mark.parametrize("info", [{}, {"action_mask": [1, 1]}, {"action_mask": None}])
def test_a_mask_that_is_nowhere_is_named(info: dict[str, Any]) -> None:
    class Silent(ScriptedEnv):
        def reset(self, **arguments: Any) -> Any:
            return super().reset(**arguments)[0], info

    env = ActionMask(Silent([Episode(rewards=(1,))], action_space=spaces.Discrete(3)), "action_mask")
    with pytest.raises(ValueError, match=r"neither in the observation nor in info: .*, where 3 entries are needed"):
        env.reset()


@pytest.mark.parametrize(
    ("env", "says"),
    [
        (
            ScriptedEnv([Episode(rewards=(1,))], action_space=spaces.Box(-1, 1, (2,))),
            "actionMask needs Discrete or MultiDiscrete actions",
        ),
        (ScriptedEnv([Episode(rewards=(1,))], as_dict=True), r"Box.* at 'step'; a mask of 2 actions has the shape"),
    ],
)
def test_what_can_have_no_mask_is_refused(env: gymnasium.Env[Any, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        ActionMask(env, "step")


class Lives(ScriptedEnv):
    """A game of three lives whose episodes are whole games. Each negative reward costs a life."""

    def __init__(self, *episodes: Episode) -> None:
        super().__init__(episodes)
        self.ale = SimpleNamespace(lives=lambda: self.lives)
        self.lives = 0

    def reset(self, **arguments: Any) -> Any:
        self.lives = 3
        return super().reset(**arguments)

    def step(self, action: Any) -> Any:
        result = super().step(action)
        self.lives -= result[1] < 0
        return result


def test_an_episode_ends_with_each_life_and_the_score_is_that_of_the_game() -> None:
    games = [Episode(rewards=(5, -1, 7, -1, 2, -1)), Episode(rewards=(1, 1), end="truncated")]
    envs = LoopVectorEnv(lambda _: EpisodicLife(Lives(*games)), seeds=[0])
    arrays = filled(envs, 11, lambda *_: np.zeros(1, np.int64))
    lane = {name: array[:, 0].tolist() for name, array in arrays.items() if array.ndim > 1}
    over = [0, 1, 0, 0, 1, 0, 0, 1, 0, 0, 0]
    assert lane["terminated"] == over
    assert lane["truncated"] == [0] * 10 + [1]
    assert lane["mask"] == [1, 1, 0, 1, 1, 0, 1, 1, 0, 1, 1]
    assert lane["reward"] == [5, -1, 0, 7, -1, 0, 2, -1, 0, 1, 1]
    assert lane["episode_return"] == [0] * 7 + [11] + [0] * 2 + [2], "of whole games"
    assert lane["episode_length"] == [0] * 7 + [6] + [0] * 2 + [2]
    frames = arrays["observation"][:, 0].tolist()
    assert frames[2] == frames[3] == [0, 2], "the next life begins with the observation that the last one ended with"
    assert frames[8:10] == [[0, 6], [1, 0]], "and the next game with a reset"


def test_the_last_life_ends_with_the_game_not_before() -> None:
    env = EpisodicLife(Lives(Episode(rewards=(-1, -1, -1, 4))))
    env.reset(seed=0)
    ends = []
    for _ in range(4):
        *_, terminated, _, info = env.step(0)
        ends.append((terminated, bool(info)))
        if info:
            env.reset()
    assert ends == [(True, True), (True, True), (False, False), (True, False)]


def test_a_seed_begins_a_new_game() -> None:
    env = EpisodicLife(Lives(Episode(rewards=(-1, 1)), Episode(rewards=(1,))))
    env.reset(seed=0)
    env.step(0)
    assert env.reset(seed=1)[0].tolist() == [1, 0]
