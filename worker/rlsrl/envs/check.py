"""Checks the parts of Gymnasium's contract that rlsrl relies on.

For users' own tests, and to say what is wrong with a result that an actor cannot use.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Generator, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from textwrap import shorten
from typing import TYPE_CHECKING, Any, SupportsFloat, cast

import numpy as np

from rlsrl.data.specs import EnvSpec
from rlsrl.envs.interface import EnvironmentInterface
from rlsrl.envs.spaces import observation_keys
from rlsrl.runtime.errors import ConfigurationError

if TYPE_CHECKING:
    import gymnasium

_RESET = "not (observation, info)"
_MAX_CHARACTERS = 300
"""Of the problems of one result."""


class BrokenContract(Exception):
    """A result of ``reset`` or ``step`` cannot be used. The text says why, and where the method is defined."""


def check_environment(env: gymnasium.Env[Any, Any], *, num_steps: int = 200, seed: int = 0) -> EnvSpec:
    """Step ``env`` with random legal actions, compare its results with its spaces, and return its spec.

    Checks that spaces are supported, and the shapes, dtypes and keys of observations. Checks that values are finite,
    that ``step`` returns a five-tuple of the right types, and that equal seeds give equal first observations. Warns
    (``UserWarning``) if the observation never changes.

    Args:
        env: The environment. The caller closes it.
        num_steps: Steps to take, over one or more episodes.
        seed: Seeds the first reset and the actions.

    Raises:
        ConfigurationError: the environment has problems; the text lists all of them, one per line.
    """
    spec = EnvironmentInterface.of(env).spec
    findings = examine(env, num_steps=num_steps, seed=seed)
    for text in findings.warnings:
        warnings.warn(f"{env}: {text}", stacklevel=2)
    if findings.problems:
        raise ConfigurationError(
            "\n".join([f"{env} breaks Gymnasium's contract:", *(f"- {line}" for line in findings.problems)])
        )
    return spec


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What ``check_environment`` finds, each text once."""

    problems: Sequence[str]
    """Where the environment breaks Gymnasium's contract."""
    warnings: Sequence[str]
    """What the contract allows, and is probably a mistake."""


def examine(env: gymnasium.Env[Any, Any], *, num_steps: int, seed: int = 0) -> Findings:
    """Return what ``check_environment`` finds."""
    observations = _Observations(env.observation_space)
    problems = list(dict.fromkeys(_problems(env, num_steps, seed, observations)))
    return Findings(problems=problems, warnings=observations.warnings())


def unusable_step(env: gymnasium.Env[Any, Any], result: Any, error: BaseException) -> BaseException:
    """Return ``BrokenContract`` with the problems of a result of ``step``, whose use raised ``error``.

    If there is no problem, return ``error``.
    """
    problems = _listed(_step_problems(env, result))
    return BrokenContract(f"{problems}{_place(env, 'step')}") if problems else error


def unusable_observation(env: gymnasium.Env[Any, Any], observation: Any, source: str, error: Exception) -> Exception:
    """Return ``BrokenContract`` with the problems of an observation that ``source`` returned, or ``error``."""
    problems = _listed(_observation_problems(env.observation_space, observation, f"{source}()"))
    return BrokenContract(f"{problems}{_place(env, source)}") if problems else error


def first_observation(env: gymnasium.Env[Any, Any], result: Any) -> Any:
    """Return the observation of a result of ``reset``.

    Raises:
        BrokenContract: the result has not two parts.
    """
    try:
        observation, _ = result
    except (TypeError, ValueError) as error:
        raise BrokenContract(f"reset() returned {_described(result)}, {_RESET}{_place(env, 'reset')}") from error
    return observation


def _is_step(result: Any) -> bool:
    return isinstance(result, tuple) and len(result) == 5


def _listed(problems: Iterator[str]) -> str:
    """Return the problems in one line; nothing if the values are too odd to look at."""
    try:
        return shorten("; ".join(problems), _MAX_CHARACTERS, placeholder="...")
    except Exception:  # noqa: BLE001 - the caller has another error to report
        return ""


def _step_problems(env: gymnasium.Env[Any, Any], result: Any) -> Iterator[str]:
    if not _is_step(result):
        yield f"step() returned {_described(result)}, not (observation, reward, terminated, truncated, info)"
        return
    observation, reward, terminated, truncated, info = result
    yield from _observation_problems(env.observation_space, observation, "step()")
    yield from _scalar_problems(reward, terminated, truncated, info)


def _place(env: gymnasium.Env[Any, Any], method: str) -> str:
    """Return file and line of the environment's method, or nothing if it is not written in Python."""
    code = getattr(getattr(type(env.unwrapped), method, None), "__code__", None)
    return "" if code is None else f" ({code.co_filename}, line {code.co_firstlineno})"


class _Observations:
    """Compares all observations of a check."""

    def __init__(self, space: gymnasium.Space[Any]) -> None:
        self._space = space
        self._first: Any = None
        self._are_equal = True
        self._num_steps = 0
        self._goes_on = False

    def add(self, observation: Any) -> None:
        """Add what ``reset`` or ``step`` returned. A malformed one is a problem of its own, and ends the comparison."""
        if not self._are_equal:
            return
        if any(_observation_problems(self._space, observation, "")):
            self._are_equal = False
        elif self._first is None:
            self._first = deepcopy(observation)  # the environment may write into the same array again
        else:
            self._are_equal = _equal(self._first, observation)

    def add_step(self, observation: Any, *, has_ended: bool) -> None:
        """Add what ``step`` returned; ``has_ended``: the episode ended with it."""
        self.add(observation)
        self._num_steps += 1
        self._goes_on = self._goes_on or not has_ended

    def warnings(self) -> list[str]:
        """Return a text if nothing changed. Episodes of one step, as of a bandit, need no other observation."""
        if not (self._are_equal and self._goes_on and self._num_steps > 1):
            return []
        same = f"the observation was the same in {self._num_steps} steps with random actions"
        return [f"{same}: the policy cannot tell states apart"]


def _problems(env: gymnasium.Env[Any, Any], num_steps: int, seed: int, observations: _Observations) -> Iterator[str]:
    """Yield problems as they are found. Stop early where further steps make no sense."""
    from rlsrl.envs.wrappers import random_action

    env.action_space.seed(seed)
    first = yield from _reset(env, seed)
    if first is None:
        return
    again = yield from _reset(env, seed)
    if again is not None and not _equal(first, again):
        yield f"reset(seed={seed}) gave two different observations: call super().reset(seed=seed), use self.np_random"
    observations.add(first)
    observation = first if again is None else again
    for _ in range(num_steps):
        result: Any = env.step(random_action(env, observation))
        yield from _step_problems(env, result)
        if not _is_step(result):
            return
        observation, _, terminated, truncated, _ = result
        observations.add_step(observation, has_ended=bool(terminated or truncated))
        if terminated or truncated:
            observation = yield from _reset(env, None)
            if observation is None:
                return
            observations.add(observation)


def _reset(env: gymnasium.Env[Any, Any], seed: int | None) -> Generator[str, None, Any]:
    """Reset the environment and yield problems. Return the observation, or None if ``reset`` returned none."""
    result: Any = env.reset(seed=seed)
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict):
        yield f"reset() returned {_described(result)}, {_RESET}"
        return None
    yield from _observation_problems(env.observation_space, result[0], "reset()")
    return result[0]


def _observation_problems(space: gymnasium.Space[Any], observation: Any, source: str) -> Iterator[str]:
    from gymnasium import spaces

    for path, keys in observation_keys(space).items():
        value, leaf = observation, cast("Any", space)
        for key in keys:
            if isinstance(key, int):
                if not isinstance(value, tuple) or len(value) != len(leaf.spaces):
                    yield f"{source} returned {_described(value)}; the space is a Tuple of {len(leaf.spaces)}"
                    return
            elif not isinstance(value, dict) or set(value) != set(leaf.spaces):
                found = sorted(value) if isinstance(value, dict) else _described(value)
                yield f"{source} returned the keys {found}; the space has the keys {sorted(leaf.spaces)}"
                return
            value, leaf = value[key], leaf[key]
        if isinstance(leaf, spaces.Discrete | spaces.MultiDiscrete):
            if not leaf.contains(value):
                yield f"{source} returned {value!r} as {path}, which is not in {leaf}"
        elif not isinstance(value, np.ndarray):
            yield f"{source} returned {_described(value)} as {path}, not an array of {leaf.dtype}{list(leaf.shape)}"
        elif value.shape != leaf.shape or value.dtype != leaf.dtype:
            yield (
                f"{source} returned {value.dtype}{list(value.shape)} as {path}; its space has "
                f"{leaf.dtype}{list(leaf.shape)}"
            )
        elif value.dtype.kind == "f" and not np.isfinite(value).all():
            yield f"{source} returned values of {path} that are not finite"


def _scalar_problems(reward: Any, terminated: Any, truncated: Any, info: Any) -> Iterator[str]:
    if not isinstance(reward, SupportsFloat) or np.shape(cast("Any", reward)) or not math.isfinite(reward):
        yield f"step() returned the reward {reward!r}, not a finite number"
    for name, value in (("terminated", terminated), ("truncated", truncated)):
        if not isinstance(value, bool | np.bool_):
            yield f"step() returned {_described(value)} as {name}, not a bool"
    if not isinstance(info, dict):
        yield f"step() returned {_described(info)} as info, not a dict"


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_equal(left[key], right[key]) for key in left)
    if isinstance(left, tuple) and isinstance(right, tuple):
        return len(left) == len(right) and all(map(_equal, left, right))
    return bool(np.array_equal(left, right))


def _described(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    if value is None:
        return "None"
    name = type(value).__name__
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"
