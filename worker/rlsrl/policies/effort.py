"""Counts the work of a network, independent of the machine: for ``rlsrl size``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlsrl.api.spec import CriticSpec
    from rlsrl.data.specs import EnvSpec
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
    critic_macs: float = 0.0
    """Multiply-adds of a forward pass of the two critics that are trained beside the network; 0 without critics."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of one version."""
        return WEIGHT_BYTES * self.num_weights

    @property
    def gradient_bytes(self) -> float:
        """Bytes of all gradients of one minibatch. The dense layers of critics have a weight for each multiply-add."""
        return self.weight_bytes + WEIGHT_BYTES * self.critic_macs


def network_effort(policy: TorchPolicy, *, critic: CriticSpec | None = None) -> NetworkEffort:
    """Count the multiply-adds of a policy's network: matrix products, convolutions and attention.

    ``critic``: describes each of the two critics that are trained beside it.
    """
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
        critic_macs=0.0 if critic is None else _critic_macs(critic, policy.env_spec),
    )


def _critic_macs(critic: CriticSpec, env_spec: EnvSpec) -> float:
    from rlsrl.policies.critics import TwinCritics

    layers = TwinCritics(env_spec.unmasked, **critic.model_dump()).layers
    return float(sum(values.numel() for name, values in layers.named_parameters() if name.endswith("weight")))
