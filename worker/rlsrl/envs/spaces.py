"""Gymnasium's spaces in our words: what an environment gives and takes, as array specs.

Observations: a Box, or a Dict of Boxes. Actions: a Discrete, or a Box of floats. Everything else is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlsrl.data.specs import ActionSpec, ArraySpec, EnvSpec
from rlsrl.runtime.errors import ConfigurationError

if TYPE_CHECKING:
    import gymnasium

OBSERVATION = "observation"
"""The path of a Box observation; those of a Dict are ``observation/<key>``."""


def spec_of(env: gymnasium.Env[Any, Any]) -> EnvSpec:
    """What ``env`` gives and takes, read from its spaces.

    Raises:
        ConfigurationError: a space that is not supported; the text names it, and what would be.
    """
    for name in ("observation_space", "action_space"):
        if getattr(env, name, None) is None:
            raise ConfigurationError(f"{type(env).__name__} sets no {name}, which says what it gives or takes")
    return EnvSpec(observation=observation_specs(env.observation_space), action=action_spec(env.action_space))


def observation_keys(space: gymnasium.Space[Any]) -> Mapping[str, str | None]:
    """For each path the key under which an observation holds that array; None: the observation is the array."""
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        return {f"{OBSERVATION}/{key}": key for key in space.spaces}
    return {OBSERVATION: None}


def observation_specs(space: gymnasium.Space[Any]) -> dict[str, ArraySpec]:
    """Array specs by path. 64-bit floats become 32-bit ones: policies compute in no more, and slots halve.

    Raises:
        ConfigurationError: neither a Box nor a Dict of Boxes.
    """
    from gymnasium import spaces

    if isinstance(space, spaces.Box):
        return {OBSERVATION: _box_spec(space, OBSERVATION)}
    if not isinstance(space, spaces.Dict):
        raise ConfigurationError(
            f"observation space {space} is a {type(space).__name__}; allowed are Box and Dict of Box "
            "(gymnasium.wrappers.FlattenObservation turns most others into a Box)"
        )
    if not space.spaces:
        raise ConfigurationError("observation space Dict() is empty; it needs at least one Box")
    specs: dict[str, ArraySpec] = {}
    for key, part in space.spaces.items():
        path = f"{OBSERVATION}/{key}"
        if not isinstance(key, str) or not isinstance(part, spaces.Box):
            raise ConfigurationError(
                f"observation space has {part} at {key!r}; a Dict may hold only Boxes, under keys that are text"
            )
        specs[path] = _box_spec(part, path)
    return specs


def _box_spec(space: gymnasium.spaces.Box, path: str) -> ArraySpec:
    dtype = np.dtype("float32") if space.dtype == np.float64 else np.dtype(space.dtype)
    if dtype.kind not in "biuf":
        raise ConfigurationError(f"{path} has dtype {dtype}; allowed are booleans, integers and floats")
    return ArraySpec(shape=space.shape, dtype=dtype.name)


def action_spec(space: gymnasium.Space[Any]) -> ActionSpec:
    """What a policy has to produce: ``[0, n)`` whatever a Discrete's start, a flat vector whatever a Box's shape.

    Raises:
        ConfigurationError: neither a Discrete nor a Box of floats.
    """
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        return ActionSpec(kind="discrete", array=ArraySpec(shape=(), dtype="int64"), num_actions=int(space.n))
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        return ActionSpec(
            kind="continuous",
            array=ArraySpec(shape=(space.low.size,), dtype="float32"),
            low=tuple(space.low.ravel().tolist()),
            high=tuple(space.high.ravel().tolist()),
        )
    raise ConfigurationError(
        f"action space {space} is a {type(space).__name__}; allowed are Discrete and Box of a float dtype"
    )


def action_decoder(space: gymnasium.Space[Any]) -> Callable[[NDArray[Any]], Sequence[Any]]:
    """A function from actions as policies choose them, [N, ...], to what each of N environments takes.

    Discrete: Python integers (cheapest for an environment to check) from the space's start. Box: clipped to the
    bounds, in the space's own dtype and shape. The arrays are new each time, since an environment may keep its last
    action.

    Raises:
        ConfigurationError: as ``action_spec``.
    """
    from gymnasium import spaces

    action_spec(space)
    if isinstance(space, spaces.Box):
        low, high, shape, dtype = space.low, space.high, (-1, *space.shape), space.dtype

        def clipped(actions: NDArray[Any]) -> Sequence[Any]:
            return list(np.clip(actions.reshape(shape), low, high, dtype=dtype))

        return clipped
    if start := int(space.start):  # type: ignore[attr-defined]  # a Discrete: action_spec refused all others

        def shifted(actions: NDArray[Any]) -> Sequence[Any]:
            return (actions + start).tolist()  # type: ignore[no-any-return]

        return shifted
    return np.ndarray.tolist
