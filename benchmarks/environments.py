"""The environments that everybody is measured on, made the same way for everybody. Knows nothing of rlsrl."""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np

ATARI_ARGUMENTS: dict[str, Any] = {"frameskip": 1, "repeat_action_probability": 0.0, "obs_type": "grayscale"}
"""How a game is made before it is preprocessed, which skips frames itself."""


class SlowEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An environment whose step takes ``seconds`` longer, without a processor: a simulator elsewhere, or a robot."""

    def __init__(self, env: gymnasium.Env[Any, Any], seconds: float) -> None:
        super().__init__(env)
        self._seconds = seconds

    def step(self, action: Any) -> Any:
        time.sleep(self._seconds)
        return self.env.step(action)


def make(env_id: str, *, step_seconds: float = 0.0) -> gymnasium.Env[Any, Any]:
    """One environment whose step takes so many seconds longer; Atari games are preprocessed.

    Without Gymnasium's checker around every step, which costs everybody the same and tells nobody anything.
    """
    if env_id.startswith("ALE/"):
        return _atari(env_id)
    env = gymnasium.make(env_id, disable_env_checker=True)
    return SlowEnv(env, step_seconds) if step_seconds else env


def _atari(env_id: str) -> gymnasium.Env[Any, Any]:
    """Each action for 4 frames, 84 x 84, grey, 4 stacked, rewards of at most 1."""
    import cv2
    from ale_py.registration import register_v5_envs

    if env_id not in gymnasium.registry:  # ALE does this itself, but not where Gymnasium is older than 1.0
        register_v5_envs()
    cv2.setNumThreads(0)  # one small image at a time is not worth waking others for
    env = gymnasium.make(env_id, disable_env_checker=True, **ATARI_ARGUMENTS)
    env = gymnasium.wrappers.AtariPreprocessing(env, noop_max=30, frame_skip=4, screen_size=84)
    env = _stacked(env)
    return gymnasium.wrappers.TransformReward(env, lambda reward: max(-1.0, min(1.0, float(reward))))


def _stacked(env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
    """Before 1.0 Gymnasium calls it otherwise, and does not make arrays of it."""
    wrappers: Any = gymnasium.wrappers
    if hasattr(wrappers, "FrameStackObservation"):
        return wrappers.FrameStackObservation(env, 4)  # type: ignore[no-any-return]
    return wrappers.TransformObservation(wrappers.FrameStack(env, 4), np.asarray)  # type: ignore[no-any-return]
