"""Makes the built-in networks that a spec describes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from rlsrl.api.spec import VALUE_OPTIONS, Network, NetworkOutputs
from rlsrl.data.specs import EnvSpec
from rlsrl.policies.cnn import CnnEncoder, NatureCnnActionValues, NatureCnnActorCritic, NatureCnnPolicy
from rlsrl.policies.impala import ImpalaEncoder
from rlsrl.policies.networks import MlpActionValues, MlpActorCritic, MlpPolicy
from rlsrl.policies.recurrent import RecurrentSharedNetwork
from rlsrl.policies.shared import MlpEncoder, SharedNetwork

Factory = Callable[[EnvSpec], nn.Module]

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


def built_in(network: Network, outputs: NetworkOutputs) -> Factory:
    """Return what makes the network with these outputs, for a spec without ``custom``."""
    name = next(name for name in _ENCODERS if getattr(network, name) is not None)
    block = getattr(network, name)
    without = _OF_NETWORK if outputs == "actionValues" else _OF_NETWORK | _OF_OUTPUTS
    kwargs: dict[str, Any] = block.model_dump(exclude=without)
    options = {option: kwargs.pop(option) for option in VALUE_OPTIONS if option in kwargs}
    encoder = partial(_ENCODERS[name], **kwargs)
    made: Factory
    if network.recurrent is not None:
        recurrent = network.recurrent.model_dump()
        made = partial(RecurrentSharedNetwork, encoder=encoder, outputs=outputs, **recurrent, **options)
    elif name == "impala_cnn" or (name == "mlp" and block.share_layers):
        made = partial(SharedNetwork, encoder=encoder, outputs=outputs, **options)
    else:
        made = partial((_MLPS if name == "mlp" else _CNNS)[outputs], **kwargs, **options)
    return made if block.initialization == "orthogonal" else partial(_drawn_uniformly, made)


def _drawn_uniformly(factory: Factory, env_spec: EnvSpec) -> nn.Module:
    """Return the network of a factory, with the first weights that torch gives its layers."""
    network = factory(env_spec)
    for module in network.modules():
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()
    return network
