"""Illegal actions made impossible: any network over discrete actions with the environment's mask on its logits.

The mask is applied where logits are made, so that whatever reads them (drawing, greedy choice, log-probabilities,
entropies, a policy worker's answer) needs to know nothing of it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from rlsrl.policies.flat import FlatLayout
from rlsrl.policies.networks import ArrangingNetwork, ExportableActor, Observation
from rlsrl.policies.program import MASKED_LOGIT, ActorProgram, CategoricalHead


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

    def arranged(self, observation: Observation) -> Observation:
        """As the network likes it (``networks.ArrangingNetwork``); the mask stays as it is."""
        if not isinstance(self.network, ArrangingNetwork):
            return observation
        return {**observation, **self.network.arranged(self._features(observation))}

    def _features(self, observation: Observation) -> Observation:
        return {path: tensor for path, tensor in observation.items() if path != self._mask}

    def actor_program(self, layout: FlatLayout) -> ActorProgram | None:
        """The network's own program with the mask at its end; None if the network has none."""
        if not isinstance(self.network, ExportableActor):
            return None
        program = self.network.actor_program(layout.below("network"))
        if program is None:
            return None
        head = CategoricalHead(num_actions=program.head.num_outputs, mask=self._mask)
        return replace(program, layout=layout.digest, head=head)
