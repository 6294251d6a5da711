"""Gymnasium wrappers that rlsrl adds to Gymnasium's own."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from typing_extensions import override

from rlsrl.envs.info_keys import EPISODE_CONTINUES
from rlsrl.runtime.errors import ConfigurationError

EnvStep = tuple[Any, Any, bool, bool, dict[str, Any]]
"""The return type of ``gymnasium.Env.step``."""
Reset = tuple[Any, dict[str, Any]]
"""The return type of ``gymnasium.Env.reset``."""


class EpisodicLife(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Ends the training episode with each lost life of an Atari game, though the game goes on (Mnih et al. 2015).

    The ``reset`` after a lost life steps nothing: the next episode begins with the last observation. There ``info`` has
    ``EPISODE_CONTINUES``, so that reported scores are those of whole games.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self._ale: Any = env.unwrapped.ale  # type: ignore[attr-defined]  # ale_py has no types
        self._lives = 0
        self._next_life: Reset | None = None
        """What the reset after a lost life returns; None unless a life was just lost."""

    @override
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        """Begin a new game if the last one is over or a seed is given; else go on with the next life."""
        next_life, self._next_life = self._next_life, None
        if next_life is not None and seed is None:
            return next_life
        result: Reset = self.env.reset(seed=seed, options=options)
        self._lives = self._ale.lives()
        return result

    @override
    def step(self, action: Any) -> EnvStep:
        """Step the game. Terminate also when a life is lost and another is left."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        lives, before = self._ale.lives(), self._lives
        self._lives = lives
        if terminated or truncated or not 0 < lives < before:
            return observation, reward, terminated, truncated, info
        self._next_life = observation, info
        return observation, reward, True, False, {**info, EPISODE_CONTINUES: True}


class ActionMask(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Makes an environment's action mask part of its observation, and checks that some action is legal.

    The mask has one entry per choice: 0 where the choice is illegal now. A MultiDiscrete has the choices of all its
    entries, one entry after the other. A Dict observation may have the mask under ``key``. Else the wrapper takes it
    from ``info`` under ``key`` and adds it to the observation, as ``{"observation": ..., key: ...}`` if that is not a
    Dict. In ``info`` the mask of a MultiDiscrete may also be a tuple of one array per entry, as ``sample`` takes it.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], key: str) -> None:
        """Take the mask from ``key``.

        Raises:
            ConfigurationError: actions are neither a Discrete nor a MultiDiscrete of one axis, or the observation's
                array under the key has another shape.
        """
        super().__init__(env)
        self.key = key
        """The observation's key of the mask."""
        action = env.action_space
        if isinstance(action, spaces.Discrete):
            self._sizes = [int(action.n)]
        elif isinstance(action, spaces.MultiDiscrete) and len(action.shape) == 1:
            self._sizes = action.nvec.tolist()
        else:
            raise ConfigurationError(
                f"{env}: actionMask needs Discrete or MultiDiscrete actions of one axis, not {action}"
            )
        self._starts = [0, *accumulate(self._sizes)][:-1]
        """The place of each entry's first choice in the mask."""
        self._shape = (sum(self._sizes),)
        space = env.observation_space
        self._is_dict = isinstance(space, spaces.Dict)
        parts = dict(space.spaces) if isinstance(space, spaces.Dict) else {"observation": space}
        self._from_info = not self._is_dict or key not in parts
        if self._from_info:
            parts[key] = spaces.MultiBinary(self._shape[0])
            self.observation_space = spaces.Dict(parts)
        elif parts[key].shape != self._shape:
            raise ConfigurationError(
                f"{env}: the observation has {parts[key]} at {key!r}; a mask of {self._shape[0]} actions has the shape "
                f"{self._shape}"
            )

    @override
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        observation, info = self.env.reset(seed=seed, options=options)
        return self._with_mask(observation, info, is_final=False), info

    @override
    def step(self, action: Any) -> EnvStep:
        """Step the environment. The final observation of an episode may have no legal action."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        observation = self._with_mask(observation, info, is_final=terminated or truncated)
        return observation, reward, terminated, truncated, info

    def _with_mask(self, observation: Any, info: dict[str, Any], *, is_final: bool) -> Any:
        """Return the observation with its mask.

        Raises:
            ValueError: the mask is missing or has another shape, or no action is legal.
        """
        if self._from_info:
            mask = self._mask_of(info, is_final)
            observation = {**(observation if self._is_dict else {"observation": observation}), self.key: mask}
        if not is_final and not all(is_possible := self._possible(observation[self.key])):
            entry = is_possible.index(False)
            where = f" for entry {entry} of the action" if len(self._sizes) > 1 else ""
            raise ValueError(
                f"the action mask {self.key!r} is all 0{where}; at least one of {self._sizes[entry]} actions must be "
                "legal"
            )
        return observation

    def _possible(self, mask: NDArray[Any]) -> list[bool]:
        """Return for each entry of the action whether a choice is legal."""
        if len(self._sizes) == 1:
            return [bool(np.any(mask))]
        possible: list[bool] = np.logical_or.reduceat(np.asarray(mask) != 0, self._starts).tolist()
        return possible

    def sample(self, observation: Any) -> Any:
        """Return a random legal action."""
        mask = np.asarray(observation[self.key], np.int8)
        if isinstance(self.action_space, spaces.Discrete):
            return self.action_space.sample(mask)
        return self.action_space.sample(tuple(np.split(mask, self._starts[1:])))

    def _mask_of(self, info: dict[str, Any], is_final: bool) -> NDArray[np.int8]:
        if self.key not in info and is_final:
            return np.zeros(self._shape, np.int8)
        found = info.get(self.key)
        if isinstance(found, tuple) and len(self._sizes) > 1:
            found = np.concatenate(found) if [np.size(part) for part in found] == self._sizes else None
        mask = np.asarray(found)
        if mask.shape != self._shape:
            raise ValueError(
                f"the action mask is neither in the observation nor in info: info[{self.key!r}] is "
                f"{info.get(self.key)!r}, where {self._shape[0]} entries are needed"
            )
        return np.where(mask != 0, np.int8(1), np.int8(0))


def random_action(env: gymnasium.Env[Any, Any], observation: Any) -> Any:
    """Return a random action of the environment; a legal one if its outermost wrapper is an ``ActionMask``."""
    return env.sample(observation) if isinstance(env, ActionMask) else env.action_space.sample()
