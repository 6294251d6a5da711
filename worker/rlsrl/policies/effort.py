"""Counts the work of a network, independent of the machine: for ``rlsrl size``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlsrl.policies.products import Product

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
    products: Sequence[Product]
    """Those of a whole forward pass, with all heads."""
    acting_macs: float
    """Multiply-adds of acting: fewer than ``forward_macs`` if the actor is exported without the value."""
    exported: bool
    """Whether the network has an exported form, so that acting needs no torch."""
    critic_products: Sequence[Product] = ()
    """Those of a forward pass of the two critics that are trained beside the network; none without critics."""

    @property
    def forward_macs(self) -> float:
        """Multiply-adds of a whole forward pass, with all heads."""
        return sum(product.macs for product in self.products)

    @property
    def critic_macs(self) -> float:
        """Multiply-adds of a forward pass of the two critics."""
        return sum(product.macs for product in self.critic_products)

    @property
    def num_trained_weights(self) -> float:
        """Weights that are trained. The dense layers of critics have one for each multiply-add."""
        return self.num_weights + self.critic_macs

    @property
    def weight_bytes(self) -> int:
        """Bytes of one version."""
        return WEIGHT_BYTES * self.num_weights

    @property
    def gradient_bytes(self) -> float:
        """Bytes of all gradients of one minibatch."""
        return WEIGHT_BYTES * self.num_trained_weights


def network_effort(policy: TorchPolicy, *, critic: CriticSpec | None = None) -> NetworkEffort:
    """Count the multiply-adds of a policy's network: matrix products, convolutions and attention.

    ``critic``: describes each of the two critics that are trained beside it.
    """
    import torch

    from rlsrl.data.version import INITIAL
    from rlsrl.policies.product_counter import ProductCounter

    observation = {
        path: torch.zeros((_ROWS, *spec.shape), dtype=getattr(torch, spec.dtype))
        for path, spec in policy.env_spec.observation.items()
    }
    vector = torch.from_numpy(policy.parameters(INITIAL).vector.copy())
    with ProductCounter(_ROWS) as counter, torch.no_grad():
        if policy.state:
            state = {name: torch.zeros((_ROWS, *spec.shape)) for name, spec in policy.state.items()}
            frames = {path: array.unsqueeze(0) for path, array in observation.items()}
            policy.pure.unroll(vector, frames, state, torch.zeros((1, _ROWS), dtype=torch.bool))
        else:
            policy.pure(vector, observation)
    products = counter.products
    forward = sum(product.macs for product in products)
    exported = policy.export()
    dense = None if exported is None else sum(layer.macs for layer in exported.all_layers)
    return NetworkEffort(
        num_weights=vector.numel(),
        products=products,
        acting_macs=forward if dense is None else float(dense),
        exported=exported is not None,
        critic_products=() if critic is None else _critic_products(critic, policy.env_spec),
    )


def _critic_products(critic: CriticSpec, env_spec: EnvSpec) -> list[Product]:
    """Return a product for each layer of each of the two critics."""
    from rlsrl.policies.critics import TwinCritics

    layers = TwinCritics(env_spec.unmasked, **critic.model_dump()).layers
    pairs = [values for name, values in layers.named_parameters() if name.endswith("weight")]
    return [Product(macs=float(matrix.numel())) for pair in pairs for matrix in pair]
