"""A network as a pure function of its flat parameter vector."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor, nn

from rlsrl.policies.flat import FlatLayout
from rlsrl.policies.networks import (
    Heads,
    Observation,
    PreferredLayoutNetwork,
    State,
    state_sizes_of,
    unrolled,
)

_Found = TypeVar("_Found")


class PureNetwork:
    """Computes ``(vector, observation) -> heads`` by an ``nn.Module`` (``networks.PolicyNetwork``).

    It does what ``torch.func.functional_call`` does, for one module and one layout, without resolving names at each
    call: that costs more than a small network's forward. A call changes the module and restores it afterwards. So one
    thread uses it; another thread needs an instance and a network of its own.
    """

    def __init__(self, network: nn.Module) -> None:
        self.layout = FlatLayout.of(network)
        self._network = network
        order = {id(parameter): place for place, (_, parameter) in enumerate(network.named_parameters())}
        self._places = [
            (module._parameters, name, order[id(parameter)])  # noqa: SLF001 - as torch.func does
            for module in network.modules()
            for name, parameter in module._parameters.items()  # noqa: SLF001
            if parameter is not None
        ]

    @property
    def is_recurrent(self) -> bool:
        """Whether the network is recurrent: ``unroll`` evaluates it, and a call does not."""
        return bool(state_sizes_of(self._network))

    def __call__(self, vector: Tensor, observation: Observation) -> Heads:
        """Evaluate the network with these parameters, [num_parameters]. Gradients flow into the vector."""
        return self._with(vector, lambda network: network(observation))

    def unroll(self, vector: Tensor, observation: Observation, state: State, is_first: Tensor) -> tuple[Heads, State]:
        """Evaluate a recurrent network with these parameters on frames in order: see ``networks.unrolled``."""
        return self._with(vector, lambda network: unrolled(network, observation, state, is_first))

    def _with(self, vector: Tensor, evaluate: Callable[[nn.Module], _Found]) -> _Found:
        """Return what ``evaluate`` does while the vector's parts stand in for the network's parameters."""
        parts = self.layout.split(vector)
        own = [holder[name] for holder, name, _ in self._places]
        try:
            for holder, name, place in self._places:
                holder[name] = parts[place]  # type: ignore[assignment]  # a view stands in for the nn.Parameter
            return evaluate(self._network)
        finally:
            for (holder, name, _), parameter in zip(self._places, own, strict=True):
                holder[name] = parameter

    def to_preferred_layout(self, observation: Observation) -> Observation:
        """Return the same arrays, in the memory layout that the network prefers."""
        return (
            self._network.to_preferred_layout(observation)
            if isinstance(self._network, PreferredLayoutNetwork)
            else observation
        )
