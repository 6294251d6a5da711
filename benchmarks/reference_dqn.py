"""DQN in one file and one process, in the manner of CleanRL's ``dqn.py``: the reference for learning and speed.

It shares no code with rlsrl. The same algorithm with the same settings, written in the plainest way, shows how well a
distributed system should learn. Run it and ``rlsrl run`` on one machine:

    python benchmarks/reference_dqn.py --env-id CartPole-v1 --seed 1 --evaluate-every 1000 --out curve.csv

With ``--report`` it prints a line of JSON per iteration. An iteration gathers a rollout of every environment, then
trains on all that is due. Every ``--evaluate-every`` env steps it plays ``--evaluation-episodes`` greedy episodes and
writes their mean return.

It differs from CleanRL in three points: double Q-learning, which ``--plain`` omits, several environments, and Huber's
loss. The environments' NEXT_STEP autoreset makes a step without a transition, which is not stored.
"""

from __future__ import annotations

import argparse
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
from torch.nn import functional

RETURN_WINDOW = 100


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", choices=["dqn"], default="dqn")
    parser.add_argument("--env-id", required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--total-steps", type=int, default=50_000)
    parser.add_argument("--report", action="store_true", help="print a line of JSON per iteration")
    parser.add_argument("--out", type=Path, help="CSV with one line per evaluation")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--compile", action="store_true", help="compile the update by torch.compile")
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--num-steps", type=int, default=16, help="steps of each environment in an iteration")
    parser.add_argument("--network", choices=["mlp", "cnn"], default="mlp")
    parser.add_argument("--hidden-size", type=int, default=256, help="of the mlp")
    parser.add_argument("--updates-per-env-step", type=float, default=0.5)
    parser.add_argument("--minibatch-size", type=int, default=64)
    parser.add_argument("--capacity", type=int, default=100_000)
    parser.add_argument("--start", type=int, default=1000, help="transitions before training begins")
    parser.add_argument("--plain", action="store_true", help="no double Q-learning: the target network chooses, too")
    parser.add_argument("--target-period", type=int, default=128, help="updates between two copies of the network")
    parser.add_argument("--learning-rate", type=float, default=2.3e-3)
    parser.add_argument("--discount", type=float, default=0.99)
    parser.add_argument("--max-gradient-norm", type=float, default=10.0)
    parser.add_argument("--last-epsilon", type=float, default=0.04)
    parser.add_argument("--epsilon-steps", type=int, default=8000, help="env steps until epsilon is the last one")
    parser.add_argument("--evaluate-every", type=int, default=0, help="env steps; 0: no evaluation")
    parser.add_argument("--evaluation-episodes", type=int, default=20)
    return parser.parse_args()


def network(num_inputs: int, num_actions: int, hidden_size: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs, gain in (
        (num_inputs, hidden_size, math.sqrt(2.0)),
        (hidden_size, hidden_size, math.sqrt(2.0)),
        (hidden_size, num_actions, 1.0),
    ):
        linear = nn.Linear(inputs, outputs)
        nn.init.orthogonal_(linear.weight, gain)
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Images(nn.Module):
    """Makes numbers from 0 to 1 of an image's pixels."""

    def forward(self, image: Tensor) -> Tensor:
        return image.float() / 255.0


def image_network(num_actions: int) -> nn.Sequential:
    """Return the network of Mnih et al. (2015) for 4 stacked images of 84 x 84."""
    layers: list[nn.Module] = []
    for inputs, outputs, size, stride in ((4, 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1)):
        layers += [nn.Conv2d(inputs, outputs, size, stride), nn.ReLU()]
    layers += [nn.Flatten(), nn.Linear(64 * 7 * 7, 512), nn.ReLU(), nn.Linear(512, num_actions)]
    for layer in layers:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.orthogonal_(layer.weight, 1.0 if layer is layers[-1] else math.sqrt(2.0))
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]  # each has one
    return nn.Sequential(Images(), *layers)


class Store:
    """The last transitions, in arrays."""

    def __init__(self, capacity: int, shape: tuple[int, ...], dtype: Any) -> None:
        self.capacity = capacity
        self.size = self.place = 0
        self.arrays: dict[str, Any] = {
            "observation": np.zeros((capacity, *shape), dtype),
            "following": np.zeros((capacity, *shape), dtype),
            "action": np.zeros(capacity, np.int64),
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
        torch.set_num_threads(args.threads)
        torch.manual_seed(args.seed)
        self.rng = np.random.default_rng(args.seed)
        made = [lambda: environments.make(args.env_id)] * args.num_envs
        self.envs: Any = wrappers.RecordEpisodeStatistics(gymnasium.vector.SyncVectorEnv(made))
        space = self.envs.single_action_space
        assert isinstance(space, gymnasium.spaces.Discrete)
        seen, self.num_actions = self.envs.single_observation_space, int(space.n)
        shape: tuple[int, ...] = seen.shape or ()
        self.shape = shape if args.network == "cnn" else (math.prod(shape),)
        self.online, self.target = self.made(), self.made()
        self.target.load_state_dict(self.online.state_dict())
        self.optimizer = torch.optim.Adam(self.online.parameters(), lr=args.learning_rate, eps=1e-5)
        self.gradient_step = torch.compile(self.loss_backward) if args.compile else self.loss_backward
        self.store = Store(args.capacity, self.shape, seen.dtype if args.network == "cnn" else np.float32)
        self.observation = self.envs.reset(seed=args.seed)[0]
        self.resetting = np.zeros(args.num_envs, bool)
        self.env_steps = self.updates = 0
        self.returns: deque[float] = deque(maxlen=RETURN_WINDOW)

    def made(self) -> nn.Sequential:
        if self.args.network == "cnn":
            return image_network(self.num_actions)
        return network(self.shape[0], self.num_actions, self.args.hidden_size)

    @property
    def epsilon(self) -> float:
        if self.env_steps < self.args.start:
            return 1.0
        last: float = self.args.last_epsilon
        gone: float = self.env_steps / self.args.epsilon_steps
        return max(1.0 - (1.0 - last) * gone, last)

    def iterate(self) -> None:
        epsilon = self.epsilon
        for _ in range(self.args.num_steps):
            self.step(epsilon)
        due = (self.env_steps - self.args.start) * self.args.updates_per_env_step
        while self.updates < int(due):
            self.update(self.store.draw(self.args.minibatch_size, self.rng))

    def step(self, epsilon: float) -> None:
        with torch.no_grad():
            values = self.online(torch.from_numpy(self.observation.reshape(-1, *self.shape)))
        action = values.argmax(dim=1).numpy()
        is_random = self.rng.random(len(action)) < epsilon
        action = np.where(is_random, self.rng.integers(0, self.num_actions, len(action)), action)
        following, reward, terminated, truncated, info = self.envs.step(action)
        valid = ~self.resetting
        self.store.add(
            observation=self.observation[valid].reshape(-1, *self.shape),
            following=following[valid].reshape(-1, *self.shape),
            action=action[valid],
            reward=reward[valid],
            terminated=terminated[valid],
        )
        self.observation, self.resetting = following, terminated | truncated
        self.env_steps += int(valid.sum())
        if "episode" in info:
            self.returns.extend(info["episode"]["r"][info["_episode"]].tolist())

    def loss_backward(self, rows: dict[str, Tensor]) -> None:
        chosen = self.online(rows["observation"]).gather(1, rows["action"][:, None]).squeeze(1)
        with torch.no_grad():
            values = self.target(rows["following"])
            choosing = values if self.args.plain else self.online(rows["following"])
            value = values.gather(1, choosing.argmax(dim=1, keepdim=True)).squeeze(1)
            target = rows["reward"] + self.args.discount * (1.0 - rows["terminated"]) * value
        loss = functional.huber_loss(chosen, target)
        loss.backward()

    def update(self, rows: dict[str, Tensor]) -> None:
        self.optimizer.zero_grad()
        self.gradient_step(rows)
        nn.utils.clip_grad_norm_(self.online.parameters(), self.args.max_gradient_norm)
        self.optimizer.step()
        self.updates += 1
        if self.updates % self.args.target_period == 0:
            self.target.load_state_dict(self.online.state_dict())

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the mean return of greedy episodes, one environment after the other."""
        env, returns = environments.make(self.args.env_id), []
        for episode in range(self.args.evaluation_episodes):
            observation, _ = env.reset(seed=1_000_000 * self.args.seed + episode)
            total, has_ended = 0.0, False
            while not has_ended:
                values = self.online(torch.as_tensor(np.asarray(observation)).reshape(1, *self.shape))
                observation, reward, terminated, truncated, _ = env.step(int(values.argmax()))
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
