"""A NumpyPolicy gives the results of the network that it was exported from."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlsrl.data.inference import RolloutRequest
from rlsrl.data.random_slots import random_slot
from rlsrl.data.specs import ArraySpec, EnvSpec
from rlsrl.data.version import Version
from rlsrl.policies.build import build_network
from rlsrl.policies.exported import LayoutMismatch
from rlsrl.policies.networks import MlpActorCritic
from rlsrl.policies.normalization import mean_of, variance_of
from rlsrl.policies.numpy_policy import MAX_SIZES, NumpyPolicy
from rlsrl.policies.torch_policy import TorchPolicy
from rlsrl.testing.rollouts import (
    CHOICES_AND_FLAGS,
    MIXED,
    bounded_env_spec,
    categories_env_spec,
    continuous_env_spec,
    discrete_action,
    discrete_env_spec,
    joint_action,
)

LEGAL = "observation/legal"
MASKED = EnvSpec(
    observation={
        "observation/seen": ArraySpec(shape=(2, 2), dtype="float32"),
        LEGAL: ArraySpec(shape=(3,), dtype="int8"),
    },
    action=replace(discrete_action(3), mask=LEGAL),
)
KINDS = {
    "discrete": discrete_env_spec(),
    "continuous": continuous_env_spec(),
    "squashed": bounded_env_spec("squashed"),
    "clipped": bounded_env_spec("clipped"),
    "masked": MASKED,
    "categories": categories_env_spec(),
    "joint": replace(discrete_env_spec(), action=CHOICES_AND_FLAGS),
    "mixed": replace(discrete_env_spec(), action=MIXED),
    "masked choices": replace(MASKED, action=replace(joint_action(("categorical", 2), ("categorical", 1)), mask=LEGAL)),
}


def twins(env_spec: EnvSpec) -> tuple[TorchPolicy, NumpyPolicy]:
    """Return a network and its exported actor as policies, with random weights and statistics."""
    network = TorchPolicy(build_network(MlpActorCritic, env_spec, {"hidden_sizes": (8,)}, seed=0), env_spec)
    actor = network.export()
    assert actor is not None
    rng = np.random.default_rng(0)
    vector = rng.standard_normal(network.layout.num_parameters).astype(np.float32)
    path = next(path for path, spec in env_spec.observation.items() if spec.dtype == "float32")
    shape = env_spec.observation[path].shape
    statistics = {mean_of(path): rng.standard_normal(shape), variance_of(path): rng.uniform(0.5, 2.0, shape)}
    parameters = replace(network.parameters(Version(3, 7)), vector=vector, statistics=statistics)
    exported = NumpyPolicy(actor)
    for policy in (network, exported):
        policy.load(parameters)
    return network, exported


def request_of(env_spec: EnvSpec, num_lanes: int, seed: int) -> RolloutRequest:
    slot = random_slot(env_spec, num_steps=1, num_lanes=num_lanes, rng=np.random.default_rng(seed))
    observation = {path: slot.arrays[path][0] for path in env_spec.observation}
    for array in observation.values():
        array.flags.writeable = False
    return RolloutRequest(observation=observation)


@pytest.mark.parametrize("kind", KINDS)
def test_it_answers_as_the_network_does_for_any_number_of_lanes(kind: str) -> None:
    network, exported = twins(KINDS[kind])
    for seed, sizes in enumerate([(3, 1, 5), (9,), (2,), (9,), (3, 1, 5)]):
        requests = [request_of(KINDS[kind], size, seed) for size in sizes]
        for expected, found in zip(network.predict(requests), exported.predict(requests), strict=True):
            np.testing.assert_allclose(found.distribution, expected.distribution, rtol=1e-4, atol=1e-5)
            assert found.version == expected.version == (3, 7)


def test_answers_stay_as_they_were_whatever_is_asked_next() -> None:
    _, exported = twins(KINDS["discrete"])
    (first,) = exported.predict([request_of(KINDS["discrete"], 4, seed=1)])
    before = first.distribution.copy()
    for size in range(1, MAX_SIZES + 3):
        exported.predict([request_of(KINDS["discrete"], size, seed=2)])
    assert np.array_equal(first.distribution, before)
    assert np.array_equal(exported.predict([request_of(KINDS["discrete"], 4, seed=1)])[0].distribution, before)


def test_it_exports_itself_and_takes_no_other_weights() -> None:
    network, exported = twins(KINDS["discrete"])
    assert exported.export() == network.export()
    with pytest.raises(LayoutMismatch, match="do not fit the exported actor's"):
        exported.load(replace(network.parameters(Version(4, 0)), layout="other"))
    assert exported.predict([request_of(KINDS["discrete"], 1, seed=0)])[0].version == (3, 7)


def test_nothing_is_evaluated_before_weights_are_there() -> None:
    actor = twins(KINDS["discrete"])[0].export()
    assert actor is not None
    with pytest.raises(RuntimeError, match=r"load\(\) comes before predict\(\)"):
        NumpyPolicy(actor).predict([request_of(KINDS["discrete"], 1, seed=0)])
