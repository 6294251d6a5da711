"""The environments that everybody is measured on, made the same way for everybody. Knows nothing of rlsrl."""

from __future__ import annotations

import time
from typing import Any

import gymnasium


class SlowEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An environment whose step takes ``seconds`` longer, without a processor: a simulator elsewhere, or a robot."""

    def __init__(self, env: gymnasium.Env[Any, Any], seconds: float) -> None:
        super().__init__(env)
        self._seconds = seconds

    def step(self, action: Any) -> Any:
        time.sleep(self._seconds)
        return self.env.step(action)


def slow_cartpole(seconds: float) -> gymnasium.Env[Any, Any]:
    """CartPole whose step takes so many seconds longer."""
    return SlowEnv(gymnasium.make("CartPole-v1"), seconds)


def make(env_id: str, *, step_seconds: float = 0.0) -> gymnasium.Env[Any, Any]:
    """One environment; Atari games with the usual preprocessing: each action for 4 frames, 84 x 84, grey, 4 stacked."""
    if not env_id.startswith("ALE/"):
        return SlowEnv(gymnasium.make(env_id), step_seconds) if step_seconds else gymnasium.make(env_id)
    import ale_py

    gymnasium.register_envs(ale_py)
    env = gymnasium.make(env_id, frameskip=1, repeat_action_probability=0.0, obs_type="grayscale")
    env = gymnasium.wrappers.AtariPreprocessing(env, noop_max=30, frame_skip=4, screen_size=84, grayscale_obs=True)
    env = gymnasium.wrappers.FrameStackObservation(env, 4)
    return gymnasium.wrappers.TransformReward(env, lambda reward: max(-1.0, min(1.0, float(reward))))
