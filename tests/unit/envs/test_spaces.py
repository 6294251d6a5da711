"""Gymnasium's spaces as array specs, and actions in Gymnasium's form."""

from __future__ import annotations

from dataclasses import replace

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from rlsrl.data.random_slots import random_slot
from rlsrl.data.specs import ArraySpec
from rlsrl.envs.interface import EnvironmentInterface
from rlsrl.envs.spaces import action_decoder, action_spec, observation_specs
from rlsrl.runtime.errors import ConfigurationError
from rlsrl.testing.rollouts import discrete_env_spec, joint_action

BOX = spaces.Box(-1, 1, (3,), np.float32)


@pytest.mark.parametrize(
    ("space", "specs"),
    [
        (BOX, {"observation": ArraySpec(shape=(3,), dtype="float32")}),
        (spaces.Box(0, 255, (4, 84, 84), np.uint8), {"observation": ArraySpec(shape=(4, 84, 84), dtype="uint8")}),
        (spaces.Box(-1, 1, (2,), np.float64), {"observation": ArraySpec(shape=(2,), dtype="float32")}),
        (
            spaces.Dict({"camera": spaces.Box(0, 255, (2, 2), np.uint8), "joints": BOX}),
            {
                "observation/camera": ArraySpec(shape=(2, 2), dtype="uint8"),
                "observation/joints": ArraySpec(shape=(3,), dtype="float32"),
            },
        ),
        (spaces.Box(0, 9, (2,), np.int64), {"observation": ArraySpec(shape=(2,), dtype="int64")}),
        (
            spaces.Discrete(5, start=-2),
            {"observation": ArraySpec(shape=(), dtype="int64", categories=((-2, 5),))},
        ),
        (
            spaces.MultiDiscrete([[2, 3]], start=[[1, 0]], dtype=np.int32),
            {"observation": ArraySpec(shape=(1, 2), dtype="int32", categories=((1, 2), (0, 3)))},
        ),
        (
            spaces.Tuple((spaces.Discrete(2), spaces.Dict({"goal": BOX}))),
            {
                "observation/0": ArraySpec(shape=(), dtype="int64", categories=((0, 2),)),
                "observation/1/goal": ArraySpec(shape=(3,), dtype="float32"),
            },
        ),
        (spaces.MultiBinary(3), {"observation": ArraySpec(shape=(3,), dtype="int8")}),
        (
            spaces.Dict({"arm": spaces.Dict({"joints": BOX, "touches": spaces.MultiBinary([2, 2])}), "goal": BOX}),
            {
                "observation/arm/joints": ArraySpec(shape=(3,), dtype="float32"),
                "observation/arm/touches": ArraySpec(shape=(2, 2), dtype="int8"),
                "observation/goal": ArraySpec(shape=(3,), dtype="float32"),
            },
        ),
    ],
)
def test_observations_become_specs_by_path(space: spaces.Space, specs: dict[str, ArraySpec]) -> None:
    assert observation_specs(space) == specs


@pytest.mark.parametrize(
    ("space", "says"),
    [
        (spaces.Sequence(BOX), r"observation is a Sequence, .*; allowed are Box, Discrete, MultiDiscrete, .* Tuple of"),
        (spaces.Tuple(()), r"Tuple\(\) is empty"),
        (spaces.Dict({}), r"Dict\(\) is empty"),
        (spaces.Dict({"inner": spaces.Dict({})}), r"at 'inner': Dict\(\) is empty"),
        (spaces.Tuple((BOX, spaces.Text(3))), "observation/1 is a Text"),
        (spaces.Dict({"inner": spaces.Dict({"n": spaces.Text(3)})}), "observation/inner/n is a Text"),
        (spaces.Dict({"a": spaces.Dict({"b": BOX}), "a/b": BOX}), "two arrays with the path 'observation/a/b'"),
    ],
)
def test_other_observations_are_refused_by_name(space: spaces.Space, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        observation_specs(space)


def test_a_discrete_action_counts_from_zero_and_is_handed_over_from_its_start() -> None:
    space = spaces.Discrete(3, start=5)
    spec = action_spec(space)
    assert (spec.kind, spec.num_actions, spec.array) == ("discrete", 3, ArraySpec(shape=(), dtype="int64"))
    decoded = action_decoder(space)(np.array([0, 2, 1]))
    assert list(decoded) == [5, 7, 6]
    assert all(space.contains(action) for action in decoded)


def test_discrete_actions_are_integers_as_gymnasiums_own_vector_environments_give_them() -> None:
    assert [type(action) for action in action_decoder(spaces.Discrete(2))(np.array([0, 1]))] == [np.int64] * 2


def test_continuous_actions_are_flat_for_the_policy_and_clipped_and_shaped_for_the_environment() -> None:
    space = spaces.Box(
        np.array([[-1.0, -2.0], [0.0, -np.inf]]), np.array([[1.0, 2.0], [3.0, np.inf]]), dtype=np.float64
    )
    spec = action_spec(space)
    assert spec.array == ArraySpec(shape=(4,), dtype="float32")
    assert (spec.low, spec.high) == ((-1.0, -2.0, 0.0, -np.inf), (1.0, 2.0, 3.0, np.inf))
    chosen = np.array([[-9, 0.5, -1, 1e9], [9, -9, 9, -1e9]], np.float32)
    decoded = action_decoder(space)(chosen)
    np.testing.assert_array_equal(decoded, [[[-1, 0.5], [0, 1e9]], [[1, -2], [3, -1e9]]])
    assert all(space.contains(action) for action in decoded)


def test_continuous_actions_have_the_spaces_dtype() -> None:
    space = spaces.Box(-1, 1, (2,), np.float16)
    (decoded,) = action_decoder(space)(np.array([[0.5, 7]], np.float32))
    assert space.contains(decoded)


def test_continuous_actions_are_not_overwritten_by_later_ones() -> None:
    decode = action_decoder(BOX)
    chosen = np.zeros((1, 3), np.float32)
    kept = decode(chosen)[0]
    chosen[:] = 1
    decode(chosen)
    np.testing.assert_array_equal(kept, [0, 0, 0])


NESTED = spaces.Tuple((
    spaces.Discrete(3, start=1),
    spaces.Tuple((spaces.Box(np.array([0.0, -np.inf]), np.array([5.0, np.inf])), spaces.MultiBinary([1, 2]))),
    spaces.MultiDiscrete([2, 4], start=[0, 7]),
))  # fmt: skip
JOINT = {
    "choices": (spaces.MultiDiscrete([2, 3]), joint_action(("categorical", 2), ("categorical", 3))),
    "one choice": (spaces.MultiDiscrete([4]), joint_action(("categorical", 4))),
    "choices on a grid": (
        spaces.MultiDiscrete([[2, 3]], start=[[5, -1]], dtype=np.int32),
        joint_action(("categorical", 2), ("categorical", 3)),
    ),
    "flags": (spaces.MultiBinary([2, 2]), joint_action(("bernoulli", 4))),
    "choice in a tuple": (spaces.Tuple((spaces.Discrete(4),)), joint_action(("categorical", 4))),
    "nested": (
        NESTED,
        joint_action(("categorical", 3), ("gaussian", 2), ("bernoulli", 2), ("categorical", 2), ("categorical", 4)),
    ),
}


@pytest.mark.parametrize("name", JOINT)
def test_actions_of_several_parts_are_one_vector_for_the_policy_and_the_space_for_the_environment(name: str) -> None:
    space, spec = JOINT[name]
    assert action_spec(space) == spec
    rng, decode = np.random.default_rng(0), action_decoder(space)
    slot = random_slot(replace(discrete_env_spec(), action=spec), num_steps=30, num_lanes=5, rng=rng)
    for chosen in slot.arrays["action"]:
        decoded = decode(chosen)
        assert len(decoded) == 5
        assert all(space.contains(action) for action in decoded), decoded


def test_parts_keep_their_order_and_their_values() -> None:
    decode = action_decoder(NESTED)
    first, second = decode(np.array([[2, -3, 0.5, 1, 0, 1, 3], [0, 9, -1e9, 0, 1, 0, 0]], np.float32))
    assert first[0] == 3 and second[0] == 1
    np.testing.assert_array_equal(first[1][0], [0, 0.5])
    np.testing.assert_array_equal(second[1][0], np.array([5, -1e9], np.float32))
    np.testing.assert_array_equal(first[1][1], [[1, 0]])
    np.testing.assert_array_equal(second[1][1], [[0, 1]])
    np.testing.assert_array_equal(first[2], [1, 10])
    np.testing.assert_array_equal(second[2], [0, 7])


def test_integers_are_not_overwritten_by_later_ones() -> None:
    decode = action_decoder(spaces.MultiDiscrete([2, 3]))
    chosen = np.zeros((1, 2), np.int64)
    kept = decode(chosen)[0]
    chosen[:] = 1
    np.testing.assert_array_equal(kept, [0, 0])


@pytest.mark.parametrize(
    ("space", "says"),
    [
        (
            spaces.Box(0, 9, (2,), np.int64),
            "action is a Box, .*; allowed are Discrete, .* Box of a float dtype, and Tup",
        ),
        (spaces.Dict({}), "action is a Dict"),
        (spaces.Tuple(()), "action is a Tuple"),
        (spaces.Tuple((spaces.Discrete(2), spaces.Tuple((spaces.Text(2),)))), "action/1/0 is a Text"),
    ],
)
def test_other_actions_are_refused_by_name(space: spaces.Space, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        action_spec(space)
    with pytest.raises(ConfigurationError, match=says):
        action_decoder(space)


def test_an_environment_without_spaces_is_named() -> None:
    class Bare(gymnasium.Env):
        observation_space = BOX

    with pytest.raises(ConfigurationError, match="Bare has no action_space"):
        EnvironmentInterface.of(Bare())
