"""PPO in one file and one process, in the manner of CleanRL's ``ppo*.py``: the reference for learning and speed.

It shares no code with rlsrl. The same algorithm with the same settings, written in the plainest way, shows how well a
distributed system should learn. Run it and ``rlsrl run`` on one machine:

    python benchmarks/reference_ppo.py --env-id HalfCheetah-v5 --seed 1 --total-steps 1000000 --out curve.csv

With ``--report`` it prints a line of JSON per iteration, which ``make bench`` reads.

It differs from CleanRL in two points. All environments share the running statistics of observations and rewards, as in
Stable-Baselines3. A truncated episode is bootstrapped with the value of its last observation.
"""

from __future__ import annotations

import argparse
import csv
import functools
import importlib
import json
import math
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import environments
import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.wrappers import vector as wrappers
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, Normal

NORMALIZED_RANGE = 10.0
RETURN_WINDOW = 100


def parser_of(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env-id", required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--step-seconds", type=float, default=0.0, help="seconds that each environment step sleeps")
    parser.add_argument("--total-steps", type=int, default=1_000_000)
    parser.add_argument("--goal", type=float, default=math.inf, help="mean return that ends the run")
    parser.add_argument("--report", action="store_true", help="print a line of JSON per iteration")
    parser.add_argument("--out", type=Path, help="CSV with one line per iteration")
    parser.add_argument(
        "--vector", choices=["sync", "async", "native"], default="sync", help="vectorisation of the environments"
    )
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="device of the network")
    parser.add_argument("--network", choices=["mlp", "cnn"], default="mlp")
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--num-steps", type=int, default=256, help="steps of each environment in an iteration")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--minibatch-size", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument(
        "--anneal", action=argparse.BooleanOptionalAction, default=True, help="anneal the learning rate linearly to 0"
    )
    parser.add_argument("--discount", type=float, default=0.99)
    parser.add_argument("--gae-lambda", type=float, default=0.95)
    parser.add_argument("--clip-range", type=float, default=0.2)
    parser.add_argument("--entropy-coefficient", type=float, default=0.0)
    parser.add_argument("--value-coefficient", type=float, default=0.5)
    parser.add_argument("--clip-value-loss", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--max-gradient-norm", type=float, default=0.5)
    parser.add_argument(
        "--normalize", action=argparse.BooleanOptionalAction, default=True, help="normalise observations and rewards"
    )
    return parser


def arguments() -> argparse.Namespace:
    return parser_of(__doc__).parse_args()


def tell_mujoco_warnings() -> None:
    """Print MuJoCo's warnings to standard error. By default MuJoCo writes them to a file in the working folder."""
    try:
        mujoco = importlib.import_module("mujoco")
    except ImportError:
        return
    mujoco.set_mju_user_warning(lambda text: print(text, file=sys.stderr))


def make_envs(args: argparse.Namespace) -> gymnasium.vector.VectorEnv[Any, Any, Any]:
    """Return environments with NEXT_STEP autoreset: the step after the end of an episode only resets."""
    envs: Any
    if args.vector == "native":
        envs = gymnasium.make_vec(args.env_id, num_envs=args.num_envs, vectorization_mode="vector_entry_point")
    else:
        made = functools.partial(environments.make, args.env_id, step_seconds=args.step_seconds)
        kind = {"sync": gymnasium.vector.SyncVectorEnv, "async": gymnasium.vector.AsyncVectorEnv}[args.vector]
        envs = kind([made] * args.num_envs)
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


def nature_cnn(num_channels: int) -> nn.Sequential:
    """Return the convolutional body of Mnih et al. (2015), for 84 x 84 pixels."""
    convolutions = []
    for inputs, outputs, size, stride in ((num_channels, 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1)):
        convolution = nn.Conv2d(inputs, outputs, size, stride)
        nn.init.orthogonal_(convolution.weight, math.sqrt(2.0))
        assert convolution.bias is not None
        nn.init.zeros_(convolution.bias)
        convolutions += [convolution, nn.ReLU()]
    return nn.Sequential(*convolutions, nn.Flatten(), layer(64 * 7 * 7, 512), nn.ReLU())


class PixelAgent(nn.Module):
    """Policy and value heads on one convolutional body."""

    def __init__(self, envs: gymnasium.vector.VectorEnv[Any, Any, Any]) -> None:
        super().__init__()
        assert isinstance(envs.single_action_space, spaces.Discrete)
        self.body = nature_cnn((envs.single_observation_space.shape or ())[0])
        self.actor = layer(512, int(envs.single_action_space.n), 0.01)
        self.critic = layer(512, 1, 1.0)

    def forward(self, observation: Tensor) -> tuple[Distribution, Tensor]:
        features = self.body(observation / 255.0)
        return Categorical(logits=self.actor(features)), self.critic(features).squeeze(-1)


class Agent(nn.Module):
    """Separate towers for policy and value. Continuous actions have a state-independent standard deviation."""

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

    def forward(self, observation: Tensor) -> tuple[Distribution, Tensor]:
        outputs, value = self.actor(observation), self.critic(observation).squeeze(-1)
        if self.log_std is None:
            return Categorical(logits=outputs), value
        return Independent(Normal(outputs, self.log_std.exp().expand_as(outputs)), 1), value


class Trainer:
    """Repeats rollout, advantages and update."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        torch.set_num_threads(args.threads)
        torch.manual_seed(args.seed)
        Distribution.set_default_validate_args(False)
        self.rng = np.random.default_rng(args.seed)
        self.envs = make_envs(args)
        self.device = torch.device(args.device)
        self.agent = self.make_agent().to(self.device)
        self.optimizer = torch.optim.Adam(self.agent.parameters(), lr=args.learning_rate, eps=1e-5)
        self.is_image = args.network == "cnn"
        self.observation = self.as_tensor(self.envs.reset(seed=args.seed)[0])
        self.resetting = torch.zeros(args.num_envs, dtype=torch.bool, device=self.device)
        self.env_steps = 0
        self.num_episodes = 0
        self.returns: deque[float] = deque(maxlen=RETURN_WINDOW)

    def make_agent(self) -> nn.Module:
        return PixelAgent(self.envs) if self.args.network == "cnn" else Agent(self.envs)

    def as_tensor(self, observation: Any) -> Tensor:
        if self.is_image:
            return torch.from_numpy(np.array(observation)).to(self.device)
        return torch.as_tensor(np.asarray(observation), dtype=torch.float32, device=self.device).flatten(1)

    def iterate(self) -> None:
        if self.args.anneal:
            remaining = max(1.0 - self.env_steps / self.args.total_steps, 0.0)
            self.optimizer.param_groups[0]["lr"] = remaining * self.args.learning_rate
        self.update(self.rollout())

    @torch.no_grad()
    def rollout(self) -> dict[str, Tensor]:
        """Return the rows of one iteration, each transition with advantage and return. Resets are left out."""
        steps: list[dict[str, Tensor]] = []
        for _ in range(self.args.num_steps):
            distribution, value = self.agent(self.observation)
            action = distribution.sample()
            following, reward, terminated, truncated, info = self.envs.step(action.cpu().numpy())
            steps.append(
                {
                    "observation": self.observation,
                    "action": action,
                    "log_prob": distribution.log_prob(action),
                    "value": value,
                    "reward": torch.as_tensor(np.asarray(reward), dtype=torch.float32, device=self.device),
                    "terminated": torch.as_tensor(terminated, device=self.device),
                    "ended": torch.as_tensor(terminated | truncated, device=self.device),
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
        """Return generalised advantages. The value after a step is that of the next row's observation."""
        args = self.args
        following_value = torch.cat([rows["value"][1:], self.last_value()[None]])
        delta = rows["reward"] + args.discount * following_value * ~rows["terminated"] - rows["value"]
        advantage, accumulated = torch.zeros_like(delta), torch.zeros(args.num_envs, device=self.device)
        for t in reversed(range(args.num_steps)):
            goes_on = rows["valid"][t] & ~rows["ended"][t]
            accumulated = delta[t] + args.discount * args.gae_lambda * goes_on * accumulated
            advantage[t] = accumulated
        return advantage

    def last_value(self) -> Tensor:
        """Return the value of the observation after the last step."""
        _, value = self.agent(self.observation)
        return value  # type: ignore[no-any-return]

    def count(self, info: dict[str, Any], num_transitions: int) -> None:
        self.env_steps += num_transitions
        if "episode" in info:
            finished = info["episode"]["r"][info["_episode"]].tolist()
            self.returns.extend(finished)
            self.num_episodes += len(finished)

    def reached(self, goal: float) -> bool:
        """Return whether the mean return of a full window of episodes has reached the goal."""
        return len(self.returns) == RETURN_WINDOW and float(np.mean(self.returns)) >= goal

    def update(self, rows: dict[str, Tensor]) -> None:
        num_rows = len(rows["action"])
        for _ in range(self.args.epochs):
            order = torch.from_numpy(self.rng.permutation(num_rows)).to(self.device)
            for chosen in torch.split(order, self.args.minibatch_size):
                if len(chosen) > 1:
                    self.minibatch_step({name: array[chosen] for name, array in rows.items()})

    def evaluated(self, rows: dict[str, Tensor]) -> tuple[dict[str, Tensor], Distribution, Tensor]:
        """Return the transitions of a minibatch, and what the network says of them now."""
        distribution, value = self.agent(rows["observation"])
        return rows, distribution, value

    def minibatch_step(self, rows: dict[str, Tensor]) -> None:
        args = self.args
        rows, distribution, value = self.evaluated(rows)
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


def main(args: argparse.Namespace, kind: type[Trainer] = Trainer) -> None:
    tell_mujoco_warnings()
    trainer, began, lines = kind(args), time.monotonic(), []
    while trainer.env_steps < args.total_steps and not trainer.reached(args.goal):
        trainer.iterate()
        mean = float(np.mean(trainer.returns)) if trainer.returns else math.nan
        seconds = time.monotonic() - began
        lines.append((trainer.env_steps, trainer.num_episodes, round(mean, 3), round(seconds, 2)))
        if args.report:
            print(json.dumps({"wall": time.time(), "env_steps": trainer.env_steps, "return_mean": mean}), flush=True)
        elif len(lines) % 20 == 1 or trainer.env_steps >= args.total_steps:
            print(f"{trainer.env_steps:>9,} steps  return {mean:10.2f}  {trainer.env_steps / seconds:8,.0f} steps/s")
    trainer.envs.close()
    if args.out is not None:
        with args.out.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("env_steps", "episodes", "return_mean", "seconds"))
            writer.writerows(lines)


if __name__ == "__main__":
    main(arguments())
