"""Does an environment keep to Gymnasium's contract where rlsrl relies on it? For a user's own tests."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any, SupportsFloat, cast

import numpy as np

from rlsrl.data.specs import EnvSpec
from rlsrl.envs.spaces import observation_keys, spec_of
from rlsrl.runtime.errors import ConfigurationError

if TYPE_CHECKING:
    import gymnasium


def check_environment(env: gymnasium.Env[Any, Any], *, num_steps: int = 200, seed: int = 0) -> EnvSpec:
    """Step ``env`` with random actions, legal ones where it has a mask, and compare what it gives with its spaces.

    Looked at: supported spaces, the shape, dtype and keys of observations, finite values, the five-tuple and its
    types, and that equal seeds give equal first observations.

    Args:
        env: The environment; closing it is left to the caller.
        num_steps: Steps to take, over as many episodes as they last.
        seed: Of the resets and of the actions.

    Returns:
        What the environment gives and takes.

    Raises:
        ConfigurationError: all that was found wrong, one line each.
    """
    spec = spec_of(env)
    problems = dict.fromkeys(_problems(env, num_steps, seed))
    if problems:
        raise ConfigurationError("\n".join([f"{env} is not usable as it is:", *(f"- {line}" for line in problems)]))
    return spec


def _problems(env: gymnasium.Env[Any, Any], num_steps: int, seed: int) -> Iterator[str]:
    """What is wrong, as found; ends early where going on makes no sense."""
    env.action_space.seed(seed)
    first = yield from _reset(env, seed)
    if first is None:
        return
    again = yield from _reset(env, seed)
    if again is not None and not _equal(first, again):
        yield f"reset(seed={seed}) did not repeat itself: call super().reset(seed=seed), then draw from self.np_random"
    observation = first if again is None else again
    for _ in range(num_steps):
        result: Any = env.step(env.action_space.sample(_legal(env, observation)))
        if not isinstance(result, tuple) or len(result) != 5:
            yield f"step() returned {_described(result)}, not (observation, reward, terminated, truncated, info)"
            return
        observation, reward, terminated, truncated, info = result
        yield from _observation_problems(env.observation_space, observation, "step()")
        yield from _scalar_problems(reward, terminated, truncated, info)
        if terminated or truncated:
            observation = yield from _reset(env, None)
            if observation is None:
                return


def _legal(env: gymnasium.Env[Any, Any], observation: Any) -> Any:
    """The mask to draw an action by; None if there is none."""
    from rlsrl.envs.wrappers import ActionMask

    return np.asarray(observation[env.key], np.int8) if isinstance(env, ActionMask) else None


def _reset(env: gymnasium.Env[Any, Any], seed: int | None) -> Generator[str, None, Any]:
    """Reset, yielding problems; returns the observation, or None where there is none."""
    result: Any = env.reset(seed=seed)
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict):
        yield f"reset() returned {_described(result)}, not (observation, info)"
        return None
    yield from _observation_problems(env.observation_space, result[0], "reset()")
    return result[0]


def _observation_problems(space: gymnasium.Space[Any], observation: Any, source: str) -> Iterator[str]:
    for path, keys in observation_keys(space).items():
        value, leaf = observation, cast("Any", space)
        for key in keys:
            if not isinstance(value, dict) or set(value) != set(leaf.spaces):
                found = sorted(value) if isinstance(value, dict) else _described(value)
                yield f"{source} observed {found}, its space has the keys {sorted(leaf.spaces)}"
                return
            value, leaf = value[key], leaf[key]
        if not isinstance(value, np.ndarray):
            yield f"{source} gave {_described(value)} as {path}, not a numpy array of {leaf.dtype}{list(leaf.shape)}"
        elif value.shape != leaf.shape or value.dtype != leaf.dtype:
            yield (
                f"{source} gave {value.dtype}{list(value.shape)} as {path}, its space says "
                f"{leaf.dtype}{list(leaf.shape)}"
            )
        elif value.dtype.kind == "f" and not np.isfinite(value).all():
            yield f"{source} gave values of {path} that are not finite"


def _scalar_problems(reward: Any, terminated: Any, truncated: Any, info: Any) -> Iterator[str]:
    if not isinstance(reward, SupportsFloat) or np.shape(cast("Any", reward)) or not math.isfinite(reward):
        yield f"step() gave the reward {reward!r}, not a finite number"
    for name, value in (("terminated", terminated), ("truncated", truncated)):
        if not isinstance(value, bool | np.bool_):
            yield f"step() gave {name} as {_described(value)}, not a bool"
    if not isinstance(info, dict):
        yield f"step() gave {_described(info)} as info, not a dict"


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_equal(left[key], right[key]) for key in left)
    return bool(np.array_equal(left, right))


def _described(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return "None" if value is None else f"a {type(value).__name__}"
