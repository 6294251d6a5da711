"""A tiny fixed run of PPO. Refactoring must not change its numbers; processors differ slightly."""

from __future__ import annotations

import numpy as np
import pytest

from rlsrl.algorithms.adam import Adam
from rlsrl.algorithms.learner import Learner
from rlsrl.algorithms.ppo import Ppo
from rlsrl.data.random_slots import random_slot
from rlsrl.data.version import Version
from rlsrl.parameters.protocols import Parameters
from rlsrl.policies.build import build_network
from rlsrl.policies.networks import MlpActorCritic
from rlsrl.policies.torch_policy import TorchPolicy
from rlsrl.testing.rollouts import discrete_env_spec

METRICS = [
    {
        "approx_kl": 0.00079729594,
        "behavior_kl": 0.69408457,
        "clip_fraction": 0.30937502,
        "entropy": 0.74583995,
        "explained_variance": -0.026760381,
        "gradient_norm": 0.83615398,
        "loss": 1.2166241,
        "policy_loss": 0.42764536,
        "value_loss": 1.5928743,
    },
    {
        "approx_kl": 0.00065588101,
        "behavior_kl": 0.68119009,
        "clip_fraction": 0.296875,
        "entropy": 0.80424911,
        "explained_variance": 0.092184998,
        "gradient_norm": 0.64889598,
        "loss": 0.58839369,
        "policy_loss": -0.21165997,
        "value_loss": 1.6161923,
    },
    {
        "approx_kl": 0.00026609964,
        "behavior_kl": 0.45818276,
        "clip_fraction": 0.22261907,
        "entropy": 0.80982852,
        "explained_variance": -0.06794683,
        "gradient_norm": 0.67890894,
        "loss": 0.36897805,
        "policy_loss": -0.046811592,
        "value_loss": 0.84777582,
    },
]
SETTINGS = {"learning_rate": 3e-3, "clip_range": 0.03, "entropy_coefficient": 0.01}
CHANGE = [
    *(-0.01626045, -0.01324129, -0.006702397, -0.001041822, 0.002214208, -0.02117163, -0.01269641),
    *(-0.002435327, 0.0002439618, 0.007082522, 0.01272184, 0.003592536, -0.004603937),
]
"""The change of every twentieth parameter."""


def trained() -> tuple[list[dict[str, float]], np.ndarray]:
    """Train three steps on weights and slots from numpy's generator; return metrics and the parameters' change."""
    env_spec = discrete_env_spec(num_features=3, num_actions=3)
    policy = TorchPolicy(build_network(MlpActorCritic, env_spec, {"hidden_sizes": (8, 8)}, seed=0), env_spec)
    rng = np.random.default_rng(7)
    vector = (0.5 * rng.standard_normal(policy.layout.num_parameters)).astype(np.float32)
    ppo = Ppo(
        policy,
        discount=0.98,
        gae_lambda=0.9,
        clip_range=SETTINGS["clip_range"],
        clip_value_loss=True,
        entropy_coefficient=SETTINGS["entropy_coefficient"],
        value_coefficient=0.5,
        epochs=2,
        minibatch_size=16,
        normalize_advantages=True,
    )
    initial = Parameters(version=Version(1, 0), vector=vector, layout=policy.layout.digest)
    learner = Learner(
        ppo,
        initial,
        learning_rate=SETTINGS["learning_rate"],
        optimizer=Adam(epsilon=1e-5, max_gradient_norm=0.5),
        seed=1,
    )
    slots = [random_slot(env_spec, num_steps=8, num_lanes=4, rng=rng) for _ in range(3)]
    metrics = [dict(learner.step(slot.arrays).metrics) for slot in slots]
    return metrics, learner.parameters(Version(1, 3)).vector - vector


def test_three_steps_give_the_recorded_numbers() -> None:
    metrics, change = trained()
    for ours, recorded in zip(metrics, METRICS, strict=True):
        assert ours == pytest.approx(recorded | SETTINGS, rel=1e-5, abs=1e-7)
    np.testing.assert_allclose(change[::20], CHANGE, rtol=1e-4, atol=1e-7)
