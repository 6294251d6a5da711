"""How fast an environment is, found by stepping it for a moment in this process."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlsrl.envs.factory import EnvironmentSource, make_environment
from rlsrl.envs.spaces import observation_keys, spec_of
from rlsrl.envs.vector import EnvironmentFailed
from rlsrl.runtime.errors import ConfigurationError
from rlsrl.sizing.workload import EnvironmentSpeed

if TYPE_CHECKING:
    import gymnasium

SECONDS = 1.0
"""For how long it is stepped."""
WARM_STEPS = 10
"""Before that: the first steps of many environments load what they need."""
LEAST_STEPS = 3
NOISE = 0.02
"""Share of the time that is not taken for waiting: calls of the clocks do not meet."""
_SCHEDSTAT = Path("/proc/thread-self/schedstat")


def measure_environment(source: EnvironmentSource, *, seconds: float = SECONDS) -> EnvironmentSpeed:
    """Step one environment with random actions for so many seconds, resets included.

    What it takes splits into what it computes, in this thread, and what it waits; for a processor that others use it
    does neither. Threads of its own count as waiting.

    Raises:
        ConfigurationError: the environment cannot be made, or a space is not supported.
        EnvironmentFailed: its own code raised something else.
    """
    try:
        with closing(make_environment(source)) as env:
            act = _actions(env)
            observation, _ = env.reset(seed=0)
            for _ in range(WARM_STEPS):
                observation = _step(env, act(observation))[0]
            return _measure(env, act, observation, seconds)
    except ConfigurationError:
        raise
    except Exception as error:
        raise EnvironmentFailed(f"{source} raised {type(error).__name__}: {error}") from error


def _measure(
    env: gymnasium.Env[Any, Any], act: Callable[[Any], Any], observation: Any, seconds: float
) -> EnvironmentSpeed:
    spent, steps, resets = 0.0, 0, 0
    began, computed, queued = time.perf_counter(), time.thread_time(), _queued_seconds()
    while (elapsed := time.perf_counter() - began) < seconds or steps < LEAST_STEPS:
        action = act(observation)
        before = time.perf_counter()
        observation, ended = _step(env, action)
        spent += time.perf_counter() - before
        steps += 1
        resets += ended
    computed, queued = time.thread_time() - computed, _queued_seconds() - queued
    waited = elapsed - computed - queued
    if waited < NOISE * elapsed:
        waited = 0.0
    # All waiting is the environment's; of the time in the queue it has the share that it has of what was computed.
    stepping = max(0.0, spent - waited) / (1.0 + queued / computed)
    places = steps + resets  # where actors step environments, a reset is a step of its own
    return EnvironmentSpeed(
        step_seconds=min(stepping, computed) / places, wait_seconds=waited / places, transition_share=steps / places
    )


def _step(env: gymnasium.Env[Any, Any], action: Any) -> tuple[Any, bool]:
    """One step, and the reset after an episode's end; the observation to go on from, and whether there was one."""
    observation, _, terminated, truncated, _ = env.step(action)
    if terminated or truncated:
        return env.reset()[0], True
    return observation, False


def _actions(env: gymnasium.Env[Any, Any]) -> Callable[[Any], Any]:
    """Random legal actions, by the observation."""
    spec = spec_of(env)
    env.action_space.seed(0)
    if (path := spec.action.mask) is None:
        return lambda _: env.action_space.sample()
    keys = dict(observation_keys(env.observation_space))[path]

    def legal(observation: Any) -> Any:
        for key in keys:
            observation = observation[key]
        return env.action_space.sample(mask=np.asarray(observation, np.int8))

    return legal


def _queued_seconds() -> float:
    """For how long this thread was ready and others had its processor; 0 where the kernel does not say."""
    try:
        return int(_SCHEDSTAT.read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
