"""Vectors within [-1, 1]: how they are drawn, their densities, and what a version says of exploration."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from rlsrl.api.spec import VectorActions
from rlsrl.data.inference import RolloutRequest
from rlsrl.data.random_slots import random_actions
from rlsrl.data.specs import Arrays
from rlsrl.data.version import Version
from rlsrl.parameters.protocols import Parameters
from rlsrl.policies.build import build_network
from rlsrl.policies.cnn import NatureCnnPolicy
from rlsrl.policies.distributions import log_prob_and_entropy_for, log_prob_for, squashed_sample
from rlsrl.policies.exploration import DEVIATION, UNIFORM, UNIFORM_LOG_STD, make_uniform
from rlsrl.policies.export import check_export
from rlsrl.policies.exported import MASKED_LOGIT, ExportedActor
from rlsrl.policies.networks import MlpPolicy
from rlsrl.policies.numpy_policy import NumpyPolicy
from rlsrl.policies.sampling import Sampler, sampler_for
from rlsrl.policies.torch_policy import TorchPolicy
from rlsrl.runtime.errors import ConfigurationError
from rlsrl.testing.rollouts import (
    bounded_env_spec,
    discrete_action,
    discrete_env_spec,
    joint_action,
    masked_env_spec,
    pixels_env_spec,
)

KINDS: tuple[VectorActions, ...] = ("squashed", "clipped")
MEAN, STD = np.array([0.3, -0.9]), np.array([0.5, 0.2])
EACH_KIND = pytest.mark.parametrize("vectors", KINDS)


def sampler(vectors: VectorActions, num_steps: int, num_lanes: int, *, greedy: bool = False) -> Sampler:
    action = bounded_env_spec(vectors).action
    rng = np.random.default_rng(0)
    draws = sampler_for(action, num_steps=num_steps, num_lanes=num_lanes, rng=rng, greedy=greedy)
    draws.parameters[...] = np.concatenate([MEAN, np.log(STD)])[:, np.newaxis]
    return draws


def drawn(draws: Sampler) -> np.ndarray:
    num_steps, _, num_lanes = draws.parameters.shape
    draws.begin()
    actions = np.full((num_steps, num_lanes, 2), np.nan, np.float32)
    for step in range(num_steps):
        draws.choose(step, actions[step])
    return actions


def test_squashed_vectors_are_the_tanh_of_gaussian_ones() -> None:
    actions = drawn(sampler("squashed", 50, 1000)).reshape(-1, 2)
    deviations = (np.arctanh(actions.astype(float)) - MEAN) / STD
    np.testing.assert_allclose(deviations.mean(0), 0.0, atol=4 / np.sqrt(50_000))
    np.testing.assert_allclose(deviations.var(0), 1.0, atol=4 * np.sqrt(2 / 50_000))


def test_clipped_vectors_are_cut_to_the_bounds() -> None:
    actions = drawn(sampler("clipped", 50, 1000)).reshape(-1, 2)
    assert actions.min() == -1.0
    assert actions.max() == 1.0
    inside = (np.abs(actions) < 1).all(axis=1)
    share = [0.5 * (1 + math.erf(each / math.sqrt(2))) for each in (1.4, 2.6)]  # 0.7 and 1.3 in deviations of 0.5
    wanted = (share[0] + share[1] - 1) * (0.5 * (1 + math.erf(0.5 / math.sqrt(2))))  # the second: 0.1 of 0.2, one side
    assert inside.mean() == pytest.approx(wanted, abs=0.01)


@EACH_KIND
def test_the_greedy_action_is_that_of_the_mean(vectors: VectorActions) -> None:
    actions = drawn(sampler(vectors, 3, 2, greedy=True))
    wanted = np.tanh(MEAN) if vectors == "squashed" else MEAN
    np.testing.assert_allclose(actions, np.broadcast_to(wanted, actions.shape), rtol=1e-6)


@EACH_KIND
def test_a_lane_draws_what_the_whole_draws_for_it(vectors: VectorActions) -> None:
    whole = sampler(vectors, 8, 3)
    actions, lane = drawn(whole), whole.of_lane(1)
    lane.parameters[...] = whole.parameters[:, :, 1:2]
    for step in range(8):
        chosen = np.empty((1, 2), np.float32)
        lane.choose(step, chosen)
        np.testing.assert_array_equal(chosen[0], actions[step, 1])


@EACH_KIND
def test_densities_within_the_bounds_add_up_to_their_share(vectors: VectorActions) -> None:
    """The integral over a grid: 1 for squashed vectors, what lies inside for clipped ones."""
    number = 400
    centres = (np.arange(number) + 0.5) / number * 2 - 1
    grid = np.stack(np.meshgrid(centres, centres, indexing="ij"), axis=-1).reshape(number * number, 1, 2)
    draws = sampler(vectors, number * number, 1)
    out = np.empty((number * number, 1), np.float32)
    draws.log_probs(grid.astype(np.float32), out)
    total = float(np.exp(out.astype(float)).sum() * (2 / number) ** 2)
    actions = drawn(sampler("clipped", 50, 1000)).reshape(-1, 2)
    inside = 1.0 if vectors == "squashed" else float((np.abs(actions) < 1).all(axis=1).mean())
    assert total == pytest.approx(inside, abs=0.01)


@EACH_KIND
def test_densities_are_finite_at_the_bounds(vectors: VectorActions) -> None:
    draws = sampler(vectors, 2, 1)
    out = np.empty((2, 1), np.float32)
    with np.errstate(all="raise", under="ignore"):
        draws.log_probs(np.array([[[1.0, -1.0]], [[-1.0, 1.0]]], np.float32), out)
    assert np.isfinite(out).all()


def test_extreme_deviations_are_cut() -> None:
    for log_std in (50.0, -50.0):
        draws = sampler("squashed", 20, 50)
        draws.parameters[:, 2:] = log_std
        actions = drawn(draws)
        assert np.isfinite(actions).all()
        spread = float(np.arctanh(np.clip(actions, -0.999999, 0.999999)).std())
        assert (spread > 2) == (log_std > 0)


def test_torch_draws_and_values_squashed_vectors_as_actors_do() -> None:
    rng = np.random.default_rng(1)
    draws = sampler("squashed", 4, 5)
    draws.parameters[...] = rng.standard_normal(draws.parameters.shape)
    actions = drawn(draws)
    out = np.empty((4, 5), np.float32)
    draws.log_probs(actions, out)
    parameters = torch.from_numpy(draws.parameters.transpose(0, 2, 1).copy())
    noise = torch.from_numpy(draws._noise.transpose(0, 2, 1).copy())
    found, log_prob = squashed_sample(parameters, noise)
    np.testing.assert_allclose(found.numpy(), actions, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(log_prob.numpy(), out, rtol=1e-2, atol=1e-2)


@EACH_KIND
def test_what_was_done_has_no_log_probability_in_torch(vectors: VectorActions) -> None:
    action = bounded_env_spec(vectors).action
    for function in (log_prob_for, log_prob_and_entropy_for):
        with pytest.raises(ConfigurationError, match=f"the log-probability of {vectors} actions does not follow"):
            function(action)


def test_densities_in_torch_are_those_of_its_own_distributions() -> None:
    parameters = 0.5 * torch.randn(7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    action, log_prob = squashed_sample(parameters, noise)
    normal = torch.distributions.Normal(parameters[:, :3], parameters[:, 3:].clamp(-20, 2).exp())
    squashed = torch.distributions.TransformedDistribution(normal, [torch.distributions.TanhTransform()])
    torch.testing.assert_close(squashed.log_prob(action).sum(-1), log_prob)


def test_a_density_far_from_the_mean_stays_finite_with_its_gradient() -> None:
    parameters = torch.tensor([[60.0, -60.0, 2.0, 2.0]], requires_grad=True)
    action, log_prob = squashed_sample(parameters, torch.zeros(1, 2))
    (action.sum() + log_prob.sum()).backward()
    assert parameters.grad is not None
    assert bool(torch.isfinite(log_prob).all())
    assert bool(torch.isfinite(parameters.grad).all())


@EACH_KIND
def test_a_version_can_have_uniform_actions(vectors: VectorActions) -> None:
    draws = sampler(vectors, 50, 1000)
    draws.parameters[:, 2:] = UNIFORM_LOG_STD
    actions = drawn(draws).reshape(-1, 2)
    for column in actions.T:
        shares = np.histogram(column, bins=20, range=(-1, 1))[0] / len(column)
        np.testing.assert_allclose(shares, 0.05, atol=4 * np.sqrt(0.05 * 0.95 / len(column)) + 0.001)
    assert abs(np.corrcoef(actions.T)[0, 1]) < 4 / np.sqrt(len(actions))
    out = np.empty((50, 1000), np.float32)
    draws.log_probs(actions.reshape(50, 1000, 2), out)
    np.testing.assert_allclose(out, -2 * math.log(2), rtol=1e-6)


def policies_of(env_spec: Any, statistics: Arrays) -> tuple[TorchPolicy, NumpyPolicy]:
    """Return a network and its exported actor as policies, at a version with these statistics."""
    module = build_network(MlpPolicy, env_spec, {"hidden_sizes": (8,)}, seed=0, outputs="policy")
    policy = TorchPolicy(module, env_spec, outputs="policy")
    rng = np.random.default_rng(0)
    vector = rng.standard_normal(policy.layout.num_parameters).astype(np.float32)
    parameters = Parameters(version=Version(1, 0), vector=vector, layout=policy.layout.digest, statistics=statistics)
    exported = policy.export()
    assert exported is not None
    assert ExportedActor.from_json(exported.to_json()) == exported
    check_export(policy, exported, parameters)
    by_numpy = NumpyPolicy(exported)
    for each in (policy, by_numpy):
        each.load(parameters)
    return policy, by_numpy


def answers(policies: Any, request: RolloutRequest) -> list[np.ndarray]:
    return [policy.predict([request])[0].distribution for policy in policies]


REQUEST = RolloutRequest(
    observation={"observation": np.random.default_rng(3).standard_normal((5, 4)).astype(np.float32)}
)


def test_the_deviation_of_clipped_vectors_is_that_of_the_version() -> None:
    for deviation, wanted in ((0.25, math.log(0.25)), (None, None), (0.0, None)):
        statistics = {} if deviation is None else {DEVIATION: np.array(deviation, np.float32)}
        by_torch, by_numpy = answers(policies_of(bounded_env_spec("clipped"), statistics), REQUEST)
        np.testing.assert_allclose(by_torch, by_numpy, rtol=1e-4, atol=1e-5)
        assert by_torch.shape == (5, 4)
        assert (np.abs(by_torch[:, :2]) <= 1).all(), "means are within the bounds"
        if wanted is None:
            assert (np.exp(by_torch[:, 2:]) < 1e-30).all(), "without a deviation the mean itself"
        else:
            np.testing.assert_allclose(by_torch[:, 2:], wanted, rtol=1e-6)


def test_the_deviation_of_squashed_vectors_depends_on_the_observation() -> None:
    by_torch, by_numpy = answers(policies_of(bounded_env_spec("squashed"), {}), REQUEST)
    np.testing.assert_allclose(by_torch, by_numpy, rtol=1e-4, atol=1e-5)
    assert by_torch[:, 2:].std(axis=0).min() > 0.01


@EACH_KIND
def test_uniform_actions_are_said_by_the_answer_itself(vectors: VectorActions) -> None:
    statistics = {UNIFORM: np.array(1.0, np.float32), DEVIATION: np.array(0.1, np.float32)}
    for answer in answers(policies_of(bounded_env_spec(vectors), statistics), REQUEST):
        assert (answer[:, 2:] == UNIFORM_LOG_STD).all()
    statistics[UNIFORM] = np.array(0.0, np.float32)
    for answer in answers(policies_of(bounded_env_spec(vectors), statistics), REQUEST):
        assert (answer[:, 2:] < 10).all()


@EACH_KIND
def test_the_greedy_action_is_that_of_the_mean_while_others_are_uniform(vectors: VectorActions) -> None:
    draws = sampler(vectors, 3, 2, greedy=True)
    draws.parameters[:, 2:] = UNIFORM_LOG_STD
    actions = drawn(draws)
    wanted = np.tanh(MEAN) if vectors == "squashed" else MEAN
    np.testing.assert_allclose(actions, np.broadcast_to(wanted, actions.shape), rtol=1e-6)


def test_choices_and_flags_stay_the_most_probable_ones() -> None:
    parameters = np.array([[-3.0, 2.0], [1.0, -1.0], [0.5, 0.5], [4.0, -4.0], [-0.1, 0.0]], np.float32)
    parts = joint_action(("categorical", 3), ("bernoulli", 2)).parts
    before = parameters.copy()
    make_uniform(parameters, parts)
    assert np.abs(parameters).max() < 1e-4
    np.testing.assert_array_equal(parameters[:3].argmax(axis=0), before[:3].argmax(axis=0))
    np.testing.assert_array_equal(np.sign(parameters[3:]), np.sign(before[3:]))


def test_legal_choices_are_equally_probable() -> None:
    statistics = {UNIFORM: np.array(1.0, np.float32)}
    for answer in answers(policies_of(discrete_env_spec(), statistics), REQUEST):
        assert np.abs(answer).max() < 1e-4
    env_spec, rng = masked_env_spec(), np.random.default_rng(0)
    mask_path = env_spec.action.mask
    assert mask_path is not None
    mask = np.array([[1, 0, 1], [0, 0, 1]], np.int8)
    observation = {
        path: mask if path == mask_path else rng.standard_normal((2, *spec.shape)).astype(spec.dtype)
        for path, spec in env_spec.observation.items()
    }
    for answer in answers(policies_of(env_spec, statistics), RolloutRequest(observation=observation)):
        np.testing.assert_allclose(answer, np.where(mask, 0.0, MASKED_LOGIT), atol=1e-4)


def test_a_gaussian_without_bounds_stays_as_it_is() -> None:
    parameters = np.arange(8, dtype=np.float32).reshape(4, 2)
    before = parameters.copy()
    make_uniform(parameters, bounded_env_spec("gaussian").action.parts)
    np.testing.assert_array_equal(parameters, before)


@EACH_KIND
def test_a_network_for_images_gives_such_vectors(vectors: VectorActions) -> None:
    pixels = pixels_env_spec()
    env_spec = type(pixels)(observation=pixels.observation, action=bounded_env_spec(vectors).action)
    module = build_network(NatureCnnPolicy, env_spec, {"hidden_size": 16}, seed=0, outputs="policy")
    policy = TorchPolicy(module, env_spec, outputs="policy")
    policy.load(policy.parameters(Version(1, 0)))
    image = np.random.default_rng(0).integers(0, 256, (3, 2, 36, 36)).astype(np.uint8)
    answer = policy.predict([RolloutRequest(observation={"observation": image})])[0].distribution
    assert answer.shape == (3, 4)
    assert (np.abs(answer[:, :2]) < 0.5).all()


def test_random_actions_of_tests_are_within_the_bounds() -> None:
    for vectors in KINDS:
        action = bounded_env_spec(vectors).action
        drawn_ones = random_actions(action, (200, 2), np.random.default_rng(0))
        assert np.abs(drawn_ones).max() == 1.0
    assert random_actions(discrete_action(3), (200,), np.random.default_rng(0)).max() == 2
