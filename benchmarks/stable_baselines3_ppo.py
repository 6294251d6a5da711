"""Stable-Baselines3's PPO with the settings of ``reference_ppo.py``, to check the reference itself.

It shares no code with rlsrl and needs its own Python environment (``pip install stable-baselines3 gymnasium[mujoco]``).

    python benchmarks/stable_baselines3_ppo.py --env-id HalfCheetah-v5 --seed 1 --total-steps 1000000 --out curve.csv

Its value loss has no factor of one half, so that the coefficient is half the reference's. The value loss is not clipped
(``reference_ppo.py --no-clip-value-loss``). With ``--report`` it prints a line of JSON per iteration, which ``make
bench`` reads.
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
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecNormalize

RETURN_WINDOW = 100


class Curve(BaseCallback):
    """Records the mean return of the last 100 episodes after each rollout, and ends the run at its goal."""

    def __init__(self, *, goal: float, report: bool) -> None:
        super().__init__()
        self.lines: list[tuple[int, int, float, float]] = []
        self.num_episodes = 0
        self.began = time.monotonic()
        self.goal = goal
        self.reached = False
        self.report = report

    def _on_step(self) -> bool:
        self.num_episodes += sum("episode" in info for info in self.locals["infos"])
        return not self.reached  # ends ``learn``; checked once an iteration, as in all contestants

    def _on_rollout_start(self) -> None:
        # All steps gathered so far are trained now.
        self.reached = len(self.model.ep_info_buffer or ()) == RETURN_WINDOW and self.mean >= self.goal
        if self.report:
            line = {"wall": time.time(), "env_steps": self.num_timesteps, "return_mean": self.mean}
            print(json.dumps(line), flush=True)

    def _on_rollout_end(self) -> None:
        seconds = time.monotonic() - self.began
        self.lines.append((self.num_timesteps, self.num_episodes, round(self.mean, 3), round(seconds, 2)))

    @property
    def mean(self) -> float:
        finished = [episode["r"] for episode in self.model.ep_info_buffer or ()]
        return float(np.mean(finished)) if finished else math.nan


def parser_of(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env-id", required=True)
    parser.add_argument("--step-seconds", type=float, default=0.0, help="seconds that each environment step sleeps")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--total-steps", type=int, default=1_000_000)
    parser.add_argument("--goal", type=float, default=math.inf, help="mean return that ends the run")
    parser.add_argument("--report", action="store_true", help="print a line of JSON per iteration")
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--vector", choices=["dummy", "subproc"], default="dummy", help="vectorisation of the environments"
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
    parser.add_argument(
        "--normalize", action=argparse.BooleanOptionalAction, default=True, help="normalise observations and rewards"
    )
    return parser


def main(args: argparse.Namespace, kind_of_model: Any = PPO, policy: str | None = None, **network: Any) -> None:
    """Train a model. ``policy`` and ``network``: its policy class and keyword arguments, if not the default ones."""
    torch.set_num_threads(args.threads)
    made = functools.partial(environments.make, args.env_id, step_seconds=args.step_seconds)
    kind = {"dummy": DummyVecEnv, "subproc": SubprocVecEnv}[args.vector]
    # Fork, because 64 processes that import everything themselves take minutes to start.
    how = {"start_method": "fork"} if args.vector == "subproc" else {}
    envs: VecEnv = make_vec_env(made, n_envs=args.num_envs, seed=args.seed, vec_env_cls=kind, vec_env_kwargs=how)
    if args.normalize:
        envs = VecNormalize(envs, gamma=args.discount, clip_obs=10.0)
    rate = args.learning_rate
    model = kind_of_model(
        policy or {"mlp": "MlpPolicy", "cnn": "CnnPolicy"}[args.network],
        envs,
        policy_kwargs=network or None,
        learning_rate=(lambda remaining: rate * remaining) if args.anneal else rate,
        n_steps=args.num_steps,
        batch_size=args.minibatch_size,
        n_epochs=args.epochs,
        gamma=args.discount,
        gae_lambda=args.gae_lambda,
        clip_range=args.clip_range,
        ent_coef=args.entropy_coefficient,
        vf_coef=0.25,
        max_grad_norm=0.5,
        seed=args.seed,
        device=args.device,
    )
    curve = Curve(goal=args.goal, report=args.report)
    model.learn(args.total_steps, callback=curve)
    envs.close()
    if args.out is not None:
        with args.out.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("env_steps", "episodes", "return_mean", "seconds"))
            writer.writerows(curve.lines)
        print(f"{args.env_id} seed {args.seed}: return {curve.lines[-1][2]} after {curve.lines[-1][0]:,} steps")


if __name__ == "__main__":
    main(parser_of(__doc__).parse_args())
