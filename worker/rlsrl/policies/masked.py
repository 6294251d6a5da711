"""Makes illegal actions impossible: applies the environment's mask to the logits of any network.

The mask is applied where the logits are computed. So everything that reads logits (drawing, greedy choice,
log-probabilities, entropies, a policy worker's answer) works without knowing of the mask.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from typing_extensions import override

from rlsrl.policies.exported import MASKED_LOGIT, CategoricalHead, ExportedActor, JointHead
from rlsrl.policies.flat import FlatLayout
from rlsrl.policies.networks import ExportableNetwork, Heads, Observation, PreferredLayoutNetwork, acting_head


class MaskedNetwork(nn.Module):
    """A network whose logits, or values, of illegal actions are replaced. No gradient flows into replaced ones.

    If no action is legal, as in some final observations of episodes, all logits are equal: no NaN.
    """

    def __init__(self, network: nn.Module, mask: str) -> None:
        """``mask`` is the path of the mask, [N, num_outputs]. ``network`` does not get that array."""
        super().__init__()
        self.network = network
        self._mask = mask

    @override
    def forward(self, observation: Observation) -> Heads:
        """Return the network's heads, the acting one masked."""
        heads: Heads = self.network(self._features(observation))
        acting = acting_head(heads)
        return {**heads, acting: torch.where(observation[self._mask] != 0, heads[acting], MASKED_LOGIT)}

    def to_preferred_layout(self, observation: Observation) -> Observation:
        """Return the arrays in the layout that the network prefers; the mask keeps its own."""
        if not isinstance(self.network, PreferredLayoutNetwork):
            return observation
        return {**observation, **self.network.to_preferred_layout(self._features(observation))}

    def _features(self, observation: Observation) -> Observation:
        return {path: tensor for path, tensor in observation.items() if path != self._mask}

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
