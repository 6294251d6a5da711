"""A policy that is a program: what a policy worker evaluates where the network exports one. numpy only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlsrl.data.inference import RolloutRequest, RolloutResult, batch_observations, split_results
from rlsrl.data.specs import Arrays
from rlsrl.parameters.protocols import Parameters
from rlsrl.policies.base import Policy
from rlsrl.policies.exported import DenseStack, DenseWeights, ExportedActor

MAX_SIZES = 64
"""Batch sizes whose memory is kept; actors of one kind ask in few."""


class NumpyPolicy(Policy):
    """Evaluates a program for any number of lanes."""

    def __init__(self, program: ExportedActor) -> None:
        self._program = program
        self._weights = DenseWeights(program)
        self._stacks: dict[int, DenseStack] = {}

    def load(self, parameters: Parameters) -> None:
        """Evaluate with these weights and statistics from now on.

        Raises:
            LayoutMismatch: they are of another network.
        """
        self._weights.load(parameters)

    def predict(self, requests: Sequence[RolloutRequest]) -> list[RolloutResult]:
        """Answer each request, in order, from one evaluation of all their lanes."""
        if (version := self._weights.version) is None:
            raise RuntimeError("load() comes before predict()")
        program, observation = self._program, batch_observations(requests)
        num_lanes = sum(request.num_lanes for request in requests)
        features = [observation[path].reshape(num_lanes, -1).T for path in program.observation]
        mask = None if program.head.mask is None else observation[program.head.mask].T
        distribution = np.empty((program.head.distribution_size, num_lanes), np.float32)
        self._stack(num_lanes).forward(features, distribution, mask)
        return split_results(requests, np.ascontiguousarray(distribution.T), version)

    def _stack(self, num_lanes: int) -> DenseStack:
        if num_lanes not in self._stacks:
            if len(self._stacks) == MAX_SIZES:
                self._stacks.clear()
            self._stacks[num_lanes] = DenseStack(self._weights, num_lanes)
        return self._stacks[num_lanes]

    def initial_state(self, num_envs: int) -> Arrays:
        """Empty: a program has no memory."""
        del num_envs
        return {}

    def export(self) -> ExportedActor:
        """Itself."""
        return self._program
