"""The benchmark environments, made the same way for all contestants. Imports nothing of rlsrl."""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np

ATARI_ARGUMENTS: dict[str, Any] = {"frameskip": 1, "repeat_action_probability": 0.0, "obs_type": "grayscale"}
"""Arguments of a game without its own frame skip: the preprocessing skips frames."""


WITHOUT_VELOCITIES = "CartPole-without-velocities"
"""CartPole whose observations have the position and the angle alone."""


class PositionsOnly(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Leaves the velocities out. Gymnasium before 1.0 has this wrapper, too."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        space: Any = env.observation_space
        self.observation_space = gymnasium.spaces.Box(space.low[[0, 2]], space.high[[0, 2]])

    def observation(self, observation: Any) -> Any:
        return observation[[0, 2]]


class SlowEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An environment whose step sleeps for ``seconds``, like a remote simulator or a robot."""

    def __init__(self, env: gymnasium.Env[Any, Any], seconds: float) -> None:
        super().__init__(env)
        self._seconds = seconds

    def step(self, action: Any) -> Any:
        time.sleep(self._seconds)
        return self.env.step(action)


def make(env_id: str, *, step_seconds: float = 0.0) -> gymnasium.Env[Any, Any]:
    """Return one environment whose step sleeps for ``step_seconds``. Atari games are preprocessed.

    Gymnasium's checker of each step is off: it costs all contestants the same and finds nothing here.
    """
    if env_id.startswith("ALE/"):
        return _atari(env_id)
    if env_id == WITHOUT_VELOCITIES:
        return PositionsOnly(gymnasium.make("CartPole-v1", disable_env_checker=True))
    env = gymnasium.make(env_id, disable_env_checker=True)
    return SlowEnv(env, step_seconds) if step_seconds else env


def _atari(env_id: str) -> gymnasium.Env[Any, Any]:
    """Return a game with each action for 4 frames, 84 x 84 grey pixels, 4 stacked frames, rewards from -1 to 1."""
    import cv2
    from ale_py.registration import register_v5_envs

    if env_id not in gymnasium.registry:  # ALE does this itself with Gymnasium 1.0 and newer
        register_v5_envs()
    cv2.setNumThreads(0)  # one small image is not worth waking other threads
    env = gymnasium.make(env_id, disable_env_checker=True, **ATARI_ARGUMENTS)
    env = gymnasium.wrappers.AtariPreprocessing(env, noop_max=30, frame_skip=4, screen_size=84)
    env = _stacked(env)
    return gymnasium.wrappers.TransformReward(env, lambda reward: max(-1.0, min(1.0, float(reward))))


def _stacked(env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
    """Return the environment with stacked frames. Gymnasium before 1.0 has another name for it, and no arrays."""
    wrappers: Any = gymnasium.wrappers
    if hasattr(wrappers, "FrameStackObservation"):
        return wrappers.FrameStackObservation(env, 4)  # type: ignore[no-any-return]
    return wrappers.TransformObservation(wrappers.FrameStack(env, 4), np.asarray)  # type: ignore[no-any-return]
