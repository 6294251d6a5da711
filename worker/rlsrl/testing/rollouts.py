"""Builders of small specs and filled slots, for tests of acting and training."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlsrl.data.slots import Slot, rollout_layout
from rlsrl.data.specs import ActionPart, ActionSpec, ArraySpec, EnvSpec, PartKind


def discrete_env_spec(num_features: int = 4, num_actions: int = 2) -> EnvSpec:
    """Return a spec with a vector observation and a discrete action, like CartPole's."""
    return EnvSpec(
        observation={"observation": ArraySpec(shape=(num_features,), dtype="float32")},
        action=discrete_action(num_actions),
    )


def categories_env_spec() -> EnvSpec:
    """Return a spec whose observation has two arrays of categories and a vector, with a discrete action."""
    return EnvSpec(
        observation={
            "observation/0": ArraySpec(shape=(), dtype="int64", categories=((0, 5),)),
            "observation/1": ArraySpec(shape=(2,), dtype="float32"),
            "observation/2": ArraySpec(shape=(2, 1), dtype="int32", categories=((-1, 2), (3, 4))),
        },
        action=discrete_action(3),
    )


def discrete_action(num_actions: int) -> ActionSpec:
    """Return the spec of a discrete action."""
    return ActionSpec(kind="discrete", array=ArraySpec(shape=(), dtype="int64"), num_actions=num_actions)


def continuous_env_spec(num_features: int = 4, num_dimensions: int = 2) -> EnvSpec:
    """Return a spec with a vector observation and a continuous action, like Pendulum's."""
    return EnvSpec(
        observation={"observation": ArraySpec(shape=(num_features,), dtype="float32")},
        action=continuous_action(num_dimensions),
    )


def continuous_action(num_dimensions: int) -> ActionSpec:
    """Return the spec of a continuous action, each entry from -1 to 1."""
    array = ArraySpec(shape=(num_dimensions,), dtype="float32")
    return ActionSpec(kind="continuous", array=array, low=(-1.0,) * num_dimensions, high=(1.0,) * num_dimensions)


def joint_action(*parts: tuple[PartKind, int]) -> ActionSpec:
    """Return the spec of an action of several parts, given as (kind, number of outputs)."""
    made = tuple(ActionPart(kind=kind, num_outputs=number) for kind, number in parts)
    dtype = "float32" if any(part.kind == "gaussian" for part in made) else "int64"
    array = ArraySpec(shape=(sum(part.num_entries for part in made),), dtype=dtype)
    return ActionSpec(kind="joint", array=array, joint=made)


CHOICES_AND_FLAGS = joint_action(("categorical", 3), ("categorical", 4), ("bernoulli", 2))
"""Actions of a ``Tuple((MultiDiscrete([3, 4]), MultiBinary(2)))``: vectors of integers."""
MIXED = joint_action(("gaussian", 2), ("categorical", 3), ("bernoulli", 2), ("gaussian", 1))
"""Actions of a ``Tuple`` with two boxes of floats: deviations stand between outputs."""


def empty_slot(env_spec: EnvSpec, *, num_steps: int, num_lanes: int) -> Slot:
    """Return a slot of zeros with its own memory."""
    layout = rollout_layout(env_spec, num_steps=num_steps, num_lanes=num_lanes)
    return Slot(arrays=layout.view(bytearray(layout.nbytes)))


def random_slot(
    env_spec: EnvSpec, *, num_steps: int, num_lanes: int, rng: np.random.Generator, end_probability: float = 0.1
) -> Slot:
    """Return a slot of random observations, actions and rewards, with ends as in NEXT_STEP autoreset."""
    slot = empty_slot(env_spec, num_steps=num_steps, num_lanes=num_lanes)
    arrays, shape = slot.arrays, (num_steps, num_lanes)
    for path in env_spec.observation:
        array, spec = arrays[path], env_spec.observation[path]
        if spec.categories:
            first, number = (np.reshape(each, spec.shape) for each in np.array(spec.categories).T)
            array[...] = rng.integers(first, first + number, array.shape)
        elif array.dtype.kind == "f":
            array[...] = rng.standard_normal(array.shape)
        else:
            array[...] = rng.integers(0, 2, array.shape)
    arrays["action"][...] = random_actions(env_spec.action, arrays["action"].shape, rng)
    arrays["behavior_log_prob"][...] = np.log(rng.uniform(0.2, 0.8, shape))
    arrays["reward"][...] = rng.standard_normal(shape)
    fill_ends(slot, rng=rng, end_probability=end_probability)
    return slot


def random_actions(action: ActionSpec, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[Any]:
    """Return random actions; floats may exceed the bounds, as a policy's do."""
    if action.kind == "discrete":
        return rng.integers(0, action.num_actions, shape)
    leading = shape[:-1]
    parts: list[NDArray[Any]] = []
    for part in action.parts:
        if part.kind == "gaussian":
            parts.append(rng.standard_normal((*leading, part.num_entries)))
        else:
            num_values = part.num_outputs if part.kind == "categorical" else 2
            parts.append(rng.integers(0, num_values, (*leading, part.num_entries)))
    return np.concatenate(parts, axis=-1)


def fill_ends(slot: Slot, *, rng: np.random.Generator, end_probability: float) -> None:
    """End episodes at random, half of them by truncation; the step after an end is masked."""
    arrays = slot.arrays
    resetting = np.zeros(slot.num_lanes, np.bool_)
    for t in range(len(arrays["mask"])):
        ends = ~resetting & (rng.random(slot.num_lanes) < end_probability)
        arrays["terminated"][t] = ends & (rng.random(slot.num_lanes) < 0.5)
        arrays["truncated"][t] = ends & ~arrays["terminated"][t]
        arrays["mask"][t] = ~resetting
        resetting = ends
