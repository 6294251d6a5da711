"""Illegal actions made impossible: any network over discrete actions with the environment's mask on its logits.

The mask is applied where logits are made, so that whatever reads them (drawing, greedy choice, log-probabilities,
entropies, a policy worker's answer) needs to know nothing of it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from rlsrl.policies.exported import MASKED_LOGIT, CategoricalHead, ExportedActor
from rlsrl.policies.flat import FlatLayout
from rlsrl.policies.networks import ExportableNetwork, Observation, PreferredLayoutNetwork


class MaskedActorCritic(nn.Module):
    """A network's logits, with those of illegal actions replaced; no gradient flows into what was replaced.

    Where nothing is legal, as an episode's final observation may have it, all choices are alike: no NaN.
    """

    def __init__(self, network: nn.Module, mask: str) -> None:
        """``mask`` is the path of the mask, [N, num_actions], which the network itself is not given."""
        super().__init__()
        self.network = network
        self._mask = mask

    def forward(self, observation: Observation) -> tuple[Tensor, Tensor]:
        """Logits [N, A] and values [N]."""
        logits, value = self.network(self._features(observation))
        return torch.where(observation[self._mask] != 0, logits, MASKED_LOGIT), value

    def to_preferred_layout(self, observation: Observation) -> Observation:
        """As the network likes it (``networks.PreferredLayoutNetwork``); the mask stays as it is."""
        if not isinstance(self.network, PreferredLayoutNetwork):
            return observation
        return {**observation, **self.network.to_preferred_layout(self._features(observation))}

    def _features(self, observation: Observation) -> Observation:
        return {path: tensor for path, tensor in observation.items() if path != self._mask}

    def export_actor(self, layout: FlatLayout) -> ExportedActor | None:
        """The network's own program with the mask at its end; None if the network has none."""
        if not isinstance(self.network, ExportableNetwork):
            return None
        program = self.network.export_actor(layout.below("network"))
        if program is None:
            return None
        head = CategoricalHead(num_actions=program.head.num_outputs, mask=self._mask)
        return replace(program, layout=layout.digest, head=head)
