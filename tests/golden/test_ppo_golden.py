"""A tiny fixed run of PPO: its numbers stay what they are across refactors, within what processors differ by."""

from __future__ import annotations

import numpy as np
import pytest

from rlsrl.algorithms.learner import Learner
from rlsrl.algorithms.ppo import Ppo
from rlsrl.data.version import Version
from rlsrl.parameters.protocols import Parameters
from rlsrl.policies.build import build_network
from rlsrl.policies.networks import MlpActorCritic
from rlsrl.policies.torch_policy import TorchPolicy
from rlsrl.testing.rollouts import discrete_env_spec, random_slot

METRICS = [
    {
        "approx_kl": 0.67524719,
        "clip_fraction": 0.8218751,
        "entropy": 0.74489439,
        "explained_variance": -0.026760382,
        "gradient_norm": 0.92757291,
        "loss": 1.2718451,
        "policy_loss": 0.49367529,
        "value_loss": 1.5712376,
    },
    {
        "approx_kl": 0.66726518,
        "clip_fraction": 0.8839286,
        "entropy": 0.8089658,
        "explained_variance": 0.10054663,
        "gradient_norm": 0.67286694,
        "loss": 0.83097816,
        "policy_loss": 0.040184744,
        "value_loss": 1.597766,
    },
    {
        "approx_kl": 0.42814648,
        "clip_fraction": 0.83095241,
        "entropy": 0.82854009,
        "explained_variance": -0.064712383,
        "gradient_norm": 0.78483284,
        "loss": 0.55965799,
        "policy_loss": 0.14895368,
        "value_loss": 0.8379795,
    },
]
SETTINGS = {"learning_rate": 3e-3, "clip_range": 0.2, "entropy_coefficient": 0.01}
CHANGE = [
    *(-0.02458302, -0.002577662, -0.03102151, 0.0225189, -0.01324047, -0.03087085, -0.02191054),
    *(0.004760742, -0.01013368, -0.003346235, 0.01558459, -0.005094081, 0.005429804),
]
"""Of every twentieth parameter."""


def trained() -> tuple[list[dict[str, float]], np.ndarray]:
    """Three steps from weights and slots that only numpy's generator decides; the parameters' change."""
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
        ppo, initial, learning_rate=SETTINGS["learning_rate"], adam_epsilon=1e-5, max_gradient_norm=0.5, seed=1
    )
    slots = [random_slot(env_spec, num_steps=8, num_lanes=4, rng=rng) for _ in range(3)]
    metrics = [dict(learner.step(slot.arrays).metrics) for slot in slots]
    return metrics, learner.parameters(Version(1, 3)).vector - vector


def test_three_steps_give_the_numbers_on_record() -> None:
    metrics, change = trained()
    for ours, recorded in zip(metrics, METRICS, strict=True):
        assert ours == pytest.approx(recorded | SETTINGS, rel=1e-5, abs=1e-7)
    np.testing.assert_allclose(change[::20], CHANGE, rtol=1e-4, atol=1e-7)
