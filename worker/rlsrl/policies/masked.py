"""Makes illegal actions impossible: applies the environment's mask to the logits of any network.

The mask is applied where the logits are computed. So everything that reads logits (drawing, greedy choice,
log-probabilities, entropies, a policy worker's answer) works without knowing of the mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from typing_extensions import override

from rlsrl.policies.exported import MASKED_LOGIT, CategoricalHead, ExportedActor, JointHead
from rlsrl.policies.flat import FlatLayout
from rlsrl.policies.networks import (
    ExportableNetwork,
    Heads,
    Observation,
    PreferredLayoutNetwork,
    State,
    acting_head,
    state_sizes_of,
    unrolled,
)


class _Masked(nn.Module):
    """A network whose logits, or values, of illegal actions are replaced. No gradient flows into replaced ones.

    If no action is legal, as in some final observations of episodes, all logits are equal: no NaN.
    """

    def __init__(self, network: nn.Module, mask: str) -> None:
        """``mask`` is the path of the mask, [N, num_outputs]. ``network`` does not get that array."""
        super().__init__()
        self.network = network
        self._mask = mask

    def _features(self, observation: Observation) -> Observation:
        return {path: tensor for path, tensor in observation.items() if path != self._mask}

    def _masked(self, heads: Heads, observation: Observation) -> Heads:
        acting = acting_head(heads)
        return {**heads, acting: torch.where(observation[self._mask] != 0, heads[acting], MASKED_LOGIT)}

    def export_actor(self, layout: FlatLayout) -> ExportedActor | None:
        """Return the network's exported actor with the mask in its head, or None if the network has none."""
        if not isinstance(self.network, ExportableNetwork):
            return None
        exported = self.network.export_actor(layout.below("network"))
        if exported is None:
            return None
        if not isinstance(exported.head, CategoricalHead | JointHead):
            raise ValueError(f"the mask {self._mask!r} needs logits, and the exported actor has means")
        return replace(exported, layout=layout.digest, head=replace(exported.head, mask=self._mask))


class MaskedNetwork(_Masked):
    """A network without memory, whose acting head is masked."""

    @override
    def forward(self, observation: Observation) -> Heads:
        """Return the network's heads, the acting one masked."""
        return self._masked(self.network(self._features(observation)), observation)

    def to_preferred_layout(self, observation: Observation) -> Observation:
        """Return the arrays in the layout that the network prefers; the mask keeps its own."""
        if not isinstance(self.network, PreferredLayoutNetwork):
            return observation
        return {**observation, **self.network.to_preferred_layout(self._features(observation))}


class MaskedRecurrentNetwork(_Masked):
    """A recurrent network, whose acting head is masked."""

    @property
    def state_sizes(self) -> Mapping[str, int]:
        """The sizes of the network's state."""
        return state_sizes_of(self.network)

    @override
    def forward(self, observation: Observation, state: State) -> tuple[Heads, State]:
        """Return the network's heads, the acting one masked, and the next state."""
        heads, state = self.network(self._features(observation), state)
        return self._masked(heads, observation), state

    def unroll(self, observation: Observation, state: State, is_first: Tensor) -> tuple[Heads, State]:
        """Return the heads for L frames, the acting one masked, and the states: see ``networks.unrolled``."""
        heads, states = unrolled(self.network, self._features(observation), state, is_first)
        return self._masked(heads, observation), states


def masked_network(network: nn.Module, mask: str) -> nn.Module:
    """Return the network with the mask at that path applied to its acting head."""
    return (MaskedRecurrentNetwork if state_sizes_of(network) else MaskedNetwork)(network, mask)
