"""Stable-Baselines3's PPO with the settings of ``reference_ppo.py``: what the reference itself is measured by.

Needs an environment of its own (``pip install stable-baselines3 'gymnasium[mujoco]'``); it shares no code with rlsrl.

    python benchmarks/stable_baselines3_ppo.py --env-id HalfCheetah-v5 --seed 1 --total-steps 1000000 --out curve.csv

Its value loss has no factor of one half, so that the coefficient is half the reference's, and is not clipped
(``reference_ppo.py --no-clip-value-loss``).
"""

from __future__ import annotations

import argparse
import csv
import math
import time
from pathlib import Path

import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize


class Curve(BaseCallback):
    """Notes the mean return of the last 100 episodes after each rollout."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int, int, float, float]] = []
        self.num_episodes = 0
        self.began = time.monotonic()

    def _on_step(self) -> bool:
        self.num_episodes += sum("episode" in info for info in self.locals["infos"])
        return True

    def _on_rollout_end(self) -> None:
        finished = [episode["r"] for episode in self.model.ep_info_buffer or ()]
        mean = float(np.mean(finished)) if finished else math.nan
        seconds = time.monotonic() - self.began
        self.lines.append((self.num_timesteps, self.num_episodes, round(mean, 3), round(seconds, 2)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env-id", required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--total-steps", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    envs = VecNormalize(make_vec_env(args.env_id, n_envs=8, seed=args.seed), gamma=0.99, clip_obs=10.0)
    model = PPO(
        "MlpPolicy",
        envs,
        learning_rate=lambda remaining: 3e-4 * remaining,
        n_steps=256,
        batch_size=64,
        n_epochs=10,
        gamma=0.99,
        gae_lambda=0.95,
        clip_range=0.2,
        ent_coef=0.0,
        vf_coef=0.25,
        max_grad_norm=0.5,
        seed=args.seed,
        device="cpu",
    )
    curve = Curve()
    model.learn(args.total_steps, callback=curve)
    with args.out.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("env_steps", "episodes", "return_mean", "seconds"))
        writer.writerows(curve.lines)
    print(f"{args.env_id} seed {args.seed}: return {curve.lines[-1][2]} after {curve.lines[-1][0]:,} steps")


if __name__ == "__main__":
    main()
