"""Environments for tests of the environment server: with failures on demand, and with a journal of their steps."""

from __future__ import annotations

import os
import time
import uuid
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from typing_extensions import override

from rlsrl.envs.place import EnvironmentPlace


class ServedEnv(gymnasium.Env[Any, Any]):
    """Counts its steps: an observation is a Dict with the count, a small image and the action before."""

    def __init__(
        self,
        size: int = 2,
        *,
        raises_at: int | None = None,
        step_seconds: float = 0.0,
        reward: float = 1.0,
        place: EnvironmentPlace | None = None,
    ) -> None:
        """``raises_at``: the step that raises. ``reward``: of each step."""
        self.observation_space = spaces.Dict(
            {
                "count": spaces.Box(-np.inf, np.inf, (size,), np.float32),
                "image": spaces.Box(0, 255, (4, 4, 3), np.uint8),
                "before": spaces.Tuple([spaces.Discrete(3), spaces.MultiBinary(2)]),
            }
        )
        self.action_space = spaces.Tuple([spaces.Discrete(3, start=1), spaces.Box(-1, 1, (2,), np.float32)])
        self._size = size
        self._raises_at = raises_at
        self._step_seconds = step_seconds
        self._reward = reward
        self._place = place
        self._taken = 0

    @override
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._taken = 0
        rank = -1 if self._place is None else self._place.rank
        return self._observed(0), {"seed": seed, "options": options, "rank": rank, "draw": self.np_random.random()}

    @override
    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        number, box = action
        if not (isinstance(box, np.ndarray) and box.dtype == np.float32):
            raise TypeError(f"the action is {action!r}")
        self._taken += 1
        time.sleep(self._step_seconds)
        if self._taken == self._raises_at:
            raise ArithmeticError("the arm is stuck")
        info = {"taken": self._taken, "array": np.arange(3), "object": object(), "inf": np.inf}
        return self._observed(int(number) - 1), self._reward, False, self._taken == 8, info

    def _observed(self, before: int) -> dict[str, Any]:
        return {
            "count": np.full(self._size, self._taken, np.float32),
            "image": np.full((4, 4, 3), self._taken, np.uint8),
            "before": (before, np.array([0, 1], np.int8)),
        }


class JournaledCartPole(gymnasium.Wrapper[Any, Any, Any, Any]):
    """CartPole that counts its steps in a file of its own, which survives SIGKILL: ``PURPOSE-RANK-UUID``."""

    def __init__(self, folder: str, *, place: EnvironmentPlace) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        path = Path(folder) / f"{place.purpose}-{place.rank}-{uuid.uuid4().hex}"
        path.parent.mkdir(exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        self._num_steps = 0

    @override
    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        result = super().step(action)
        self._num_steps += 1
        os.pwrite(self._file, b"%d" % self._num_steps, 0)
        return result

    @override
    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        super().close()


def journaled_steps(folder: Path) -> dict[str, Counter[int]]:
    """Return the steps that the environments of a folder have counted, by purpose and rank."""
    found: dict[str, Counter[int]] = defaultdict(Counter)
    for path in folder.iterdir():
        purpose, rank, _ = path.name.split("-")
        found[purpose][int(rank)] += int(path.read_text() or 0)
    return found
