"""Environments that need memory: the present observation alone does not say what to do."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.wrappers import TransformObservation
from numpy.typing import NDArray
from typing_extensions import override


class DelayedCue(gymnasium.Env[NDArray[np.float32], np.int64]):
    """Shows one of two cues in the first observation, and asks for it ``delay`` steps later.

    Observations are [cue 0, cue 1, question], each 0 or 1, and all 0 in between. Each action is one of the cues; that
    for the question is right or wrong: reward 1 or 0, and ``info["is_success"]``. Others mean nothing. Without memory
    half of the answers are right.
    """

    metadata = {"render_modes": []}  # noqa: RUF012 - Gymnasium's interface

    def __init__(self, *, delay: int = 20) -> None:
        """Ask ``delay`` steps after the cue.

        Raises:
            ValueError: it is below 1.
        """
        if delay < 1:
            raise ValueError(f"delay is {delay}; allowed: integer >= 1")
        self.observation_space = spaces.Box(0.0, 1.0, (3,), np.float32)
        self.action_space = spaces.Discrete(2)
        self._delay = delay
        self._cue = 0
        self._steps = 0

    @override
    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        super().reset(seed=seed)
        self._cue, self._steps = int(self.np_random.integers(2)), 0
        observation = np.zeros(3, np.float32)
        observation[self._cue] = 1.0
        return observation, {}

    @override
    def step(self, action: np.int64) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        observation = np.zeros(3, np.float32)
        if self._steps == self._delay:
            is_right = int(action) == self._cue
            return observation, float(is_right), True, False, {"is_success": float(is_right)}
        self._steps += 1
        observation[2] = self._steps == self._delay
        return observation, 0.0, False, False, {}


def cartpole_without_velocities() -> gymnasium.Env[Any, Any]:
    """Return CartPole-v1 whose observations have the cart's position and the pole's angle, without their velocities."""
    env = gymnasium.make("CartPole-v1")
    space = env.observation_space
    assert isinstance(space, spaces.Box), "CartPole's"
    return TransformObservation(env, lambda seen: seen[[0, 2]], spaces.Box(space.low[[0, 2]], space.high[[0, 2]]))
