"""A policy that torch evaluates: for training, for policy workers, and for actors whose network is not exported."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from typing_extensions import override

from rlsrl.api.spec import NetworkOutputs
from rlsrl.data.inference import RolloutRequest, RolloutResult, batch_observations, batch_states, split_results
from rlsrl.data.specs import Arrays, EnvSpec, state_specs
from rlsrl.data.version import Version
from rlsrl.parameters.protocols import Parameters
from rlsrl.policies.acting import Policy
from rlsrl.policies.device import all_to_device, assign, to_host
from rlsrl.policies.epsilon_greedy import epsilon_of, values_to_logits
from rlsrl.policies.exploration import is_uniform, log_deviation_of, make_uniform
from rlsrl.policies.export import ExportMismatch
from rlsrl.policies.exported import ExportedActor, LayoutMismatch
from rlsrl.policies.functional import PureNetwork
from rlsrl.policies.networks import (
    ActingNetwork,
    ExportableNetwork,
    Observation,
    acting_output,
    state_sizes_of,
)
from rlsrl.policies.normalization import Standardization, standardizations, standardized
from rlsrl.policies.recorded import RecordedEvaluation


class TorchPolicy(Policy):
    """A network with one set of weights loaded.

    It takes the network over: the network's parameters become views of one vector, on the network's device.
    """

    def __init__(self, network: nn.Module, env_spec: EnvSpec, *, outputs: NetworkOutputs = "policyAndValue") -> None:
        """If the network's ``outputs`` are the values of actions, the policy is epsilon-greedy."""
        self._has_values = outputs == "actionValues"
        self.env_spec = env_spec
        """The spec of the environments that the policy acts in."""
        self._distribution_size = env_spec.action.distribution_size
        self.pure = PureNetwork(network)
        """The network as a function of any parameters, for the loss."""
        self.layout = self.pure.layout
        """The places of the parameters in the flat vector."""
        self.network = network
        """The network itself: its parameters are views of the loaded weights."""
        self._vector = self.layout.flatten(network)
        self.device = self._vector.device
        """The device that evaluates the network."""
        self.state = state_specs(state_sizes_of(network))
        self.is_quick = self.device.type == "cuda"
        records = self.is_quick and not self.state
        self._recorded = RecordedEvaluation(network, self.device) if records else None
        self._distribution: Callable[[Observation], Tensor] | None = None
        """Computes distribution parameters or values with the loaded weights; None before the first ``load``."""
        self._statistics: Arrays = {}
        self._epsilon = 0.0
        self._log_deviation = np.float32(0.0)
        self._is_uniform = False
        self._standardizations: Mapping[str, Standardization] = {}
        self._version: Version | None = None
        for parameter, view in zip(network.parameters(), self.layout.split(self._vector), strict=True):
            parameter.data = view

    def parameters(self, version: Version) -> Parameters:
        """Return a copy of the loaded weights under that version.

        Before the first ``load`` these are the network's initial weights, without statistics.
        """
        vector = to_host(self._vector).copy()
        vector.flags.writeable = False
        return Parameters(version=version, vector=vector, layout=self.layout.digest, statistics=self._statistics)

    @override
    def load(self, parameters: Parameters) -> None:
        if parameters.layout != self.layout.digest or parameters.vector.size != self.layout.num_parameters:
            raise LayoutMismatch(
                f"weights of layout {parameters.layout} ({parameters.vector.size} values) do not fit the network's "
                f"{self.layout.digest} ({self.layout.num_parameters})"
            )
        assign(self._vector, parameters.vector)
        self._distribution = _distribution_function(self.network)
        self._statistics = parameters.statistics
        self._epsilon = epsilon_of(parameters.statistics)
        self._log_deviation = log_deviation_of(parameters.statistics)
        self._is_uniform = is_uniform(parameters.statistics)
        self._standardizations = standardizations(parameters.statistics, self.env_spec.observation)
        self._version = parameters.version

    @override
    def predict(self, requests: Sequence[RolloutRequest]) -> list[RolloutResult]:
        distribution, state = self.network_output(requests)
        assert self._version is not None, "loaded"
        if (missing := self._distribution_size - distribution.shape[1]) > 0:
            deviations = np.full((len(distribution), missing), self._log_deviation)
            distribution = np.concatenate([distribution, deviations], axis=1)
        if self._has_values or self._is_uniform:
            distribution = distribution.copy()
        if self._has_values:
            values_to_logits(distribution.T, self._epsilon)
        if self._is_uniform:
            make_uniform(distribution.T, self.env_spec.action.parts)
        return split_results(requests, distribution, self._version, state)

    def network_output(self, requests: Sequence[RolloutRequest]) -> tuple[NDArray[np.float32], Arrays]:
        """Return what the network says of actions, [N, A], for all lanes of the requests, and their next states.

        The first are parameters of the action distribution, without the deviations of a version, or the values of
        actions. States are by name, each [N, size]; a policy without a state has an empty mapping.
        """
        if self._distribution is None:
            raise RuntimeError("load() comes before predict()")
        by_path = self._standardizations
        distribution = None if self._recorded is None else self._recorded.evaluate(requests, by_path)
        if distribution is not None:
            return distribution, {}
        with torch.inference_mode():
            tensors = all_to_device(standardized(batch_observations(requests), by_path), self.device)
            if not self.state:
                return to_host(self._distribution(tensors)), {}
            heads, state = self.network(tensors, all_to_device(batch_states(requests), self.device))
            return to_host(acting_output(heads)), {name: to_host(tensor) for name, tensor in state.items()}

    @override
    def export(self) -> ExportedActor | None:
        network, parts = self.network, self.env_spec.action.parts
        exported = network.export_actor(self.layout) if isinstance(network, ExportableNetwork) else None
        if exported is not None and exported.head.parts != parts:
            raise ExportMismatch(
                f"the exported actor chooses {exported.head.parts}; the environment's actions are {parts}. Pass "
                "action=env_spec.action to export_dense()"
            )
        if exported is not None and exported.state != self.state:
            raise ExportMismatch(
                f"the exported actor has the state {sorted(exported.state)}, and the network {sorted(self.state)}; "
                "export_recurrent() exports a state that is named hidden, and cell of an LSTM"
            )
        return exported


def _distribution_function(network: nn.Module) -> Callable[[Observation], Tensor]:
    """Return the network's cheapest way to the distribution parameters, or the values of actions."""
    if isinstance(network, ActingNetwork):
        return network.prepared_actor()
    return lambda observation: acting_output(network(observation))
