from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import Bernoulli, Categorical, Independent, Normal

from rlsrl.policies.distributions import (
    categorical_log_prob,
    categorical_log_prob_and_entropy,
    gaussian_log_prob,
    gaussian_log_prob_and_entropy,
    log_prob_and_entropy_for,
    log_prob_for,
)
from rlsrl.testing.rollouts import CHOICES_AND_FLAGS, MIXED, continuous_action, discrete_action


@pytest.mark.parametrize("shape", [(6,), (3, 2)])
def test_agrees_with_torch_distributions(shape: tuple[int, ...]) -> None:
    logits, action = torch.randn(*shape, 5) * 3, torch.randint(0, 5, shape)
    reference = Categorical(logits=logits)
    torch.testing.assert_close(categorical_log_prob(logits, action), reference.log_prob(action))
    log_prob, entropy = categorical_log_prob_and_entropy(logits, action)
    torch.testing.assert_close(log_prob, reference.log_prob(action))
    torch.testing.assert_close(entropy, reference.entropy())


def test_extreme_logits_stay_finite_in_value_and_gradient() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4]], requires_grad=True)
    log_prob, entropy = categorical_log_prob_and_entropy(logits, torch.tensor([1, 0]))
    (gradient,) = torch.autograd.grad(log_prob.sum() + entropy.sum(), logits)
    assert torch.isfinite(log_prob).all()
    torch.testing.assert_close(entropy, torch.tensor([0.0, math.log(3.0)]))
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("shape", [(6,), (3, 2)])
def test_gaussians_agree_with_torch_distributions(shape: tuple[int, ...]) -> None:
    mean, log_std, action = torch.randn(*shape, 5) * 3, torch.randn(*shape, 5), torch.randn(*shape, 5) * 3
    parameters = torch.cat([mean, log_std], -1)
    reference = Independent(Normal(mean, log_std.exp()), 1)
    torch.testing.assert_close(gaussian_log_prob(parameters, action), reference.log_prob(action))
    log_prob, entropy = gaussian_log_prob_and_entropy(parameters, action)
    torch.testing.assert_close(log_prob, reference.log_prob(action))
    torch.testing.assert_close(entropy, reference.entropy())


def test_each_kind_of_action_has_its_distribution() -> None:
    assert log_prob_and_entropy_for(discrete_action(3)) is categorical_log_prob_and_entropy
    assert log_prob_and_entropy_for(continuous_action(3)) is gaussian_log_prob_and_entropy


@pytest.mark.parametrize("shape", [(6,), (3, 2)])
def test_choices_and_flags_add_up(shape: tuple[int, ...]) -> None:
    parameters = torch.randn(*shape, 9) * 2
    actions = torch.cat([torch.randint(0, 3, (*shape, 1)), torch.randint(0, 4, (*shape, 1))], -1)
    actions = torch.cat([actions, torch.randint(0, 2, (*shape, 2))], -1)
    references = [
        (Categorical(logits=parameters[..., :3]), actions[..., 0]),
        (Categorical(logits=parameters[..., 3:7]), actions[..., 1]),
        (Independent(Bernoulli(logits=parameters[..., 7:]), 1), actions[..., 2:].float()),
    ]
    log_prob, entropy = log_prob_and_entropy_for(CHOICES_AND_FLAGS)(parameters, actions)
    torch.testing.assert_close(log_prob, sum(each.log_prob(chosen) for each, chosen in references))
    torch.testing.assert_close(log_prob, log_prob_for(CHOICES_AND_FLAGS)(parameters, actions))
    torch.testing.assert_close(entropy, sum(each.entropy() for each, _ in references))


def test_mixed_parts_add_up() -> None:
    parameters = torch.randn(5, 11)
    actions = torch.cat([torch.randn(5, 2), torch.tensor([[2.0, 1, 0]] * 5), torch.randn(5, 1)], -1)
    first, last = Independent(Normal(parameters[:, :2], parameters[:, 2:4].exp()), 1), parameters[:, 9:]
    references = [
        (first, actions[:, :2]),
        (Categorical(logits=parameters[:, 4:7]), actions[:, 2]),
        (Independent(Bernoulli(logits=parameters[:, 7:9]), 1), actions[:, 3:5]),
        (Independent(Normal(last[:, :1], last[:, 1:].exp()), 1), actions[:, 5:]),
    ]
    log_prob, entropy = log_prob_and_entropy_for(MIXED)(parameters, actions)
    torch.testing.assert_close(log_prob, sum(each.log_prob(chosen) for each, chosen in references))
    torch.testing.assert_close(entropy, sum(each.entropy() for each, _ in references))


def test_flags_stay_finite_in_value_and_gradient() -> None:
    parameters = torch.tensor([[0.0] * 7 + [1e4, -1e4]], requires_grad=True)
    log_prob, entropy = log_prob_and_entropy_for(CHOICES_AND_FLAGS)(parameters, torch.tensor([[0, 0, 0, 1]]))
    (gradient,) = torch.autograd.grad(log_prob.sum() + entropy.sum(), parameters)
    assert torch.isfinite(log_prob).all()
    torch.testing.assert_close(entropy, torch.tensor([math.log(12.0)]))
    assert torch.isfinite(gradient).all()
