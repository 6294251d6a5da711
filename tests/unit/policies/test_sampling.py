from __future__ import annotations

import numpy as np

from rlsrl.policies.sampling import CategoricalSampler


def sampler(num_steps: int, num_lanes: int, num_actions: int, *, greedy: bool = False) -> CategoricalSampler:
    return CategoricalSampler(
        num_steps=num_steps, num_lanes=num_lanes, num_actions=num_actions, rng=np.random.default_rng(0), greedy=greedy
    )


def test_choices_have_the_softmax_distribution() -> None:
    num_steps, num_lanes = 50, 1000
    logits = np.array([0.0, 1.0, -2.0, 0.5], np.float32)
    draws = sampler(num_steps, num_lanes, 4)
    draws.logits[...] = logits[:, np.newaxis]
    draws.begin()
    actions = np.empty((num_steps, num_lanes), np.int64)
    for t in range(num_steps):
        draws.choose(t, actions[t])
    expected = np.exp(logits) / np.exp(logits).sum() * actions.size
    chi_square = np.square(np.bincount(actions.ravel(), minlength=4) - expected) / expected
    assert chi_square.sum() < 16.3, "p = 0.001 of three degrees of freedom"


def test_log_probs_are_those_of_the_softmax_and_stay_finite_for_extreme_logits() -> None:
    draws = sampler(3, 2, 3)
    draws.logits[0] = [[1.0, 0.0], [2.0, 0.0], [3.0, 0.0]]
    draws.logits[1] = [[1000.0, -1000.0], [0.0, 0.0], [-1000.0, 1000.0]]
    draws.logits[2] = 7.0
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
    """A generator whose exponential draws are all 0, as one in eight million is."""

    def standard_exponential(self, *, out: np.ndarray, dtype: type) -> None:
        out[...] = 0


def test_a_draw_of_zero_still_makes_finite_noise() -> None:
    draws = CategoricalSampler(num_steps=2, num_lanes=1, num_actions=2, rng=ZeroDraws(), greedy=False)
    with np.errstate(all="raise"):
        draws.begin()
    assert np.isfinite(draws._noise).all()
