"""Networks in torch: their protocols, and the built-in multi-layer perceptron."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Literal, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn
from typing_extensions import override

from rlsrl.api.spec import NetworkOutputs
from rlsrl.data.specs import ArraySpec, EnvSpec
from rlsrl.policies.distributions import constant_deviations, policy_head
from rlsrl.policies.export import export_dense
from rlsrl.policies.exported import ExportedActor
from rlsrl.policies.flat import FlatLayout
from rlsrl.policies.one_hot import OneHot
from rlsrl.runtime.errors import ConfigurationError

Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)

Observation = Mapping[str, Tensor]
"""Observation arrays by path, each [N, *shape]: ``"observation"``, or ``"observation/<key>"`` for a Dict or Tuple."""
Heads = Mapping[str, Tensor]
"""A network's outputs by the names of its heads."""
State = Mapping[str, Tensor]
"""The recurrent state by name, each [N, size] float32."""

POLICY_HEAD, VALUE_HEAD, ACTION_VALUES_HEAD, QUANTILES_HEAD = "policy", "value", "q", "quantiles"
HEADS: Mapping[NetworkOutputs, tuple[str, ...]] = {
    "policy": (POLICY_HEAD,),
    "policyAndValue": (POLICY_HEAD, VALUE_HEAD),
    "actionValues": (ACTION_VALUES_HEAD,),
}
"""The heads that a network must have, by what its algorithm needs."""


class PolicyNetwork(Protocol):
    """The protocol of every network: an ``nn.Module`` with this ``forward``.

    Name your own network's factory as ``module:attr``: a callable ``(env_spec: EnvSpec, **kwargs) -> nn.Module``.
    """

    def forward(self, observation: Observation) -> Heads:
        """Return the heads that the algorithm needs, and any others: ``policy`` [N, A], ``value`` [N], ``q`` [N, A].

        ``policy`` has the parameters of the action distribution. Discrete actions: the logits of the A choices.
        Continuous actions, vectors of A / 2: the means, then the logarithms of the standard deviations. If these are
        drawn as ``clipped`` (``env_spec.action.vectors``): the means alone, within [-1, 1]. Joint actions: the
        parameters of each of ``env_spec.action.parts``, one part after the other.

        ``value`` is the observation's. ``q`` has the value of each of the A choices of a discrete action. A network
        with that head has no ``policy``. It may have ``quantiles`` [N, A, K], too, whose means are ``q``.

        Observations have the environment's dtype, or float32 if they are normalised. Categories
        (``ArraySpec.categories``) come as integers; ``FlattenObservation`` makes them one-hot. The function is pure: it
        keeps nothing between calls and draws nothing.

        The network may be on a GPU. Make constants buffers (``register_buffer(..., persistent=False)``), which move
        with it. Make new tensors on the observations' device.
        """


@runtime_checkable
class RecurrentNetwork(Protocol):
    """The protocol of recurrent networks: an ``nn.Module`` with these members in place of ``PolicyNetwork``'s."""

    state_sizes: Mapping[str, int]
    """The numbers of each array of one environment's state, by name. Episodes begin with zeros."""

    def forward(self, observation: Observation, state: State) -> tuple[Heads, State]:
        """Return the heads for the observations of N environments, and the state with which the next ones are seen.

        Heads and purity are those of ``PolicyNetwork.forward``.
        """


@runtime_checkable
class UnrolledNetwork(Protocol):
    """A recurrent network that evaluates many frames in less time than one after the other. Optional."""

    def unroll(self, observation: Observation, state: State, is_first: Tensor) -> tuple[Heads, State]:
        """Do what ``unrolled`` does."""


def unrolled(network: nn.Module, observation: Observation, state: State, is_first: Tensor) -> tuple[Heads, State]:
    """Return a recurrent network's heads for L frames of N environments, and the state after each frame.

    Args:
        network: A ``RecurrentNetwork``.
        observation: By path, each [L, N, *shape].
        state: Before the first frame, by name, each [N, size].
        is_first: Whether the frame is the first of an episode, [L, N] bool: it is seen with a state of zeros.

    Returns:
        The heads, each [L, N, ...], and the states, each [L, N, size].
    """
    if isinstance(network, UnrolledNetwork):
        return network.unroll(observation, state, is_first)
    return stepped(network, observation, state, is_first)


def stepped(network: nn.Module, observation: Observation, state: State, is_first: Tensor) -> tuple[Heads, State]:
    """Do what ``unrolled`` does by one call of the network for each frame."""
    heads, states = [], []
    for step in range(len(is_first)):
        known = {name: zeroed(array, is_first[step]) for name, array in state.items()}
        found, state = network({path: frames[step] for path, frames in observation.items()}, known)
        heads.append(found)
        states.append(state)
    return _stacked(heads), _stacked(states)


def zeroed(state: Tensor, is_first: Tensor) -> Tensor:
    """Return the state, [N, size], with zeros for the environments that begin an episode, [N] bool."""
    return state.masked_fill(is_first.unsqueeze(-1), 0.0)


def _stacked(found: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([each[name] for each in found]) for name in found[0]}


def state_sizes_of(network: nn.Module) -> Mapping[str, int]:
    """Return the sizes of a network's recurrent state, by name; empty for one without."""
    return network.state_sizes if isinstance(network, RecurrentNetwork) else {}


def acting_head(heads: Heads) -> str:
    """Return the name of the head by which actors choose, [N, A]: distribution parameters, or values of actions."""
    return POLICY_HEAD if POLICY_HEAD in heads else ACTION_VALUES_HEAD


def acting_output(heads: Heads) -> Tensor:
    """Return the output of the acting head, [N, A]."""
    return heads[acting_head(heads)]


@runtime_checkable
class ExportableNetwork(Protocol):
    """A network whose actor consists of dense layers, and at most one recurrent one, so that actors need no torch.
    Optional."""

    def export_actor(self, layout: FlatLayout) -> ExportedActor | None:
        """Return the actor over the flat vector of that layout, or None if this network has no exported form."""


@runtime_checkable
class ActingNetwork(Protocol):
    """A network that acts in less time than a whole forward pass, once it has prepared its weights. Optional."""

    def prepared_actor(self) -> Callable[[Observation], Tensor]:
        """Return a function to the acting head of ``forward``, [N, A], bit for bit, with the present weights."""


@runtime_checkable
class PreferredLayoutNetwork(Protocol):
    """A network that reads observations faster in another memory layout. Optional."""

    def to_preferred_layout(self, observation: Observation) -> Observation:
        """Return the same arrays, [N, *shape], in the preferred layout. Rows stay contiguous.

        The trainer calls it once for observations that it evaluates several times.
        """


class Tanh(nn.Tanh):
    """tanh(x) = 2 s(2x) - 1 with the logistic function s, to within 2e-7.

    On a CPU torch computes s by the exponential, in a fifth to an eighth of the time of its tanh, which is exact to
    the last bit. With that tanh it took a third of a small network's step.
    """

    @override
    def forward(self, input: Tensor) -> Tensor:
        """[...] -> [...]."""
        return 2.0 * torch.sigmoid(2.0 * input) - 1.0


ACTIVATION_MODULES = {"tanh": Tanh, "relu": nn.ReLU}


class MlpPolicy(nn.Module):
    """A tower of dense layers over the flattened observation: logits and means of actions.

    ``layer_norm`` normalises hidden layers before their activation. Orthogonal weights (gain sqrt(2); 0.01 before the
    logits or means) and zero biases, as in PPO's reference implementations. The deviations of ``gaussian`` actions are
    parameters that do not depend on the observation; those of ``squashed`` ones are outputs, as the means are. They
    start at 1.
    """

    def __init__(
        self,
        env_spec: EnvSpec,
        *,
        hidden_sizes: Sequence[int] = (64, 64),
        activation: Literal["tanh", "relu"] = "tanh",
        layer_norm: bool = False,
    ) -> None:
        super().__init__()
        self._specs = dict(env_spec.observation)
        self.flatten = FlattenObservation(self._specs)
        sizes = [self.flatten.num_features, *hidden_sizes]
        self._action = env_spec.action
        self.actor = _tower(sizes, self._action.num_layer_outputs, activation, head_gain=0.01, layer_norm=layer_norm)
        self.log_std = constant_deviations(self._action)

    @override
    def forward(self, observation: Observation) -> Heads:
        """Return ``policy`` [N, A]."""
        return {POLICY_HEAD: self.distribution(self.flatten(observation))}

    def distribution(self, features: Tensor) -> Tensor:
        """Return distribution parameters [N, A] for flattened observations [N, features]."""
        return policy_head(self._action, self.actor(features), self.log_std)

    def export_actor(self, layout: FlatLayout) -> ExportedActor:
        """Return the actor tower in its exported form."""
        log_std = None if self.log_std is None else "log_std"
        return export_dense(self.actor, "actor", layout, self._specs, log_std=log_std, action=self._action)


class MlpActorCritic(MlpPolicy):
    """``MlpPolicy`` and a second tower for the value, with gain 1 before it."""

    def __init__(
        self,
        env_spec: EnvSpec,
        *,
        hidden_sizes: Sequence[int] = (64, 64),
        activation: Literal["tanh", "relu"] = "tanh",
        layer_norm: bool = False,
    ) -> None:
        super().__init__(env_spec, hidden_sizes=hidden_sizes, activation=activation, layer_norm=layer_norm)
        sizes = [self.flatten.num_features, *hidden_sizes]
        self.critic = _tower(sizes, 1, activation, head_gain=1.0, layer_norm=layer_norm)

    @override
    def forward(self, observation: Observation) -> Heads:
        """Return ``policy`` [N, A] and ``value`` [N]."""
        features = self.flatten(observation)
        return {POLICY_HEAD: self.distribution(features), VALUE_HEAD: self.critic(features).squeeze(-1)}


class MlpActionValues(nn.Module):
    """A tower of dense layers over the flattened observation: the value of each action.

    With ``dueling`` it gives the actions' advantages, and a second tower the observation's value (Wang et al. 2016).
    With several ``quantiles`` it gives those of each action's return (Dabney et al. 2018); its value is their mean.
    Weights start as those of ``MlpPolicy``, with gain 1 before the values.
    """

    def __init__(
        self,
        env_spec: EnvSpec,
        *,
        hidden_sizes: Sequence[int] = (64, 64),
        activation: Literal["tanh", "relu"] = "tanh",
        layer_norm: bool = False,
        dueling: bool = False,
        quantiles: int = 1,
    ) -> None:
        """Fit the observations and the discrete actions of ``env_spec``.

        Raises:
            ConfigurationError: the actions are not discrete.
        """
        super().__init__()
        num_actions = num_choices(env_spec)
        self._specs = dict(env_spec.observation)
        self.flatten = FlattenObservation(self._specs)
        sizes = [self.flatten.num_features, *hidden_sizes]
        self._quantiles = quantiles
        self.q = _tower(sizes, num_actions * quantiles, activation, head_gain=1.0, layer_norm=layer_norm)
        self.value = _tower(sizes, quantiles, activation, head_gain=1.0, layer_norm=layer_norm) if dueling else None

    @override
    def forward(self, observation: Observation) -> Heads:
        """Return the values of actions, ``q`` [N, A], and their ``quantiles`` [N, A, K] if there are several."""
        features = self.flatten(observation)
        value = None if self.value is None else self.value(features)
        return action_values(self.q(features), value, quantiles=self._quantiles)

    def export_actor(self, layout: FlatLayout) -> ExportedActor:
        """Return the first tower in its exported form: actions are chosen by their advantages alone."""
        return export_dense(self.q, "q", layout, self._specs, is_values=True, quantiles=self._quantiles)


def action_values(outputs: Tensor, value: Tensor | None, *, quantiles: int) -> Heads:
    """Return the heads of values of actions: ``q`` [N, A], and ``quantiles`` [N, A, K] if there are several.

    Args:
        outputs: Those of each action, one action after the other, [N, A * K].
        value: The observation's, [N, K]: the outputs are advantages then (Wang et al. 2016, equation 9). None: they are
            the values themselves.
        quantiles: K.
    """
    found = outputs.reshape(outputs.shape[0], -1, quantiles)
    if value is not None:
        found = value.unsqueeze(1) + found - found.mean(dim=1, keepdim=True)
    if quantiles == 1:
        return {ACTION_VALUES_HEAD: found.squeeze(-1)}
    return {ACTION_VALUES_HEAD: found.mean(dim=-1), QUANTILES_HEAD: found}


def num_choices(env_spec: EnvSpec) -> int:
    """Return the number of choices of discrete actions.

    Raises:
        ConfigurationError: the actions are not discrete.
    """
    action = env_spec.action
    if action.kind != "discrete":
        raise ConfigurationError(
            f"the algorithm values each action, so that it needs the action space Discrete; the environment's actions "
            f"are {action.kind}"
        )
    return action.num_actions


class FlattenObservation(nn.Module):
    """Makes one float32 vector of all observation arrays, flattened in the specs' order, with categories one-hot."""

    def __init__(self, specs: Mapping[str, ArraySpec]) -> None:
        super().__init__()
        self.num_features = sum(spec.num_features for spec in specs.values())
        """Length of the vector."""
        self._one_hots: dict[str, tuple[str, str] | None] = {}
        """Names of the buffers (entries, values) of each path's encoding; None: its entries are numbers."""
        for place, (path, spec) in enumerate(specs.items()):
            encoding, names = OneHot.of(spec), (f"entries_{place}", f"values_{place}")
            self._one_hots[path] = None if encoding is None else names
            if encoding is not None:
                for name, table in zip(names, (encoding.entries, encoding.values), strict=True):
                    self.register_buffer(name, torch.from_numpy(table), persistent=False)

    @override
    def forward(self, observation: Observation) -> Tensor:
        """Return the vectors, [N, features]."""
        flat = [self._encoded(observation[path], one_hot) for path, one_hot in self._one_hots.items()]
        return flat[0] if len(flat) == 1 else torch.cat(flat, dim=-1)

    def _encoded(self, array: Tensor, one_hot: tuple[str, str] | None) -> Tensor:
        flat = array.reshape(array.shape[0], -1)
        if one_hot is not None:
            entries, values = one_hot
            flat = flat.to(torch.int64)[:, getattr(self, entries)] == getattr(self, values)
        return flat.to(torch.float32)


def _tower(
    sizes: Sequence[int], num_outputs: int, activation: str, *, head_gain: float, layer_norm: bool
) -> nn.Sequential:
    hidden = hidden_layers(sizes, activation, layer_norm=layer_norm)
    return nn.Sequential(*hidden, orthogonal(nn.Linear(sizes[-1], num_outputs), head_gain))


def hidden_layers(sizes: Sequence[int], activation: str, *, layer_norm: bool) -> list[nn.Module]:
    """Return dense layers between those numbers of units, each with its activation, and maybe a norm before it.

    Their weights are orthogonal with gain sqrt(2).
    """
    layers: list[nn.Module] = []
    for num_inputs, num_units in pairwise(sizes):
        norm = [nn.LayerNorm(num_units)] if layer_norm else []
        linear = orthogonal(nn.Linear(num_inputs, num_units), math.sqrt(2))
        layers += [linear, *norm, ACTIVATION_MODULES[activation]()]
    return layers


def orthogonal(layer: Layer, gain: float) -> Layer:
    """Return the layer with orthogonal weights of that gain and zero biases."""
    nn.init.orthogonal_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer
