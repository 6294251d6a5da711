"""PQN: targets by their definition, the loss by torch's own, epsilon in each version, and a whole step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import mse_loss

from rlsrl.algorithms.adam import Adam
from rlsrl.algorithms.base import INDEX, POLICY, WEIGHT, one_rank
from rlsrl.algorithms.check import check_algorithm
from rlsrl.algorithms.gradients import gathered
from rlsrl.algorithms.learner import Learner
from rlsrl.algorithms.pqn import Pqn, build, coefficients
from rlsrl.api.spec import AlgorithmSpec, PqnSpec
from rlsrl.data.random_slots import random_slot
from rlsrl.data.specs import Arrays
from rlsrl.data.version import Version
from rlsrl.policies.build import build_network
from rlsrl.policies.epsilon_greedy import EPSILON
from rlsrl.policies.networks import MlpActionValues
from rlsrl.policies.torch_policy import TorchPolicy
from rlsrl.testing.rollouts import MASK, discrete_env_spec, masked_env_spec

ENV_SPEC = discrete_env_spec(num_features=3, num_actions=4)
NUM_STEPS, NUM_LANES = 16, 4
NETWORK = {"hidden_sizes": (8,), "layer_norm": True}
SPEC = PqnSpec.model_validate({
    "discount": 0.9, "qLambda": 0.7, "minibatchSize": 32, "epochs": 3, "epsilon": 1.0,
    "epsilonSchedule": {"linear": {"to": 0.2, "envSteps": 1000}},
})  # fmt: skip


def policy_of(seed: int = 0) -> TorchPolicy:
    module = build_network(MlpActionValues, ENV_SPEC, NETWORK, seed=seed, outputs="actionValues")
    return TorchPolicy(module, ENV_SPEC, outputs="actionValues")


def slots_of(seed: int = 0) -> Arrays:
    rng = np.random.default_rng(seed)
    return random_slot(ENV_SPEC, num_steps=NUM_STEPS, num_lanes=NUM_LANES, rng=rng, end_probability=0.2).arrays


def prepared(algorithm: Pqn, policy: TorchPolicy, slots: Arrays) -> tuple[torch.Tensor, Any]:
    params = torch.from_numpy(policy.parameters(Version(0, 0)).vector.copy())
    return params, algorithm.prepare({POLICY: params}, slots, one_rank, algorithm.evaluate)


@pytest.mark.parametrize("seed", range(5))
def test_targets_are_those_of_the_definition(seed: int) -> None:
    policy, slots = policy_of(seed), slots_of(seed)
    params, batch = prepared(build(SPEC, policy, 1, None), policy, slots)
    observation = torch.from_numpy(slots["observation"].reshape(-1, 3))
    values = policy.pure(params, {"observation": observation})["q"]
    largest = values.amax(-1).detach().numpy().reshape(NUM_STEPS + 1, NUM_LANES).astype(np.float64)
    target = np.zeros((NUM_STEPS, NUM_LANES))
    for lane in range(NUM_LANES):
        for t in reversed(range(NUM_STEPS)):
            if not slots["mask"][t, lane]:
                continue
            following = largest[t + 1, lane]
            if slots["terminated"][t, lane]:
                following = 0.0
            elif not slots["truncated"][t, lane] and t + 1 < NUM_STEPS:
                following = 0.3 * following + 0.7 * target[t + 1, lane]
            target[t, lane] = slots["reward"][t, lane] + 0.9 * following
    found = batch.rows["target"].numpy().reshape(NUM_STEPS, NUM_LANES)
    np.testing.assert_allclose(found[slots["mask"]], target[slots["mask"]], rtol=1e-4, atol=1e-5)
    assert {bool(slots[name].any()) for name in ("terminated", "truncated")} == {True}
    assert batch.num_transitions == slots["mask"].sum()


def test_the_loss_is_the_mean_squared_error_over_transitions() -> None:
    policy, slots = policy_of(), slots_of()
    algorithm = build(SPEC, policy, 1, None)
    params, batch = prepared(algorithm, policy, slots)
    schedule = algorithm.schedule(batch, np.random.default_rng(1), one_rank)
    assert schedule[INDEX].shape == schedule[WEIGHT].shape == (3 * 2, 32)
    minibatch = {name: tensor[4] for name, tensor in schedule.items()}
    loss, metrics = algorithm.loss({POLICY: params}, {}, gathered(batch.rows, minibatch))
    rows = minibatch[INDEX][minibatch[WEIGHT] > 0]
    values = policy.pure(params, {"observation": batch.rows["observation"][rows]})["q"]
    chosen = values[torch.arange(len(rows)), batch.rows["action"][rows]]
    torch.testing.assert_close(loss, mse_loss(chosen, batch.rows["target"][rows]))
    torch.testing.assert_close(metrics["q"], chosen.mean().detach())


def test_each_version_has_the_epsilon_of_its_transitions() -> None:
    policy, slots = policy_of(), slots_of()
    initial = policy.parameters(Version(0, 0))
    learner = Learner(build(SPEC, policy, 1, None), initial, learning_rate=1e-3, optimizer=Adam(), seed=0)
    first = learner.parameters(Version(0, 0)).statistics[EPSILON]
    learner.step(slots)
    second = learner.parameters(Version(0, 1)).statistics[EPSILON]
    assert (first, first.shape, first.dtype) == (1.0, (), np.float32)
    assert second == pytest.approx(1.0 - 0.8 * slots["mask"].sum() / 1000)
    learner.adopt(1e-3, coefficients(PqnSpec(epsilon=0.05), None))
    assert learner.parameters(Version(0, 2)).statistics[EPSILON] == np.float32(0.05)


def test_an_observation_without_a_legal_action_has_the_value_0() -> None:
    """So may the last one of a truncated episode be."""
    env_spec = masked_env_spec()
    module = build_network(MlpActionValues, env_spec, NETWORK, seed=1, outputs="actionValues")
    policy = TorchPolicy(module, env_spec, outputs="actionValues")
    params = {POLICY: torch.from_numpy(policy.parameters(Version(0, 0)).vector.copy())}
    mask = torch.tensor([[1, 0, 1], [0, 0, 0]], dtype=torch.int8)
    rows = {"observation/x": torch.ones(2, 4), MASK: mask, "action": torch.zeros(2, dtype=torch.int64)}
    largest = build(SPEC, policy, 1, None).evaluate(params, rows)["largest"].detach()
    assert largest[1] == 0.0
    assert 0.0 < abs(float(largest[0])) < 100


@pytest.mark.parametrize("env_spec", [ENV_SPEC, masked_env_spec()], ids=["plain", "masked"])
def test_it_keeps_the_interface_of_algorithms(env_spec: Any) -> None:
    spec = AlgorithmSpec.model_validate({"pqn": {"minibatchSize": 64, "epochs": 2}})
    check_algorithm(spec, env_spec, MlpActionValues, NETWORK)
