"""Rescaled values (Pohlen et al. 2018, "Observe and look further", section 3.2): networks learn large returns without
rewards that are clipped."""

from __future__ import annotations

import torch
from torch import Tensor

_SLOPE = 1e-3
"""epsilon of the paper: the inverse function has no derivative above 1 / epsilon."""


def rescaled(values: Tensor) -> Tensor:
    """Return ``h(x) = sign(x) (sqrt(|x| + 1) - 1) + epsilon x`` of values, [...].

    Computed as ``x / (sqrt(|x| + 1) + 1) + epsilon x``, which is exact near 0, too.
    """
    return values / (torch.sqrt(values.abs() + 1.0) + 1.0) + _SLOPE * values


def restored(values: Tensor) -> Tensor:
    """Return the inverse of ``rescaled`` (proposition A.2).

    The square root is taken in a form that is exact where the paper's divides a small difference by 2 epsilon.
    """
    distance = values.abs() + 1.0 + _SLOPE
    root = 2.0 * distance / (1.0 + torch.sqrt(1.0 + 4.0 * _SLOPE * distance))
    return torch.sign(values) * (root * root - 1.0)
