"""Builders of small specs, for tests of acting and training."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rlsrl.api.spec import VectorActions
from rlsrl.buffers.replay.rows import IMPORTANCE, NEXT
from rlsrl.data.specs import ActionPart, ActionSpec, Arrays, ArraySpec, EnvSpec, PartKind

MASK = "observation/mask"
"""Path of the mask of ``masked_env_spec``."""


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


def masked_env_spec() -> EnvSpec:
    """Return a spec with a vector, an action mask at ``MASK`` and a discrete action."""
    observation = {"observation/x": ArraySpec(shape=(4,), dtype="float32"), MASK: ArraySpec(shape=(3,), dtype="int8")}
    action = ActionSpec(kind="discrete", array=ArraySpec(shape=(), dtype="int64"), num_actions=3, mask=MASK)
    return EnvSpec(observation=observation, action=action)


def masked_rows(num_rows: int, seed: int) -> Arrays:
    """Return observations, observations that follow, and legal actions of ``masked_env_spec``, as a store gives rows.

    In an eighth of the rows, on average, what follows has no legal action.
    """
    rng = np.random.default_rng(seed)
    action = rng.integers(0, 3, num_rows)
    mask, next_mask = rng.integers(0, 2, (2, num_rows, 3), np.int8)
    mask[np.arange(num_rows), action] = 1
    vector, next_vector = rng.standard_normal((2, num_rows, 4), np.float32)
    observation = {"observation/x": vector, MASK: mask}
    return {**observation, NEXT + "observation/x": next_vector, NEXT + MASK: next_mask, "action": action}


def with_outcomes(rows: Arrays, seed: int) -> Arrays:
    """Return rows of observations and actions with rewards, discounts and importance ratios, as a store gives them.

    In a third of the rows, on average, an episode ended.
    """
    rng = np.random.default_rng(seed)
    num_rows = len(rows["action"])
    return {
        **rows,
        "reward": 3 * rng.standard_normal(num_rows, np.float32),
        "discount": np.where(rng.random(num_rows) < 1 / 3, 0.0, 0.9**3).astype(np.float32),
        IMPORTANCE: rng.uniform(0.1, 1.0, num_rows).astype(np.float32),
    }


def vector_rows(num_rows: int, seed: int, *, num_features: int = 4, num_dimensions: int = 2) -> Arrays:
    """Return observations, observations that follow, and actions of ``bounded_env_spec``, as a store gives rows."""
    rng = np.random.default_rng(seed)
    vector, following = rng.standard_normal((2, num_rows, num_features), np.float32)
    action = rng.uniform(-1, 1, (num_rows, num_dimensions)).astype(np.float32)
    return {"observation": vector, NEXT + "observation": following, "action": action}


def pixels_env_spec() -> EnvSpec:
    """Return a spec with a small image and a discrete action."""
    return EnvSpec(observation={"observation": ArraySpec(shape=(2, 36, 36), dtype="uint8")}, action=discrete_action(3))


def discrete_action(num_actions: int) -> ActionSpec:
    """Return the spec of a discrete action."""
    return ActionSpec(kind="discrete", array=ArraySpec(shape=(), dtype="int64"), num_actions=num_actions)


def continuous_env_spec(num_features: int = 4, num_dimensions: int = 2) -> EnvSpec:
    """Return a spec with a vector observation and a continuous action, like Pendulum's."""
    return EnvSpec(
        observation={"observation": ArraySpec(shape=(num_features,), dtype="float32")},
        action=continuous_action(num_dimensions),
    )


def bounded_env_spec(vectors: VectorActions, num_features: int = 4, num_dimensions: int = 2) -> EnvSpec:
    """Return ``continuous_env_spec`` for a policy that draws vectors within their bounds in that way."""
    spec = continuous_env_spec(num_features, num_dimensions)
    return replace(spec, action=replace(spec.action, vectors=vectors))


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
