"""Translates Gymnasium's spaces into array specs.

Observations: a Box, a Discrete, a MultiDiscrete, a MultiBinary, or a Dict or Tuple of those, nested or not. Actions: a
Discrete, a MultiDiscrete, a MultiBinary, a Box of floats, or a Tuple of those, nested or not. All other spaces are
refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlsrl.data.specs import ActionPart, ActionSpec, ArraySpec, EnvSpec
from rlsrl.runtime.errors import ConfigurationError

if TYPE_CHECKING:
    import gymnasium

ACTION = "action"
"""The path of an action space. Paths of a Tuple's parts are ``action/<place>`` from 0."""

OBSERVATION = "observation"
"""The path of an observation that is one array. Paths of a Dict are ``observation/<key>``, those of a Tuple
``observation/<place>`` from 0; nested spaces have longer paths."""

Keys = tuple[str | int, ...]
"""The keys of Dicts and places in Tuples that lead to one array of an observation."""


def spec_of_spaces(observation: gymnasium.Space[Any], action: gymnasium.Space[Any]) -> EnvSpec:
    """Return the spec of an environment with those spaces, without an action mask.

    Raises:
        ConfigurationError: a space is not supported; the text names it and the spaces that are.
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
    """Return the spec of actions as policies choose them: ``[0, n)`` for a Discrete, a flat vector for others.

    A start and a shape do not matter to policies: ``action_batcher`` applies them.

    Raises:
        ConfigurationError: a space is not supported; the text names its path and the spaces that are.
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
    parts = tuple(_action_parts(space, ACTION))
    array = ArraySpec(
        shape=(sum(part.num_entries for part in parts),),
        dtype="float32" if any(part.kind == "gaussian" for part in parts) else "int64",
    )
    return ActionSpec(kind="joint", array=array, joint=parts)


def _action_parts(space: gymnasium.Space[Any], path: str) -> Iterator[ActionPart]:
    """Yield the parts of an action space, in order: one of a Discrete, a Box or a MultiBinary, several of others."""
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        yield ActionPart(kind="categorical", num_outputs=int(space.n))
    elif isinstance(space, spaces.MultiDiscrete):
        for number in space.nvec.ravel().tolist():
            yield ActionPart(kind="categorical", num_outputs=number)
    elif isinstance(space, spaces.MultiBinary):
        yield ActionPart(kind="bernoulli", num_outputs=math.prod(space.shape))
    elif isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        yield ActionPart(kind="gaussian", num_outputs=space.low.size)
    elif isinstance(space, spaces.Tuple) and space.spaces:
        for place, part in enumerate(space.spaces):
            yield from _action_parts(part, f"{path}/{place}")
    else:
        raise ConfigurationError(
            f"{path} is a {type(space).__name__}, {space}; allowed are Discrete, MultiDiscrete, MultiBinary, Box of a "
            "float dtype, and Tuple of those"
        )


def action_leaves(space: gymnasium.Space[Any], path: str = ACTION) -> dict[str, gymnasium.Space[Any]]:
    """Return the spaces of an action's arrays by path, in the order of their entries: itself, or those of a Tuple."""
    from gymnasium import spaces

    if not isinstance(space, spaces.Tuple):
        return {path: space}
    return {
        leaf: found
        for place, part in enumerate(space)
        for leaf, found in action_leaves(part, f"{path}/{place}").items()
    }


def action_decoder(space: gymnasium.Space[Any]) -> Callable[[NDArray[Any]], Sequence[Any]]:
    """Return a function from actions as policies choose them, [N, ...], to the actions that N environments take.

    Discrete: numpy integers from the space's start. (Gymnasium's vector environments use them, too, and its spaces
    check them faster than Python's integers.) Box: clipped to the bounds, in the space's dtype and shape.
    MultiDiscrete and MultiBinary: in the space's dtype and shape. Tuple: a tuple. Each call returns new arrays: an
    environment may keep its last action.

    Raises:
        ConfigurationError: as ``action_spec``.
    """
    from gymnasium import spaces

    batch = action_batcher(space)
    if isinstance(space, spaces.Discrete) and not space.start:
        return list
    return lambda actions: _each(batch(actions))


def _each(batch: Any) -> list[Any]:
    """Return the N actions of a batch: an array [N, ...], or a tuple of batches."""
    return list(zip(*map(_each, batch), strict=True)) if isinstance(batch, tuple) else list(batch)


def action_batcher(space: gymnasium.Space[Any]) -> Callable[[NDArray[Any]], Any]:
    """Return a function from actions as policies choose them, [N, ...], to one batch of actions for N environments.

    A batch is an array [N, ...], or for a Tuple a tuple of batches. The conversion is that of ``action_decoder``. Each
    call returns new arrays.

    Raises:
        ConfigurationError: as ``action_spec``.
    """
    from gymnasium import spaces

    action_spec(space)
    if isinstance(space, spaces.Discrete):
        start = int(space.start)
        return lambda actions: actions + start
    return _vector_batcher(space)


def _vector_batcher(space: gymnasium.Space[Any]) -> Callable[[NDArray[Any]], Any]:
    """Return the ``action_batcher`` for actions that are vectors, [N, entries]."""
    from gymnasium import spaces

    if isinstance(space, spaces.Tuple):
        sizes = [sum(part.num_entries for part in _action_parts(part, ACTION)) for part in space.spaces]
        places = [slice(begin, end) for begin, end in pairwise([0, *accumulate(sizes)])]
        batchers = [_vector_batcher(part) for part in space.spaces]
        return lambda actions: tuple(batch(actions[:, place]) for batch, place in zip(batchers, places, strict=True))
    if isinstance(space, spaces.Box):
        low, high, shape, dtype = space.low, space.high, (-1, *space.shape), space.dtype

        def clipped(actions: NDArray[Any]) -> NDArray[Any]:
            batch: NDArray[Any] = np.clip(actions.reshape(shape), low, high, dtype=dtype)
            return batch

        return clipped
    integer_shape, integer_dtype = (-1, *(space.shape or ())), space.dtype
    start = 0 if isinstance(space, spaces.MultiBinary) else space.start  # type: ignore[attr-defined]  # all that is left

    def integers(actions: NDArray[Any]) -> NDArray[Any]:
        batch: NDArray[Any] = actions.astype(integer_dtype).reshape(integer_shape)
        batch += start
        return batch

    return integers
