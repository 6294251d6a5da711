"""Requests for an evaluation of the policy, and their results. Inline and remote inference use the same records.

A result holds the parameters of the action distribution, not an action: the actor draws from its own seeded noise. So
an actor's actions depend neither on where its policy is evaluated nor on the other requests of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from rlsrl.data.specs import Arrays, ArraySpec, EnvSpec, digest
from rlsrl.data.version import INITIAL, Version


@dataclass(frozen=True, kw_only=True, eq=False)
class RolloutRequest:
    """One frame of N lanes."""

    observation: Arrays
    """Observation arrays by path, each [N, ...]."""
    state: Arrays = field(default_factory=dict)
    """Recurrent state by path, each [N, ...]; empty for a policy without memory."""
    min_version: Version = INITIAL
    """The oldest weights that may answer: the minimum version of the slot."""

    @property
    def num_lanes(self) -> int:
        """N of this request."""
        return int(next(iter(self.observation.values())).shape[0])


@dataclass(frozen=True, kw_only=True, eq=False)
class RolloutResult:
    """The result for the N lanes of one request."""

    distribution: NDArray[np.float32]
    """Parameters of the action distribution, [N, A]: see ``ActionSpec.distribution_size``."""
    state: Arrays = field(default_factory=dict)
    """Recurrent state after this frame, for the next request."""
    version: Version
    """The version of the weights that were evaluated."""


def batch_observations(requests: Sequence[RolloutRequest]) -> Arrays:
    """Concatenate the observations of all requests along the lanes: by path, [sum of N, ...].

    The arrays of a single request are returned as they are.
    """
    return _joined([request.observation for request in requests])


def batch_states(requests: Sequence[RolloutRequest]) -> Arrays:
    """Concatenate the recurrent states of all requests, as ``batch_observations`` does."""
    return _joined([request.state for request in requests])


def _joined(parts: Sequence[Arrays]) -> Arrays:
    if len(parts) == 1:
        return parts[0]
    return {path: np.concatenate([part[path] for part in parts]) for path in parts[0]}


def split_results(
    requests: Sequence[RolloutRequest], distribution: NDArray[np.float32], version: Version, state: Arrays | None = None
) -> list[RolloutResult]:
    """Return each request's part of what was computed from ``batch_observations`` and ``batch_states``.

    ``distribution`` is [sum of N, A], and each array of ``state`` [sum of N, ...]; None without recurrent state.
    """
    ends = accumulate((request.num_lanes for request in requests), initial=0)
    if not state:
        return [RolloutResult(distribution=distribution[a:b], version=version) for a, b in pairwise(ends)]
    return [
        RolloutResult(
            distribution=distribution[a:b],
            state={name: array[a:b] for name, array in state.items()},
            version=version,
        )
        for a, b in pairwise(ends)
    ]


@dataclass(frozen=True, kw_only=True)
class InferenceLayout:
    """The arrays of requests and results, per lane. Both ends of a stream compare their layouts in the handshake."""

    observation: Mapping[str, ArraySpec]
    """Observation specs by path."""
    distribution_size: int
    """A: parameters of one action's distribution."""
    state: Mapping[str, ArraySpec] = field(default_factory=dict)
    """Recurrent state by path; empty for a policy without memory."""

    @classmethod
    def of(cls, env: EnvSpec, state: Mapping[str, ArraySpec] | None = None) -> Self:
        """Return the layout for environments with that spec and a policy with that recurrent state."""
        return cls(observation=env.observation, distribution_size=env.action.distribution_size, state=state or {})

    @property
    def digest(self) -> str:
        """A short hash of paths, dtypes and shapes."""
        return digest(self.to_json())

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value that ``from_json`` reads back. It keeps the order of paths."""
        return {
            "observation": [[path, spec.to_json()] for path, spec in self.observation.items()],
            "distribution_size": self.distribution_size,
            "state": [[path, spec.to_json()] for path, spec in self.state.items()],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read what ``to_json`` wrote.

        Raises:
            KeyError, TypeError, ValueError: the value is not a layout.
        """
        return cls(
            observation={str(path): ArraySpec.from_json(spec) for path, spec in value["observation"]},
            distribution_size=int(value["distribution_size"]),
            state={str(path): ArraySpec.from_json(spec) for path, spec in value["state"]},
        )

    @override
    def __str__(self) -> str:
        arrays = [f"{path} {spec.dtype}{list(spec.shape)}" for path, spec in {**self.observation, **self.state}.items()]
        return f"{', '.join(arrays)} -> {self.distribution_size} distribution parameters"
