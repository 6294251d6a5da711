"""A version's policy as one torch module, from raw observations to the most probable actions of the action space.

A recurrent policy takes its state beside the observations, and returns the next one beside the actions. Programs
without rlsrl act with it once it is written as a torch program or an ONNX graph.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from typing_extensions import override

from rlsrl.data.slots import state_field
from rlsrl.data.specs import ActionPart, Arrays, EnvSpec
from rlsrl.envs.interface import EnvironmentInterface
from rlsrl.envs.spaces import action_leaves
from rlsrl.policies.networks import Observation, acting_head, state_sizes_of
from rlsrl.policies.normalization import CLIP_RANGE, Standardization, standardizations


class StandalonePolicy(nn.Module):
    """Normalisation, network, mask, choice of the most probable action, and the scaling to the action space."""

    def __init__(self, network: nn.Module, interface: EnvironmentInterface, statistics: Arrays) -> None:
        """Take a network with a version's weights, and the version's statistics."""
        super().__init__()
        spec: EnvSpec = interface.spec
        self.network = copy.deepcopy(network)
        for parameter in self.network.parameters():
            parameter.data = parameter.data.clone()  # those of a policy are views of one vector
            parameter.requires_grad = False
        found = standardizations(statistics, spec.observation)
        self._places = {path: place for place, path in enumerate(found)}
        self.normalizations = nn.ModuleList(Normalization(each) for each in found.values())
        self._state = tuple(state_sizes_of(network))
        self._parts = spec.action.parts
        is_scaled = interface.vector_actions != "gaussian"
        leaves = action_leaves(interface.action_space)
        self._outputs = tuple(leaves)
        self._leaves = tuple(ActionLeaf(space, is_scaled=is_scaled) for space in leaves.values())
        self.leaves = nn.ModuleList(self._leaves)

    @override
    def forward(self, observation: Observation) -> dict[str, Tensor]:
        """Return the arrays of the actions by path, [N, ...], and the network's acting head, [N, A], by its name.

        ``observation`` has the raw arrays of ``EnvSpec.observation`` by path, [N, *shape]. A recurrent policy
        finds its state there, too (``state_field``), and returns the next one under ``next_state_field``.
        """
        fields = {name: state_field(name) for name in self._state}
        inputs = {
            path: self.normalizations[self._places[path]](array) if path in self._places else array
            for path, array in observation.items()
            if path not in fields.values()
        }
        following = {}
        if fields:
            heads, state = self.network(inputs, {name: observation[field] for name, field in fields.items()})
            following = {next_state_field(name): state[name] for name in fields}
        else:
            heads = self.network(inputs)
        head = acting_head(heads)
        chosen = most_probable(self._parts, heads[head])
        actions, begin = {}, 0
        for path, leaf in zip(self._outputs, self._leaves, strict=True):
            actions[path] = leaf(chosen[begin : begin + leaf.num_parts])
            begin += leaf.num_parts
        return {**actions, **following, head: heads[head]}


def next_state_field(name: str) -> str:
    """Return the name of the output with the next state of that name."""
    return f"next_{state_field(name)}"


class Normalization(nn.Module):
    """Computes (x - mean) * scale within ``CLIP_RANGE``, as ``rlsrl.policies.normalization`` does."""

    mean: Tensor
    scale: Tensor

    def __init__(self, found: Standardization) -> None:
        super().__init__()
        self.register_buffer("mean", torch.from_numpy(np.array(found.mean)))
        self.register_buffer("scale", torch.from_numpy(np.array(found.scale)))

    @override
    def forward(self, values: Tensor) -> Tensor:
        """[N, *shape] -> [N, *shape] float32."""
        return ((values.to(torch.float32) - self.mean) * self.scale).clamp(-float(CLIP_RANGE), float(CLIP_RANGE))


class ActionLeaf(nn.Module):
    """Makes one array of an action from the entries of its parts, in the space's dtype and shape."""

    def __init__(self, space: spaces.Space[Any], *, is_scaled: bool) -> None:
        """``is_scaled``: entries are within [-1, 1] and are scaled to the bounds; otherwise they are cut to them."""
        super().__init__()
        self.num_parts = space.nvec.size if isinstance(space, spaces.MultiDiscrete) else 1
        self._shape = tuple(space.shape or ())
        self._dtype = torch.from_numpy(np.zeros(0, space.dtype)).dtype
        self._is_scaled = is_scaled
        self._is_vector = isinstance(space, spaces.Box)
        if isinstance(space, spaces.Box):
            low, high = space.low, space.high
            names = {"low": low, "high": high, "centre": low / 2 + high / 2, "half_range": high / 2 - low / 2}
            for name, array in names.items():
                self.register_buffer(name, torch.from_numpy(np.array(array)))
        else:
            start = np.zeros(self._shape) if isinstance(space, spaces.MultiBinary) else space.start  # type: ignore[attr-defined]
            self.register_buffer("start", torch.from_numpy(np.array(start, space.dtype)))

    @override
    def forward(self, entries: Sequence[Tensor]) -> Tensor:
        """[N, entries] for each part -> [N, *shape]."""
        joined = torch.cat(list(entries), dim=1) if len(entries) > 1 else entries[0]
        array = joined.to(self._dtype).reshape(-1, *self._shape)
        if not self._is_vector:
            return array + self.get_buffer("start")
        if self._is_scaled:
            array = self.get_buffer("centre") + self.get_buffer("half_range") * array
        return torch.minimum(torch.maximum(array, self.get_buffer("low")), self.get_buffer("high"))


def most_probable(parts: Sequence[ActionPart], outputs: Tensor) -> list[Tensor]:
    """Return the entries of each part's most probable choice, [N, entries], for the acting head's outputs, [N, A].

    As the samplers of ``rlsrl.policies.sampling`` without noise.
    """
    begins = [0, *accumulate(part.num_parameters for part in parts)]
    return [
        _most_probable(part, outputs[:, begin : begin + part.num_outputs])
        for part, (begin, _) in zip(parts, pairwise(begins), strict=True)
    ]


def _most_probable(part: ActionPart, outputs: Tensor) -> Tensor:
    """``outputs`` are the part's logits or means."""
    if part.kind == "categorical":
        return outputs.argmax(dim=1, keepdim=True)
    if part.kind == "bernoulli":
        return (outputs > 0).to(torch.int64)
    if part.kind == "squashed":
        return torch.tanh(outputs)
    return outputs.clamp(-1.0, 1.0) if part.kind == "clipped" else outputs
