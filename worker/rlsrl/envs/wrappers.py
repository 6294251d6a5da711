"""What stands between an environment and the actors that step it, where Gymnasium's own wrappers do not do it."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from rlsrl.envs.info_keys import EPISODE_CONTINUES
from rlsrl.runtime.errors import ConfigurationError

Step = tuple[Any, Any, bool, bool, dict[str, Any]]
"""What ``gymnasium.Env.step`` returns."""
Reset = tuple[Any, dict[str, Any]]
"""What ``gymnasium.Env.reset`` returns."""


class EpisodicLife(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Ends the episode with each life of an Atari game that is lost, though the game goes on (Mnih et al. 2015).

    The reset after it steps nothing: the next episode begins with the observation that the last one ended with.
    ``info`` says where an episode did not end (``EPISODE_CONTINUES``), so that scores are those of whole games.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self._ale: Any = env.unwrapped.ale  # type: ignore[attr-defined]  # ale_py has no types
        self._lives = 0
        self._pause: Reset | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        """A new game if the last one is over or a seed is given; else the next life of this one."""
        pause, self._pause = self._pause, None
        if pause is not None and seed is None:
            return pause
        result: Reset = self.env.reset(seed=seed, options=options)
        self._lives = self._ale.lives()
        return result

    def step(self, action: Any) -> Step:
        """Terminated where a life was lost and another is left; at none left the game itself says when it ends."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        lives, before = self._ale.lives(), self._lives
        self._lives = lives
        if terminated or truncated or not 0 < lives < before:
            return observation, reward, terminated, truncated, info
        self._pause = observation, info
        return observation, reward, True, False, {**info, EPISODE_CONTINUES: True}


class ActionMask(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Sees to it that an environment's action mask is part of its observation, and allows something.

    The mask is an array with an entry for each of the discrete actions, 0 where it is illegal now. It is what a Dict
    observation has under ``key``, or else what ``info`` has under it (both are usual); from there it is put beside the
    observation, which becomes a Dict if it is none: ``{"observation": ..., key: ...}``.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], key: str) -> None:
        """Look for the mask under ``key``.

        Raises:
            ConfigurationError: actions are not discrete, or what the observation has under the key is no mask.
        """
        super().__init__(env)
        self.key = key
        """The observation's key under which the mask is."""
        if not isinstance(env.action_space, spaces.Discrete):
            raise ConfigurationError(f"{env}: an action mask is for Discrete actions, these are {env.action_space}")
        self._shape = (int(env.action_space.n),)
        space = env.observation_space
        self._is_dict = isinstance(space, spaces.Dict)
        parts = dict(space.spaces) if isinstance(space, spaces.Dict) else {"observation": space}
        self._from_info = not self._is_dict or key not in parts
        if self._from_info:
            parts[key] = spaces.MultiBinary(self._shape[0])
            self.observation_space = spaces.Dict(parts)
        elif parts[key].shape != self._shape:
            raise ConfigurationError(
                f"{env}: the observation has {parts[key]} at {key!r}, no mask of {self._shape[0]} actions"
            )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        """See the class."""
        observation, info = self.env.reset(seed=seed, options=options)
        return self._with_mask(observation, info, is_final=False), info

    def step(self, action: Any) -> Step:
        """See the class; where an episode ends nothing need be legal."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        observation = self._with_mask(observation, info, is_final=terminated or truncated)
        return observation, reward, terminated, truncated, info

    def _with_mask(self, observation: Any, info: dict[str, Any], *, is_final: bool) -> Any:
        """The observation with its mask in it.

        Raises:
            ValueError: there is no mask where it should be, or it leaves nothing that is legal.
        """
        if self._from_info:
            mask = self._mask_of(info, is_final)
            observation = {**(observation if self._is_dict else {"observation": observation}), self.key: mask}
        if not is_final and not np.any(observation[self.key]):
            raise ValueError(f"the action mask {self.key!r} is all 0: none of {self._shape[0]} actions is legal")
        return observation

    def _mask_of(self, info: dict[str, Any], is_final: bool) -> NDArray[np.int8]:
        if self.key not in info and is_final:
            return np.zeros(self._shape, np.int8)
        mask = np.asarray(info.get(self.key))
        if mask.shape != self._shape:
            raise ValueError(
                f"info has {info.get(self.key)!r} under {self.key!r}, no mask of {self._shape[0]} actions, and neither "
                "has the observation"
            )
        return np.where(mask != 0, np.int8(1), np.int8(0))
