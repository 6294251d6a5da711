"""Sample Factory's asynchronous PPO with the settings of ``reference_ppo.py``, as far as it supports them.

It shares no code with rlsrl. It needs its own Python environment (``requirements/sample-factory.txt``) with a Gymnasium
before 1.0, which has no HalfCheetah-v5.

    python benchmarks/sample_factory_appo.py --env-id CartPole-v1 --report

Prints a line of JSON after each training step and runs until it is ended.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
import time
from typing import Any

import environments
import numpy as np
from sample_factory.algo.utils.misc import LEARNER_ENV_STEPS, ExperimentStatus
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env
from sample_factory.train import make_runner

UNCLIPPED = 1e6
"""A clip range that no value reaches."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env-id", required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--step-seconds", type=float, default=0.0, help="seconds that each environment step sleeps")
    parser.add_argument("--total-steps", type=int, default=1_000_000_000)
    parser.add_argument(
        "--goal", type=float, default=math.inf, help="ignored: the caller reads the reports and ends the run"
    )
    parser.add_argument("--report", action="store_true", help="print a line of JSON per training step")
    parser.add_argument("--workers", type=int, default=1, help="processes that step environments")
    parser.add_argument("--serial", action="store_true", help="everything in one process, in turn")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="device of the network")
    parser.add_argument("--network", choices=["mlp", "cnn"], default="mlp")
    parser.add_argument("--recurrent", choices=["gru", "lstm"], help="a recurrent layer of 64 units behind 64 x tanh")
    parser.add_argument("--sequence-length", type=int, default=16)
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--num-steps", type=int, default=128, help="steps of each environment in an iteration")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--minibatch-size", type=int, default=256)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--anneal", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--discount", type=float, default=0.99)
    parser.add_argument("--gae-lambda", type=float, default=0.95)
    parser.add_argument("--clip-range", type=float, default=0.2)
    parser.add_argument("--entropy-coefficient", type=float, default=0.0)
    parser.add_argument("--normalize", action=argparse.BooleanOptionalAction, default=False)
    return parser.parse_args()


def words_of(args: argparse.Namespace) -> list[str]:
    """Return the settings as Sample Factory's arguments.

    A worker steps its environments one after the other, if possible in two halves: it steps one half while the other is
    being evaluated.
    """
    envs_each = args.num_envs // args.workers
    options = {
        "algo": "APPO",
        "env": args.env_id,
        "experiment": "bench",
        "device": {"cpu": "cpu", "cuda": "gpu"}[args.device],
        "seed": args.seed,
        "serial_mode": args.serial,
        "async_rl": not args.serial,
        "num_workers": args.workers,
        "num_envs_per_worker": envs_each,
        "worker_num_splits": 1 if args.serial or envs_each % 2 else 2,
        "rollout": args.num_steps,
        "recurrence": args.sequence_length if args.recurrent else 1,
        "use_rnn": args.recurrent is not None,
        "batch_size": args.minibatch_size,
        "num_batches_per_epoch": args.num_envs * args.num_steps // args.minibatch_size,
        "num_epochs": args.epochs,
        "shuffle_minibatches": True,
        "learning_rate": args.learning_rate,
        "adam_eps": 1e-5,
        "max_grad_norm": 0.5,
        "gamma": args.discount,
        "gae_lambda": args.gae_lambda,
        "ppo_clip_ratio": args.clip_range,
        "ppo_clip_value": UNCLIPPED,
        "value_loss_coeff": 0.5,
        "exploration_loss_coeff": args.entropy_coefficient,
        "normalize_input": args.normalize,
        "normalize_returns": args.normalize,
        "decorrelate_envs_on_one_worker": False,
        "train_for_env_steps": args.total_steps,
        "log_to_file": False,
    }
    return [f"--{name}={value}" for name, value in options.items()] + network_words(args.network, args.recurrent)


def network_words(network: str, recurrent: str | None) -> list[str]:
    """Return the arguments for two towers of 64 x 64 tanh, the network of Mnih et al. (2015), or a recurrent one."""
    if recurrent is not None:
        layers = ["--encoder_mlp_layers", "64", "--nonlinearity=tanh", "--actor_critic_share_weights=True"]
        return [*layers, f"--rnn_type={recurrent}", "--rnn_size=64", "--rnn_num_layers=1"]
    if network == "cnn":
        body = ["--encoder_conv_architecture=convnet_atari", "--encoder_conv_mlp_layers", "512", "--obs_scale=255.0"]
        return [*body, "--nonlinearity=relu", "--actor_critic_share_weights=True"]
    return ["--encoder_mlp_layers", "64", "64", "--nonlinearity=tanh", "--actor_critic_share_weights=False"]


def make(env_id: str, *_: Any, step_seconds: float) -> Any:
    """Make an environment, in any process."""
    return environments.make(env_id, step_seconds=step_seconds)


def tell(runner: Any, message: dict[str, Any], policy: int) -> None:
    """Print the progress that the learner reports."""
    finished = runner.policy_avg_stats.get("reward", [()])[policy]
    mean = float(np.mean(finished)) if len(finished) else math.nan
    line = {"wall": time.time(), "env_steps": message[LEARNER_ENV_STEPS], "return_mean": mean}
    print(json.dumps(line), flush=True)


def main() -> int:
    args = arguments()
    register_env(args.env_id, functools.partial(make, step_seconds=args.step_seconds))
    words = words_of(args)
    parser, _ = parse_sf_args(words)
    _, runner = make_runner(parse_full_cfg(parser, words))
    if args.report:
        runner.policy_msg_handlers[LEARNER_ENV_STEPS].append(tell)
    status = runner.init()
    if status == ExperimentStatus.SUCCESS:
        status = runner.run()
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
