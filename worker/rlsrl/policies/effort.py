"""Counts the work of a network, independent of the machine: for ``rlsrl size``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlsrl.policies.torch_policy import TorchPolicy

WEIGHT_BYTES = 4
"""Bytes of a float32."""
_ROWS = 4
"""Observations in the forward pass that is counted."""


@dataclass(frozen=True, kw_only=True)
class NetworkEffort:
    """The size of a policy's network, and the work of one observation."""

    num_weights: int
    """Values of the flat vector."""
    forward_macs: float
    """Multiply-adds of a whole forward pass, with all heads."""
    acting_macs: float
    """Multiply-adds of acting: fewer than ``forward_macs`` if the actor is exported without the value."""
    exported: bool
    """Whether the network has an exported form, so that acting needs no torch."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of one version."""
        return WEIGHT_BYTES * self.num_weights


def network_effort(policy: TorchPolicy) -> NetworkEffort:
    """Count the multiply-adds of a policy's network: matrix products, convolutions and attention."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from rlsrl.data.version import INITIAL

    observation = {
        path: torch.zeros((_ROWS, *spec.shape), dtype=getattr(torch, spec.dtype))
        for path, spec in policy.env_spec.observation.items()
    }
    vector = torch.from_numpy(policy.parameters(INITIAL).vector.copy())
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        policy.pure(vector, observation)
    forward = counter.get_total_flops() / 2 / _ROWS
    exported = policy.export()
    dense = None if exported is None else sum(layer.in_size * layer.out_size for layer in exported.layers)
    return NetworkEffort(
        num_weights=vector.numel(),
        forward_macs=forward,
        acting_macs=forward if dense is None else float(dense),
        exported=exported is not None,
    )
