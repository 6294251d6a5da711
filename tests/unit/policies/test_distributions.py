from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import Categorical

from rlsrl.data.specs import ActionSpec, ArraySpec
from rlsrl.policies.distributions import (
    categorical_entropy,
    categorical_log_prob,
    categorical_log_prob_and_entropy,
    log_prob_and_entropy_for,
)
from rlsrl.runtime.errors import ConfigurationError


@pytest.mark.parametrize("shape", [(6,), (3, 2)])
def test_agrees_with_torch_distributions(shape: tuple[int, ...]) -> None:
    logits, action = torch.randn(*shape, 5) * 3, torch.randint(0, 5, shape)
    reference = Categorical(logits=logits)
    torch.testing.assert_close(categorical_log_prob(logits, action), reference.log_prob(action))
    torch.testing.assert_close(categorical_entropy(logits), reference.entropy())
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


def test_continuous_actions_have_none_yet() -> None:
    action = ActionSpec(kind="continuous", array=ArraySpec(shape=(1,), dtype="float32"), low=(-1.0,), high=(1.0,))
    with pytest.raises(ConfigurationError, match="continuous"):
        log_prob_and_entropy_for(action)
