"""Drawing actions from distribution parameters, one rollout at a time. numpy only.

Noise is drawn once a rollout and log-probabilities are computed once at its end; a step is one addition and one argmax.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

SMALLEST = np.finfo(np.float32).tiny
"""Keeps the logarithm of an exponential draw finite: a draw can be exactly 0."""


class CategoricalSampler:
    """Draws from softmax(logits) by the Gumbel-max trick: argmax(logits + Gumbel noise) has that distribution."""

    def __init__(
        self, *, num_steps: int, num_lanes: int, num_actions: int, rng: np.random.Generator, greedy: bool
    ) -> None:
        """``greedy``: no noise, so the most probable action is chosen and ``rng`` is not used."""
        self.logits: Floats = np.zeros((num_steps, num_actions, num_lanes), np.float32)
        """Logits of the rollout, [T, A, N]: step t is written here before ``choose(t)``."""
        self._rng = None if greedy else rng
        self._noise: Floats = np.zeros_like(self.logits)
        self._steps = list(zip(self.logits, self._noise, strict=True))
        self._perturbed: Floats = np.empty((num_actions, num_lanes), np.float32)

    def begin(self) -> None:
        """Draw the noise of a whole rollout."""
        if self._rng is None:
            return
        noise = self._noise
        self._rng.standard_exponential(out=noise, dtype=np.float32)
        np.maximum(noise, SMALLEST, out=noise)
        np.log(noise, out=noise)
        np.negative(noise, out=noise)

    def choose(self, step: int, out: NDArray[Any]) -> None:
        """Write the actions of that step, [N] int64, from its logits."""
        logits, noise = self._steps[step]
        np.add(logits, noise, out=self._perturbed)
        self._perturbed.argmax(0, out=out)

    def log_probs(self, actions: NDArray[Any], out: Floats) -> None:
        """Write the log-probability of each of the rollout's actions, both [T, N]."""
        shifted = self.logits - self.logits.max(axis=1, keepdims=True)
        chosen = np.take_along_axis(shifted, actions[:, np.newaxis], axis=1)[:, 0]
        np.subtract(chosen, np.log(np.exp(shifted).sum(axis=1)), out=out)
