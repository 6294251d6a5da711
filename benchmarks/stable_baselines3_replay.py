"""Stable-Baselines3's DQN, SAC and TD3 with the settings of ``reference_dqn.py`` and ``reference_twin_critics.py``.

It shares no code with rlsrl and needs its own Python environment (``pip install stable-baselines3 gymnasium[mujoco]``).

    python benchmarks/stable_baselines3_replay.py --algorithm sac --env-id Pendulum-v1 --evaluate-every 500 --out a.csv

Its DQN is without double Q-learning, which needs one evaluation of a network less. With ``--report`` it prints a line
of JSON per iteration, which ``make bench`` reads.
"""

from __future__ import annotations

import argparse
import csv
import functools
import json
import math
import time
from pathlib import Path
from typing import Any

import environments
import numpy as np
import torch
from stable_baselines3 import DQN, SAC, TD3
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.noise import NormalActionNoise


class Curve(BaseCallback):
    """Reports after each iteration, and evaluates without exploration every so many env steps."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.args = args
        self.lines: list[tuple[int, float, float, float]] = []
        self.began = time.monotonic()
        self.evaluated_at = 0

    def _on_step(self) -> bool:
        return True

    def _on_rollout_start(self) -> None:
        # All updates that are due for the steps so far are made now.
        line = {"wall": time.time(), "env_steps": self.num_timesteps, "return_mean": self.mean}
        every = self.args.evaluate_every
        if every and self.num_timesteps >= self.evaluated_at + every:
            self.evaluated_at = self.num_timesteps
            envs = make_vec_env(functools.partial(environments.make, self.args.env_id), n_envs=1)
            mean, _ = evaluate_policy(self.model, envs, n_eval_episodes=self.args.evaluation_episodes)
            line["greedy_return"] = float(np.mean(mean))
            seconds = round(time.monotonic() - self.began, 2)
            self.lines.append((self.num_timesteps, line["greedy_return"], round(self.mean, 3), seconds))
            envs.close()
        if self.args.report:
            print(json.dumps(line), flush=True)

    @property
    def mean(self) -> float:
        finished = [episode["r"] for episode in self.model.ep_info_buffer or ()]
        return float(np.mean(finished)) if finished else math.nan


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", choices=["dqn", "sac", "td3"], required=True)
    parser.add_argument("--env-id", required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--total-steps", type=int, default=20_000)
    parser.add_argument("--report", action="store_true", help="print a line of JSON per iteration")
    parser.add_argument("--out", type=Path, help="CSV with one line per evaluation")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--num-envs", type=int, default=1)
    parser.add_argument("--num-steps", type=int, default=8, help="steps of each environment in an iteration")
    parser.add_argument("--network", choices=["mlp", "cnn"], default="mlp")
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--updates-per-env-step", type=float, default=1.0)
    parser.add_argument("--minibatch-size", type=int, default=256)
    parser.add_argument("--capacity", type=int, default=100_000)
    parser.add_argument("--start", type=int, default=1000, help="transitions before training begins")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--critic-learning-rate", type=float, help="has to be the same")
    parser.add_argument("--discount", type=float, default=0.99)
    parser.add_argument("--plain", action="store_true", help="no double Q-learning, as always here")
    parser.add_argument("--target-period", type=int, default=128, help="DQN: updates between two copies")
    parser.add_argument("--last-epsilon", type=float, default=0.04, help="DQN")
    parser.add_argument("--epsilon-steps", type=int, default=8000, help="DQN: env steps until epsilon is the last one")
    parser.add_argument("--evaluate-every", type=int, default=0, help="env steps; 0: no evaluation")
    parser.add_argument("--evaluation-episodes", type=int, default=10)
    args = parser.parse_args()
    if args.critic_learning_rate not in (None, args.learning_rate):
        parser.error("Stable-Baselines3 has one learning rate for policy and critics")
    return args


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    envs = make_vec_env(functools.partial(environments.make, args.env_id), n_envs=args.num_envs, seed=args.seed)
    shared: dict[str, Any] = {
        "learning_rate": args.learning_rate,
        "buffer_size": args.capacity,
        "learning_starts": args.start,
        "batch_size": args.minibatch_size,
        "gamma": args.discount,
        "train_freq": args.num_steps,
        "gradient_steps": round(args.updates_per_env_step * args.num_envs * args.num_steps),
        "seed": args.seed,
        "device": "cpu",
    }
    if args.network == "mlp":
        shared["policy_kwargs"] = {"net_arch": [args.hidden_size, args.hidden_size], "activation_fn": torch.nn.ReLU}
    policy = {"mlp": "MlpPolicy", "cnn": "CnnPolicy"}[args.network]
    model: DQN | SAC | TD3
    if args.algorithm == "dqn":
        # Its target network is copied every so many env steps, not updates.
        interval = round(args.target_period / args.updates_per_env_step)
        explored = args.epsilon_steps / args.total_steps
        model = DQN(
            policy,
            envs,
            target_update_interval=interval,
            exploration_fraction=min(explored, 1.0),
            exploration_final_eps=args.last_epsilon,
            max_grad_norm=10.0,
            **shared,
        )
    elif args.algorithm == "sac":
        model = SAC(policy, envs, tau=0.005, ent_coef="auto", **shared)
    else:
        size = envs.action_space.shape
        noise = NormalActionNoise(np.zeros(size), np.full(size, 0.1))
        model = TD3(policy, envs, tau=0.005, action_noise=noise, **shared)
    curve = Curve(args)
    model.learn(args.total_steps, callback=curve)
    envs.close()
    if args.out is not None:
        with args.out.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("env_steps", "greedy_return", "return_mean", "seconds"))
            writer.writerows(curve.lines)


if __name__ == "__main__":
    main()
