"""What is asked of whoever evaluates a policy, and what comes back. One form for inline and remote inference.

The answer is the parameters of the action distribution, not an action: the actor draws, from its own seeded noise. So
an actor's actions do not depend on where its policy was evaluated or with whom it shared a batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rlsrl.data.specs import Arrays
from rlsrl.data.version import Version


@dataclass(frozen=True, kw_only=True, eq=False)
class RolloutRequest:
    """One frame of N lanes."""

    observation: Arrays
    """By path, each [N, ...]."""
    state: Arrays = field(default_factory=dict)
    """Recurrent state by path, each [N, ...]; empty for a policy without memory."""

    @property
    def num_lanes(self) -> int:
        """N of this request."""
        return int(next(iter(self.observation.values())).shape[0])


@dataclass(frozen=True, kw_only=True, eq=False)
class RolloutResult:
    """The policy's answer for the N lanes of one request."""

    distribution: NDArray[np.float32]
    """Parameters of the action distribution, [N, A]: logits for discrete actions."""
    state: Arrays = field(default_factory=dict)
    """Recurrent state after this frame, for the next request."""
    version: Version
    """The weights that were evaluated."""
