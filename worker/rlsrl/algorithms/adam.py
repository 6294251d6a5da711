"""One optimizer step on one flat vector: clip the gradient, apply Adam, skip the step if a number is not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from typing_extensions import override

from rlsrl.api.spec import OptimizerName

BETA_FIRST = 0.9
BETA_SECOND = 0.999
LEAST_LENGTH = 5.0
"""``RAdam`` uses the second moment once it is a mean of more gradients than this, as torch; in the paper it is 4."""


@dataclass(frozen=True, kw_only=True)
class Adam:
    """Adam (Kingma and Ba 2015) on gradients of limited length. Its methods are pure functions, which compile."""

    epsilon: float = 1e-5
    """Added to the denominator."""
    max_gradient_norm: float = math.inf
    """Longer gradients are scaled down to this Euclidean norm."""

    def corrections(self, num_steps: Tensor) -> Tensor:
        """Return what the step after ``num_steps`` steps needs to know of their number, float32 [2].

        The bias corrections of the moments, c1 and c2, are ``1 - beta ** (num_steps + 1)``. The first moment's factor
        is ``sqrt(c2) / c1``, and ``epsilon`` becomes ``epsilon * sqrt(c2)``: that saves two of three divisions for each
        parameter (Kingma and Ba, end of section 2, where epsilon stays).
        """
        exponent = (num_steps + 1).to(torch.float64)
        first, second = 1.0 - BETA_FIRST**exponent, (1.0 - BETA_SECOND**exponent).sqrt()
        return torch.stack([second / first, self.epsilon * second]).to(torch.float32)

    def direction(self, first_moment: Tensor, second_moment: Tensor, corrections: Tensor) -> Tensor:
        """Return the step for a learning rate of 1, [P], by both moments. The caller may change the tensor."""
        denominator = second_moment.sqrt().add_(corrections[1])
        return (first_moment * corrections[0]).div_(denominator)


@dataclass(frozen=True, kw_only=True)
class RAdam(Adam):
    """Rectified Adam (Liu et al. 2020, algorithm 2): steps are shorter while the second moment is uncertain."""

    @override
    def corrections(self, num_steps: Tensor) -> Tensor:
        """Return the first moment's factor, and what the step is multiplied by for the second moment.

        The latter is 0 in the first steps: these leave the second moment alone.
        """
        number = (num_steps + 1).to(torch.float64)
        first, second = 1.0 - BETA_FIRST**number, 1.0 - BETA_SECOND**number
        longest = 2.0 / (1.0 - BETA_SECOND) - 1.0
        length = longest - 2.0 * number * (1.0 - second) / second
        known = length.clamp(min=LEAST_LENGTH)
        rectification = (known - 4.0) * (known - 2.0) * longest / ((longest - 4.0) * (longest - 2.0) * known)
        scale = torch.where(length > LEAST_LENGTH, (rectification * second).sqrt(), 0.0)
        return torch.stack([1.0 / first, scale]).to(torch.float32)

    @override
    def direction(self, first_moment: Tensor, second_moment: Tensor, corrections: Tensor) -> Tensor:
        scale = corrections[1]
        adapted = torch.where(scale > 0.0, scale / (second_moment.sqrt() + self.epsilon), 1.0)
        return (first_moment * corrections[0]).mul_(adapted)


OPTIMIZERS: Mapping[OptimizerName, type[Adam]] = {"adam": Adam, "radam": RAdam}
"""The optimizers by their names in the spec."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AdamState:
    """The state of ``Adam`` and of ``RAdam``."""

    first_moment: Tensor
    """Decaying mean of the gradient, [P]."""
    second_moment: Tensor
    """Decaying mean of its square, [P]."""
    num_steps: Tensor
    """Steps taken, int64 []: a tensor, so that a compiled step sees it change. torch 2.13 compiles a float64 [] as a
    Python number and loses writes to it."""
    corrections: Tensor
    """``Adam.corrections`` of the next step. They follow from ``num_steps``, and are kept because a compiled step would
    compute them again for every few parameters."""

    @classmethod
    def of(cls, adam: Adam, *, first_moment: Tensor, second_moment: Tensor, num_steps: Tensor) -> Self:
        """Return a state with the corrections that follow from ``num_steps``."""
        moments = {"first_moment": first_moment, "second_moment": second_moment}
        return cls(**moments, num_steps=num_steps, corrections=adam.corrections(num_steps))

    def stored(self) -> dict[str, Tensor]:
        """Return the arguments from which ``of`` makes an equal state, without copying them."""
        return {name: tensor for name, tensor in vars(self).items() if name != "corrections"}

    def copy(self) -> Self:
        """Return a state with tensors of its own."""
        return type(self)(**{name: tensor.clone() for name, tensor in vars(self).items()})

    @classmethod
    def zeros(cls, adam: Adam, params: Tensor) -> Self:
        """Return the state before the first step."""
        return cls.of(
            adam,
            first_moment=torch.zeros_like(params),
            second_moment=torch.zeros_like(params),
            num_steps=torch.zeros((), dtype=torch.int64, device=params.device),
        )


def adam_step_(
    adam: Adam, params: Tensor, gradient: Tensor, total_loss: Tensor, state: AdamState, *, learning_rate: Tensor
) -> tuple[Tensor, Tensor]:
    """Change ``params`` and ``state`` in place; return (gradient norm before clipping, whether the step was taken).

    ``total_loss`` [] is the whole minibatch's loss. ``learning_rate`` is a float32 []: a tensor, so that a compiled
    step sees it change.

    If ``total_loss`` or the gradient is not finite, neither parameters nor state change. The function has no branch on
    a value: it compiles, and ranks with equal gradients take equal steps.
    """
    norm = torch.linalg.vector_norm(gradient)
    is_taken = torch.isfinite(norm + total_loss)
    gradient = gradient * (adam.max_gradient_norm / (norm + 1e-6)).clamp(max=1.0)
    num_steps = state.num_steps + 1
    first_moment = torch.lerp(state.first_moment, gradient, 1.0 - BETA_FIRST)
    second_moment = torch.lerp(state.second_moment, gradient * gradient, 1.0 - BETA_SECOND)
    step = adam.direction(first_moment, second_moment, state.corrections).mul_(learning_rate)
    for old, new in (
        (params, params - step),
        (state.first_moment, first_moment),
        (state.second_moment, second_moment),
        (state.corrections, adam.corrections(num_steps)),
        (state.num_steps, num_steps),
    ):
        old.copy_(torch.where(is_taken, new, old))
    return norm, is_taken
