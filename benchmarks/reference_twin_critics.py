"""SAC and TD3 in one file and one process, in the manner of CleanRL: the reference for learning and speed.

It shares no code with rlsrl. The same algorithms with the same settings, written in the plainest way, show how well a
distributed system should learn. Run it and ``rlsrl run`` on one machine:

    python benchmarks/reference_twin_critics.py --algorithm sac --env-id Pendulum-v1 --evaluate-every 500 --out a.csv

With ``--report`` it prints a line of JSON per iteration. An iteration gathers a rollout of every environment, then
trains on all that is due. Every ``--evaluate-every`` env steps it plays ``--evaluation-episodes`` episodes without
noise and writes their mean return.

It differs from CleanRL in the several environments and in the orthogonal weights at the start. Actions are within
[-1, 1] and are scaled to the bounds of the environment. The environments' NEXT_STEP autoreset makes a step without a
transition, which is not stored.
"""

from __future__ import annotations

import argparse
import copy
import csv
import json
import math
import time
from collections import deque
from pathlib import Path
from typing import Any

import environments
import gymnasium
import numpy as np
import torch
from gymnasium.wrappers import vector as wrappers
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn import functional

RETURN_WINDOW = 10
LEAST_LOG_STD, MOST_LOG_STD = -20.0, 2.0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", choices=["sac", "td3"], required=True)
    parser.add_argument("--env-id", required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--total-steps", type=int, default=20_000)
    parser.add_argument("--report", action="store_true", help="print a line of JSON per iteration")
    parser.add_argument("--out", type=Path, help="CSV with one line per evaluation")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--compile", action="store_true", help="compile the losses by torch.compile")
    parser.add_argument("--num-envs", type=int, default=4)
    parser.add_argument("--num-steps", type=int, default=8, help="steps of each environment in an iteration")
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--updates-per-env-step", type=float, default=1.0)
    parser.add_argument("--minibatch-size", type=int, default=256)
    parser.add_argument("--capacity", type=int, default=100_000)
    parser.add_argument("--start", type=int, default=1000, help="transitions before training begins")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="of the policy and the temperature")
    parser.add_argument("--critic-learning-rate", type=float, default=1e-3)
    parser.add_argument("--discount", type=float, default=0.99)
    parser.add_argument("--tau", type=float, default=0.005)
    parser.add_argument("--temperature", type=float, default=1.0, help="SAC: the first one")
    parser.add_argument(
        "--policy-period", type=int, default=2, help="TD3: updates of the critics for one of the policy"
    )
    parser.add_argument("--exploration-deviation", type=float, default=0.1, help="TD3")
    parser.add_argument("--target-deviation", type=float, default=0.2, help="TD3")
    parser.add_argument("--target-noise-clip", type=float, default=0.5, help="TD3")
    parser.add_argument("--evaluate-every", type=int, default=0, help="env steps; 0: no evaluation")
    parser.add_argument("--evaluation-episodes", type=int, default=10)
    return parser.parse_args()


def network(num_inputs: int, num_outputs: int, hidden_size: int, gain: float) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs, of_layer in (
        (num_inputs, hidden_size, math.sqrt(2.0)),
        (hidden_size, hidden_size, math.sqrt(2.0)),
        (hidden_size, num_outputs, gain),
    ):
        linear = nn.Linear(inputs, outputs)
        nn.init.orthogonal_(linear.weight, of_layer)
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Store:
    """The last transitions, in arrays."""

    def __init__(self, capacity: int, num_features: int, num_dimensions: int) -> None:
        self.capacity = capacity
        self.size = self.place = 0
        self.arrays: dict[str, Any] = {
            "observation": np.zeros((capacity, num_features), np.float32),
            "following": np.zeros((capacity, num_features), np.float32),
            "action": np.zeros((capacity, num_dimensions), np.float32),
            "reward": np.zeros(capacity, np.float32),
            "terminated": np.zeros(capacity, np.float32),
        }

    def add(self, **rows: np.ndarray) -> None:
        places = (self.place + np.arange(len(rows["action"]))) % self.capacity
        for name, array in self.arrays.items():
            array[places] = rows[name]
        self.place = (self.place + len(places)) % self.capacity
        self.size = min(self.size + len(places), self.capacity)

    def draw(self, number: int, rng: np.random.Generator) -> dict[str, Tensor]:
        places = rng.integers(0, self.size, number)
        return {name: torch.from_numpy(array[places]) for name, array in self.arrays.items()}


class Trainer:
    """Repeats a rollout and the updates that are due after it."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.is_sac = args.algorithm == "sac"
        torch.set_num_threads(args.threads)
        torch.manual_seed(args.seed)
        self.rng = np.random.default_rng(args.seed)
        made = [lambda: environments.make(args.env_id)] * args.num_envs
        self.envs: Any = wrappers.RecordEpisodeStatistics(gymnasium.vector.SyncVectorEnv(made))
        space = self.envs.single_action_space
        assert isinstance(space, gymnasium.spaces.Box)
        self.low, self.high = space.low, space.high
        num_features, self.size = math.prod(self.envs.single_observation_space.shape or ()), space.low.size
        num_outputs = 2 * self.size if self.is_sac else self.size
        self.policy = network(num_features, num_outputs, args.hidden_size, 0.01)
        self.critics = nn.ModuleList(network(num_features + self.size, 1, args.hidden_size, 1.0) for _ in range(2))
        self.target_policy, self.target_critics = copy.deepcopy(self.policy), copy.deepcopy(self.critics)
        self.log_temperature = torch.tensor(math.log(args.temperature), requires_grad=True)
        self.policy_optimizer = torch.optim.Adam(self.policy.parameters(), lr=args.learning_rate)
        self.critic_optimizer = torch.optim.Adam(self.critics.parameters(), lr=args.critic_learning_rate)
        self.temperature_optimizer = torch.optim.Adam([self.log_temperature], lr=args.learning_rate)
        compiled = torch.compile if args.compile else lambda function: function
        self.critic_backward = compiled(self.critic_loss)
        self.policy_backward = compiled(self.policy_loss)
        self.store = Store(args.capacity, num_features, self.size)
        self.observation = self.envs.reset(seed=args.seed)[0]
        self.resetting = np.zeros(args.num_envs, bool)
        self.env_steps = self.updates = 0
        self.returns: deque[float] = deque(maxlen=RETURN_WINDOW)

    def iterate(self) -> None:
        is_random = self.env_steps < self.args.start
        for _ in range(self.args.num_steps):
            self.step(is_random)
        due = (self.env_steps - self.args.start) * self.args.updates_per_env_step
        while self.updates < int(due):
            self.update(self.store.draw(self.args.minibatch_size, self.rng))

    def step(self, is_random: bool) -> None:
        if is_random:
            action = self.rng.uniform(-1, 1, (self.args.num_envs, self.size)).astype(np.float32)
        else:
            with torch.no_grad():
                action = self.explore(torch.from_numpy(self.observation).float().flatten(1)).numpy()
        following, reward, terminated, truncated, info = self.envs.step(self.scaled(action))
        valid = ~self.resetting
        self.store.add(
            observation=self.observation.reshape(self.args.num_envs, -1)[valid],
            following=following.reshape(self.args.num_envs, -1)[valid],
            action=action[valid],
            reward=reward[valid],
            terminated=terminated[valid],
        )
        self.observation, self.resetting = following, terminated | truncated
        self.env_steps += int(valid.sum())
        if "episode" in info:
            self.returns.extend(info["episode"]["r"][info["_episode"]].tolist())

    def scaled(self, action: np.ndarray) -> np.ndarray:
        scaled: np.ndarray = self.low + (action + 1.0) / 2.0 * (self.high - self.low)
        return scaled

    def explore(self, observation: Tensor) -> Tensor:
        if self.is_sac:
            return self.sample(observation)[0]
        action = torch.tanh(self.policy(observation))
        drawn: Tensor = action + self.args.exploration_deviation * torch.randn_like(action)
        return drawn.clamp(-1.0, 1.0)

    def sample(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self.policy(observation).chunk(2, dim=1)
        normal = Normal(mean, log_std.clamp(LEAST_LOG_STD, MOST_LOG_STD).exp(), validate_args=False)
        before = normal.rsample()
        slope = 2.0 * (math.log(2.0) - before - functional.softplus(-2.0 * before))
        return torch.tanh(before), (normal.log_prob(before) - slope).sum(dim=1)

    def critic_loss(self, rows: dict[str, Tensor]) -> None:
        with torch.no_grad():
            following = rows["following"]
            if self.is_sac:
                action, log_prob = self.sample(following)
                bonus = -self.log_temperature.exp() * log_prob
            else:
                action, limit = torch.tanh(self.target_policy(following)), self.args.target_noise_clip
                noise = (self.args.target_deviation * torch.randn_like(action)).clamp(-limit, limit)
                action, bonus = (action + noise).clamp(-1.0, 1.0), torch.zeros(())
            inputs = torch.cat([following, action], dim=1)
            value = torch.minimum(*(critic(inputs).squeeze(1) for critic in self.target_critics)) + bonus
            target = rows["reward"] + self.args.discount * (1.0 - rows["terminated"]) * value
        inputs = torch.cat([rows["observation"], rows["action"]], dim=1)
        losses = [0.5 * functional.mse_loss(critic(inputs).squeeze(1), target) for critic in self.critics]
        (losses[0] + losses[1]).backward()

    def policy_loss(self, rows: dict[str, Tensor]) -> Tensor:
        observation = rows["observation"]
        if self.is_sac:
            action, log_prob = self.sample(observation)
            inputs = torch.cat([observation, action], dim=1)
            value = torch.minimum(*(critic(inputs).squeeze(1) for critic in self.critics))
            (self.log_temperature.detach().exp() * log_prob - value).mean().backward()
            return log_prob.detach()
        action = torch.tanh(self.policy(observation))
        (-self.critics[0](torch.cat([observation, action], dim=1)).mean()).backward()
        return torch.zeros(())

    def update(self, rows: dict[str, Tensor]) -> None:
        self.critic_optimizer.zero_grad()
        self.critic_backward(rows)
        self.critic_optimizer.step()
        self.updates += 1
        if not self.is_sac and self.updates % self.args.policy_period:
            return
        self.policy_optimizer.zero_grad()
        log_prob = self.policy_backward(rows)
        self.policy_optimizer.step()
        if self.is_sac:
            self.temperature_optimizer.zero_grad()
            (-self.log_temperature.exp() * (log_prob - self.size)).mean().backward()
            self.temperature_optimizer.step()
        with torch.no_grad():
            pairs = [(self.target_critics, self.critics)]
            if not self.is_sac:
                pairs.append((self.target_policy, self.policy))  # type: ignore[arg-type]  # modules alike
            for target, trained in pairs:
                for old, new in zip(target.parameters(), trained.parameters(), strict=True):
                    old.lerp_(new, self.args.tau)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the mean return of episodes without noise, one environment after the other."""
        env, returns = environments.make(self.args.env_id), []
        for episode in range(self.args.evaluation_episodes):
            observation, _ = env.reset(seed=1_000_000 * self.args.seed + episode)
            total, has_ended = 0.0, False
            while not has_ended:
                outputs = self.policy(torch.as_tensor(observation, dtype=torch.float32).reshape(1, -1))
                action = torch.tanh(outputs[0, : self.size]).numpy()
                observation, reward, terminated, truncated, _ = env.step(self.scaled(action))
                total, has_ended = total + float(reward), terminated or truncated
            returns.append(total)
        env.close()
        return float(np.mean(returns))


def main() -> None:
    args = arguments()
    trainer, began, lines = Trainer(args), time.monotonic(), []
    evaluated_at = 0
    while trainer.env_steps < args.total_steps:
        trainer.iterate()
        mean = float(np.mean(trainer.returns)) if trainer.returns else math.nan
        line = {"wall": time.time(), "env_steps": trainer.env_steps, "return_mean": mean}
        if args.evaluate_every and trainer.env_steps >= evaluated_at + args.evaluate_every:
            evaluated_at = trainer.env_steps
            line["greedy_return"] = trainer.evaluate()
            seconds = round(time.monotonic() - began, 2)
            lines.append((trainer.env_steps, line["greedy_return"], round(mean, 3), seconds))
        if args.report:
            print(json.dumps(line), flush=True)
    seconds = time.monotonic() - began
    print(f"{trainer.env_steps:,} env steps, {trainer.updates:,} updates, {trainer.env_steps / seconds:,.0f} steps/s")
    trainer.envs.close()
    if args.out is not None:
        with args.out.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("env_steps", "greedy_return", "return_mean", "seconds"))
            writer.writerows(lines)


if __name__ == "__main__":
    main()
