"""Compare the ways in which an actor steps its environments, each in its own process, interleaved.

    python benchmarks/environment_stepping.py [ROUNDS]

Fast environments, CartPole-v1: transitions a second of a loop and of CartPole's own vectorisation. Slow environments,
CartPole-v1 whose step sleeps for 5 ms: the share of the latency limit (one transition of each environment every 5 ms),
and the peak memory of the process. The network balances the pole, so that few steps only reset. Compare only ratios
within one run.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from statistics import median
from typing import Any

import gymnasium
import numpy as np
from environments import SlowEnv

from rlsrl.api.process_environment import PROCESS_ENVIRONMENT
from rlsrl.data.slots import Slot, rollout_layout
from rlsrl.data.specs import EnvSpec
from rlsrl.data.version import Version
from rlsrl.envs.factory import EnvironmentSource, make_environment
from rlsrl.envs.native import make_native
from rlsrl.envs.threads import EnvironmentThreads
from rlsrl.envs.vector import LoopVectorEnv
from rlsrl.parameters.protocols import Parameters
from rlsrl.policies.exported import CategoricalHead, DenseLayer, ExportedActor
from rlsrl.policies.numpy_policy import NumpyActor, NumpyLanes
from rlsrl.runtime.process import wake_threads_promptly
from rlsrl.workers.env_groups import EnvGroup, LockstepEnvGroup, ThreadedEnvGroup

STEP_SECONDS = 0.005
HIDDEN = 64
CARTPOLE = EnvironmentSource(id="CartPole-v1")
FAST_ENVS, FAST_STEPS, FAST_SLOTS = 64, 128, 40
SLOW_ENVS, SLOW_STEPS = (16, 64), 32
SLOW_SLOTS = {"loop": 1, "threads": 30}


def main(rounds: str = "3") -> None:
    fast: dict[str, list[float]] = {"loop": [], "native": []}
    slow: dict[tuple[str, int], list[dict[str, float]]] = {
        (name, num_envs): [] for name in SLOW_SLOTS for num_envs in SLOW_ENVS
    }
    for _ in range(int(rounds)):
        for name, rates in fast.items():
            rates.append(measured(name, 0.0, FAST_ENVS, FAST_STEPS, FAST_SLOTS)["rate"])
        for (name, num_envs), found in slow.items():
            found.append(measured(name, STEP_SECONDS, num_envs, SLOW_STEPS, SLOW_SLOTS[name]))
    for name, rates in fast.items():
        ratios = [rate / loop for rate, loop in zip(rates, fast["loop"], strict=True)]
        print(
            f"fast {name:8} {FAST_ENVS:3} environments   {spread(ratios)} x loop, {median(rates) / 1e3:.0f} k a second"
        )
    for (name, num_envs), found in slow.items():
        shares = [result["rate"] * STEP_SECONDS / num_envs for result in found]
        cores, memory = (median(result[what] for result in found) for what in ("cores", "megabytes"))
        print(
            f"slow {name:8} {num_envs:3} environments   {spread(shares)} of the latency limit, {cores:.2f} cores, "
            f"{memory:.0f} MB"
        )


def spread(values: list[float]) -> str:
    return f"{median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def measured(name: str, step_seconds: float, *sizes: int) -> dict[str, float]:
    """Return the result of a case in its own process."""
    command = [sys.executable, __file__, "case", name, str(step_seconds), *map(str, sizes)]
    environment: Mapping[str, str] = {**os.environ, **PROCESS_ENVIRONMENT}
    found = subprocess.run(command, env=environment, capture_output=True, check=True, text=True)
    result: dict[str, float] = json.loads(found.stdout)
    return result


def case(name: str, step_seconds: float, num_envs: int, num_steps: int, num_slots: int) -> dict[str, float]:
    """Fill slots and return the rate, cores and memory. The first slot does not count."""
    group, load, spec, envs = made(name, step_seconds > 0, num_envs, num_steps)
    layout = rollout_layout(spec, num_steps=num_steps, num_lanes=num_envs)
    free = [Slot(arrays=layout.view(bytearray(layout.nbytes))) for _ in range(2)]
    load(balancing(exported()))
    num_filled, transitions = 0, 0
    while num_filled <= num_slots:
        if free and group.has_room:
            group.begin(free.pop())
        slot = group.advance(touch=nothing, still_wanted=wanted)
        if slot is None:
            continue
        if num_filled == 0:
            began, busy = time.perf_counter(), time.process_time()
        else:
            transitions += int(slot.arrays["mask"].sum())
        num_filled += 1
        free.append(slot)
    seconds = time.perf_counter() - began
    cores = (time.process_time() - busy) / seconds
    group.abandon()
    envs.close()
    megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"rate": transitions / seconds, "cores": cores, "megabytes": megabytes}


def made(
    name: str, is_slow: bool, num_envs: int, num_steps: int
) -> tuple[EnvGroup, Callable[[Parameters], None], EnvSpec, Any]:
    def make() -> gymnasium.Env[Any, Any]:
        env = make_environment(CARTPOLE)
        return SlowEnv(env, STEP_SECONDS) if is_slow else env

    sizes: dict[str, Any] = {"num_steps": num_steps, "num_lanes": num_envs, "rng": np.random.default_rng(0)}
    if name == "threads":
        wake_threads_promptly()
        threads = EnvironmentThreads(lambda _: make(), seeds=range(num_envs))
        actors = NumpyLanes(exported(), **sizes), NumpyLanes(exported(), **sizes)
        group = ThreadedEnvGroup(threads, actors, num_steps=num_steps)
        return group, group.load, threads.spec, threads
    envs = (
        make_native(CARTPOLE, num_envs, seed=0)
        if name == "native"
        else LoopVectorEnv(lambda _: make(), seeds=range(num_envs))
    )
    actor = NumpyActor(exported(), **sizes)
    return LockstepEnvGroup(envs, actor, num_steps=num_steps), actor.load, envs.spec, envs


def exported() -> ExportedActor:
    """Return a network with two hidden layers of 64, as in a small experiment."""
    sizes, offset, layers = (4, HIDDEN, HIDDEN, 2), 0, []
    for number, (in_size, out_size) in enumerate(pairwise(sizes)):
        layers.append(
            DenseLayer(
                name=str(number),
                weight_offset=offset,
                bias_offset=offset + in_size * out_size,
                in_size=in_size,
                out_size=out_size,
                activation="tanh" if number < 2 else "identity",
            )
        )
        offset += (in_size + 1) * out_size
    spec = LoopVectorEnv(lambda _: make_environment(CARTPOLE), seeds=[0]).spec
    return ExportedActor(
        layout="benchmark",
        num_parameters=offset,
        observation=spec.observation,
        layers=tuple(layers),
        head=CategoricalHead(num_actions=2),
    )


def balancing(made: ExportedActor) -> Parameters:
    """Return weights that push the cart to the side where the pole falls."""
    rng = np.random.default_rng(0)
    vector = np.zeros(made.num_parameters, np.float32)
    dense = [layer for layer in made.layers if isinstance(layer, DenseLayer)]
    for layer in dense:
        size = layer.in_size * layer.out_size
        vector[layer.weight_offset : layer.weight_offset + size] = rng.standard_normal(size) * 1e-3
    first, second, last = (
        vector[layer.weight_offset : layer.weight_offset + layer.in_size * layer.out_size].reshape(
            layer.out_size, layer.in_size
        )
        for layer in dense
    )
    first[0] = (0.05, 0.2, 1.0, 0.5)
    second[0, 0] = 1.0
    last[:, 0] = (-200.0, 200.0)
    return Parameters(version=Version(1, 0), vector=vector, layout="benchmark")


def nothing() -> None:
    pass


def wanted() -> bool:
    return True


if __name__ == "__main__":
    if sys.argv[1:2] == ["case"]:
        name, step_seconds, *sizes = sys.argv[2:]
        print(json.dumps(case(name, float(step_seconds), *map(int, sizes))))
    else:
        main(*sys.argv[1:])
