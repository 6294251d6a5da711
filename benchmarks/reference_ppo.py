"""PPO in one file and one process, in the manner of CleanRL's ``ppo_continuous_action.py``: what rlsrl has to equal.

It shares no code with rlsrl. The same algorithm with the same settings, written down once more in the plainest way, is
the measure of whether a distributed system learns as well as it should. Run it beside ``rlsrl run``, on one machine:

    python benchmarks/reference_ppo.py --env-id HalfCheetah-v5 --seed 1 --total-steps 1000000 --out curve.csv

Where it departs from CleanRL: the running statistics of observations and rewards are shared by all environments (as
Stable-Baselines3 has them), and an episode that was cut short is worth what its last observation is worth.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import math
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.wrappers import vector as wrappers
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, Normal

NORMALIZED_RANGE = 10.0
RETURN_WINDOW = 100


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env-id", required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--total-steps", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path, help="CSV with one line an iteration")
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--num-steps", type=int, default=256, help="of each environment in an iteration")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--minibatch-size", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--anneal", action=argparse.BooleanOptionalAction, default=True, help="the rate, linearly to 0")
    parser.add_argument("--discount", type=float, default=0.99)
    parser.add_argument("--gae-lambda", type=float, default=0.95)
    parser.add_argument("--clip-range", type=float, default=0.2)
    parser.add_argument("--entropy-coefficient", type=float, default=0.0)
    parser.add_argument("--value-coefficient", type=float, default=0.5)
    parser.add_argument("--clip-value-loss", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--max-gradient-norm", type=float, default=0.5)
    parser.add_argument("--normalize", action=argparse.BooleanOptionalAction, default=True, help="inputs and rewards")
    return parser.parse_args()


def tell_mujoco_warnings() -> None:
    """On the standard error: otherwise MuJoCo writes them to a file in the working folder."""
    try:
        mujoco = importlib.import_module("mujoco")
    except ImportError:
        return
    mujoco.set_mju_user_warning(lambda text: print(text, file=sys.stderr))


def make_envs(args: argparse.Namespace) -> gymnasium.vector.VectorEnv[Any, Any, Any]:
    """NEXT_STEP autoreset: the step after an episode's end only resets, and its observation is the last one's."""
    envs: Any = gymnasium.make_vec(args.env_id, num_envs=args.num_envs, vectorization_mode="sync")
    envs = wrappers.RecordEpisodeStatistics(envs)
    if isinstance(envs.single_action_space, spaces.Box):
        envs = wrappers.ClipAction(envs)
    if args.normalize:
        envs = wrappers.NormalizeObservation(envs)
        envs = wrappers.TransformObservation(envs, lambda obs: np.clip(obs, -NORMALIZED_RANGE, NORMALIZED_RANGE))
        envs = wrappers.NormalizeReward(envs, gamma=args.discount)
        envs = wrappers.ClipReward(envs, -NORMALIZED_RANGE, NORMALIZED_RANGE)
    return envs  # type: ignore[no-any-return]


def layer(num_inputs: int, num_outputs: int, gain: float = math.sqrt(2.0)) -> nn.Linear:
    linear = nn.Linear(num_inputs, num_outputs)
    nn.init.orthogonal_(linear.weight, gain)
    nn.init.zeros_(linear.bias)
    return linear


def tower(num_inputs: int, num_outputs: int, gain: float) -> nn.Sequential:
    return nn.Sequential(layer(num_inputs, 64), nn.Tanh(), layer(64, 64), nn.Tanh(), layer(64, num_outputs, gain))


class Agent(nn.Module):
    """Separate towers for policy and value; a deviation that no observation changes where actions are continuous."""

    def __init__(self, envs: gymnasium.vector.VectorEnv[Any, Any, Any]) -> None:
        super().__init__()
        action_space, num_inputs = envs.single_action_space, math.prod(envs.single_observation_space.shape or ())
        self.critic = tower(num_inputs, 1, gain=1.0)
        self.log_std: nn.Parameter | None = None
        if isinstance(action_space, spaces.Discrete):
            self.actor = tower(num_inputs, int(action_space.n), gain=0.01)
        else:
            size = math.prod(action_space.shape or ())
            self.actor = tower(num_inputs, size, gain=0.01)
            self.log_std = nn.Parameter(torch.zeros(size))

    def distribution(self, observation: Tensor) -> Distribution:
        outputs = self.actor(observation)
        if self.log_std is None:
            return Categorical(logits=outputs)
        return Independent(Normal(outputs, self.log_std.exp().expand_as(outputs)), 1)

    def value(self, observation: Tensor) -> Tensor:
        value: Tensor = self.critic(observation).squeeze(-1)
        return value


class Trainer:
    """Rollout, advantages, update: one iteration after another."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        torch.set_num_threads(1)
        torch.manual_seed(args.seed)
        self.rng = np.random.default_rng(args.seed)
        self.envs = make_envs(args)
        self.agent = Agent(self.envs)
        self.optimizer = torch.optim.Adam(self.agent.parameters(), lr=args.learning_rate, eps=1e-5)
        self.observation = self.as_tensor(self.envs.reset(seed=args.seed)[0])
        self.resetting = torch.zeros(args.num_envs, dtype=torch.bool)
        self.env_steps = 0
        self.num_episodes = 0
        self.returns: deque[float] = deque(maxlen=RETURN_WINDOW)

    @staticmethod
    def as_tensor(observation: Any) -> Tensor:
        return torch.as_tensor(np.asarray(observation), dtype=torch.float32).flatten(1)

    def iterate(self) -> None:
        if self.args.anneal:
            remaining = max(1.0 - self.env_steps / self.args.total_steps, 0.0)
            self.optimizer.param_groups[0]["lr"] = remaining * self.args.learning_rate
        self.update(self.rollout())

    @torch.no_grad()
    def rollout(self) -> dict[str, Tensor]:
        """Rows of one iteration: each transition with its advantage and return; resets are left out."""
        steps: list[dict[str, Tensor]] = []
        for _ in range(self.args.num_steps):
            distribution = self.agent.distribution(self.observation)
            action = distribution.sample()
            following, reward, terminated, truncated, info = self.envs.step(action.numpy())
            steps.append(
                {
                    "observation": self.observation,
                    "action": action,
                    "log_prob": distribution.log_prob(action),
                    "value": self.agent.value(self.observation),
                    "reward": torch.as_tensor(np.asarray(reward), dtype=torch.float32),
                    "terminated": torch.as_tensor(terminated),
                    "ended": torch.as_tensor(terminated | truncated),
                    "valid": ~self.resetting,
                }
            )
            self.observation, self.resetting = self.as_tensor(following), steps[-1]["ended"]
            self.count(info, int(steps[-1]["valid"].sum()))
        rows = {name: torch.stack([step[name] for step in steps]) for name in steps[0]}
        rows["advantage"] = self.advantages(rows)
        rows["return"] = rows["advantage"] + rows["value"]
        return {name: array[rows["valid"]] for name, array in rows.items()}

    def advantages(self, rows: dict[str, Tensor]) -> Tensor:
        """Generalised advantage estimation. The value that follows a step is that of the next row's observation."""
        args = self.args
        following_value = torch.cat([rows["value"][1:], self.agent.value(self.observation)[None]])
        delta = rows["reward"] + args.discount * following_value * ~rows["terminated"] - rows["value"]
        advantage, accumulated = torch.zeros_like(delta), torch.zeros(args.num_envs)
        for t in reversed(range(args.num_steps)):
            goes_on = rows["valid"][t] & ~rows["ended"][t]
            accumulated = delta[t] + args.discount * args.gae_lambda * goes_on * accumulated
            advantage[t] = accumulated
        return advantage

    def count(self, info: dict[str, Any], num_transitions: int) -> None:
        self.env_steps += num_transitions
        if "episode" in info:
            finished = info["episode"]["r"][info["_episode"]].tolist()
            self.returns.extend(finished)
            self.num_episodes += len(finished)

    def update(self, rows: dict[str, Tensor]) -> None:
        num_rows = len(rows["action"])
        for _ in range(self.args.epochs):
            order = torch.from_numpy(self.rng.permutation(num_rows))
            for chosen in torch.split(order, self.args.minibatch_size):
                if len(chosen) > 1:
                    self.minibatch_step({name: array[chosen] for name, array in rows.items()})

    def minibatch_step(self, rows: dict[str, Tensor]) -> None:
        args = self.args
        distribution, value = self.agent.distribution(rows["observation"]), self.agent.value(rows["observation"])
        ratio = (distribution.log_prob(rows["action"]) - rows["log_prob"]).exp()
        advantage = (rows["advantage"] - rows["advantage"].mean()) / (rows["advantage"].std() + 1e-8)
        clipped_ratio = ratio.clamp(1.0 - args.clip_range, 1.0 + args.clip_range)
        policy_loss = -torch.min(ratio * advantage, clipped_ratio * advantage).mean()
        value_error = (value - rows["return"]) ** 2
        if args.clip_value_loss:
            kept_value = rows["value"] + (value - rows["value"]).clamp(-args.clip_range, args.clip_range)
            value_error = torch.max(value_error, (kept_value - rows["return"]) ** 2)
        value_loss = 0.5 * value_error.mean()
        loss = policy_loss + args.value_coefficient * value_loss
        loss = loss - args.entropy_coefficient * distribution.entropy().mean()
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.agent.parameters(), args.max_gradient_norm)
        self.optimizer.step()


def main() -> None:
    args = arguments()
    tell_mujoco_warnings()
    trainer, began, lines = Trainer(args), time.monotonic(), []
    while trainer.env_steps < args.total_steps:
        trainer.iterate()
        mean = float(np.mean(trainer.returns)) if trainer.returns else math.nan
        seconds = time.monotonic() - began
        lines.append((trainer.env_steps, trainer.num_episodes, round(mean, 3), round(seconds, 2)))
        if len(lines) % 20 == 1 or trainer.env_steps >= args.total_steps:
            print(f"{trainer.env_steps:>9,} steps  return {mean:10.2f}  {trainer.env_steps / seconds:8,.0f} steps/s")
    trainer.envs.close()
    if args.out is not None:
        with args.out.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("env_steps", "episodes", "return_mean", "seconds"))
            writer.writerows(lines)


if __name__ == "__main__":
    main()
