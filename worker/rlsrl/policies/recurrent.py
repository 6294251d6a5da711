"""Networks in torch with a recurrent layer: gated recurrent units, or long short-term memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from rlsrl.api.spec import NetworkOutputs, Recurrent, RecurrentKind
from rlsrl.data.specs import EnvSpec
from rlsrl.policies.cnn import CnnEncoder
from rlsrl.policies.distributions import constant_deviations, policy_head
from rlsrl.policies.export import export_recurrent
from rlsrl.policies.exported import NUM_GATES, ExportedActor
from rlsrl.policies.flat import FlatLayout
from rlsrl.policies.networks import (
    POLICY_HEAD,
    VALUE_HEAD,
    FlattenObservation,
    Heads,
    Observation,
    State,
    action_values,
    hidden_layers,
    num_choices,
    orthogonal,
    zeroed,
)


class RecurrentModule(nn.Module, ABC):
    """A recurrent layer whose parameters are those of ``nn.GRUCell`` or ``nn.LSTMCell``, by the same names.

    Orthogonal weights and zero biases, as CleanRL's ``ppo_atari_lstm.py``.
    """

    kind: RecurrentKind

    def __init__(self, num_inputs: int, size: int) -> None:
        """Make a layer of ``size`` units for ``num_inputs`` inputs."""
        super().__init__()
        self.size = size
        rows = NUM_GATES[self.kind] * size
        self.weight_ih = nn.Parameter(nn.init.orthogonal_(torch.empty(rows, num_inputs)))
        self.weight_hh = nn.Parameter(nn.init.orthogonal_(torch.empty(rows, size)))
        self.bias_ih = nn.Parameter(torch.zeros(rows))
        self.bias_hh = nn.Parameter(torch.zeros(rows))

    @property
    def state_sizes(self) -> dict[str, int]:
        """The sizes of one environment's state, by name. The layer's output is ``hidden``."""
        return Recurrent(kind=self.kind, size=self.size).state_sizes

    @abstractmethod
    def step(self, projected: Tensor, state: State) -> dict[str, Tensor]:
        """Return the next state, for inputs times ``weight_ih`` plus ``bias_ih``, [N, gates * size]."""

    @override
    def forward(self, inputs: Tensor, state: State) -> dict[str, Tensor]:
        """Return the state after one frame of inputs, [N, num_inputs]."""
        return self.step(functional.linear(inputs, self.weight_ih, self.bias_ih), state)

    def unroll(self, inputs: Tensor, state: State, is_first: Tensor) -> dict[str, Tensor]:
        """Return the states after each of L frames of inputs, [L, N, num_inputs]: see ``networks.unrolled``."""
        projected = functional.linear(inputs, self.weight_ih, self.bias_ih)
        states = []
        for gates, first in zip(projected.unbind(), is_first.unbind(), strict=True):
            state = self.step(gates, {name: zeroed(array, first) for name, array in state.items()})
            states.append(state)
        return {name: torch.stack([each[name] for each in states]) for name in states[0]}


class Gru(RecurrentModule):
    """Gated recurrent units (Cho et al. 2014), as ``nn.GRUCell``."""

    kind = "gru"

    @override
    def step(self, projected: Tensor, state: State) -> dict[str, Tensor]:
        hidden = state["hidden"]
        recurrent = functional.linear(hidden, self.weight_hh, self.bias_hh)
        reset_in, update_in, new_in = projected.chunk(3, dim=-1)
        reset_of, update_of, new_of = recurrent.chunk(3, dim=-1)
        reset, update = torch.sigmoid(reset_in + reset_of), torch.sigmoid(update_in + update_of)
        new = torch.tanh(new_in + reset * new_of)
        return {"hidden": new + update * (hidden - new)}


class Lstm(RecurrentModule):
    """Long short-term memory (Hochreiter and Schmidhuber 1997), as ``nn.LSTMCell``."""

    kind = "lstm"

    @override
    def step(self, projected: Tensor, state: State) -> dict[str, Tensor]:
        gates = projected + functional.linear(state["hidden"], self.weight_hh, self.bias_hh)
        into, keep, new, out = gates.chunk(4, dim=-1)
        cell = torch.sigmoid(keep) * state["cell"] + torch.sigmoid(into) * torch.tanh(new)
        return {"hidden": torch.sigmoid(out) * torch.tanh(cell), "cell": cell}


MODULES: Mapping[RecurrentKind, type[RecurrentModule]] = {"gru": Gru, "lstm": Lstm}


class MlpEncoder(nn.Module):
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
        self.specs = dict(env_spec.observation)
        self.flatten = FlattenObservation(self.specs)
        sizes = [self.flatten.num_features, *hidden_sizes]
        self.layers = nn.Sequential(*hidden_layers(sizes, activation, layer_norm=layer_norm))
        self.num_features = sizes[-1]

    @override
    def forward(self, observation: Observation) -> Tensor:
        """Return the last layer's outputs, [N, num_features]."""
        features: Tensor = self.layers(self.flatten(observation))
        return features


class RecurrentHeads(nn.Module, ABC):
    """Heads on a recurrent layer behind an encoder."""

    def __init__(
        self, env_spec: EnvSpec, encoder: Callable[[EnvSpec], nn.Module], *, kind: RecurrentKind = "gru", size: int = 64
    ) -> None:
        """Fit the observations of ``env_spec``.

        ``encoder`` makes a module that returns [N, ``num_features``] for N observations.
        """
        super().__init__()
        self.encoder = encoder(env_spec)
        self.recurrent = MODULES[kind](_num_features(self.encoder), size)

    @property
    def state_sizes(self) -> Mapping[str, int]:
        """The sizes of the recurrent layer's state."""
        return self.recurrent.state_sizes

    @override
    def forward(self, observation: Observation, state: State) -> tuple[Heads, State]:
        """Return the heads for N observations, and the next state: see ``RecurrentNetwork``."""
        state = self.recurrent(self.encoder(observation), state)
        return self.heads(state["hidden"]), state

    def unroll(self, observation: Observation, state: State, is_first: Tensor) -> tuple[Heads, State]:
        """Return the heads for L frames of N environments, and the states: see ``networks.unrolled``."""
        features = self.encoder({path: frames.flatten(0, 1) for path, frames in observation.items()})
        states = self.recurrent.unroll(features.reshape(*is_first.shape, -1), state, is_first)
        heads = self.heads(states["hidden"].flatten(0, 1))
        return {name: outputs.reshape(*is_first.shape, *outputs.shape[1:]) for name, outputs in heads.items()}, states

    @abstractmethod
    def heads(self, features: Tensor) -> Heads:
        """Return the heads for the recurrent layer's outputs, [N, size]."""


class RecurrentPolicy(RecurrentHeads):
    """Logits and means of actions on a recurrent layer behind an encoder; gain 0.01 before them."""

    def __init__(
        self, env_spec: EnvSpec, encoder: Callable[[EnvSpec], nn.Module], *, kind: RecurrentKind = "gru", size: int = 64
    ) -> None:
        """Fit the observations and actions of ``env_spec``: see ``RecurrentHeads``."""
        super().__init__(env_spec, encoder, kind=kind, size=size)
        self._action = env_spec.action
        self.actor = orthogonal(nn.Linear(size, self._action.num_layer_outputs), 0.01)
        self.log_std = constant_deviations(self._action)

    @override
    def heads(self, features: Tensor) -> Heads:
        """Return the heads for the recurrent layer's outputs, [N, size]: ``policy`` [N, A]."""
        return {POLICY_HEAD: policy_head(self._action, self.actor(features), self.log_std)}

    def export_actor(self, layout: FlatLayout) -> ExportedActor | None:
        """Return the actor in its exported form, or None if the encoder has none."""
        if not isinstance(self.encoder, MlpEncoder):
            return None
        return export_recurrent(
            self.encoder.layers,
            self.recurrent.kind,
            self.actor,
            names=("encoder.layers", "recurrent", "actor"),
            layout=layout,
            observation=self.encoder.specs,
            log_std=None if self.log_std is None else "log_std",
            action=self._action,
        )


class RecurrentActorCritic(RecurrentPolicy):
    """``RecurrentPolicy`` with the value on the same recurrent layer; gain 1 before it."""

    def __init__(
        self, env_spec: EnvSpec, encoder: Callable[[EnvSpec], nn.Module], *, kind: RecurrentKind = "gru", size: int = 64
    ) -> None:
        """Fit the observations and actions of ``env_spec``: see ``RecurrentPolicy``."""
        super().__init__(env_spec, encoder, kind=kind, size=size)
        self.critic = orthogonal(nn.Linear(size, 1), 1.0)

    @override
    def heads(self, features: Tensor) -> Heads:
        """Return the heads for the recurrent layer's outputs, [N, size]: ``policy`` [N, A] and ``value`` [N]."""
        return {**super().heads(features), VALUE_HEAD: self.critic(features).squeeze(-1)}


class RecurrentActionValues(RecurrentHeads):
    """The value of each action on a recurrent layer; gain 1 before the values. Options as of ``MlpActionValues``."""

    def __init__(
        self,
        env_spec: EnvSpec,
        encoder: Callable[[EnvSpec], nn.Module],
        *,
        kind: RecurrentKind = "gru",
        size: int = 64,
        dueling: bool = False,
        quantiles: int = 1,
    ) -> None:
        """Fit the observations and the discrete actions of ``env_spec``: see ``RecurrentHeads``.

        Raises:
            ConfigurationError: the actions are not discrete.
        """
        num_actions = num_choices(env_spec)
        super().__init__(env_spec, encoder, kind=kind, size=size)
        self._quantiles = quantiles
        self.q = orthogonal(nn.Linear(size, num_actions * quantiles), 1.0)
        self.value = orthogonal(nn.Linear(size, quantiles), 1.0) if dueling else None

    @override
    def heads(self, features: Tensor) -> Heads:
        """Return the values of actions, ``q`` [N, A], and their ``quantiles`` [N, A, K] if there are several."""
        value = None if self.value is None else self.value(features)
        return action_values(self.q(features), value, quantiles=self._quantiles)

    def export_actor(self, layout: FlatLayout) -> ExportedActor | None:
        """Return the actor in its exported form, or None if the encoder has none. It has no observation's value."""
        if not isinstance(self.encoder, MlpEncoder):
            return None
        return export_recurrent(
            self.encoder.layers,
            self.recurrent.kind,
            self.q,
            names=("encoder.layers", "recurrent", "q"),
            layout=layout,
            observation=self.encoder.specs,
            is_values=True,
            quantiles=self._quantiles,
        )


def _num_features(encoder: nn.Module) -> int:
    number = encoder.num_features
    assert isinstance(number, int), "of MlpEncoder and CnnEncoder"
    return number


_NETWORKS: Mapping[NetworkOutputs, type[RecurrentHeads]] = {
    "policy": RecurrentPolicy,
    "policyAndValue": RecurrentActorCritic,
    "actionValues": RecurrentActionValues,
}


def recurrent_mlp(
    env_spec: EnvSpec,
    *,
    outputs: NetworkOutputs,
    kind: RecurrentKind,
    size: int,
    hidden_sizes: Sequence[int] = (64, 64),
    activation: Literal["tanh", "relu"] = "tanh",
    layer_norm: bool = False,
    **options: Any,
) -> RecurrentHeads:
    """Return the network with these outputs on a recurrent layer behind dense layers. ``options``: of the outputs."""
    encoder = partial(MlpEncoder, hidden_sizes=hidden_sizes, activation=activation, layer_norm=layer_norm)
    return _NETWORKS[outputs](env_spec, encoder, kind=kind, size=size, **options)


def recurrent_cnn(
    env_spec: EnvSpec,
    *,
    outputs: NetworkOutputs,
    kind: RecurrentKind,
    size: int,
    hidden_size: int = 512,
    precision: Literal["float32", "bfloat16"] = "float32",
    **options: Any,
) -> RecurrentHeads:
    """Return the network with these outputs on a recurrent layer behind the body of ``NatureCnn``: see
    ``recurrent_mlp``."""
    encoder = partial(CnnEncoder, hidden_size=hidden_size, precision=precision)
    return _NETWORKS[outputs](env_spec, encoder, kind=kind, size=size, **options)
