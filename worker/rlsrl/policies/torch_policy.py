"""Policies evaluated by torch: for training, for policy workers, and for actors whose network has no program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rlsrl.data.inference import RolloutRequest, RolloutResult, batch_observations, split_results
from rlsrl.data.slots import Slot
from rlsrl.data.specs import Arrays, EnvSpec
from rlsrl.data.version import Version
from rlsrl.parameters.protocols import Parameters
from rlsrl.policies.asking import AskingActor
from rlsrl.policies.base import Policy
from rlsrl.policies.device import all_to_device, assign, to_host
from rlsrl.policies.exported import ExportedActor, LayoutMismatch
from rlsrl.policies.functional import PureNetwork
from rlsrl.policies.networks import ActingNetwork, ExportableNetwork, Observation
from rlsrl.policies.normalization import Standardization, standardizations, standardized


class TorchPolicy(Policy):
    """A network with one set of weights loaded. Takes the network over: its parameters become views of one vector,
    where the network was made or moved to.
    """

    def __init__(self, network: nn.Module, env_spec: EnvSpec) -> None:
        self.env_spec = env_spec
        """What the policy acts on."""
        self.pure = PureNetwork(network)
        """The network as a function of any parameters, for the loss."""
        self.layout = self.pure.layout
        """How the parameters stand in the flat vector."""
        self._network = network
        self._vector = self.layout.flatten(network)
        self.device = self._vector.device
        """Where it is evaluated."""
        self._distribution: Callable[[Observation], Tensor] | None = None
        """Gives the distribution's parameters by what is loaded."""
        self._statistics: Arrays = {}
        self._standardizations: Mapping[str, Standardization] = {}
        self._version: Version | None = None
        for parameter, view in zip(network.parameters(), self.layout.split(self._vector), strict=True):
            parameter.data = view

    def parameters(self, version: Version) -> Parameters:
        """What is loaded, under that name, copied; at first the weights the network was made with, no statistics."""
        vector = to_host(self._vector).copy()
        vector.flags.writeable = False
        return Parameters(version=version, vector=vector, layout=self.layout.digest, statistics=self._statistics)

    def load(self, parameters: Parameters) -> None:
        """Evaluate with these weights and statistics from now on.

        Raises:
            LayoutMismatch: they are of another network.
        """
        if parameters.layout != self.layout.digest or parameters.vector.size != self.layout.num_parameters:
            raise LayoutMismatch(
                f"weights of layout {parameters.layout} ({parameters.vector.size} values) do not fit the network's "
                f"{self.layout.digest} ({self.layout.num_parameters})"
            )
        assign(self._vector, parameters.vector)
        self._distribution = _acting(self._network)
        self._statistics = parameters.statistics
        self._standardizations = standardizations(parameters.statistics, self.env_spec.observation)
        self._version = parameters.version

    def predict(self, requests: Sequence[RolloutRequest]) -> list[RolloutResult]:
        """Answer each request, in order, from one forward pass over all their lanes."""
        if self._version is None or self._distribution is None:
            raise RuntimeError("load() comes before predict()")
        with torch.inference_mode():
            observation = standardized(batch_observations(requests), self._standardizations)
            tensors = all_to_device(observation, self.device)
            distribution: NDArray[np.float32] = to_host(self._distribution(tensors))
        return split_results(requests, distribution, self._version)

    def initial_state(self, num_envs: int) -> Arrays:
        """Empty: the network has no memory."""
        del num_envs
        return {}

    def export(self) -> ExportedActor | None:
        """The actor as a program, if the network says how (``networks.ExportableNetwork``)."""
        network = self._network
        return network.export_actor(self.layout) if isinstance(network, ExportableNetwork) else None


def _acting(network: nn.Module) -> Callable[[Observation], Tensor]:
    """How its distribution is had."""
    return (
        network.prepared_actor() if isinstance(network, ActingNetwork) else lambda observation: network(observation)[0]
    )


class TorchActor:
    """Acts by evaluating a policy in this process: ``policies.acting.RolloutActor`` for networks without a program.

    Draws from the same noise as ``NumpyActor``: with equal generators both choose the same actions.
    """

    def __init__(
        self, policy: TorchPolicy, *, num_steps: int, num_lanes: int, rng: np.random.Generator, greedy: bool = False
    ) -> None:
        """Act for slots of ``num_steps`` steps and ``num_lanes`` lanes, with noise from ``rng``.

        ``greedy``: take the most probable action, as evaluation does.
        """
        self._policy = policy
        self._asking = AskingActor(policy.env_spec, num_steps=num_steps, num_lanes=num_lanes, rng=rng, greedy=greedy)

    def load(self, parameters: Parameters) -> None:
        """Act with these weights from the next step on.

        Raises:
            LayoutMismatch: they are of another network.
        """
        self._policy.load(parameters)

    def begin(self, slot: Slot) -> None:
        """Start on a slot: draw noise for all its steps."""
        self._asking.begin(slot)

    def act(self, step: int) -> NDArray[Any]:
        """Choose the actions of that step."""
        (answer,) = self._policy.predict([self._asking.ask(step)])
        return self._asking.act(step, answer)

    def finish(self) -> None:
        """Write ``behavior_log_prob`` of all steps."""
        self._asking.finish()
