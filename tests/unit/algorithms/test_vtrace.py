"""V-trace: targets and advantages by their definition, and the loss by torch's own distributions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Categorical

from rlsrl.algorithms.base import INDEX, POLICY, WEIGHT, one_rank
from rlsrl.algorithms.returns import generalized_advantages
from rlsrl.algorithms.vtrace import Vtrace, build, coefficients, vtrace_targets
from rlsrl.api.spec import VtraceSpec
from rlsrl.data.random_slots import random_slot
from rlsrl.policies.build import build_network
from rlsrl.policies.networks import MlpActorCritic
from rlsrl.policies.torch_policy import TorchPolicy
from rlsrl.testing.rollouts import discrete_env_spec

ENV_SPEC = discrete_env_spec(num_features=3, num_actions=4)
NUM_STEPS, NUM_LANES = 16, 4
SPEC = VtraceSpec(
    discount=0.9, trace_decay=0.8, rho_clip=1.2, c_clip=0.9, minibatch_size=64, value_coefficient=0.7,
    entropy_coefficient=0.05,
)  # fmt: skip


def by_definition(
    reward: Any, value: Any, importance: Any, terminated: Any, truncated: Any, mask: Any, discount: float,
    trace_decay: float, rho_clip: float, c_clip: float,
) -> tuple[Any, Any]:  # fmt: skip
    """Return advantage and target as the paper's sums, O(T^2), float64: each lane, each step, to the episode's end."""
    num_steps, num_lanes = reward.shape
    advantage, target = np.zeros((num_steps, num_lanes)), np.zeros((num_steps, num_lanes))
    for lane in range(num_lanes):
        ends = [bool(terminated[t, lane] or truncated[t, lane]) for t in range(num_steps)]

        def error(t: int, following: float, lane: int = lane) -> float:
            rho = min(rho_clip, float(importance[t, lane]))
            return rho * (float(reward[t, lane]) + discount * following - float(value[t, lane]))

        def next_value(t: int, lane: int = lane) -> float:
            return 0.0 if terminated[t, lane] else float(value[t + 1, lane])

        for t in range(num_steps):
            if not mask[t, lane]:
                continue
            trace, target[t, lane] = 1.0, float(value[t, lane])
            for k in range(t, num_steps):
                if not mask[k, lane]:
                    break
                target[t, lane] += trace * error(k, next_value(k))
                trace *= discount * trace_decay * min(c_clip, float(importance[k, lane]))
                if ends[k]:
                    break
        for t in range(num_steps):
            if mask[t, lane]:
                goes_on = not ends[t] and t + 1 < num_steps and mask[t + 1, lane]
                advantage[t, lane] = error(t, target[t + 1, lane] if goes_on else next_value(t))
    return advantage, target


def random_inputs(seed: int, num_steps: int, num_lanes: int, end_probability: float = 0.2, absent: float = 0.0) -> Any:
    rng = np.random.default_rng(seed)
    shape = (num_steps, num_lanes)
    terminated, truncated = rng.random(shape) < end_probability, rng.random(shape) < end_probability
    mask = rng.random(shape) >= absent
    for t in range(1, num_steps):
        mask[t] &= ~(mask[t - 1] & (terminated[t - 1] | truncated[t - 1]))
    return {
        "reward": rng.standard_normal(shape).astype(np.float32),
        "value": rng.standard_normal((num_steps + 1, num_lanes)).astype(np.float32),
        "importance": np.exp(rng.standard_normal(shape)).astype(np.float32),
        "terminated": terminated,
        "truncated": truncated,
        "mask": mask,
    }


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_steps=st.integers(1, 14),
    num_lanes=st.integers(1, 4),
    end_probability=st.sampled_from([0.0, 0.1, 0.4, 1.0]),
    absent=st.sampled_from([0.0, 0.2]),
    discount=st.sampled_from([0.0, 0.9, 1.0]),
    trace_decay=st.sampled_from([0.0, 0.95, 1.0]),
    rho_clip=st.sampled_from([0.5, 1.0, 1e6]),
    c_clip=st.sampled_from([0.5, 1.0]),
)
def test_agrees_with_the_definition(
    seed: int, num_steps: int, num_lanes: int, end_probability: float, absent: float, **parameters: float
) -> None:
    inputs = random_inputs(seed, num_steps, num_lanes, end_probability, absent)
    expected = by_definition(**inputs, **parameters)
    gone = ~inputs["mask"]
    for name in ("reward", "importance"):
        inputs[name][gone] = np.nan  # not used
    found = vtrace_targets(**inputs, **parameters)
    for array, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(array, other, rtol=2e-4, atol=2e-4)
        assert array.dtype == np.float32


def test_without_lag_it_is_the_advantage_of_whole_returns() -> None:
    inputs = random_inputs(3, 12, 5)
    inputs["importance"] = np.ones_like(inputs["importance"])
    advantage, target = vtrace_targets(**inputs, discount=0.9, trace_decay=1.0, rho_clip=1.0, c_clip=1.0)
    del inputs["importance"]
    expected = generalized_advantages(**inputs, discount=0.9, gae_lambda=1.0)
    np.testing.assert_allclose(advantage, expected[0], atol=1e-5)
    np.testing.assert_allclose(target, expected[1], atol=1e-5)


def make_policy() -> TorchPolicy:
    return TorchPolicy(build_network(MlpActorCritic, ENV_SPEC, {"hidden_sizes": (8,)}, seed=0), ENV_SPEC)


def make_params(policy: TorchPolicy, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 0.3 * torch.randn(policy.layout.num_parameters, generator=generator)


def test_loss_and_gradient_are_those_of_the_textbook() -> None:
    policy = make_policy()
    algorithm = build(SPEC, policy, 1, None)
    acting, params = make_params(policy, 1), make_params(policy, 2)
    slots = random_slot(
        ENV_SPEC, num_steps=NUM_STEPS, num_lanes=NUM_LANES, rng=np.random.default_rng(0), end_probability=0.15
    ).arrays
    observation = torch.from_numpy(slots["observation"][:-1].reshape(-1, 3))
    actions = torch.from_numpy(slots["action"].reshape(-1))
    acted = Categorical(logits=policy.pure(acting, {"observation": observation})["policy"]).log_prob(actions)
    slots["behavior_log_prob"][...] = acted.numpy().reshape(NUM_STEPS, NUM_LANES)
    batch = algorithm.prepare({POLICY: params}, slots, one_rank, algorithm.evaluate)
    schedule = algorithm.schedule(batch, np.random.default_rng(0), one_rank)
    assert tuple(schedule[INDEX].shape) == (1, 64)
    minibatch = {name: rows[schedule[INDEX][0]] for name, rows in batch.rows.items()}
    minibatch |= {WEIGHT: schedule[WEIGHT][0], "entropy_coefficient": torch.tensor(0.05)}
    leaf = params.clone().requires_grad_()
    loss, metrics = algorithm.loss({POLICY: leaf}, {}, minibatch)
    (gradient,) = torch.autograd.grad(loss, leaf)

    every = {"observation": torch.from_numpy(slots["observation"].reshape(-1, 3))}
    value = policy.pure(params, every)["value"].numpy().reshape(NUM_STEPS + 1, NUM_LANES)
    trained = Categorical(logits=policy.pure(params, {"observation": observation})["policy"]).log_prob(actions)
    importance = (trained - acted).exp().numpy().reshape(NUM_STEPS, NUM_LANES)
    fields = {name: slots[name] for name in ("reward", "terminated", "truncated", "mask")}
    advantage, target = by_definition(
        **fields, value=value, importance=importance, discount=0.9, trace_decay=0.8, rho_clip=1.2, c_clip=0.9
    )
    chosen = torch.from_numpy(slots["mask"].reshape(-1))
    assert int((~chosen).sum()) > 0
    leaf = params.clone().requires_grad_()
    heads = policy.pure(leaf, {"observation": observation[chosen]})
    logits, values = heads["policy"], heads["value"]
    distribution = Categorical(logits=logits)
    of_rows = [torch.from_numpy(array.reshape(-1).astype(np.float32))[chosen] for array in (advantage, target)]
    policy_loss = -(distribution.log_prob(actions[chosen]) * of_rows[0]).mean()
    value_loss = 0.5 * (values - of_rows[1]).square().mean()
    entropy = distribution.entropy().mean()
    expected = policy_loss + 0.7 * value_loss - 0.05 * entropy
    (expected_gradient,) = torch.autograd.grad(expected, leaf)
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-3, atol=1e-5)
    for name, tensor in (("policy_loss", policy_loss), ("value_loss", value_loss), ("entropy", entropy)):
        torch.testing.assert_close(metrics[name], tensor, rtol=1e-4, atol=1e-5)


def test_coefficients_follow_their_schedule_and_edits() -> None:
    spec = VtraceSpec.model_validate(
        {"entropyCoefficient": 0.1, "entropyCoefficientSchedule": {"linear": {"to": 0.0, "envSteps": 100}}}
    )
    algorithm: Vtrace = build(spec, make_policy(), 1, None)
    assert algorithm.coefficients(50) == pytest.approx({"entropy_coefficient": 0.05})
    algorithm.adopt(coefficients(VtraceSpec(entropy_coefficient=0.3), None))
    assert algorithm.coefficients(50) == {"entropy_coefficient": 0.3}
