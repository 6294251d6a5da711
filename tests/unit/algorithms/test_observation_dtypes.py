"""Boxes of every dtype are acted on and trained on, whatever their bounds."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces

from rlsrl.algorithms.adam import Adam
from rlsrl.algorithms.learner import Learner
from rlsrl.algorithms.ppo import Ppo
from rlsrl.data.random_slots import random_slot
from rlsrl.data.version import Version
from rlsrl.envs.spaces import spec_of_spaces
from rlsrl.policies.build import build_network
from rlsrl.policies.export import check_export
from rlsrl.policies.networks import MlpActorCritic
from rlsrl.policies.torch_policy import TorchPolicy

INTEGERS = [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64]
BOXES = {
    **{dtype.__name__: spaces.Box(0, 100, (2, 3), dtype) for dtype in INTEGERS},
    "bool": spaces.Box(0, 1, (3,), np.bool_),
    "scalar": spaces.Box(-1.0, 2.0, (), np.float32),
    "float16": spaces.Box(-1.0, 2.0, (3,), np.float16),
    "float64": spaces.Box(-1.0, 2.0, (3,), np.float64),
    "unbounded": spaces.Box(np.array([-np.inf, 0.0, -np.inf]), np.array([np.inf, np.inf, 5.0]), dtype=np.float64),
}
ACTIONS = spaces.Box(np.array([-1.0, -np.inf, 2.0]), np.array([3.0, np.inf, np.inf]), dtype=np.float64)


@pytest.mark.parametrize("name", BOXES)
def test_a_box_of_any_dtype_trains(name: str) -> None:
    env_spec = spec_of_spaces(BOXES[name], ACTIONS)
    policy = TorchPolicy(build_network(MlpActorCritic, env_spec, {"hidden_sizes": (8,)}, seed=0), env_spec)
    initial = policy.parameters(Version(1, 0))
    exported = policy.export()
    assert exported is not None
    check_export(policy, exported, initial)
    ppo = Ppo(
        policy, discount=0.99, gae_lambda=0.95, clip_range=0.2, clip_value_loss=True, entropy_coefficient=0.01,
        value_coefficient=0.5, epochs=2, minibatch_size=8, normalize_advantages=True,
    )  # fmt: skip
    learner = Learner(ppo, initial, learning_rate=1e-3, optimizer=Adam(epsilon=1e-5, max_gradient_norm=0.5), seed=0)
    slot = random_slot(env_spec, num_steps=8, num_lanes=4, rng=np.random.default_rng(0))
    result = learner.step(slot.arrays)
    assert (result.skipped, result.optimizer_steps) == (0, 8)
    vector = learner.parameters(Version(1, 1)).vector
    assert np.isfinite(vector).all()
    assert not np.array_equal(vector, initial.vector)
