"""One optimizer step on one flat vector: clip the gradient, apply Adam, skip the step if a number is not finite."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

BETA_FIRST = 0.9
BETA_SECOND = 0.999


@dataclass(frozen=True, kw_only=True, eq=False)
class AdamState:
    """The state of Adam (Kingma and Ba 2015)."""

    first_moment: Tensor
    """Decaying mean of the gradient, [P]."""
    second_moment: Tensor
    """Decaying mean of its square, [P]."""
    num_steps: Tensor
    """Steps taken, int64 []: a tensor, so that a compiled step sees it change. torch 2.13 compiles a float64 [] as a
    Python number and loses writes to it."""
    corrections: Tensor
    """The next step's bias corrections 1 - beta ** (num_steps + 1) of the two moments, float32 [2]. They follow from
    ``num_steps``, and are kept because a compiled step would compute them again for every few parameters."""

    @classmethod
    def of(cls, *, first_moment: Tensor, second_moment: Tensor, num_steps: Tensor) -> Self:
        """Return a state with the corrections that follow from ``num_steps``."""
        moments = {"first_moment": first_moment, "second_moment": second_moment}
        return cls(**moments, num_steps=num_steps, corrections=_corrections(num_steps))

    def stored(self) -> dict[str, Tensor]:
        """Return the arguments from which ``of`` makes an equal state, without copying them."""
        return {name: tensor for name, tensor in vars(self).items() if name != "corrections"}

    @classmethod
    def zeros(cls, params: Tensor) -> Self:
        """Return the state before the first step."""
        return cls.of(
            first_moment=torch.zeros_like(params),
            second_moment=torch.zeros_like(params),
            num_steps=torch.zeros((), dtype=torch.int64, device=params.device),
        )


def adam_step_(
    params: Tensor,
    gradient: Tensor,
    total_loss: Tensor,
    state: AdamState,
    *,
    learning_rate: Tensor,
    epsilon: float,
    max_gradient_norm: float,
) -> tuple[Tensor, Tensor]:
    """Change ``params`` and ``state`` in place; return (gradient norm before clipping, whether the step was taken).

    ``total_loss`` [] is the whole minibatch's loss. ``learning_rate`` is a float32 []: a tensor, so that a compiled
    step sees it change.

    The gradient is scaled down to ``max_gradient_norm``. If ``total_loss`` or the gradient is not finite, neither
    parameters nor state change. The function has no branch on a value: it compiles, and ranks with equal gradients take
    equal steps.
    """
    norm = torch.linalg.vector_norm(gradient)
    is_taken = torch.isfinite(norm + total_loss)
    gradient = gradient * (max_gradient_norm / (norm + 1e-6)).clamp(max=1.0)
    num_steps = state.num_steps + 1
    first_moment = torch.lerp(state.first_moment, gradient, 1.0 - BETA_FIRST)
    second_moment = torch.lerp(state.second_moment, gradient * gradient, 1.0 - BETA_SECOND)
    denominator = (second_moment / state.corrections[1]).sqrt_().add_(epsilon)
    step = (first_moment / state.corrections[0]).div_(denominator).mul_(learning_rate)
    for old, new in (
        (params, params - step),
        (state.first_moment, first_moment),
        (state.second_moment, second_moment),
        (state.corrections, _corrections(num_steps)),
        (state.num_steps, num_steps),
    ):
        old.copy_(torch.where(is_taken, new, old))
    return norm, is_taken


def _corrections(num_steps: Tensor) -> Tensor:
    """Return the bias corrections of the step after ``num_steps`` steps, float32 [2]."""
    exponent = (num_steps + 1).to(torch.float64)
    return torch.stack([1.0 - BETA_FIRST**exponent, 1.0 - BETA_SECOND**exponent]).to(torch.float32)
