"""Acting by the values of actions: the distribution, its draws, and equal results with torch and without."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rlsrl.data.inference import RolloutRequest
from rlsrl.data.random_slots import random_slot
from rlsrl.data.slots import Slot
from rlsrl.data.specs import Arrays, ArraySpec, EnvSpec
from rlsrl.data.version import Version
from rlsrl.envs.threads import lane_of
from rlsrl.parameters.protocols import Parameters
from rlsrl.policies.acting import LocalActor, PolicyActor, RolloutActor
from rlsrl.policies.build import build_network
from rlsrl.policies.cnn import NatureCnnActionValues
from rlsrl.policies.epsilon_greedy import EPSILON, ape_x_exponents, raise_epsilon, values_to_logits
from rlsrl.policies.export import ExportMismatch, check_export, export_dense
from rlsrl.policies.exported import MASKED_LOGIT, ExportedActor
from rlsrl.policies.flat import FlatLayout
from rlsrl.policies.networks import MlpActionValues, MlpActorCritic
from rlsrl.policies.numpy_policy import NumpyActor, NumpyLanes, NumpyPolicy
from rlsrl.policies.sampling import Exploration
from rlsrl.policies.torch_policy import TorchPolicy
from rlsrl.runtime.errors import ConfigurationError
from rlsrl.testing.rollouts import continuous_env_spec, discrete_env_spec, masked_env_spec, pixels_env_spec

NUM_STEPS, NUM_LANES = 4000, 3
NETWORK = {"hidden_sizes": (16, 8), "activation": "relu", "layer_norm": True}


def policy_of(env_spec: EnvSpec, epsilon: float | None, factory: Any = MlpActionValues, **kwargs: Any) -> TorchPolicy:
    module = build_network(factory, env_spec, kwargs or NETWORK, seed=1, outputs="actionValues")
    policy = TorchPolicy(module, env_spec, outputs="actionValues")
    policy.load(version(policy, {} if epsilon is None else {EPSILON: np.array(epsilon, np.float32)}))
    return policy


def version(policy: TorchPolicy, statistics: Arrays) -> Parameters:
    vector = np.random.default_rng(0).standard_normal(policy.layout.num_parameters).astype(np.float32)
    return Parameters(version=Version(1, 1), vector=vector, layout=policy.layout.digest, statistics=statistics)


def softmax(logits: np.ndarray) -> np.ndarray:
    return np.exp(logits) / np.exp(logits).sum(axis=0)


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0])
def test_the_best_action_is_taken_but_for_epsilon(epsilon: float) -> None:
    logits = np.array([[0.5, 7.0], [0.6, -3.0], [-1.0, 6.9]], np.float32)
    values_to_logits(logits, epsilon)
    others = epsilon / 3
    best = 1 - epsilon + others
    np.testing.assert_allclose(softmax(logits), [[others, best], [best, others], [others, others]], atol=1e-5)
    assert logits.argmax(axis=0).tolist() == [1, 0], "an evaluation takes the best one, whatever epsilon is"


def test_only_legal_actions_are_taken_at_random() -> None:
    logits = np.array([[0.5, MASKED_LOGIT], [0.6, MASKED_LOGIT], [MASKED_LOGIT, MASKED_LOGIT]], np.float32)
    values_to_logits(logits, 0.5)
    np.testing.assert_allclose(softmax(logits)[:, 0], [0.25, 0.75, 0.0], atol=1e-5)
    assert np.isfinite(logits).all(), "also where no action is legal"


@pytest.mark.parametrize("epsilon", [1.0, 0.4, 0.01, 0.0])
def test_each_lane_may_have_a_power_of_epsilon(epsilon: float) -> None:
    values = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
    values[2:, 4] = MASKED_LOGIT
    values[1:, 5] = MASKED_LOGIT  # no choice
    exponents = np.array([1.0, 2.0, 8.0, 1.5, 3.0, 2.0], np.float32)
    raised, expected = values.copy(), values.copy()
    values_to_logits(raised, epsilon)
    raise_epsilon(raised, exponents)
    for lane, exponent in enumerate(exponents):
        of_lane = expected[:, lane : lane + 1]
        values_to_logits(of_lane, epsilon ** float(exponent))
    np.testing.assert_allclose(softmax(raised), softmax(expected), rtol=1e-4, atol=1e-9)
    assert raised.argmax(axis=0).tolist() == values.argmax(axis=0).tolist()


def test_the_exponents_of_a_fleet_are_those_of_ape_x_whatever_the_actors() -> None:
    whole = ape_x_exponents(range(8), 8, 7.0)
    np.testing.assert_allclose(whole, [1 + 7 * i / 7 for i in range(8)])
    parts = [ape_x_exponents(ranks, 8, 7.0) for ranks in (range(3), range(3, 6), range(6, 8))]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    np.testing.assert_array_equal(ape_x_exponents(range(1), 1, 7.0), [1.0])


@pytest.mark.parametrize("exponents", [None, np.linspace(1.0, 3.0, NUM_LANES, dtype=np.float32)], ids=["same", "each"])
@pytest.mark.parametrize("kind", ["exported", "torch", "lanes"])
def test_draws_and_log_probabilities_follow_the_distribution(kind: str, exponents: Any) -> None:
    env_spec, epsilon = masked_env_spec(), 0.4
    policy = policy_of(env_spec, epsilon)
    slot = random_slot(env_spec, num_steps=NUM_STEPS, num_lanes=NUM_LANES, rng=np.random.default_rng(3))
    sizes: dict[str, Any] = {
        "num_steps": NUM_STEPS,
        "num_lanes": NUM_LANES,
        "rng": np.random.default_rng(5),
        "exploration": Exploration(exponents=exponents),
    }
    actor: LocalActor
    if kind == "torch":
        actor = PolicyActor(policy, env_spec, **sizes)
    else:
        exported = policy.export()
        assert exported is not None
        actor = (NumpyActor if kind == "exported" else NumpyLanes)(exported, **sizes)
        actor.load(version(policy, {EPSILON: np.array(epsilon, np.float32)}))
    actor.begin(slot)
    lanes: list[tuple[RolloutActor, Slot]] = [(actor, slot)]
    if isinstance(actor, NumpyLanes):
        lanes = [(lane, Slot(arrays=lane_of(slot.arrays, number))) for number, lane in enumerate(actor.lanes)]
        for lane, own in lanes:
            lane.begin(own)
    for step in range(NUM_STEPS):
        for lane, _ in lanes:
            lane.act(step)
    actor.finish()

    assert env_spec.action.mask is not None
    mask = slot.arrays[env_spec.action.mask][:-1] != 0
    values = raw_values(policy, {path: slot.arrays[path][:-1].reshape(-1, *spec.shape) for path, spec in
                                 env_spec.observation.items()}).reshape(*mask.shape)  # fmt: skip
    has_choice = mask.sum(axis=-1) > 1
    chosen, best = slot.arrays["action"], values.argmax(axis=-1)
    epsilons = epsilon ** (np.ones(NUM_LANES) if exponents is None else exponents.astype(np.float64))
    share = epsilons / np.maximum(mask.sum(axis=-1), 1)
    expected = np.where(chosen == best, 1 - epsilons + share, share)
    found = np.exp(slot.arrays["behavior_log_prob"])
    np.testing.assert_allclose(found[has_choice], expected[has_choice], rtol=1e-4)
    assert np.take_along_axis(mask, chosen[..., None], axis=-1)[has_choice].all(), "only legal ones"
    frequency, probability = (chosen == best)[has_choice], (1 - epsilons + share)[has_choice]
    deviation = np.sqrt((probability * (1 - probability)).sum())
    assert abs(frequency.sum() - probability.sum()) < 4 * deviation


def raw_values(policy: TorchPolicy, observation: Arrays) -> np.ndarray:
    values, _ = policy.network_output([RolloutRequest(observation=observation)])
    return values


@pytest.mark.parametrize("epsilon", [None, 0.0, 0.2])
def test_the_exported_form_with_layer_norm_computes_the_same(epsilon: float | None) -> None:
    policy = policy_of(discrete_env_spec(), epsilon)
    exported = policy.export()
    assert exported is not None
    assert ExportedActor.from_json(exported.to_json()) == exported
    statistics = {} if epsilon is None else {EPSILON: np.array(epsilon, np.float32)}
    check_export(policy, exported, version(policy, statistics))


@pytest.mark.parametrize("quantiles", [1, 5])
@pytest.mark.parametrize("env_spec", [discrete_env_spec(), masked_env_spec()], ids=["plain", "masked"])
def test_a_dueling_network_adds_advantages_to_the_value_and_acts_by_advantages(
    env_spec: EnvSpec, quantiles: int
) -> None:
    """Wang et al. (2016), equation 9: the mean of the actions' values is the observation's."""
    policy = policy_of(env_spec, 0.1, hidden_sizes=(16, 8), dueling=True, quantiles=quantiles)
    exported = policy.export()
    assert exported is not None
    assert exported.head.num_outputs == env_spec.action.num_actions
    check_export(policy, exported, version(policy, {}))
    observation = {path: random_array(spec) for path, spec in env_spec.observation.items()}
    network = policy.network.network if env_spec.action.mask else policy.network
    features = network.flatten({path: torch.from_numpy(observation[path]) for path in network._specs})
    with torch.no_grad():
        advantage = network.q(features).reshape(20, -1, quantiles).mean(dim=-1)
        value = network.value(features).mean(dim=-1, keepdim=True)
        values = network({path: torch.from_numpy(observation[path]) for path in network._specs})["q"]
    torch.testing.assert_close(values.mean(dim=-1, keepdim=True), value)
    torch.testing.assert_close(values - values[:, :1], advantage - advantage[:, :1])
    numpy_policy = NumpyPolicy(exported)
    for each in (policy, numpy_policy):
        each.load(version(policy, {EPSILON: np.array(0.1, np.float32)}))
    requests = [RolloutRequest(observation=observation)]
    (by_torch,), (by_numpy,) = policy.predict(requests), numpy_policy.predict(requests)
    np.testing.assert_allclose(by_numpy.distribution, by_torch.distribution, rtol=1e-5)


@pytest.mark.parametrize("dueling", [False, True])
@pytest.mark.parametrize("size", [100.0, 1000.0])
def test_large_values_whose_differences_are_small_are_exported(size: float, dueling: bool) -> None:
    """As those of a trained network are; their rounding is that of their size."""
    env_spec = discrete_env_spec()
    policy = policy_of(env_spec, None, hidden_sizes=(64, 64), dueling=dueling)
    parameters = version(policy, {})
    vector = parameters.vector.copy()
    for name, offset in policy.layout.offsets.items():
        count = int(np.prod(policy.layout.shapes[name]))
        part = vector[offset : offset + count]
        part *= 0.1
        if name in ("q.4.weight", "q.4.bias"):
            part *= 0.01
        if name == ("value.4.bias" if dueling else "q.4.bias"):
            part += size
    exported = policy.export()
    assert exported is not None
    check_export(policy, exported, replace(parameters, vector=vector))


def test_the_value_of_an_action_is_the_mean_of_its_quantiles() -> None:
    env_spec = discrete_env_spec(num_actions=3)
    policy = policy_of(env_spec, None, hidden_sizes=(8,), quantiles=7)
    exported = policy.export()
    assert exported is not None
    assert ExportedActor.from_json(exported.to_json()) == exported
    assert (exported.layers[-1].out_size, exported.layers[-1].means_of) == (3, 7)
    check_export(policy, exported, version(policy, {}))
    heads = policy.network({"observation": torch.from_numpy(random_array(env_spec.observation["observation"]))})
    assert heads["quantiles"].shape == (20, 3, 7)
    torch.testing.assert_close(heads["q"], heads["quantiles"].mean(dim=-1))


def random_array(spec: ArraySpec) -> np.ndarray:
    values = np.random.default_rng(0).standard_normal((20, *spec.shape))
    return (values > 0).astype(spec.dtype) if spec.dtype == "int8" else values.astype(spec.dtype)


def test_a_dueling_network_for_images_adds_advantages_to_the_value() -> None:
    policy = policy_of(pixels_env_spec(), 0.1, NatureCnnActionValues, hidden_size=16, dueling=True)
    network, slot = (
        policy.network,
        random_slot(pixels_env_spec(), num_steps=1, num_lanes=4, rng=np.random.default_rng(0)),
    )
    observation = {path: torch.from_numpy(slot.arrays[path][0]) for path in pixels_env_spec().observation}
    with torch.no_grad():
        features = network.features(observation)
        torch.testing.assert_close(network(observation)["q"].mean(dim=-1, keepdim=True), network.value(features))


def test_values_that_differ_are_found_where_the_best_action_is_the_same() -> None:
    policy = policy_of(discrete_env_spec(), 1.0)
    exported = policy.export()
    assert exported is not None
    *layers, last = exported.layers
    wrong = replace(exported, layers=(*layers, replace(last, activation="tanh")))
    with pytest.raises(ExportMismatch, match="differ from the network's"):
        check_export(policy, wrong, version(policy, {}))


def test_the_actor_of_an_actor_critic_has_layer_norm_too() -> None:
    env_spec = continuous_env_spec()
    policy = TorchPolicy(build_network(MlpActorCritic, env_spec, NETWORK, seed=1), env_spec)
    exported = policy.export()
    assert exported is not None
    check_export(policy, exported, version(policy, {}))


@pytest.mark.parametrize(
    "norm", [nn.LayerNorm(5), nn.LayerNorm(4, eps=1e-3), nn.LayerNorm(4, elementwise_affine=False)]
)
def test_a_normalisation_that_has_no_exported_form_is_refused(norm: nn.Module) -> None:
    tower = nn.Sequential(nn.Linear(3, 4), norm, nn.ReLU(), nn.Linear(4, 2))
    with pytest.raises(ValueError, match=r"q.1 is LayerNorm"):
        export_dense(tower, "q", FlatLayout.of(tower), {}, is_values=True)


def test_a_tower_must_not_end_with_a_normalisation() -> None:
    tower = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    with pytest.raises(ValueError, match="must end with"):
        export_dense(tower, "q", FlatLayout.of(tower), {}, is_values=True)


def test_a_network_for_images_values_actions() -> None:
    env_spec = pixels_env_spec()
    policy = policy_of(env_spec, 0.5, NatureCnnActionValues, hidden_size=16)
    slot = random_slot(env_spec, num_steps=1, num_lanes=4, rng=np.random.default_rng(0))
    observation = {path: slot.arrays[path][0] for path in env_spec.observation}
    (result,) = policy.predict([RolloutRequest(observation=observation)])
    values = raw_values(policy, observation)
    assert policy.export() is None
    assert result.distribution.argmax(axis=-1).tolist() == values.argmax(axis=-1).tolist()
    others = 0.5 / values.shape[1]
    np.testing.assert_allclose(np.exp(result.distribution.min(axis=-1)), others, rtol=1e-4)


def test_a_version_without_epsilon_acts_greedily() -> None:
    policy = policy_of(discrete_env_spec(), None)
    exported = policy.export()
    assert exported is not None
    numpy_policy = NumpyPolicy(exported)
    numpy_policy.load(version(policy, {}))
    observation = {"observation": np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)}
    (result,) = numpy_policy.predict([RolloutRequest(observation=observation)])
    np.testing.assert_allclose(softmax(result.distribution.T).max(axis=0), 1.0, atol=1e-6)


@pytest.mark.parametrize("factory", [MlpActionValues, NatureCnnActionValues])
def test_other_actions_than_discrete_are_refused(factory: Any) -> None:
    with pytest.raises(ConfigurationError, match="needs the action space Discrete; the environment's actions are cont"):
        build_network(factory, continuous_env_spec(), {}, seed=0, outputs="actionValues")
