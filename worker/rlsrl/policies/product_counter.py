"""Counts the products that torch computes. Torch."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from typing_extensions import override

from rlsrl.policies.products import Product

DENSE = {"mm", "addmm", "bmm", "baddbmm"}
"""torch's products of matrices."""


class ProductCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class has no types
    """Within the block, as a context manager, it lists what is multiplied."""

    def __init__(self, num_rows: int) -> None:
        """Count the multiply-adds of one of ``num_rows`` rows."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._num_rows = num_rows
        self.products: list[Product] = []
        """In the order of their computation."""

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        if (operations := flop_registry.get(packet)) is not None:
            self.products.append(
                Product(
                    macs=operations(*args, **(kwargs or {}), out_val=result) / 2 / self._num_rows,
                    dense=packet.__name__ in DENSE,
                    bfloat16=args[0].dtype == torch.bfloat16,
                )
            )
        return result
