"""The work that an algorithm declares of its updates, against the matrix products that its losses compute."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch.utils.flop_counter import FlopCounterMode

from rlsrl.algorithms.adam import Adam
from rlsrl.algorithms.catalog import implementation_of
from rlsrl.algorithms.learner import Learner
from rlsrl.api.spec import AlgorithmSpec
from rlsrl.buffers.replay.rows import IMPORTANCE, NEXT
from rlsrl.data.specs import Arrays, EnvSpec
from rlsrl.data.version import Version
from rlsrl.policies.build import build_network
from rlsrl.policies.effort import network_effort
from rlsrl.policies.networks import MlpActionValues, MlpPolicy
from rlsrl.policies.torch_policy import TorchPolicy
from rlsrl.testing.rollouts import bounded_env_spec, discrete_env_spec

FEATURES, DIMENSIONS, CHOICES = 8, 2, 4
SIZE, UPDATES = 16, 6
NETWORK = {"hidden_sizes": (64, 64), "activation": "relu"}
CRITIC = {"hiddenSizes": [96, 96]}


def rows_of(env_spec: EnvSpec) -> Arrays:
    """Return the rows of a training step, as a store gives them."""
    rng, number = np.random.default_rng(0), UPDATES * SIZE
    vectors = rng.uniform(-1, 1, (number, DIMENSIONS)).astype(np.float32)
    return {
        "observation": rng.standard_normal((number, FEATURES), np.float32),
        NEXT + "observation": rng.standard_normal((number, FEATURES), np.float32),
        "action": rng.integers(0, CHOICES, number) if env_spec.action.kind == "discrete" else vectors,
        "reward": rng.standard_normal(number, np.float32),
        "discount": np.ones(number, np.float32),
        IMPORTANCE: np.ones(number, np.float32),
    }


@pytest.mark.parametrize(
    ("name", "fields", "env_spec"),
    [
        ("dqn", {}, discrete_env_spec(FEATURES, CHOICES)),
        ("dqn", {"double": False}, discrete_env_spec(FEATURES, CHOICES)),
        ("sac", {"critic": CRITIC}, bounded_env_spec("squashed", FEATURES, DIMENSIONS)),
        ("sac", {"critic": CRITIC, "learnTemperature": False}, bounded_env_spec("squashed", FEATURES, DIMENSIONS)),
        ("td3", {"critic": CRITIC}, bounded_env_spec("clipped", FEATURES, DIMENSIONS)),
        ("td3", {"critic": CRITIC, "policyPeriod": 3}, bounded_env_spec("clipped", FEATURES, DIMENSIONS)),
    ],
)
def test_the_declared_work_is_that_of_the_losses(name: str, fields: dict[str, Any], env_spec: EnvSpec) -> None:
    spec = AlgorithmSpec.model_validate({name: {"minibatchSize": SIZE, **fields}})
    settings = spec.chosen
    kind = MlpActionValues if settings.outputs == "actionValues" else MlpPolicy
    module = build_network(kind, env_spec, NETWORK, seed=0, outputs=settings.outputs)
    policy = TorchPolicy(module, env_spec, outputs=settings.outputs)
    algorithm = implementation_of(spec).build(settings, policy, 1, None)
    learner = Learner(algorithm, policy.parameters(Version(0, 0)), learning_rate=1e-3, optimizer=Adam(), seed=0)

    with FlopCounterMode(display=False) as counter:
        learner.step(rows_of(env_spec))

    effort, work = network_effort(policy, critic=settings.critic_network), settings.update_work
    # A pass is a forward pass and twice as much back. The first layer has no gradient of its inputs.
    declared = 3 * (work.network_passes * effort.forward_macs + work.critic_passes * effort.critic_macs)
    assert declared == pytest.approx(counter.get_total_flops() / 2 / (SIZE * UPDATES), rel=0.08)
    assert work.losses == sum(1 / group.every for group in algorithm.groups.values())
