"""PPO with the environment, the policy and the update in one program compiled by JAX, on the CPU.

In the manner of PureJaxRL (Lu et al. 2022, "Discovered Policy Optimisation"): it is what a compiled environment allows
at most. It shares no code with rlsrl. Settings, losses, and the treatment of ends of episodes are those of
``reference_ppo.py``: the step after an end only resets, and a truncated episode is bootstrapped.

It prints a line of JSON for every few iterations, which ``make bench`` reads.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections import deque
from functools import partial
from typing import Any, NamedTuple, TypeAlias

RETURN_WINDOW = 100
REPORT_SECONDS = 0.25
"""About the time from one report to the next."""
ONLY = {"step-seconds": 0.0, "network": "mlp", "device": "cpu"}
"""What it has one value of."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env-id", choices=["CartPole-v1"], required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--total-steps", type=int, default=1_000_000)
    parser.add_argument("--goal", type=float, default=math.inf, help="mean return that ends the run")
    parser.add_argument("--report", action="store_true", help="print lines of JSON")
    parser.add_argument("--threads", type=int, default=1, help="cores that XLA may use")
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--num-steps", type=int, default=128, help="steps of each environment in an iteration")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--minibatch-size", type=int, default=256)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--discount", type=float, default=0.99)
    parser.add_argument("--gae-lambda", type=float, default=0.95)
    parser.add_argument("--clip-range", type=float, default=0.2)
    parser.add_argument("--entropy-coefficient", type=float, default=0.0)
    parser.add_argument("--value-coefficient", type=float, default=0.5)
    parser.add_argument("--max-gradient-norm", type=float, default=0.5)
    for name, only in ONLY.items():
        parser.add_argument(
            f"--{name}", choices=[only], type=type(only), default=only, help="the other peers have more"
        )
    parser.add_argument("--no-anneal", action="store_true", required=True)
    parser.add_argument("--no-normalize", action="store_true", required=True)
    args = parser.parse_args()
    if args.num_envs * args.num_steps % args.minibatch_size:
        parser.error(f"--minibatch-size {args.minibatch_size} does not divide {args.num_envs} x {args.num_steps} rows")
    return args


if __name__ == "__main__":  # XLA's threads are made at the import: as many as there are cores
    ARGUMENTS = arguments()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: ARGUMENTS.threads])

import jax  # type: ignore[import-not-found]  # noqa: E402
import jax.numpy as jnp  # type: ignore[import-not-found]  # noqa: E402

Array: TypeAlias = Any
"""A ``jax.Array``."""
Parameters = dict[str, list[tuple[Array, Array]]]
"""By tower, the (weight, bias) of each layer."""

GRAVITY, CART_MASS, POLE_MASS, HALF_LENGTH, FORCE, SECONDS = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
LARGEST_ANGLE, LARGEST_POSITION, MAX_STEPS = 12 * 2 * math.pi / 360, 2.4, 500
ADAM_BETAS, ADAM_EPSILON = (0.9, 0.999), 1e-5


class Lane(NamedTuple):
    """An environment between two steps."""

    state: Array
    """Position, velocity, angle and angular velocity, [4]: the observation."""
    steps: Array
    resetting: Array
    """Whether the last step ended an episode, so that the next one only resets."""


class Transition(NamedTuple):
    """A step of an environment."""

    observation: Array
    action: Array
    log_prob: Array
    value: Array
    reward: Array
    terminated: Array
    ended: Array
    valid: Array
    """Whether it is a step of an episode, and no reset."""


class Learner(NamedTuple):
    """Everything that changes in training."""

    parameters: Parameters
    moments: tuple[Parameters, Parameters]
    updates: Array
    lanes: Lane
    key: Array


def reset(key: Array) -> Lane:
    """Return the start of an episode: Gymnasium's CartPole-v1."""
    return Lane(jax.random.uniform(key, (4,), minval=-0.05, maxval=0.05), jnp.int32(0), jnp.bool_(False))


def step(lane: Lane, action: Array, key: Array) -> tuple[Lane, Array, Array, Array]:
    """Return the lane, reward, terminated and truncated after an action."""
    _, velocity, angle, spin = lane.state
    force = jnp.where(action == 1, FORCE, -FORCE)
    cosine, sine, mass = jnp.cos(angle), jnp.sin(angle), CART_MASS + POLE_MASS
    pushed = (force + POLE_MASS * HALF_LENGTH * spin**2 * sine) / mass
    turned = (GRAVITY * sine - cosine * pushed) / (HALF_LENGTH * (4.0 / 3.0 - POLE_MASS * cosine**2 / mass))
    moved = pushed - POLE_MASS * HALF_LENGTH * turned * cosine / mass
    change = jnp.stack([velocity, moved, spin, turned])
    state, steps = lane.state + SECONDS * change, lane.steps + 1
    terminated = (jnp.abs(state[0]) > LARGEST_POSITION) | (jnp.abs(state[2]) > LARGEST_ANGLE)
    truncated = (steps >= MAX_STEPS) & ~terminated
    stepped = Lane(state, steps, terminated | truncated)
    following = jax.tree.map(partial(jnp.where, lane.resetting), reset(key), stepped)
    valid = ~lane.resetting
    return following, valid.astype(jnp.float32), terminated & valid, truncated & valid


def layers(key: Array, sizes: tuple[int, ...], gain: float) -> list[tuple[Array, Array]]:
    """Return orthogonal layers; ``gain`` is that of the last."""
    gains = [math.sqrt(2.0)] * (len(sizes) - 2) + [gain]
    keys = jax.random.split(key, len(gains))
    make = [jax.nn.initializers.orthogonal(each) for each in gains]
    return [
        (of(one, (inputs, outputs)), jnp.zeros(outputs))
        for of, one, inputs, outputs in zip(make, keys, sizes[:-1], sizes[1:], strict=True)
    ]


def tower(parameters: list[tuple[Array, Array]], inputs: Array) -> Array:
    for weight, bias in parameters[:-1]:
        inputs = jnp.tanh(inputs @ weight + bias)
    weight, bias = parameters[-1]
    return inputs @ weight + bias


def evaluate(parameters: Parameters, observation: Array) -> tuple[Array, Array]:
    """Return the logarithms of the actions' probabilities, [..., 2], and values, [...]."""
    logits = tower(parameters["actor"], observation)
    return jax.nn.log_softmax(logits), tower(parameters["critic"], observation).squeeze(-1)


def chosen(log_probs: Array, action: Array) -> Array:
    return jnp.take_along_axis(log_probs, action[..., None], axis=-1).squeeze(-1)


def rollout(args: argparse.Namespace, learner: Learner, key: Array) -> tuple[Lane, Transition]:
    """Return the lanes after an iteration's steps, and the steps, [T, N]."""

    def advance(lanes: Lane, key: Array) -> tuple[Lane, Transition]:
        of_action, of_lanes = jax.random.split(key)
        log_probs, value = evaluate(learner.parameters, lanes.state)
        action = jax.random.categorical(of_action, log_probs)
        following, reward, terminated, truncated = jax.vmap(step)(
            lanes, action, jax.random.split(of_lanes, args.num_envs)
        )
        return following, Transition(
            lanes.state, action, chosen(log_probs, action), value, reward, terminated, terminated | truncated,
            ~lanes.resetting,
        )  # fmt: skip

    found: tuple[Lane, Transition] = jax.lax.scan(advance, learner.lanes, jax.random.split(key, args.num_steps))
    return found


def advantages(args: argparse.Namespace, steps: Transition, last_value: Array) -> Array:
    """Return generalised advantages, [T, N]. The value after a step is that of the next row's observation."""

    def back(carry: tuple[Array, Array], row: Transition) -> tuple[tuple[Array, Array], Array]:
        accumulated, following = carry
        delta = row.reward + args.discount * following * ~row.terminated - row.value
        goes_on = row.valid & ~row.ended
        advantage = delta + args.discount * args.gae_lambda * goes_on * accumulated
        return (advantage, row.value), advantage

    _, found = jax.lax.scan(back, (jnp.zeros_like(last_value), last_value), steps, reverse=True)
    return found


def loss(parameters: Parameters, args: argparse.Namespace, rows: tuple[Transition, Array, Array]) -> Array:
    """Return PPO's loss of a minibatch: means over rows that are steps of episodes."""
    steps, advantage, target = rows
    weight = steps.valid / jnp.maximum(steps.valid.sum(), 1)
    log_probs, value = evaluate(parameters, steps.observation)
    ratio = jnp.exp(chosen(log_probs, steps.action) - steps.log_prob)
    mean = (weight * advantage).sum()
    deviation = jnp.sqrt((weight * (advantage - mean) ** 2).sum())
    normal = (advantage - mean) / (deviation + 1e-8)
    clipped = jnp.clip(ratio, 1.0 - args.clip_range, 1.0 + args.clip_range)
    policy = -(weight * jnp.minimum(ratio * normal, clipped * normal)).sum()
    error = 0.5 * (weight * (value - target) ** 2).sum()
    entropy = -(weight * (jnp.exp(log_probs) * log_probs).sum(-1)).sum()
    return policy + args.value_coefficient * error - args.entropy_coefficient * entropy


def adam(args: argparse.Namespace, learner: Learner, gradient: Parameters) -> Learner:
    """Return the learner after a step of Adam, by a gradient that is scaled to the largest norm."""
    norm = jnp.sqrt(sum((each**2).sum() for each in jax.tree.leaves(gradient)))
    scale = jnp.minimum(1.0, args.max_gradient_norm / (norm + 1e-6))
    gradient = jax.tree.map(lambda each: scale * each, gradient)
    first, second = ADAM_BETAS
    updates = learner.updates + 1
    mean = jax.tree.map(lambda m, g: first * m + (1 - first) * g, learner.moments[0], gradient)
    square = jax.tree.map(lambda v, g: second * v + (1 - second) * g**2, learner.moments[1], gradient)
    rate = args.learning_rate / (1 - first**updates)
    correction = 1 - second**updates
    parameters = jax.tree.map(
        lambda p, m, v: p - rate * m / (jnp.sqrt(v / correction) + ADAM_EPSILON), learner.parameters, mean, square
    )
    return learner._replace(parameters=parameters, moments=(mean, square), updates=updates)


def iterate(args: argparse.Namespace, learner: Learner) -> tuple[Learner, tuple[Array, Array, Array]]:
    """Return the learner after an iteration, and of its steps the rewards, ends and validity, [T, N]."""
    key, of_rollout, of_epochs = jax.random.split(learner.key, 3)
    lanes, steps = rollout(args, learner, of_rollout)
    _, last_value = evaluate(learner.parameters, lanes.state)
    advantage = advantages(args, steps, last_value)
    rows = jax.tree.map(lambda each: each.reshape(-1, *each.shape[2:]), (steps, advantage, advantage + steps.value))
    num_rows = args.num_envs * args.num_steps

    def minibatch(learner: Learner, places: Array) -> tuple[Learner, None]:
        batch = jax.tree.map(lambda each: each[places], rows)
        return adam(args, learner, jax.grad(loss)(learner.parameters, args, batch)), None

    def epoch(learner: Learner, key: Array) -> tuple[Learner, None]:
        places = jax.random.permutation(key, num_rows).reshape(-1, args.minibatch_size)
        return jax.lax.scan(minibatch, learner, places)[0], None

    learner, _ = jax.lax.scan(epoch, learner, jax.random.split(of_epochs, args.epochs))
    return learner._replace(lanes=lanes, key=key), (steps.reward, steps.ended, steps.valid)


def begin(args: argparse.Namespace) -> Learner:
    key, of_actor, of_critic, of_lanes = jax.random.split(jax.random.key(args.seed), 4)
    parameters = {"actor": layers(of_actor, (4, 64, 64, 2), 0.01), "critic": layers(of_critic, (4, 64, 64, 1), 1.0)}
    zeros = jax.tree.map(jnp.zeros_like, parameters)
    lanes = jax.vmap(reset)(jax.random.split(of_lanes, args.num_envs))
    return Learner(parameters, (zeros, zeros), jnp.int32(0), lanes, key)


class Returns:
    """Collects the returns of whole episodes."""

    def __init__(self, num_envs: int) -> None:
        self.running = [0.0] * num_envs
        self.last: deque[float] = deque(maxlen=RETURN_WINDOW)

    def add(self, rewards: Any, ends: Any) -> None:
        """Take steps in their order, [K, N]."""
        for lane in range(len(self.running)):
            begin = 0
            for place in ends[:, lane].nonzero()[0].tolist():
                self.last.append(self.running[lane] + float(rewards[begin : place + 1, lane].sum()))
                self.running[lane], begin = 0.0, place + 1
            self.running[lane] += float(rewards[begin:, lane].sum())

    @property
    def mean(self) -> float:
        return sum(self.last) / len(self.last) if self.last else math.nan


def main(args: argparse.Namespace) -> None:
    @partial(jax.jit, static_argnums=1)
    def run(learner: Learner, iterations: int) -> tuple[Learner, tuple[Array, Array, Array]]:
        found: tuple[Learner, tuple[Array, Array, Array]]
        found = jax.lax.scan(lambda learner, _: iterate(args, learner), learner, length=iterations)
        return found

    learner, returns, env_steps = begin(args), Returns(args.num_envs), 0
    number, times = 1, 0
    while env_steps < args.total_steps and not (len(returns.last) == RETURN_WINDOW and returns.mean >= args.goal):
        began = time.monotonic()
        learner, found = run(learner, number)
        rewards, ends, valid = (jax.device_get(each).reshape(-1, args.num_envs) for each in found)
        times += 1
        if times == 2:  # the first call has compiled one iteration
            number = max(2, round(REPORT_SECONDS / (time.monotonic() - began)))
        env_steps += int(valid.sum())
        returns.add(rewards, ends)
        if args.report:
            print(json.dumps({"wall": time.time(), "env_steps": env_steps, "return_mean": returns.mean}), flush=True)


if __name__ == "__main__":
    main(ARGUMENTS)
