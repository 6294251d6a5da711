"""Encoders of parts of an observation, such as an image beside numbers, which join in dense layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from rlsrl.data.specs import EnvSpec
from rlsrl.policies.export import export_encoder
from rlsrl.policies.exported import ExportedEncoder
from rlsrl.policies.flat import FlatLayout
from rlsrl.policies.networks import FlattenObservation, Observation, hidden_layers
from rlsrl.policies.observation_parts import parts_of
from rlsrl.policies.shared import DenseEncoder, Encoder, MlpEncoder, in_preferred_layout, num_features_of


class JoinedEncoder(DenseEncoder):
    """Dense layers over the outputs of encoders and over all arrays without one.

    An encoder's outputs stand in the place of its arrays: the order is that of the observation's space.
    """

    def __init__(
        self,
        env_spec: EnvSpec,
        *,
        encoders: Mapping[str, Encoder],
        hidden_sizes: Sequence[int] = (64, 64),
        activation: Literal["tanh", "relu"] = "tanh",
        layer_norm: bool = False,
    ) -> None:
        """Fit the observations of ``env_spec``.

        Args:
            encoders: By key of the observation: those of nested ones are joined by slashes.
            hidden_sizes, activation, layer_norm: As those of ``MlpPolicy``.

        Raises:
            ConfigurationError: the observation has no such key, or an encoder does not fit its arrays.
        """
        super().__init__()
        self.specs = env_spec.observation
        makers = [*encoders.values()]
        parts = [
            FlattenObservation(part.arrays)
            if part.encoder is None
            else makers[part.encoder](replace(env_spec, observation=part.arrays))
            for part in parts_of(self.specs, [*encoders])
        ]
        self.parts = nn.ModuleList(parts)
        sizes = [sum(map(num_features_of, parts)), *hidden_sizes]
        self.layers = nn.Sequential(*hidden_layers(sizes, activation, layer_norm=layer_norm))
        self.num_features = sizes[-1]

    @override
    def forward(self, observation: Observation) -> Tensor:
        """Return the last layer's outputs, [N, num_features]."""
        features: Tensor = self.layers(torch.cat([part(observation) for part in self.parts], dim=-1))
        return features

    def to_preferred_layout(self, observation: Observation) -> Observation:
        """Return the arrays in the layouts that their encoders prefer."""
        for part in self.parts:
            observation = in_preferred_layout(part, observation)
        return observation

    @override
    def export_inputs(self, name: str, layout: FlatLayout) -> Sequence[ExportedEncoder] | None:
        exported = []
        for number, part in enumerate(self.parts):
            if isinstance(part, FlattenObservation):
                continue
            if not isinstance(part, MlpEncoder):
                return None
            exported.append(export_encoder(part.layers, f"{name}.parts.{number}.layers", layout, part.specs))
        return exported
