"""Categories are one-hot where a network's features begin."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlsrl.data.inference import RolloutRequest
from rlsrl.data.version import Version
from rlsrl.policies.build import build_network
from rlsrl.policies.export import check_export
from rlsrl.policies.networks import FlattenObservation, MlpActorCritic
from rlsrl.policies.numpy_policy import NumpyPolicy
from rlsrl.policies.torch_policy import TorchPolicy
from rlsrl.testing.rollouts import categories_env_spec

ENV_SPEC = categories_env_spec()
OBSERVATION = {
    "observation/0": np.array([4, 0, 5]),
    "observation/1": np.array([[0.5, -2.0], [7.0, 8.0], [0.0, 0.0]], np.float32),
    "observation/2": np.array([[[0], [3]], [[-1], [6]], [[1], [2]]], np.int32),
}
"""Of three lanes. In the last one every category has a value outside its space."""
FEATURES = [
    [0, 0, 0, 0, 1, 0.5, -2, 0, 1, 1, 0, 0, 0],
    [1, 0, 0, 0, 0, 7, 8, 1, 0, 0, 0, 0, 1],
    [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
]


def test_each_value_of_a_category_is_one_feature() -> None:
    flatten = FlattenObservation(ENV_SPEC.observation)
    assert flatten.num_features == 13
    features = flatten({path: torch.from_numpy(array) for path, array in OBSERVATION.items()})
    assert features.dtype == torch.float32
    assert features.tolist() == FEATURES


def test_an_exported_actor_sees_the_same_features() -> None:
    policy = TorchPolicy(build_network(MlpActorCritic, ENV_SPEC, {"hidden_sizes": (8,)}, seed=0), ENV_SPEC)
    exported = policy.export()
    assert exported is not None
    assert exported.layers[0].in_size == 13
    check_export(policy, exported, policy.parameters(Version(1, 0)))
    parameters = policy.parameters(Version(1, 0))
    weights = parameters.vector[: 8 * 13].reshape(8, 13)
    by_numpy = NumpyPolicy(exported)
    by_numpy.load(parameters)
    (found,) = by_numpy.predict([RolloutRequest(observation=OBSERVATION)])
    (expected,) = policy.predict([RolloutRequest(observation=OBSERVATION)])
    np.testing.assert_allclose(found.distribution, expected.distribution, rtol=1e-4, atol=1e-6)
    last = parameters.vector[8 * 13 + 8 : 8 * 13 + 8 + 24].reshape(3, 8)
    np.testing.assert_allclose(
        found.distribution, np.tanh(np.array(FEATURES, np.float32) @ weights.T) @ last.T, rtol=1e-4, atol=1e-6
    )


def test_tables_are_no_parameters() -> None:
    network = FlattenObservation(ENV_SPEC.observation)
    assert list(network.parameters()) == []
    assert list(network.state_dict()) == []


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tables_move_with_the_network(device: str) -> None:
    network = FlattenObservation(ENV_SPEC.observation).to(device)
    assert {buffer.device.type for buffer in network.buffers()} == {device}
