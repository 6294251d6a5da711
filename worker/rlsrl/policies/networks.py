"""Actor-critic networks in torch: what one has to be, and the built-in multi-layer perceptron."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Literal, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from rlsrl.data.specs import EnvSpec
from rlsrl.policies.export import dense_program
from rlsrl.policies.exported import ExportedActor
from rlsrl.policies.flat import FlatLayout

Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)

Observation = Mapping[str, Tensor]
"""Observation arrays by path (``"observation"``, or ``"observation/<key>"`` of a Dict space), each [N, *shape]."""


class ActorCritic(Protocol):
    """What a network has to be: an ``nn.Module`` with this forward.

    A network of your own is named ``module:attr``, a callable ``(env_spec: EnvSpec, **kwargs) -> nn.Module``.
    """

    def forward(self, observation: Observation) -> tuple[Tensor, Tensor]:
        """Distribution parameters [N, A] and values [N].

        Of discrete actions: the logits of the A choices. Of continuous ones, vectors of A / 2: the means, then the
        logarithms of the standard deviations. Observations come in the environment's own dtype, or as float32 where
        they are normalised. Pure: nothing is kept from call to call, nothing drawn.

        It may be on a GPU: constants are buffers (``register_buffer(..., persistent=False)``), which go with it, and
        what is made here is made on the observations' device.
        """


@runtime_checkable
class ExportableNetwork(Protocol):
    """A network whose actor is dense layers only, so that actors need no torch. Optional."""

    def export_actor(self, layout: FlatLayout) -> ExportedActor | None:
        """The actor over the flat vector of that layout; None if it cannot be one after all."""


@runtime_checkable
class ActingNetwork(Protocol):
    """A network that acts for less than a whole forward pass, once it has prepared its weights. Optional."""

    def prepared_actor(self) -> Callable[[Observation], Tensor]:
        """What gives ``forward``'s distribution parameters, [N, A], to the bit, by the weights that there are now."""


@runtime_checkable
class PreferredLayoutNetwork(Protocol):
    """A network that reads observations faster in another order of their dimensions in memory. Optional."""

    def to_preferred_layout(self, observation: Observation) -> Observation:
        """The same arrays, [N, *shape], rows one after the other, each in that order: what is evaluated several times
        is brought into it once."""


class Tanh(nn.Tanh):
    """tanh(x) = 2 s(2x) - 1 with the logistic function s, to within 2e-7.

    On a CPU torch computes s with the exponential, in a fifth to an eighth of the time of its tanh, which is exact to
    the last bit; of a small network's step that was the third that took longest.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name for it
        """[...] -> [...]."""
        return 2.0 * torch.sigmoid(2.0 * input) - 1.0


ACTIVATION_MODULES = {"tanh": Tanh, "relu": nn.ReLU}


class MlpActorCritic(nn.Module):
    """Two towers of dense layers over the flattened observation: logits of discrete actions or means of continuous
    ones, and the value.

    Orthogonal weights (gain sqrt(2); 0.01 before the logits or means, 1 before the value) and zero biases, as in PPO's
    reference implementations. The deviations of continuous actions are parameters that no observation changes, 1 at
    first.
    """

    def __init__(
        self,
        env_spec: EnvSpec,
        *,
        hidden_sizes: Sequence[int] = (64, 64),
        activation: Literal["tanh", "relu"] = "tanh",
    ) -> None:
        super().__init__()
        self._specs = dict(env_spec.observation)
        num_inputs = sum(math.prod(spec.shape) for spec in self._specs.values())
        sizes = [num_inputs, *hidden_sizes]
        num_dimensions = math.prod(env_spec.action.array.shape)
        is_discrete = env_spec.action.kind == "discrete"
        num_outputs = env_spec.action.num_actions if is_discrete else num_dimensions
        self.actor = _tower(sizes, num_outputs, activation, head_gain=0.01)
        self.log_std = None if is_discrete else nn.Parameter(torch.zeros(num_dimensions))
        self.critic = _tower(sizes, 1, activation, head_gain=1.0)

    def forward(self, observation: Observation) -> tuple[Tensor, Tensor]:
        """Distribution parameters [N, A] and values [N]."""
        features = flatten_observation(observation, self._specs)
        outputs: Tensor = self.actor(features)
        if self.log_std is not None:
            outputs = torch.cat([outputs, self.log_std.expand_as(outputs)], dim=-1)
        return outputs, self.critic(features).squeeze(-1)

    def export_actor(self, layout: FlatLayout) -> ExportedActor:
        """The actor tower as a program."""
        log_std = None if self.log_std is None else "log_std"
        return dense_program(self.actor, "actor", layout, self._specs, log_std=log_std)


def flatten_observation(observation: Observation, paths: Iterable[str]) -> Tensor:
    """All observation arrays as float32, flattened and concatenated in the order of ``paths``: [N, features]."""
    flat = [observation[path].reshape(observation[path].shape[0], -1).to(torch.float32) for path in paths]
    return flat[0] if len(flat) == 1 else torch.cat(flat, dim=-1)


def _tower(sizes: Sequence[int], num_outputs: int, activation: str, head_gain: float) -> nn.Sequential:
    layers: list[nn.Module] = []
    for num_inputs, num_units in pairwise(sizes):
        layers += [orthogonal(nn.Linear(num_inputs, num_units), math.sqrt(2)), ACTIVATION_MODULES[activation]()]
    return nn.Sequential(*layers, orthogonal(nn.Linear(sizes[-1], num_outputs), head_gain))


def orthogonal(layer: Layer, gain: float) -> Layer:
    """The layer with orthogonal weights of that gain and zero biases."""
    nn.init.orthogonal_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer
