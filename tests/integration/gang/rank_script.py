"""One rank of a gang under torchrun: trains on its half of each batch and writes the result."""

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlsrl.algorithms.adam import Adam
from rlsrl.algorithms.base import Algorithm
from rlsrl.algorithms.catalog import implementation_of
from rlsrl.algorithms.custom import Setup
from rlsrl.algorithms.learner import Learner
from rlsrl.algorithms.ppo import Ppo
from rlsrl.algorithms.sequences import Sequences
from rlsrl.api.spec import AlgorithmNeeds, AlgorithmSpec, CustomAlgorithmSpec, NetworkOutputs
from rlsrl.buffers.replay.layout import ReplayLayout
from rlsrl.buffers.replay.rows import IMPORTANCE, RowForm, sequences_of
from rlsrl.buffers.replay.segments import Segments
from rlsrl.data.random_slots import random_slot
from rlsrl.data.slots import ProducerId, is_state_field, rollout_layout
from rlsrl.data.specs import Arrays, EnvSpec, state_specs
from rlsrl.data.version import Version
from rlsrl.parameters.protocols import Parameters
from rlsrl.policies.build import build_network, seeded
from rlsrl.policies.networks import MlpActionValues, MlpActorCritic, MlpPolicy
from rlsrl.policies.recurrent import RecurrentSharedNetwork
from rlsrl.policies.shared import MlpEncoder
from rlsrl.policies.torch_policy import TorchPolicy
from rlsrl.testing.actor_and_critic import ActorAndCritic
from rlsrl.testing.rollouts import (
    bounded_env_spec,
    discrete_env_spec,
    masked_env_spec,
    masked_rows,
    vector_rows,
    with_outcomes,
)
from rlsrl.workers.gang import Gang, ProcessGroupGang, SoloGang

STEPS, LANES, TRAIN_STEPS = 8, 4, 5
SIZE = 6
"""Units of the recurrent layer."""
ROWS, UPDATES = 16, 2
"""With replay: rows of a minibatch, and minibatches of a batch."""


def learner_of(gang: Gang, kind: str, initial: Parameters | None = None) -> Learner:
    """Make the same learner on every rank. Without replay the batch is the one minibatch: order does not matter."""
    env_spec, network, outputs, algorithm_of = KINDS[kind]
    policy = TorchPolicy(build_network(network, env_spec, {}, seed=1, outputs=outputs), env_spec, outputs=outputs)
    return Learner(
        algorithm_of(policy, gang.size),
        initial or policy.parameters(Version(1, 0)),
        learning_rate=1e-3,
        optimizer=Adam(epsilon=1e-5, max_gradient_norm=0.5),
        seed=3,
        reduce=gang.reduce,
        parallel=gang.size > 1,
    )


def ppo_of(policy: TorchPolicy, num_ranks: int) -> Algorithm:
    return Ppo(
        policy,
        discount=0.99,
        gae_lambda=0.95,
        clip_range=0.2,
        clip_value_loss=True,
        entropy_coefficient=0.01,
        value_coefficient=0.5,
        epochs=4,
        minibatch_size=STEPS * LANES // num_ranks,
        normalize_advantages=True,
        sequences=Sequences(length=STEPS // 2, burn_in=2),
    )


def two_groups_of(policy: TorchPolicy, num_ranks: int) -> Algorithm:
    needs = AlgorithmNeeds(minibatch_size=STEPS * LANES, epochs=4, outputs="policy")
    settings = CustomAlgorithmSpec(factory="rlsrl.testing.actor_and_critic:ActorAndCritic", needs=needs)
    with seeded(1):
        return ActorAndCritic(Setup(policy=policy, settings=settings, num_ranks=num_ranks))


def replaying(**block: Any) -> Callable[[TorchPolicy, int], Algorithm]:
    """Return the builder of an algorithm that replays, by its block of the spec."""
    ((name, fields),) = block.items()
    spec = AlgorithmSpec.model_validate({name: {"minibatchSize": ROWS, **fields}})

    def build(policy: TorchPolicy, num_ranks: int) -> Algorithm:
        with seeded(1):
            return implementation_of(spec).build(spec.chosen, policy, num_ranks, None)

    return build


CRITIC = {"hiddenSizes": [8]}
KINDS: dict[str, tuple[EnvSpec, Any, NetworkOutputs, Callable[[TorchPolicy, int], Algorithm]]] = {
    "ppo": (discrete_env_spec(), MlpActorCritic, "policyAndValue", ppo_of),
    "recurrent": (
        discrete_env_spec(),
        partial(RecurrentSharedNetwork, encoder=MlpEncoder, outputs="policyAndValue", kind="lstm", size=SIZE),
        "policyAndValue",
        ppo_of,
    ),
    "two groups": (discrete_env_spec(), MlpPolicy, "policy", two_groups_of),
    "dqn": (masked_env_spec(), MlpActionValues, "actionValues", replaying(dqn={"targetPeriod": 3})),
    "r2d2": (
        discrete_env_spec(),
        partial(RecurrentSharedNetwork, encoder=MlpEncoder, outputs="actionValues", kind="gru", size=SIZE),
        "actionValues",
        replaying(dqn={"targetPeriod": 3, "minibatchSize": ROWS * STEPS, "valueRescaling": True}),
    ),
    "sac": (masked_env_spec(), MlpPolicy, "policy", replaying(sac={"critic": CRITIC, "tau": 0.5})),
    # Two ranks draw other noise than one does, so the target's noise is 0 here.
    "td3": (
        bounded_env_spec("clipped"),
        MlpPolicy,
        "policy",
        replaying(td3={"critic": CRITIC, "tau": 0.5, "policyPeriod": 2, "targetDeviation": 0}),
    ),
}


def of_transitions(rows: Callable[[int, int], Arrays]) -> Callable[[int], Arrays]:
    """Return what makes the rows of a batch with a seed, by observations and actions for their number and a seed."""
    return lambda seed: with_outcomes(rows(UPDATES * ROWS, seed), seed)


def sequences(seed: int) -> Arrays:
    """Return sequences that were drawn from a store with three rollouts of each lane."""
    env_spec, state = discrete_env_spec(), state_specs({"hidden": SIZE})
    layout = rollout_layout(env_spec, num_steps=STEPS, num_lanes=LANES, state=state)
    store = ReplayLayout.of(layout, capacity=3 * STEPS * LANES)
    segments, rng = Segments(store, bytearray(store.nbytes)), np.random.default_rng(seed)
    for number in range(3):
        slot = random_slot(env_spec, num_steps=STEPS, num_lanes=LANES, rng=rng, state=state)
        slot.producer, slot.sequence = ProducerId(0, 0), number
        segments.insert(slot)
    keys = rng.integers(0, 3 * LANES, UPDATES * ROWS) * STEPS
    rows = sequences_of(segments, keys, RowForm(num_steps=2, discount=0.9, burn_in=True))
    return {**rows, IMPORTANCE: rng.uniform(0.1, 1.0, len(keys)).astype(np.float32)}


REPLAYED: dict[str, Callable[[int], Arrays]] = {
    "dqn": of_transitions(masked_rows),
    "r2d2": sequences,
    "sac": of_transitions(masked_rows),
    "td3": of_transitions(vector_rows),
}
"""By kind: the rows of a batch, for a seed."""


def everything(learner: Learner) -> dict[str, np.ndarray]:
    """Return all numbers that training goes on from."""
    arrays, _ = learner.state_dict()
    return {**arrays, "policy": learner.parameters(Version(1, 1)).vector}


def batches(kind: str, poison: int | None) -> list[dict[str, np.ndarray]]:
    made = [_batch(kind, step) for step in range(TRAIN_STEPS)]
    if poison is not None:
        made[poison]["reward"].flat[0] = np.nan
    return made


def _batch(kind: str, seed: int) -> dict[str, np.ndarray]:
    if kind in REPLAYED:
        return dict(REPLAYED[kind](seed))
    rng = np.random.default_rng(seed)
    state = state_specs({"hidden": SIZE, "cell": SIZE}) if kind == "recurrent" else None
    return random_slot(discrete_env_spec(), num_steps=STEPS, num_lanes=LANES, rng=rng, state=state).arrays


def part_of(kind: str, arrays: dict[str, np.ndarray], rank: int, size: int) -> dict[str, np.ndarray]:
    """Return a rank's lanes, or with replay its rows of each minibatch."""
    if kind in REPLAYED:
        ranks = {name: array.reshape(UPDATES, size, -1, *array.shape[1:]) for name, array in arrays.items()}
        return {name: array[:, rank].reshape(-1, *array.shape[3:]) for name, array in ranks.items()}
    lanes = slice(rank * LANES // size, (rank + 1) * LANES // size)
    by_step = {name: array[:, lanes] if array.ndim > 1 else array for name, array in arrays.items()}
    return by_step | {name: array[lanes] for name, array in arrays.items() if is_state_field(name)}


def main(out: Path, kind: str, poison: int | None) -> None:
    torch.set_num_threads(1)
    gang: Gang = ProcessGroupGang(timeout_seconds=60) if torch.distributed.is_torchelastic_launched() else SoloGang()
    learner = learner_of(gang, kind)
    metrics, skipped, untrained = [], [], []
    for arrays in batches(kind, poison):
        result = learner.step(part_of(kind, arrays, gang.rank, gang.size))
        metrics.append(dict(result.metrics))
        skipped.append(result.skipped)
        untrained.append(result.num_untrained)
    said = gang.agree({"rank": gang.rank, "text": "x" * (gang.rank * 10_000)})
    np.savez(out / f"arrays-{gang.size}-{gang.rank}.npz", **everything(learner))
    report = {"metrics": metrics, "skipped": skipped, "untrained": untrained}
    report["said"] = [[each["rank"], len(each["text"])] for each in said]
    (out / f"report-{gang.size}-{gang.rank}.json").write_text(json.dumps(report))
    assert "torch._dynamo" not in sys.modules, "the import would delay each gang's start"
    gang.close()
    os._exit(0)  # as a worker does: gloo's threads may abort an interpreter that ends slowly


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else None)
