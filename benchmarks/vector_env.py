"""Measure the CPU time of an environment step: rlsrl's loop into a slot, SyncVectorEnv copied into a slot, and neither.

    python benchmarks/vector_env.py [ENVIRONMENT_ID] [NUM_ENVS]

The three alternate within one run, and the best of several rounds counts. Only their ratio is meaningful.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from rlsrl.data.slots import rollout_layout
from rlsrl.envs.factory import EnvironmentSource, make_environment
from rlsrl.envs.spaces import action_decoder
from rlsrl.envs.vector import LoopVectorEnv

NUM_STEPS, ROUNDS, SLOTS_A_ROUND = 128, 9, 8


def main(env_id: str = "CartPole-v1", num_envs: str = "8") -> None:
    source, count = EnvironmentSource(id=env_id), int(num_envs)
    envs = LoopVectorEnv(lambda _: make_environment(source), seeds=range(count))
    layout = rollout_layout(envs.spec, num_steps=NUM_STEPS, num_lanes=count)
    arrays = layout.view(bytearray(layout.nbytes))
    actions = random_actions(source, count)
    contenders: dict[str, Callable[[], None]] = {
        "LoopVectorEnv": lambda: loop(envs, arrays, actions),
        "SyncVectorEnv": sync(source, count, arrays, actions),
        "environments alone": alone(source, count, actions),
    }
    best = dict.fromkeys(contenders, float("inf"))
    for _ in range(ROUNDS):
        for name, fill in contenders.items():
            began = time.process_time()
            for _ in range(SLOTS_A_ROUND):
                fill()
            elapsed = time.process_time() - began
            best[name] = min(best[name], elapsed / (SLOTS_A_ROUND * NUM_STEPS * count) * 1e6)
    for name, microseconds in best.items():
        print(f"{name:20} {microseconds:6.2f} us a step   {microseconds / best['LoopVectorEnv']:.2f} x LoopVectorEnv")


def random_actions(source: EnvironmentSource, count: int) -> NDArray[Any]:
    space = make_environment(source).action_space
    space.seed(0)
    return np.array([[space.sample() for _ in range(count)] for _ in range(NUM_STEPS)])


def loop(envs: LoopVectorEnv, arrays: dict[str, NDArray[Any]], actions: NDArray[Any]) -> None:
    envs.begin(arrays)
    for step in range(NUM_STEPS):
        envs.step(arrays, step, actions[step])


def sync(
    source: EnvironmentSource, count: int, arrays: dict[str, NDArray[Any]], actions: NDArray[Any]
) -> Callable[[], None]:
    envs = gymnasium.vector.SyncVectorEnv([lambda: make_environment(source)] * count, copy=False)
    envs.reset(seed=0)

    def fill() -> None:
        for step in range(NUM_STEPS):
            frame, reward, terminated, truncated, _ = envs.step(actions[step])
            arrays["observation"][step + 1] = frame
            arrays["reward"][step] = reward
            arrays["terminated"][step] = terminated
            arrays["truncated"][step] = truncated

    return fill


def alone(source: EnvironmentSource, count: int, actions: NDArray[Any]) -> Callable[[], None]:
    """Return a function that only steps the environments and writes nothing."""
    envs = [make_environment(source) for _ in range(count)]
    decode = action_decoder(envs[0].action_space)
    for env in envs:
        env.reset(seed=0)

    def fill() -> None:
        for step in range(NUM_STEPS):
            for env, action in zip(envs, decode(actions[step]), strict=True):
                _, _, terminated, truncated, _ = env.step(action)
                if terminated or truncated:
                    env.reset()

    return fill


if __name__ == "__main__":
    main(*sys.argv[1:])
