from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsrl.algorithms.returns import explained_variance, explained_variance_sums, generalized_advantages


def advantages_by_definition(
    reward: Any, value: Any, terminated: Any, truncated: Any, mask: Any, discount: float, gae_lambda: float
) -> Any:
    """A_t = sum over k >= t of (discount lambda)^(k - t) delta_k, to the end of the episode. O(T^2), float64."""
    num_steps, num_lanes = reward.shape
    advantage = np.zeros((num_steps, num_lanes))
    for lane in range(num_lanes):
        for t in range(num_steps):
            for k in range(t, num_steps):
                if not mask[k, lane]:
                    break
                following = 0.0 if terminated[k, lane] else float(value[k + 1, lane])
                delta = float(reward[k, lane]) + discount * following - float(value[k, lane])
                advantage[t, lane] += (discount * gae_lambda) ** (k - t) * delta
                if terminated[k, lane] or truncated[k, lane]:
                    break
    return advantage


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_steps=st.integers(1, 14),
    num_lanes=st.integers(1, 4),
    end_probability=st.sampled_from([0.0, 0.1, 0.4, 1.0]),
    absent_probability=st.sampled_from([0.0, 0.2]),
    discount=st.sampled_from([0.0, 0.9, 1.0]),
    gae_lambda=st.sampled_from([0.0, 0.95, 1.0]),
)
def test_agrees_with_the_definition(
    seed: int,
    num_steps: int,
    num_lanes: int,
    end_probability: float,
    absent_probability: float,
    discount: float,
    gae_lambda: float,
) -> None:
    rng = np.random.default_rng(seed)
    shape = (num_steps, num_lanes)
    terminated, truncated = rng.random(shape) < end_probability, rng.random(shape) < end_probability
    mask = rng.random(shape) >= absent_probability
    for t in range(1, num_steps):
        mask[t] &= ~(mask[t - 1] & (terminated[t - 1] | truncated[t - 1]))
    reward = rng.standard_normal(shape).astype(np.float32)
    value = rng.standard_normal((num_steps + 1, num_lanes)).astype(np.float32)
    arguments = {
        "reward": reward,
        "value": value,
        "terminated": terminated,
        "truncated": truncated,
        "mask": mask,
        "discount": discount,
        "gae_lambda": gae_lambda,
    }
    advantage, returns = generalized_advantages(**arguments)
    expected = advantages_by_definition(**arguments)
    np.testing.assert_allclose(advantage, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(returns, np.where(mask, expected + value[:-1], 0.0), rtol=1e-4, atol=1e-5)
    assert advantage.dtype == returns.dtype == np.float32


def lane(*entries: float) -> Any:
    return np.array(entries, np.float32)[:, np.newaxis]


def flags(*entries: int) -> Any:
    return np.array(entries, np.bool_)[:, np.newaxis]


@pytest.mark.parametrize(
    ("terminated", "truncated", "expected"),
    [
        (flags(0, 0, 0, 0), flags(0, 0, 0, 0), [1 + 3 + 4 + 7, 3 + 4 + 7, 4 + 7, 7]),
        (flags(0, 1, 0, 0), flags(0, 0, 0, 0), [1 + (2 - 20), 2 - 20, 0, 7]),
        (flags(0, 0, 0, 0), flags(0, 1, 0, 0), [1 + 3, 3, 0, 7]),
        (flags(0, 1, 0, 0), flags(0, 1, 0, 0), [1 + (2 - 20), 2 - 20, 0, 7]),
        (flags(0, 0, 0, 1), flags(0, 0, 0, 0), [1 + 3 + 4 + (4 - 22), 3 + 4 + (4 - 22), 4 + (4 - 22), 4 - 22]),
        (flags(0, 0, 0, 0), flags(0, 0, 0, 1), [1 + 3 + 4 + 7, 3 + 4 + 7, 4 + 7, 7]),
    ],
    ids=["goes on", "terminated", "truncated", "both", "terminated last", "truncated last"],
)
def test_by_hand(terminated: Any, truncated: Any, expected: list[float]) -> None:
    """With discount and lambda 1, delta_t = r_t + V(t + 1) - V(t) is 1, 3, 4, 7 where no episode ends."""
    ended = terminated | truncated
    mask = np.concatenate([flags(1), ~ended[:-1]])
    advantage, returns = generalized_advantages(
        reward=lane(1, 2, 3, 4),
        value=lane(20, 20, 21, 22, 25),
        terminated=terminated,
        truncated=truncated,
        mask=mask,
        discount=1.0,
        gae_lambda=1.0,
    )
    expected_advantage = np.where(mask[:, 0], expected, 0.0)
    np.testing.assert_allclose(advantage[:, 0], expected_advantage)
    values = np.array([20, 20, 21, 22])
    np.testing.assert_allclose(returns[:, 0], np.where(mask[:, 0], expected_advantage + values, 0.0))


def test_values_without_a_transition_are_not_used() -> None:
    rng = np.random.default_rng(0)
    mask = np.ones((6, 3), np.bool_)
    mask[2, 0] = mask[4:, 1] = mask[:, 2] = False
    truncated = np.zeros_like(mask)
    truncated[1, 0] = truncated[3, 1] = True
    clean = {
        "reward": rng.standard_normal((6, 3)).astype(np.float32),
        "value": rng.standard_normal((7, 3)).astype(np.float32),
        "terminated": np.zeros_like(mask),
        "truncated": truncated,
    }
    dirty = {name: array.copy() for name, array in clean.items()}
    dirty["reward"][~mask] = np.nan
    dirty["terminated"][~mask] = True
    dirty["truncated"][~mask] = True
    dirty["value"][5:, 1] = np.nan
    dirty["value"][:, 2] = np.nan
    results = [generalized_advantages(**arrays, mask=mask, discount=0.9, gae_lambda=0.9) for arrays in (clean, dirty)]
    for ours, theirs in zip(*results, strict=True):
        assert np.array_equal(ours, theirs)
        assert not ours[~mask].any()


@pytest.mark.filterwarnings("error")
def test_non_finite_values_stay_within_their_episode() -> None:
    reward = np.ones((5, 1), np.float32)
    reward[3] = np.inf
    advantage, _ = generalized_advantages(
        reward=reward,
        value=np.zeros((6, 1), np.float32),
        terminated=flags(0, 1, 0, 0, 0),
        truncated=flags(0, 0, 0, 0, 0),
        mask=flags(1, 1, 0, 1, 1),
        discount=0.5,
        gae_lambda=1.0,
    )
    assert advantage[:, 0].tolist() == [1.5, 1.0, 0.0, np.inf, 1.0]


def test_explained_variance_over_parts_is_that_of_the_whole() -> None:
    rng = np.random.default_rng(0)
    target = rng.standard_normal(100).astype(np.float32) * 3 + 5
    prediction = target + rng.standard_normal(100).astype(np.float32)
    sums = explained_variance_sums(prediction[:30], target[:30]) + explained_variance_sums(prediction[30:], target[30:])
    expected = 1 - np.var(target - prediction, dtype=np.float64) / np.var(target, dtype=np.float64)
    assert explained_variance(sums) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("target", [[], [2.0], [3.0, 3.0]])
def test_explained_variance_of_a_constant_is_zero(target: list[float]) -> None:
    values = np.array(target, np.float32)
    assert explained_variance(explained_variance_sums(values + 1, values)) == 0.0
