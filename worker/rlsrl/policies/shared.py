"""Networks whose outputs share all layers but the last: an encoder of observations, and outputs on its features."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor, nn
from typing_extensions import override

from rlsrl.api.spec import NetworkOutputs
from rlsrl.data.specs import ArraySpec, EnvSpec
from rlsrl.policies.export import export_shared
from rlsrl.policies.exported import ExportedActor, ExportedEncoder
from rlsrl.policies.flat import FlatLayout
from rlsrl.policies.networks import FlattenObservation, Heads, Observation, PreferredLayoutNetwork, hidden_layers
from rlsrl.policies.outputs import OUTPUTS

Encoder = Callable[[EnvSpec], nn.Module]
"""Makes a module that returns ``num_features`` numbers, [N, F] float32, for N observations."""


class DenseEncoder(nn.Module, ABC):
    """An encoder that ends with dense layers."""

    specs: Mapping[str, ArraySpec]
    """The arrays of the observation, by path."""
    layers: nn.Sequential
    """The dense layers, each with its activation."""
    num_features: int
    """Outputs of the last."""

    @abstractmethod
    def export_inputs(self, name: str, layout: FlatLayout) -> Sequence[ExportedEncoder] | None:
        """Return the encoders before the dense layers in their exported form, or None if one has none.

        ``name`` is this module's in its network.
        """


class MlpEncoder(DenseEncoder):
    """Dense layers over the flattened observation, each followed by its activation."""

    def __init__(
        self,
        env_spec: EnvSpec,
        *,
        hidden_sizes: Sequence[int] = (64, 64),
        activation: Literal["tanh", "relu"] = "tanh",
        layer_norm: bool = False,
    ) -> None:
        """Fit the observations of ``env_spec``; the other arguments are those of ``MlpPolicy``."""
        super().__init__()
        self.specs = env_spec.observation
        self.flatten = FlattenObservation(self.specs)
        sizes = [self.flatten.num_features, *hidden_sizes]
        self.layers = nn.Sequential(*hidden_layers(sizes, activation, layer_norm=layer_norm))
        self.num_features = sizes[-1]

    @override
    def forward(self, observation: Observation) -> Tensor:
        """Return the last layer's outputs, [N, num_features]."""
        features: Tensor = self.layers(self.flatten(observation))
        return features

    @override
    def export_inputs(self, name: str, layout: FlatLayout) -> Sequence[ExportedEncoder]:
        return ()


class SharedNetwork(nn.Module):
    """Outputs on an encoder."""

    def __init__(self, env_spec: EnvSpec, encoder: Encoder, *, outputs: NetworkOutputs, **options: Any) -> None:
        """Fit the observations and actions of ``env_spec``. ``options`` are those of the outputs."""
        super().__init__()
        self.encoder = encoder(env_spec)
        self.outputs = OUTPUTS[outputs](num_features_of(self.encoder), env_spec, **options)

    @override
    def forward(self, observation: Observation) -> Heads:
        """Return the heads for N observations."""
        heads: Heads = self.outputs(self.encoder(observation))
        return heads

    def to_preferred_layout(self, observation: Observation) -> Observation:
        """Return the observation in the memory layout that the encoder prefers."""
        return in_preferred_layout(self.encoder, observation)

    def export_actor(self, layout: FlatLayout) -> ExportedActor | None:
        """Return the actor in its exported form, or None if the encoder has none."""
        if (dense := exported_inputs(self.encoder, "encoder", layout)) is None:
            return None
        encoder, encoders = dense
        return export_shared(
            encoder.layers,
            getattr(self.outputs, self.outputs.acting),
            names=("encoder.layers", f"outputs.{self.outputs.acting}"),
            layout=layout,
            observation=encoder.specs,
            encoders=encoders,
            **self.outputs.export_options("outputs"),
        )


def exported_inputs(
    encoder: nn.Module, name: str, layout: FlatLayout
) -> tuple[DenseEncoder, Sequence[ExportedEncoder]] | None:
    """Return an encoder that has an exported form, with what comes before its dense layers, or None for another."""
    if not isinstance(encoder, DenseEncoder) or (inputs := encoder.export_inputs(name, layout)) is None:
        return None
    return encoder, inputs


def in_preferred_layout(encoder: nn.Module, observation: Observation) -> Observation:
    """Return the observation in the memory layout that an encoder prefers, if it has one."""
    return encoder.to_preferred_layout(observation) if isinstance(encoder, PreferredLayoutNetwork) else observation


def num_features_of(encoder: nn.Module) -> int:
    """Return the number of an encoder's outputs."""
    number = encoder.num_features
    assert isinstance(number, int), "of an Encoder's module"
    return number
