"""Check that V-trace learns as well from actions of a policy that is 16 steps old as from those of the step before.

    python benchmarks/vtrace_lag.py            # 40 seeds of each, some minutes

CartPole, in one process: each batch is gathered with the weights of exactly ``LAG`` training steps before (fewer only
at the beginning), by the actors' own environments and samplers, and trained by the learner. The figure of a run is the
number of env steps until the last 100 episodes have a mean return of 475, or ``MOST_ENV_STEPS``. The medians of V-trace
at a lag of 16 and of 1 are compared, and, as a negative control, those of the same loss without its correction at a lag
of 16.

Finished runs are kept in ``docs/benchmarks/vtrace-lag.json``: an interrupted check continues. ``--restart`` removes
them. The exit status is 0 if V-trace learns alike and the control is worse, else 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
from learning_verdicts import ratio_of_medians
from machine import REPOSITORY
from results import FOLDER, log, write
from typing_extensions import override

from rlsrl.algorithms.adam import Adam
from rlsrl.algorithms.base import Batch, Evaluate, Reduce, Tensors
from rlsrl.algorithms.learner import Learner
from rlsrl.algorithms.normalizer import Normalizer
from rlsrl.algorithms.vtrace import Vtrace, coefficients
from rlsrl.api.load import load_file
from rlsrl.api.spec import VtraceSpec
from rlsrl.data.episodes import EndedEpisodes
from rlsrl.data.slots import Slot, rollout_layout
from rlsrl.data.specs import Arrays
from rlsrl.data.version import Version
from rlsrl.envs.factory import EnvironmentSource, make_environment
from rlsrl.envs.returns import DiscountedReturns
from rlsrl.envs.vector import LoopVectorEnv
from rlsrl.policies.build import build_network
from rlsrl.policies.device import to_host
from rlsrl.policies.networks import MlpActorCritic
from rlsrl.policies.numpy_policy import NumpyActor
from rlsrl.policies.torch_policy import TorchPolicy

LAG = 16
GOAL = 475.0
EPISODES = 100
KEPT = FOLDER / "vtrace-lag.json"
MOST_ENV_STEPS = 1_200_000
"""A run that has missed the goal until then counts as one that reaches it."""
SETTINGS = {"learning_rate": 0.0005, "trace_decay": 0.5}
"""What differs from the example. V-trace cuts its traces where policies differ, so that a lag shortens them. Where they
are short anyhow, a lag costs little, and the correction decides whether the policy collapses."""
EXAMPLE = REPOSITORY / "examples" / "cartpole-vtrace.yaml"


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One side of a comparison."""

    lag: int
    """Training steps between the weights that act and those that are trained on the batch."""
    corrects: bool = True


VARIANTS = {
    "lag 1": Variant(lag=1),
    f"lag {LAG}": Variant(lag=LAG),
    f"lag {LAG}, uncorrected": Variant(lag=LAG, corrects=False),
}


class Uncorrected(Vtrace):
    """The same loss as if the policy in training had acted: all importance weights are 1."""

    @override
    def prepare(self, params: Tensors, slots: Arrays, reduce: Reduce, evaluate: Evaluate) -> Batch:
        def noted(params: Tensors, rows: Any) -> Any:
            outputs = evaluate(params, rows)
            steps = slots["behavior_log_prob"]
            steps[...] = to_host(outputs["log_prob"]).reshape(len(steps) + 1, -1)[:-1]
            return outputs

        return super().prepare(params, slots, reduce, noted)


def steps_to_goal(variant: Variant, seed: int) -> int:
    """Return a run's env steps to the goal, or ``MOST_ENV_STEPS`` if it misses it."""
    spec = load_file(EXAMPLE).spec
    assert spec.algorithm.vtrace is not None, "the example's algorithm"
    settings = spec.algorithm.vtrace.model_copy(update=SETTINGS)
    source = EnvironmentSource(id=spec.environment.id)
    num_lanes, num_steps = spec.actors.num_environments, spec.actors.rollout_length
    envs = LoopVectorEnv(lambda _: make_environment(source), seeds=[1000 * seed + lane for lane in range(num_lanes)])
    policy = TorchPolicy(build_network(MlpActorCritic, envs.spec, {"hidden_sizes": (64, 64)}, seed=seed), envs.spec)
    exported = policy.export()
    assert exported is not None, "a dense network can be exported"
    actor = NumpyActor(exported, num_steps=num_steps, num_lanes=num_lanes, rng=np.random.default_rng(seed))
    learner = _learner(settings, policy, variant, seed)
    layout = rollout_layout(envs.spec, num_steps=num_steps, num_lanes=num_lanes, discounted_return=True)
    discounted = DiscountedReturns(discount=settings.discount, num_lanes=num_lanes)
    slot = Slot(arrays=layout.view(bytearray(layout.nbytes)))
    acting = deque([learner.parameters(Version(1, 0))], maxlen=variant.lag + 1)
    returns: deque[float] = deque(maxlen=EPISODES)
    env_steps = 0
    while env_steps < MOST_ENV_STEPS:
        actor.load(acting[0])
        envs.begin(slot.arrays)
        actor.begin(slot)
        for step in range(num_steps):
            envs.step(slot.arrays, step, actor.act(step))
        actor.finish()
        discounted.write(slot.arrays)
        result = learner.step(slot.arrays)
        acting.append(learner.parameters(Version(1, result.step)))
        env_steps += result.num_transitions
        returns.extend(EndedEpisodes.of(slot.arrays).returns)
        if len(returns) == EPISODES and statistics.mean(returns) >= GOAL:
            break
    envs.close()
    return env_steps


def _learner(settings: VtraceSpec, policy: TorchPolicy, variant: Variant, seed: int) -> Learner:
    algorithm = (Vtrace if variant.corrects else Uncorrected)(
        policy, settings, minibatch_size=settings.minibatch_size, **coefficients(settings, MOST_ENV_STEPS)
    )
    return Learner(
        algorithm,
        policy.parameters(Version(1, 0)),
        learning_rate=settings.learning_rate,
        optimizer=Adam(epsilon=settings.adam_epsilon, max_gradient_norm=settings.max_gradient_norm),
        seed=seed,
        normalizer=Normalizer(rewards=settings.normalize_rewards),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--restart", action="store_true", help="remove the finished runs first")
    arguments = parser.parse_args()
    kept = json.loads(KEPT.read_text()) if KEPT.exists() and not arguments.restart else {}
    runs: dict[str, dict[str, int]] = {name: dict(kept.get("runs", {}).get(name, {})) for name in VARIANTS}
    with ProcessPoolExecutor(max_workers=2) as pool:
        missing = [(name, s) for s in range(arguments.seeds) for name in VARIANTS if str(s) not in runs[name]]
        found = pool.map(steps_to_goal, [VARIANTS[name] for name, _ in missing], [s for _, s in missing])
        for (name, seed), env_steps in zip(missing, found, strict=True):
            runs[name][str(seed)] = env_steps
            log(f"{name}, seed {seed}: {env_steps:,} env steps")
            write(KEPT, {"when": datetime.now(UTC).date().isoformat(), "runs": runs})
    intervals = {
        name: ratio_of_medians([*runs[name].values()], [*runs["lag 1"].values()]) for name in list(VARIANTS)[1:]
    }
    for name, interval in intervals.items():
        medians = [statistics.median(runs[each].values()) for each in (name, "lag 1")]
        log(
            f"{name} against lag 1: medians {medians[0]:,.0f} and {medians[1]:,.0f}, ratio {interval.ratio:.3f} "
            f"({interval.low:.3f} to {interval.high:.3f}): {interval.verdict}"
        )
    verdicts = [interval.verdict for interval in intervals.values()]
    write(KEPT, {"when": datetime.now(UTC).date().isoformat(), "verdicts": verdicts, "runs": runs})
    return 0 if verdicts == ["alike", "higher"] else 1


if __name__ == "__main__":
    sys.exit(main())
