"""Translates Gymnasium's spaces into array specs.

Observations: a Box, a Discrete, a MultiDiscrete, a MultiBinary, or a Dict or Tuple of those, nested or not. Actions: a
Discrete, or a Box of floats. All other spaces are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlsrl.data.specs import ActionSpec, ArraySpec, EnvSpec
from rlsrl.runtime.errors import ConfigurationError

if TYPE_CHECKING:
    import gymnasium

OBSERVATION = "observation"
"""The path of an observation that is one array. Paths of a Dict are ``observation/<key>``, those of a Tuple
``observation/<place>`` from 0; nested spaces have longer paths."""

Keys = tuple[str | int, ...]
"""The keys of Dicts and places in Tuples that lead to one array of an observation."""


def spec_of(env: gymnasium.Env[Any, Any]) -> EnvSpec:
    """Return the spec of ``env``, from its spaces and, for an action mask, from its outermost wrapper.

    Raises:
        ConfigurationError: a space is not supported; the text names it and the spaces that are.
    """
    from rlsrl.envs.wrappers import ActionMask

    for name in ("observation_space", "action_space"):
        if getattr(env, name, None) is None:
            raise ConfigurationError(f"{type(env).__name__} has no {name}; set it in its constructor")
    spec = spec_of_spaces(env.observation_space, env.action_space)
    if isinstance(env, ActionMask):
        return replace(spec, action=replace(spec.action, mask=f"{OBSERVATION}/{env.key}"))
    return spec


def spec_of_spaces(observation: gymnasium.Space[Any], action: gymnasium.Space[Any]) -> EnvSpec:
    """Return the spec of an environment with those spaces, without an action mask.

    Raises:
        ConfigurationError: as ``spec_of``.
    """
    return EnvSpec(observation=observation_specs(observation), action=action_spec(action))


def observation_keys(space: gymnasium.Space[Any]) -> dict[str, Keys]:
    """Return, for each path, the keys that lead to its array in an observation; () if the observation is the array."""
    return {path: keys for path, keys, _ in _leaves(space)}


def observation_specs(space: gymnasium.Space[Any]) -> dict[str, ArraySpec]:
    """Return array specs by path. 64-bit floats become 32-bit floats: policies compute in 32 bits, and slots halve.

    A Discrete or MultiDiscrete stays an array of integers, whose entries are categories.

    Raises:
        ConfigurationError: a space is not supported; the text names its path and the spaces that are.
    """
    specs: dict[str, ArraySpec] = {}
    for path, _, leaf in _leaves(space):
        if path in specs:
            raise ConfigurationError(f"observation space {space} has two arrays with the path {path!r}; rename a key")
        specs[path] = _leaf_spec(leaf, path)
    return specs


def _leaves(space: gymnasium.Space[Any], keys: Keys = ()) -> Iterator[tuple[str, Keys, gymnasium.Space[Any]]]:
    """Yield (path, keys that lead there, space) of each array of an observation."""
    from gymnasium import spaces

    if not isinstance(space, spaces.Dict | spaces.Tuple):
        yield _path(OBSERVATION, *keys), keys, space
        return
    if not len(space.spaces):
        kind = type(space).__name__
        raise ConfigurationError(f"observation space {_at(keys)}{kind}() is empty; it needs at least one space")
    for key, part in space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces):
        if isinstance(space, spaces.Dict) and not isinstance(key, str):
            raise ConfigurationError(f"observation space {_at(keys)}Dict has the key {key!r}; keys are text")
        yield from _leaves(part, (*keys, key))


def _path(*keys: str | int) -> str:
    return "/".join(map(str, keys))


def _at(keys: Keys) -> str:
    return f"at {_path(*keys)!r}: " if keys else ""


def _leaf_spec(space: gymnasium.Space[Any], path: str) -> ArraySpec:
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        category = int(space.start), int(space.n)
        return ArraySpec(shape=(), dtype=np.dtype(space.dtype).name, categories=(category,))
    if isinstance(space, spaces.MultiDiscrete):
        starts, numbers = np.broadcast_to(space.start, space.shape).ravel().tolist(), space.nvec.ravel().tolist()
        categories = tuple(zip(starts, numbers, strict=True))
        return ArraySpec(shape=space.shape, dtype=np.dtype(space.dtype).name, categories=categories)
    if not isinstance(space, spaces.Box | spaces.MultiBinary):
        raise ConfigurationError(
            f"{path} is a {type(space).__name__}, {space}; allowed are Box, Discrete, MultiDiscrete, MultiBinary, and "
            "Dict and Tuple of those"
        )
    dtype = np.dtype("float32") if space.dtype == np.float64 else np.dtype(space.dtype)
    if dtype.kind not in "biuf":
        raise ConfigurationError(f"{path} has dtype {dtype}; allowed are booleans, integers and floats")
    return ArraySpec(shape=space.shape, dtype=dtype.name)


def action_spec(space: gymnasium.Space[Any]) -> ActionSpec:
    """Return the spec of actions as policies choose them: ``[0, n)`` for a Discrete, a flat vector for a Box.

    A Discrete's start and a Box's shape do not matter to policies: ``action_batcher`` applies them.

    Raises:
        ConfigurationError: the space is neither a Discrete nor a Box of floats.
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
    """Return a function from actions as policies choose them, [N, ...], to the actions that N environments take.

    Discrete: numpy integers from the space's start. (Gymnasium's vector environments use them, too, and its spaces
    check them faster than Python's integers.) Box: clipped to the bounds, in the space's dtype and shape. Each call
    returns new arrays, since an environment may keep its last action.

    Raises:
        ConfigurationError: as ``action_spec``.
    """
    from gymnasium import spaces

    batch = action_batcher(space)
    if isinstance(space, spaces.Discrete) and not space.start:
        return list
    return lambda actions: list(batch(actions))


def action_batcher(space: gymnasium.Space[Any]) -> Callable[[NDArray[Any]], NDArray[Any]]:
    """Return a function from actions as policies choose them, [N, ...], to one array of actions for N environments.

    The conversion is that of ``action_decoder``. Each call returns a new array.

    Raises:
        ConfigurationError: as ``action_spec``.
    """
    from gymnasium import spaces

    action_spec(space)
    if isinstance(space, spaces.Box):
        low, high, shape, dtype = space.low, space.high, (-1, *space.shape), space.dtype

        def clipped(actions: NDArray[Any]) -> NDArray[Any]:
            batch: NDArray[Any] = np.clip(actions.reshape(shape), low, high, dtype=dtype)
            return batch

        return clipped
    start = int(space.start)  # type: ignore[attr-defined]  # a Discrete: action_spec refused all others
    return lambda actions: actions + start
