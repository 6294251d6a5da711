"""Time the two hot paths of a small on-policy run, one actor step and one training step, at CartPole's sizes.

Run with OMP_NUM_THREADS=1. Compare only ratios within one run: each path is printed beside its plain counterpart (torch
inference; modules, torch.distributions and torch.optim.Adam).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

from rlsrl.algorithms.adam import Adam
from rlsrl.algorithms.learner import Learner
from rlsrl.algorithms.ppo import Ppo
from rlsrl.data.random_slots import random_slot
from rlsrl.data.slots import Slot
from rlsrl.data.specs import Arrays
from rlsrl.data.version import Version
from rlsrl.policies.acting import LocalActor, PolicyActor
from rlsrl.policies.build import build_network
from rlsrl.policies.networks import MlpActorCritic
from rlsrl.policies.numpy_policy import NumpyActor
from rlsrl.policies.torch_policy import TorchPolicy
from rlsrl.testing.rollouts import discrete_env_spec

NUM_STEPS, NUM_LANES, EPOCHS, MINIBATCH_SIZE = 128, 8, 4, 256
ENV_SPEC = discrete_env_spec(num_features=4, num_actions=2)


def make_policy() -> TorchPolicy:
    return TorchPolicy(build_network(MlpActorCritic, ENV_SPEC, {}, seed=0), ENV_SPEC)


def rollout(actor: LocalActor, slot: Slot) -> None:
    actor.begin(slot)
    for step in range(NUM_STEPS):
        actor.act(step)
    actor.finish()


def make_learner(policy: TorchPolicy) -> Learner:
    ppo = Ppo(
        policy,
        discount=0.99,
        gae_lambda=0.95,
        clip_range=0.2,
        clip_value_loss=True,
        entropy_coefficient=0.01,
        value_coefficient=0.5,
        epochs=EPOCHS,
        minibatch_size=MINIBATCH_SIZE,
        normalize_advantages=True,
    )
    initial = policy.parameters(Version(1, 0))
    return Learner(ppo, initial, learning_rate=2.5e-4, optimizer=Adam(epsilon=1e-5, max_gradient_norm=0.5), seed=0)


def plain_update(network: nn.Module, optimizer: torch.optim.Optimizer, slots: Arrays) -> None:
    """Train on a batch as a single-file PPO does, without its advantage estimation."""
    observation = torch.from_numpy(slots["observation"][:-1].reshape(-1, 4))
    action, old_log_prob = (torch.from_numpy(slots[name].reshape(-1)) for name in ("action", "behavior_log_prob"))
    with torch.no_grad():
        old_value = network({"observation": observation})["value"]
    advantages = torch.from_numpy(slots["reward"].reshape(-1))
    returns = advantages + old_value
    for _ in range(EPOCHS):
        for index in torch.randperm(len(action)).split(MINIBATCH_SIZE):
            heads = network({"observation": observation[index]})
            value, distribution = heads["value"], Categorical(logits=heads["policy"])
            log_ratio = distribution.log_prob(action[index]) - old_log_prob[index]
            ratio = log_ratio.exp()
            with torch.no_grad():
                ((ratio - 1) - log_ratio).mean()
                ((ratio - 1.0).abs() > 0.2).float().mean().item()
            advantage = advantages[index]
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            policy_loss = torch.max(-advantage * ratio, -advantage * torch.clamp(ratio, 0.8, 1.2)).mean()
            kept = old_value[index] + torch.clamp(value - old_value[index], -0.2, 0.2)
            value_loss = 0.5 * torch.max((value - returns[index]) ** 2, (kept - returns[index]) ** 2).mean()
            loss = policy_loss - 0.01 * distribution.entropy().mean() + 0.5 * value_loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), 0.5)
            optimizer.step()


def best_of(functions: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Return the least seconds of each function. They alternate, so that a busy moment affects all alike."""
    seconds = dict.fromkeys(functions, float("inf"))
    for _ in range(repeats):
        for name, function in functions.items():
            began = time.perf_counter()
            function()
            seconds[name] = min(seconds[name], time.perf_counter() - began)
    return seconds


def main() -> None:
    policy = make_policy()
    learner = make_learner(policy)
    slot = random_slot(ENV_SPEC, num_steps=NUM_STEPS, num_lanes=NUM_LANES, rng=np.random.default_rng(0))
    exported = policy.export()
    assert exported is not None
    sizes: dict[str, Any] = {"num_steps": NUM_STEPS, "num_lanes": NUM_LANES, "rng": np.random.default_rng(0)}
    actors: dict[str, LocalActor] = {
        "exported": NumpyActor(exported, **sizes),
        "torch": PolicyActor(policy, ENV_SPEC, **sizes),
    }
    for actor in actors.values():
        actor.load(policy.parameters(Version(1, 0)))
    acting = best_of({name: partial(rollout, actor, slot) for name, actor in actors.items()}, 30)
    for name, seconds in acting.items():
        print(f"acting by {name:8} {seconds / NUM_STEPS * 1e6:8.1f} us a step of {NUM_LANES} environments")
    network = build_network(MlpActorCritic, ENV_SPEC, {}, seed=0)
    optimizer = torch.optim.Adam(network.parameters(), lr=2.5e-4, eps=1e-5)
    updates: dict[str, Callable[[], object]] = {
        "Learner.step": lambda: learner.step(slot.arrays),
        "plain update": lambda: plain_update(network, optimizer, slot.arrays),
    }
    for name, seconds in best_of(updates, 20).items():
        print(f"{name} {seconds * 1e3:8.1f} ms a batch of {NUM_STEPS} x {NUM_LANES}, {EPOCHS} epochs")


if __name__ == "__main__":
    main()
