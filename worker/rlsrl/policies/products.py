"""Products of matrices, of which the work of a network consists, and which library computes them."""

from __future__ import annotations

from dataclasses import dataclass

MKL_OPERATIONS = 1 << 21
"""Additions and multiplications of the largest dense product on the CPU that compiled code leaves to MKL
(``rlsrl.algorithms.products``)."""


@dataclass(frozen=True, kw_only=True)
class Product:
    """A product of a forward pass: a layer of weights, or of attention, for one observation."""

    macs: float
    """Multiply-adds."""
    dense: bool = True
    """Whether it multiplies matrices; False for convolutions and attention."""
    bfloat16: bool = False
    """Whether it multiplies bfloat16 and not float32."""
