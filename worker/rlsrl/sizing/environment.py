"""Measure the speed of an environment by stepping it for a moment in this process."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlsrl.envs.factory import EnvironmentSource, make_environment
from rlsrl.envs.interface import EnvironmentInterface
from rlsrl.envs.wrappers import random_action
from rlsrl.runtime.errors import ConfigurationError, EnvironmentFailed
from rlsrl.runtime.tracebacks import users_traceback
from rlsrl.sizing.workload import EnvironmentSpeed

if TYPE_CHECKING:
    import gymnasium

SECONDS = 1.0
"""Length of the measurement."""
WARM_STEPS = 10
"""Steps before the measurement: the first steps of many environments load libraries and data."""
LEAST_STEPS = 3
NOISE = 0.02
"""Smaller shares of the time do not count as waiting, because the clocks are not read at the same moment."""
_SCHEDSTAT = Path("/proc/thread-self/schedstat")


def measure_environment(source: EnvironmentSource, *, seconds: float = SECONDS) -> EnvironmentSpeed:
    """Return the time of one step of one environment, measured with random actions, resets included.

    The time is split into computing, in this thread, and waiting. Time in the queue for a processor is neither. Work in
    the environment's own threads counts as waiting.

    Raises:
        ConfigurationError: the environment cannot be made, or a space is not supported.
        EnvironmentFailed: the environment's own code raised another error.
    """
    try:
        with closing(make_environment(source)) as env:
            EnvironmentInterface.of(env)  # Raises if a space is not supported.
            env.action_space.seed(0)
            observation, _ = env.reset(seed=0)
            for _ in range(WARM_STEPS):
                observation = _step(env, random_action(env, observation))[0]
            return _measure(env, observation, seconds)
    except ConfigurationError:
        raise
    except (Exception, SystemExit) as error:
        raise EnvironmentFailed(
            f"{source} raised {type(error).__name__}: {error}", traceback=users_traceback(error)
        ) from error


def _measure(env: gymnasium.Env[Any, Any], observation: Any, seconds: float) -> EnvironmentSpeed:
    spent, steps, resets = 0.0, 0, 0
    began, computed, queued = time.perf_counter(), time.thread_time(), _queued_seconds()
    while (elapsed := time.perf_counter() - began) < seconds or steps < LEAST_STEPS:
        action = random_action(env, observation)
        before = time.perf_counter()
        observation, ended = _step(env, action)
        spent += time.perf_counter() - before
        steps += 1
        resets += ended
    computed, queued = time.thread_time() - computed, _queued_seconds() - queued
    waited = elapsed - computed - queued
    if waited < NOISE * elapsed:
        waited = 0.0
    # All waiting is the environment's. Its share of the time in the queue is its share of the computing.
    stepping = max(0.0, spent - waited) / (1.0 + queued / computed)
    all_steps = steps + resets  # in an actor, a reset is a step of its own
    return EnvironmentSpeed(
        step_seconds=min(stepping, computed) / all_steps,
        wait_seconds=waited / all_steps,
        transition_share=steps / all_steps,
    )


def _step(env: gymnasium.Env[Any, Any], action: Any) -> tuple[Any, bool]:
    """Step once, and reset after an episode's end; return the next observation, and whether there was a reset."""
    observation, _, terminated, truncated, _ = env.step(action)
    if terminated or truncated:
        return env.reset()[0], True
    return observation, False


def _queued_seconds() -> float:
    """Return how long this thread was ready while others had its processor; 0 if the kernel does not count it."""
    try:
        return int(_SCHEDSTAT.read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
