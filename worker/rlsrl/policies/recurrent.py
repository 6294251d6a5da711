"""Networks in torch with a recurrent layer: gated recurrent units, or long short-term memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from rlsrl.api.spec import NetworkOutputs, Recurrent, RecurrentKind
from rlsrl.data.specs import EnvSpec
from rlsrl.policies.export import export_recurrent
from rlsrl.policies.exported import NUM_GATES, ExportedActor
from rlsrl.policies.flat import FlatLayout
from rlsrl.policies.networks import Heads, Observation, State, zeroed
from rlsrl.policies.outputs import OUTPUTS
from rlsrl.policies.shared import Encoder, exported_inputs, in_preferred_layout, num_features_of


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

    def reset_parameters(self) -> None:
        """Draw all parameters uniformly, as torch's cells do."""
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -(self.size**-0.5), self.size**-0.5)

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
    """Long short-term memory (Hochreiter and Schmidhuber 1997), as ``nn.LSTMCell``.

    The forget gate's bias starts at 1, so that cells keep what they have (Jozefowicz et al. 2015).
    """

    kind = "lstm"

    def __init__(self, num_inputs: int, size: int) -> None:
        """Make a layer: see ``RecurrentModule``."""
        super().__init__(num_inputs, size)
        nn.init.ones_(self.bias_ih.data[size : 2 * size])

    @override
    def step(self, projected: Tensor, state: State) -> dict[str, Tensor]:
        gates = projected + functional.linear(state["hidden"], self.weight_hh, self.bias_hh)
        into, keep, new, out = gates.chunk(4, dim=-1)
        cell = torch.sigmoid(keep) * state["cell"] + torch.sigmoid(into) * torch.tanh(new)
        return {"hidden": torch.sigmoid(out) * torch.tanh(cell), "cell": cell}


MODULES: Mapping[RecurrentKind, type[RecurrentModule]] = {"gru": Gru, "lstm": Lstm}


class RecurrentSharedNetwork(nn.Module):
    """Outputs on a recurrent layer behind an encoder."""

    def __init__(
        self,
        env_spec: EnvSpec,
        encoder: Encoder,
        *,
        outputs: NetworkOutputs,
        kind: RecurrentKind,
        size: int,
        **options: Any,
    ) -> None:
        """Fit the observations and actions of ``env_spec``. ``options`` are those of the outputs."""
        super().__init__()
        self.encoder = encoder(env_spec)
        self.recurrent = MODULES[kind](num_features_of(self.encoder), size)
        self.outputs = OUTPUTS[outputs](size, env_spec, **options)

    @property
    def state_sizes(self) -> Mapping[str, int]:
        """The sizes of the recurrent layer's state."""
        return self.recurrent.state_sizes

    @override
    def forward(self, observation: Observation, state: State) -> tuple[Heads, State]:
        """Return the heads for N observations, and the next state: see ``RecurrentNetwork``."""
        state = self.recurrent(self.encoder(observation), state)
        return self.outputs(state["hidden"]), state

    def unroll(self, observation: Observation, state: State, is_first: Tensor) -> tuple[Heads, State]:
        """Return the heads for L frames of N environments, and the states: see ``networks.unrolled``."""
        frames = {path: array.flatten(0, 1) for path, array in observation.items()}
        features = self.encoder(in_preferred_layout(self.encoder, frames))
        states = self.recurrent.unroll(features.reshape(*is_first.shape, -1), state, is_first)
        heads = self.outputs(states["hidden"].flatten(0, 1))
        return {name: found.reshape(*is_first.shape, *found.shape[1:]) for name, found in heads.items()}, states

    def export_actor(self, layout: FlatLayout) -> ExportedActor | None:
        """Return the actor in its exported form, or None if the encoder has none."""
        if (dense := exported_inputs(self.encoder, "encoder", layout)) is None:
            return None
        encoder, encoders = dense
        return export_recurrent(
            encoder.layers,
            self.recurrent.kind,
            getattr(self.outputs, self.outputs.acting),
            names=("encoder.layers", "recurrent", f"outputs.{self.outputs.acting}"),
            layout=layout,
            observation=encoder.specs,
            encoders=encoders,
            **self.outputs.export_options("outputs"),
        )
