"""What is asked of whoever evaluates a policy, and what comes back. One form for inline and remote inference.

The answer is the parameters of the action distribution, not an action: the actor draws, from its own seeded noise. So
an actor's actions do not depend on where its policy was evaluated or with whom it shared a batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from rlsrl.data.specs import ActionSpec, Arrays, ArraySpec, EnvSpec, digest
from rlsrl.data.version import INITIAL, Version


@dataclass(frozen=True, kw_only=True, eq=False)
class RolloutRequest:
    """One frame of N lanes."""

    observation: Arrays
    """By path, each [N, ...]."""
    state: Arrays = field(default_factory=dict)
    """Recurrent state by path, each [N, ...]; empty for a policy without memory."""
    min_version: Version = INITIAL
    """The oldest weights that may answer: that of the slot's credit."""

    @property
    def num_lanes(self) -> int:
        """N of this request."""
        return int(next(iter(self.observation.values())).shape[0])


@dataclass(frozen=True, kw_only=True, eq=False)
class RolloutResult:
    """The policy's answer for the N lanes of one request."""

    distribution: NDArray[np.float32]
    """Parameters of the action distribution, [N, A]: see ``ActionSpec.distribution_size``."""
    state: Arrays = field(default_factory=dict)
    """Recurrent state after this frame, for the next request."""
    version: Version
    """The weights that were evaluated."""


def batch_observations(requests: Sequence[RolloutRequest]) -> Arrays:
    """The observations of all requests, by path, along the lanes: [sum of N, ...]. Of one request they are its own."""
    if len(requests) == 1:
        return requests[0].observation
    return {
        path: np.concatenate([request.observation[path] for request in requests]) for path in requests[0].observation
    }


def split_results(
    requests: Sequence[RolloutRequest], distribution: NDArray[np.float32], version: Version
) -> list[RolloutResult]:
    """Each request's part of what was computed of them ``together``, [sum of N, A]."""
    ends = accumulate((request.num_lanes for request in requests), initial=0)
    return [RolloutResult(distribution=distribution[a:b], version=version) for a, b in pairwise(ends)]


def distribution_size(action: ActionSpec) -> int:
    """A: a logit for each choice, or a mean and the logarithm of a deviation for each entry of the vector."""
    return action.num_actions if action.kind == "discrete" else 2 * math.prod(action.array.shape)


@dataclass(frozen=True, kw_only=True)
class InferenceLayout:
    """What stands in requests and results, a lane. Both ends of a stream compare theirs in the handshake."""

    observation: Mapping[str, ArraySpec]
    """By path."""
    distribution_size: int
    """A: parameters of one action's distribution."""
    state: Mapping[str, ArraySpec] = field(default_factory=dict)
    """Recurrent state by path; empty for a policy without memory."""

    @classmethod
    def of(cls, env: EnvSpec, state: Mapping[str, ArraySpec] | None = None) -> Self:
        """The layout for environments with that spec and a policy with that recurrent state."""
        return cls(observation=env.observation, distribution_size=env.action.distribution_size, state=state or {})

    @property
    def digest(self) -> str:
        """A short hash of paths, dtypes and shapes."""
        return digest(self.to_json())

    def to_json(self) -> dict[str, Any]:
        """A JSON value that ``from_json`` reads back; the order of paths is part of it."""
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

    def __str__(self) -> str:
        arrays = [f"{path} {spec.dtype}{list(spec.shape)}" for path, spec in {**self.observation, **self.state}.items()]
        return f"{', '.join(arrays)} -> {self.distribution_size} distribution parameters"
