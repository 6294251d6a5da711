"""The outputs of a network whose layers before them are shared: last layers on features, [N, F]."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from rlsrl.api.spec import NetworkOutputs
from rlsrl.data.specs import EnvSpec
from rlsrl.policies.distributions import constant_deviations, policy_head
from rlsrl.policies.networks import (
    POLICY_HEAD,
    VALUE_HEAD,
    Heads,
    action_values,
    num_choices,
    orthogonal,
)


class OutputLayers(nn.Module, ABC):
    """Heads on features."""

    acting: str
    """Name of the layer by which actors choose."""

    @override
    @abstractmethod
    def forward(self, features: Tensor) -> Heads:
        """Return the heads for features, [N, F]."""

    @abstractmethod
    def export_options(self, name: str) -> Mapping[str, Any]:
        """Return what ``export.export_shared`` needs to know of the acting layer, if this module has that name."""


class PolicyOutputs(OutputLayers):
    """Logits and means of actions; gain 0.01 before them. Deviations are as those of ``MlpPolicy``."""

    acting = "actor"

    def __init__(self, num_features: int, env_spec: EnvSpec) -> None:
        """Fit the actions of ``env_spec``."""
        super().__init__()
        self._action = env_spec.action
        self.actor = orthogonal(nn.Linear(num_features, self._action.num_layer_outputs), 0.01)
        self.log_std = constant_deviations(self._action)

    @override
    def forward(self, features: Tensor) -> Heads:
        """Return ``policy`` [N, A]."""
        return {POLICY_HEAD: policy_head(self._action, self.actor(features), self.log_std)}

    @override
    def export_options(self, name: str) -> Mapping[str, Any]:
        return {"log_std": None if self.log_std is None else f"{name}.log_std", "action": self._action}


class ActorCriticOutputs(PolicyOutputs):
    """``PolicyOutputs`` and the value; gain 1 before it."""

    def __init__(self, num_features: int, env_spec: EnvSpec) -> None:
        """Fit the actions of ``env_spec``."""
        super().__init__(num_features, env_spec)
        self.critic = orthogonal(nn.Linear(num_features, 1), 1.0)

    @override
    def forward(self, features: Tensor) -> Heads:
        """Return ``policy`` [N, A] and ``value`` [N]."""
        return {**super().forward(features), VALUE_HEAD: self.critic(features).squeeze(-1)}


class ActionValueOutputs(OutputLayers):
    """The value of each action; gain 1 before the values. Options as of ``MlpActionValues``."""

    acting = "q"

    def __init__(self, num_features: int, env_spec: EnvSpec, *, dueling: bool = False, quantiles: int = 1) -> None:
        """Fit the discrete actions of ``env_spec``.

        Raises:
            ConfigurationError: the actions are not discrete.
        """
        super().__init__()
        self._quantiles = quantiles
        self.q = orthogonal(nn.Linear(num_features, num_choices(env_spec) * quantiles), 1.0)
        self.value = orthogonal(nn.Linear(num_features, quantiles), 1.0) if dueling else None

    @override
    def forward(self, features: Tensor) -> Heads:
        """Return the values of actions, ``q`` [N, A], and their ``quantiles`` [N, A, K] if there are several."""
        value = None if self.value is None else self.value(features)
        return action_values(self.q(features), value, quantiles=self._quantiles)

    @override
    def export_options(self, name: str) -> Mapping[str, Any]:
        """As ``OutputLayers.export_options``. Actions are chosen without the observation's value."""
        return {"is_values": True, "quantiles": self._quantiles}


OUTPUTS: Mapping[NetworkOutputs, type[OutputLayers]] = {
    "policy": PolicyOutputs,
    "policyAndValue": ActorCriticOutputs,
    "actionValues": ActionValueOutputs,
}
