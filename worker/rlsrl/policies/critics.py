"""Two critics side by side: values of actions, as soft actor-critic and TD3 learn them. Torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm as normalized
from typing_extensions import override

from rlsrl.data.specs import EnvSpec
from rlsrl.policies.networks import ACTIVATION_MODULES, FlattenObservation, Heads, Observation

ACTION = "action"
"""The path of the actions that are valued, beside those of the observation."""
CRITICS = "critics"
"""The head of both critics' values."""


class TwinCritics(nn.Module):
    """Two networks of dense layers that share nothing but their inputs, multiplied together.

    For vectors of floats each values the flattened observation and action; for discrete actions it gives the value of
    each. Orthogonal weights (gain sqrt(2); 1 before the values) and zero biases.
    """

    def __init__(
        self,
        env_spec: EnvSpec,
        *,
        hidden_sizes: Sequence[int] = (256, 256),
        activation: Literal["tanh", "relu"] = "relu",
        layer_norm: bool = False,
    ) -> None:
        """Value the discrete or continuous actions of ``env_spec``, which has no action mask."""
        super().__init__()
        action = env_spec.action
        self._takes_action = action.kind == "continuous"
        self.flatten = FlattenObservation(env_spec.observation)
        num_inputs = self.flatten.num_features + (action.num_outputs if self._takes_action else 0)
        sizes = [num_inputs, *hidden_sizes, 1 if self._takes_action else action.num_outputs]
        gains = [math.sqrt(2.0)] * len(hidden_sizes) + [1.0]
        self.layers = nn.ModuleList(TwinLinear(*pair, gain) for pair, gain in zip(pairwise(sizes), gains, strict=True))
        self.norms = nn.ModuleList(TwinNorm(size) for size in hidden_sizes) if layer_norm else None
        self.activation = ACTIVATION_MODULES[activation]()

    @override
    def forward(self, observation: Observation) -> Heads:
        """Return ``critics``, [2, N], of ``ACTION``, [N, D] beside the observation; or [2, N, A] of all A choices."""
        features = self.flatten(observation)
        if self._takes_action:
            features = torch.cat([features, observation[ACTION]], dim=-1)
        *hidden, last = self.layers
        values = features.expand(2, *features.shape)
        for place, layer in enumerate(hidden):
            values = layer(values)
            if self.norms is not None:
                values = self.norms[place](values)
            values = self.activation(values)
        values = last(values)
        return {CRITICS: values.squeeze(-1) if self._takes_action else values}


class TwinLinear(nn.Module):
    """Two dense layers: [2, N, in_size] -> [2, N, out_size]."""

    def __init__(self, in_size: int, out_size: int, gain: float) -> None:
        super().__init__()
        weights = [nn.init.orthogonal_(torch.empty(out_size, in_size), gain).t() for _ in range(2)]
        self.weight = nn.Parameter(torch.stack(weights).contiguous())
        self.bias = nn.Parameter(torch.zeros(2, 1, out_size))

    @override
    def forward(self, inputs: Tensor) -> Tensor:
        """Return the layers' outputs."""
        return torch.baddbmm(self.bias, inputs, self.weight)


class TwinNorm(nn.Module):
    """Two layer normalisations: [2, N, size] -> [2, N, size]."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(2, 1, size))
        self.shift = nn.Parameter(torch.zeros(2, 1, size))

    @override
    def forward(self, inputs: Tensor) -> Tensor:
        """Return each row with mean 0 and variance 1, scaled and shifted."""
        return torch.addcmul(self.shift, normalized(inputs, inputs.shape[-1:]), self.gain)
