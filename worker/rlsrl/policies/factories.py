"""Makes the built-in networks that a spec describes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic.alias_generators import to_camel
from torch import nn
from typing_extensions import override

from rlsrl.api.spec import VALUE_OPTIONS, KeyEncoder, Network, NetworkOutputs
from rlsrl.data.specs import EnvSpec
from rlsrl.policies.cnn import CnnEncoder, NatureCnnActionValues, NatureCnnActorCritic, NatureCnnPolicy
from rlsrl.policies.impala import ImpalaEncoder
from rlsrl.policies.joined import JoinedEncoder
from rlsrl.policies.networks import MlpActionValues, MlpActorCritic, MlpPolicy
from rlsrl.policies.recurrent import RecurrentSharedNetwork
from rlsrl.policies.shared import Encoder, MlpEncoder, SharedNetwork


@dataclass(frozen=True)
class BuiltIn:
    """A built-in network of a spec."""

    name: str
    """The field of the spec that describes it."""
    make: Callable[[EnvSpec], nn.Module]

    def __call__(self, env_spec: EnvSpec) -> nn.Module:
        """Make the network."""
        return self.make(env_spec)

    @override
    def __str__(self) -> str:
        return self.name


_MLPS: Mapping[NetworkOutputs, Callable[..., nn.Module]] = {
    "policy": MlpPolicy,
    "policyAndValue": MlpActorCritic,
    "actionValues": MlpActionValues,
}
_CNNS: Mapping[NetworkOutputs, Callable[..., nn.Module]] = {
    "policy": NatureCnnPolicy,
    "policyAndValue": NatureCnnActorCritic,
    "actionValues": NatureCnnActionValues,
}
_ENCODERS: Mapping[str, Callable[..., nn.Module]] = {"mlp": MlpEncoder, "cnn": CnnEncoder, "impala_cnn": ImpalaEncoder}
_OF_OUTPUTS = {*VALUE_OPTIONS}
_OF_NETWORK = {"share_layers", "initialization"}


def built_in(network: Network, outputs: NetworkOutputs) -> BuiltIn:
    """Return what makes the network with these outputs, for a spec without ``custom``."""
    name = network.member
    block = getattr(network, name)
    without = _OF_NETWORK if outputs == "actionValues" else _OF_NETWORK | _OF_OUTPUTS
    kwargs: dict[str, Any] = block.model_dump(exclude=without)
    options = {option: kwargs.pop(option) for option in VALUE_OPTIONS if option in kwargs}
    encoder: Encoder = partial(_ENCODERS[name], **kwargs)
    if network.encoders:
        parts = {each.key: _encoder_of_key(each) for each in network.encoders}
        encoder = partial(JoinedEncoder, encoders=parts, **kwargs)
    make: Callable[[EnvSpec], nn.Module]
    if network.recurrent is not None:
        recurrent = network.recurrent.model_dump()
        make = partial(RecurrentSharedNetwork, encoder=encoder, outputs=outputs, **recurrent, **options)
    elif name == "impala_cnn" or network.encoders or (name == "mlp" and block.share_layers):
        make = partial(SharedNetwork, encoder=encoder, outputs=outputs, **options)
    else:
        make = partial((_MLPS if name == "mlp" else _CNNS)[outputs], **kwargs, **options)
    if block.initialization == "uniform":
        make = partial(_drawn_uniformly, make)
    return BuiltIn(f"policy.network.{to_camel(name)}", make)


def _encoder_of_key(encoder: KeyEncoder) -> Encoder:
    name = encoder.member
    field = {} if name == "mlp" else {"at": f"policy.network.encoders: {encoder.key!r}: {to_camel(name)}"}
    return partial(_ENCODERS[name], **getattr(encoder, name).model_dump(), **field)


def _drawn_uniformly(factory: Callable[[EnvSpec], nn.Module], env_spec: EnvSpec) -> nn.Module:
    """Return the network of a factory, with the first weights that torch gives its layers."""
    network = factory(env_spec)
    for module in network.modules():
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()
    return network
