from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch

from rlsrl.data.specs import ActionSpec
from rlsrl.policies.distributions import log_prob_for
from rlsrl.policies.sampling import CategoricalSampler, GaussianSampler, JointSampler, make_sampler, sampler_for
from rlsrl.testing.rollouts import CHOICES_AND_FLAGS, MIXED, continuous_action, discrete_action, joint_action


def sampler(num_steps: int, num_lanes: int, num_actions: int, *, greedy: bool = False) -> CategoricalSampler:
    made = make_sampler(
        discrete_action(num_actions).parts,
        is_joint=False,
        num_steps=num_steps,
        num_lanes=num_lanes,
        rng=np.random.default_rng(0),
        greedy=greedy,
    )
    assert isinstance(made, CategoricalSampler)
    return made


def test_choices_have_the_softmax_distribution() -> None:
    num_steps, num_lanes = 50, 1000
    logits = np.array([0.0, 1.0, -2.0, 0.5], np.float32)
    draws = sampler(num_steps, num_lanes, 4)
    draws.parameters[...] = logits[:, np.newaxis]
    draws.begin()
    actions = np.empty((num_steps, num_lanes), np.int64)
    for t in range(num_steps):
        draws.choose(t, actions[t])
    expected = np.exp(logits) / np.exp(logits).sum() * actions.size
    chi_square = np.square(np.bincount(actions.ravel(), minlength=4) - expected) / expected
    assert chi_square.sum() < 16.3, "p = 0.001 of three degrees of freedom"


def test_log_probs_are_those_of_the_softmax_and_stay_finite_for_extreme_logits() -> None:
    draws = sampler(3, 2, 3)
    draws.parameters[0] = [[1.0, 0.0], [2.0, 0.0], [3.0, 0.0]]
    draws.parameters[1] = [[1000.0, -1000.0], [0.0, 0.0], [-1000.0, 1000.0]]
    draws.parameters[2] = 7.0
    actions = np.array([[2, 1], [0, 0], [1, 2]])
    out = np.empty((3, 2), np.float32)
    draws.log_probs(actions, out)
    third = -np.log(3.0)
    total = np.log(np.exp([1.0, 2.0, 3.0]).sum())
    np.testing.assert_allclose(out, [[3.0 - total, third], [0.0, -2000.0], [third, third]], rtol=1e-6)


def test_noise_is_finite_and_new_each_rollout() -> None:
    draws = sampler(100, 100, 20)
    draws.begin()
    first = draws._noise.copy()
    draws.begin()
    assert np.isfinite(first).all()
    assert (first != draws._noise).mean() > 0.999
    assert abs(first.mean() - 0.5772) < 0.02, "the mean of a standard Gumbel variable"


class ZeroDraws:
    """A generator whose exponential draws are all 0. A real draw is 0 once in eight million."""

    def standard_exponential(self, *, out: np.ndarray, dtype: type) -> None:
        out[...] = 0


def test_a_draw_of_zero_still_makes_finite_noise() -> None:
    draws = CategoricalSampler(np.zeros((2, 2, 1), np.float32), cast("Any", ZeroDraws()))
    with np.errstate(all="raise"):
        draws.begin()
    assert np.isfinite(draws._noise).all()


def gaussian(num_steps: int, num_lanes: int, size: int, *, greedy: bool = False) -> GaussianSampler:
    rng = np.random.default_rng(0)
    return GaussianSampler(np.zeros((num_steps, size, num_lanes), np.float32), None if greedy else rng)


def drawn(draws: GaussianSampler) -> np.ndarray:
    num_steps, width, num_lanes = draws.parameters.shape
    draws.begin()
    actions = np.empty((num_steps, num_lanes, width // 2), np.float32)
    for t in range(num_steps):
        draws.choose(t, actions[t])
    return actions


def test_vectors_have_the_gaussian_distribution() -> None:
    draws = gaussian(50, 1000, 2)
    draws.parameters[...] = np.array([1.0, -4.0, np.log(0.5), np.log(3.0)], np.float32)[:, np.newaxis]
    actions = drawn(draws).reshape(-1, 2)
    deviations = (actions - [1.0, -4.0]) / [0.5, 3.0]
    np.testing.assert_allclose(deviations.mean(0), 0.0, atol=4 / np.sqrt(50_000))
    np.testing.assert_allclose(deviations.var(0), 1.0, atol=4 * np.sqrt(2 / 50_000))
    assert abs(np.corrcoef(deviations.T)[0, 1]) < 4 / np.sqrt(50_000)
    within = [float((np.abs(deviations) < bound).mean()) for bound in (1.0, 2.0)]
    np.testing.assert_allclose(within, [0.6827, 0.9545], atol=0.01)


def test_log_probs_of_vectors_are_those_of_the_density() -> None:
    rng, draws = np.random.default_rng(1), gaussian(4, 3, 2)
    mean, std = rng.standard_normal((4, 2, 3)), np.exp(rng.standard_normal((4, 2, 3)))
    draws.parameters[:, :2], draws.parameters[:, 2:] = mean, np.log(std)
    actions = rng.standard_normal((4, 3, 2)).astype(np.float32) * 3
    out = np.empty((4, 3), np.float32)
    draws.log_probs(actions, out)
    density = np.exp(-0.5 * ((actions.transpose(0, 2, 1) - mean) / std) ** 2) / (std * np.sqrt(2 * np.pi))
    np.testing.assert_allclose(out, np.log(density).sum(1), rtol=1e-4, atol=5e-5)


def test_the_most_probable_vector_is_the_mean() -> None:
    draws = gaussian(3, 2, 2, greedy=True)
    draws.parameters[...] = np.random.default_rng(2).standard_normal(draws.parameters.shape)
    assert np.array_equal(drawn(draws), draws.parameters[:, :2].transpose(0, 2, 1))


def test_each_rollout_of_vectors_has_its_own_noise() -> None:
    draws = gaussian(10, 10, 2)
    assert not np.isin(drawn(draws), drawn(draws)).any()


def test_each_kind_of_action_has_its_sampler() -> None:
    sizes = {"num_steps": 2, "num_lanes": 1, "rng": np.random.default_rng(0), "greedy": False}
    discrete, continuous = sampler_for(discrete_action(4), **sizes), sampler_for(continuous_action(4), **sizes)
    assert isinstance(discrete, CategoricalSampler)
    assert isinstance(continuous, GaussianSampler)
    assert (discrete.parameters.shape, continuous.parameters.shape) == ((2, 4, 1), (2, 8, 1))


def joint(action: ActionSpec, num_steps: int, num_lanes: int, *, greedy: bool = False) -> JointSampler:
    rng = np.random.default_rng(0)
    made = sampler_for(action, num_steps=num_steps, num_lanes=num_lanes, rng=rng, greedy=greedy)
    assert isinstance(made, JointSampler)
    return made


def joint_draws(draws: JointSampler, action: ActionSpec) -> np.ndarray:
    num_steps, _, num_lanes = draws.parameters.shape
    draws.begin()
    actions = np.full((num_steps, num_lanes, *action.array.shape), 99, action.array.dtype)
    for t in range(num_steps):
        draws.choose(t, actions[t])
    return actions


def test_choices_and_flags_are_drawn_independently_by_their_probabilities() -> None:
    draws = joint(CHOICES_AND_FLAGS, 50, 1000)
    logits = np.array([0.0, 1.0, -1.0, 0.5, 0.0, 0.0, 2.0, -1.5, 0.7], np.float32)
    draws.parameters[...] = logits[:, np.newaxis]
    actions = joint_draws(draws, CHOICES_AND_FLAGS).reshape(-1, 4)
    bound = 4 * np.sqrt(0.25 / len(actions))
    for entry, part in enumerate((logits[:3], logits[3:7])):
        frequencies = np.bincount(actions[:, entry], minlength=len(part)) / len(actions)
        np.testing.assert_allclose(frequencies, np.exp(part) / np.exp(part).sum(), atol=bound)
    assert set(np.unique(actions[:, 2:])) == {0, 1}
    np.testing.assert_allclose(actions[:, 2:].mean(0), 1 / (1 + np.exp(-logits[7:])), atol=bound)
    correlations = np.corrcoef(actions.T) - np.eye(4)
    assert np.abs(correlations).max() < 4 / np.sqrt(len(actions))


@pytest.mark.parametrize("action", [CHOICES_AND_FLAGS, MIXED], ids=["integers", "mixed"])
def test_joint_log_probs_are_those_that_torch_trains_with(action: ActionSpec) -> None:
    draws = joint(action, 6, 5)
    draws.parameters[...] = np.random.default_rng(3).standard_normal(draws.parameters.shape) * 2
    actions = joint_draws(draws, action)
    out = np.empty((6, 5), np.float32)
    draws.log_probs(actions, out)
    parameters = torch.from_numpy(draws.parameters.transpose(0, 2, 1).copy())
    expected = log_prob_for(action)(parameters, torch.from_numpy(actions))
    np.testing.assert_allclose(out, expected.numpy(), rtol=1e-5, atol=1e-5)


def test_the_most_probable_joint_action_is_that_of_each_part() -> None:
    draws = joint(MIXED, 1, 1, greedy=True)
    draws.parameters[0, :, 0] = [0.5, -2.0, 0.3, 0.3, 1.0, 3.0, 2.0, -0.1, 0.1, 9.0, -1.0]
    assert joint_draws(draws, MIXED).ravel().tolist() == [0.5, -2.0, 1.0, 0.0, 1.0, 9.0]


def test_a_lane_of_a_joint_sampler_draws_what_the_whole_draws_for_it() -> None:
    whole = joint(MIXED, 8, 3)
    whole.parameters[...] = np.random.default_rng(3).standard_normal(whole.parameters.shape)
    actions = joint_draws(whole, MIXED)
    lane = whole.of_lane(1)
    lane.parameters[...] = whole.parameters[:, :, 1:2]
    for t in range(8):
        chosen = np.empty((1, 6), np.float32)
        lane.choose(t, chosen)
        assert np.array_equal(chosen[0], actions[t, 1])


def test_flags_stay_finite_for_extreme_logits_and_for_a_draw_of_zero() -> None:
    class Zeros:
        def random(self, *, out: np.ndarray, dtype: type) -> None:
            out[...] = 0

    flags = joint_action(("bernoulli", 2))
    draws = sampler_for(flags, num_steps=1, num_lanes=1, rng=cast("Any", Zeros()), greedy=False)
    draws.parameters[0, :, 0] = [1000.0, -1000.0]
    chosen, out = np.array([[[5, 5]]]), np.empty((1, 1), np.float32)
    with np.errstate(all="raise", under="ignore"):
        draws.begin()
        draws.choose(0, chosen[0])
        draws.log_probs(chosen, out)
    assert chosen.ravel().tolist() == [1, 0]
    assert out.tolist() == [[0.0]]
