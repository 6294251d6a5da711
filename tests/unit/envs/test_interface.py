"""An interface survives JSON, describes the environment's arrays, and translates observations and actions."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from rlsrl.envs.codec import CodecError
from rlsrl.envs.factory import EnvironmentSource, environment_interface, make_environment
from rlsrl.envs.interface import EnvironmentInterface
from rlsrl.envs.spaces import observation_keys

MASKED = {"observation": spaces.Box(-1, 1, (3,), np.float64), "legal": spaces.MultiBinary(4)}


class Spaced(gymnasium.Env[Any, Any]):
    """An environment of any spaces."""

    def __init__(self, observation: spaces.Space[Any], action: spaces.Space[Any]) -> None:
        self.observation_space, self.action_space = observation, action

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        return self.observation_space.sample(), {}


def make_masked() -> gymnasium.Env[Any, Any]:
    return Spaced(spaces.Dict(MASKED), spaces.Discrete(4))


def make_nested() -> gymnasium.Env[Any, Any]:
    nested = spaces.Dict({"a": spaces.Tuple([spaces.Discrete(3), spaces.Box(0, 255, (2, 2), np.uint8)])})
    return Spaced(nested, spaces.Tuple([spaces.Discrete(2, start=1), spaces.Box(-2, 3, (2,), np.float32)]))


SOURCES = [
    EnvironmentSource(id="CartPole-v1"),
    EnvironmentSource(id="CartPole-v1", frame_stack=3),
    EnvironmentSource(id="Pendulum-v1", vector_actions="squashed"),
    EnvironmentSource(id="Pendulum-v1"),
    EnvironmentSource(factory=f"{__name__}:make_masked", action_mask="legal"),
    EnvironmentSource(factory=f"{__name__}:make_nested"),
]


@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_an_interface_survives_json(source: EnvironmentSource) -> None:
    interface = environment_interface(source)
    back = EnvironmentInterface.from_json(json.loads(json.dumps(interface.to_json(), allow_nan=False)))
    assert back == interface
    assert back.spec == interface.spec


@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_observations_become_the_arrays_of_the_spec(source: EnvironmentSource) -> None:
    interface = environment_interface(source)
    env = make_environment(source)
    observation, _ = env.reset(seed=0)
    arrays = interface.arrays(observation)
    assert {path: (array.shape, array.dtype.name) for path, array in arrays.items()} == {
        path: (spec.shape, spec.dtype) for path, spec in interface.spec.observation.items()
    }
    for path, keys in observation_keys(env.observation_space).items():
        value = observation
        for key in keys:
            value = value[key]
        np.testing.assert_array_equal(arrays[path], np.asarray(value).astype(arrays[path].dtype))
    env.close()


def test_actions_are_scaled_to_the_environments_own_space() -> None:
    squashed = environment_interface(EnvironmentSource(id="Pendulum-v1", vector_actions="squashed"))
    assert squashed.action_space == spaces.Box(-2.0, 2.0, (1,), np.float32)
    assert squashed.spec.action.low == (-1.0,)
    np.testing.assert_array_equal(squashed.actions(np.array([[-1.0], [0.5]], np.float32)), [[-2.0], [1.0]])
    gaussian = environment_interface(EnvironmentSource(id="Pendulum-v1"))
    np.testing.assert_array_equal(gaussian.actions(np.array([[-9.0], [0.5]], np.float32)), [[-2.0], [0.5]])
    shifted = EnvironmentInterface(
        observation_space=spaces.Box(0, 1, (1,), np.float32), action_space=spaces.Discrete(3, start=5)
    )
    assert [*shifted.actions(np.array([0, 2]))] == [5, 7]


def test_wrong_observations_are_refused_by_their_path() -> None:
    interface = EnvironmentInterface.of(make_nested())
    with pytest.raises(ValueError, match=r"observation/a/1 has the shape \(3,\); expected \(2, 2\)"):
        interface.arrays({"a": (1, np.zeros(3, np.uint8))})
    with pytest.raises(ValueError, match=r"the observation has no observation/a/0"):
        interface.arrays({"b": 1})
    with pytest.raises(ValueError, match=r"the observation has no observation/a/0"):
        interface.arrays(3)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda value: value.pop("action_space"), "is not an environment's interface: KeyError"),
        (lambda value: value.update(vector_actions="cubic"), "vector_actions is 'cubic'; allowed: gaussian"),
        (lambda value: value.update(observation_space={"type": "Text"}), "space type 'Text'"),
    ],
)
def test_what_is_no_interface_is_refused(change: Callable[[dict[str, Any]], object], text: str) -> None:
    value = environment_interface(SOURCES[0]).to_json()
    change(value)
    with pytest.raises(CodecError, match=text):
        EnvironmentInterface.from_json(value)
    with pytest.raises(CodecError, match="is not an environment's interface"):
        EnvironmentInterface.from_json(None)  # type: ignore[arg-type]
