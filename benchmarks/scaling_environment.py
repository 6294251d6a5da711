"""CartPole as it is, and as one whose step sleeps: a fast environment and a slow one of the same size."""

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


def make(step_seconds: float) -> gymnasium.Env[Any, Any]:
    env = gymnasium.make("CartPole-v1", disable_env_checker=True)
    return SlowEnv(env, step_seconds) if step_seconds else env
