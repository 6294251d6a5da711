"""Environments whose actions are scaled from [-1, 1] to their bounds."""

from __future__ import annotations

from typing import Any, cast

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

from rlsrl.data.slots import rollout_layout
from rlsrl.data.specs import ActionPart
from rlsrl.envs.bounded import BoundedActions, BoundedVectorActions
from rlsrl.envs.check import check_environment
from rlsrl.envs.factory import EnvironmentSource, environment_spec, make_environment
from rlsrl.envs.native import NativeVectorEnv, make_native
from rlsrl.envs.vector import LoopVectorEnv
from rlsrl.runtime.errors import ConfigurationError
from rlsrl.testing.environments import at_any_rank

LOW, HIGH = np.array([-2.0, 0.0, 10.0], np.float32), np.array([4.0, 1.0, 30.0], np.float32)


class Taking(gymnasium.Env[Any, Any]):
    """Keeps the actions that it takes, and shows the last one."""

    def __init__(self, low: Any = LOW, high: Any = HIGH, dtype: Any = np.float32) -> None:
        self.action_space: Any = spaces.Box(np.asarray(low), np.asarray(high), dtype=dtype)
        self.observation_space = spaces.Box(-np.inf, np.inf, self.action_space.shape, np.float32)
        self.taken: list[Any] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(self.action_space.shape, np.float32), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        self.taken.append(action)
        return np.asarray(action, np.float32), 0.0, False, False, {}


def make(**kwargs: Any) -> Taking:
    return Taking(**kwargs)


SOURCE = EnvironmentSource(factory=f"{__name__}:make", vector_actions="squashed")


def filled(envs: Any, actions: np.ndarray) -> np.ndarray:
    """Return the observations after each step with those actions, [T, N, 3]."""
    layout = rollout_layout(envs.spec, num_steps=len(actions), num_lanes=envs.num_envs)
    arrays = layout.view(bytearray(layout.nbytes))
    envs.begin(arrays)
    for step, action in enumerate(actions):
        arrays["action"][step] = action
        envs.step(arrays, step, arrays["action"][step])
    envs.close()
    seen: np.ndarray = arrays["observation"][1:]
    return seen


ACTIONS = np.random.default_rng(0).uniform(-1, 1, (6, 2, 3)).astype(np.float32)
ACTIONS[0] = [[-1, -1, -1], [1, 1, 1]]
ACTIONS[1] = 0
WANTED = LOW + (ACTIONS.astype(float) + 1) / 2 * (HIGH - LOW)


@pytest.mark.parametrize("in_bulk", [False, True])
def test_actions_are_scaled_to_the_bounds_of_each_entry(in_bulk: bool) -> None:
    if in_bulk:
        envs: Any = NativeVectorEnv(
            lambda: BoundedVectorActions(SyncVectorEnv([Taking] * 2, copy=False), "squashed"), seed=0
        )
    else:
        envs = LoopVectorEnv(at_any_rank(lambda: make_environment(SOURCE)), seeds=range(2))
    assert envs.spec == environment_spec(SOURCE)
    np.testing.assert_allclose(filled(envs, ACTIONS), WANTED, rtol=1e-6)


@pytest.mark.parametrize("vectors", ["squashed", "clipped"])
def test_the_spec_says_how_the_actions_are_drawn(vectors: Any) -> None:
    action = environment_spec(EnvironmentSource(id="Pendulum-v1", vector_actions=vectors)).action
    assert (action.low, action.high, action.vectors) == ((-1.0,), (1.0,), vectors)
    assert action.parts == (ActionPart(kind=vectors, num_outputs=1),)
    plain = environment_spec(EnvironmentSource(id="Pendulum-v1")).action
    assert (plain.low, plain.high, plain.vectors) == ((-2.0,), (2.0,), "gaussian")


def test_shape_and_dtype_are_those_of_the_environment() -> None:
    env = Taking(low=[[-3.0, 0.0]], high=[[3.0, 6.0]], dtype=np.float64)
    bounded = BoundedActions(env, "clipped")
    bounded.step(np.array([[1.0, -0.5]], np.float32))
    assert env.taken[0].dtype == np.float64
    assert env.taken[0].tolist() == [[3.0, 1.5]]


def test_a_box_of_integers_is_refused_as_with_other_algorithms() -> None:
    ends = {"low": np.zeros(3, np.uint8), "high": np.full(3, 255, np.uint8), "dtype": np.uint8}
    for vectors in ("gaussian", "squashed"):
        source = EnvironmentSource(factory=f"{__name__}:make", kwargs=ends, vector_actions=cast("Any", vectors))
        with pytest.raises(ConfigurationError, match=r"action is a Box, .*uint8.*; allowed are .*Box of a float dtype"):
            environment_spec(source)


def test_rounding_stays_within_the_bounds() -> None:
    low, high = np.full(3, 0.1, np.float32), np.array([0.3, 0.7, 1e7], np.float32)
    env = Taking(low=low, high=high)
    bounded = BoundedActions(env, "squashed")
    for action in ACTIONS.reshape(-1, 3):
        bounded.step(action)


def test_discrete_actions_stay_as_they_are() -> None:
    for source in (EnvironmentSource(id="CartPole-v1"), EnvironmentSource(id="CartPole-v1", vector_actions="squashed")):
        assert environment_spec(source).action.kind == "discrete"
    native = make_native(EnvironmentSource(id="CartPole-v1", vector_actions="squashed"), 2, seed=0)
    assert native.spec.action.kind == "discrete"
    native.close()


@pytest.mark.parametrize(("low", "high"), [(-np.inf, 1.0), (-1.0, np.inf), (-np.inf, np.inf)])
def test_a_box_without_bounds_is_refused(low: float, high: float) -> None:
    ends = {"low": np.array([-1.0, low], np.float32), "high": np.array([1.0, high], np.float32)}
    with pytest.raises(ConfigurationError, match=r"within bounds, and Box.*finite bounds"):
        environment_spec(EnvironmentSource(factory=f"{__name__}:make", kwargs=ends, vector_actions="squashed"))
    assert environment_spec(EnvironmentSource(factory=f"{__name__}:make", kwargs=ends)).action.kind == "continuous"


def test_a_registered_vector_of_environments_is_scaled_too() -> None:
    name = "TakingInBulk-v0"

    def vector(num_envs: int, **_: Any) -> Any:
        return SyncVectorEnv([Taking] * num_envs, copy=False)

    gymnasium.register(name, entry_point=f"{__name__}:Taking", vector_entry_point=vector)
    try:
        envs = make_native(EnvironmentSource(id=name, vector_actions="clipped"), 2, seed=0)
        assert envs.spec.action.vectors == "clipped"
        np.testing.assert_allclose(filled(envs, ACTIONS), WANTED, rtol=1e-6)
    finally:
        gymnasium.registry.pop(name)


def test_such_an_environment_keeps_gymnasiums_contract() -> None:
    check_environment(BoundedActions(Taking(), "squashed"))
