"""Evaluate recurrent networks on sequences of frames."""

from __future__ import annotations

import torch
from torch import Tensor

from rlsrl.algorithms.base import Tensors
from rlsrl.data.sequences import HAS_BURN_IN, IS_FIRST
from rlsrl.data.slots import state_field
from rlsrl.policies.networks import Heads
from rlsrl.policies.torch_policy import TorchPolicy


class Unrolling:
    """Evaluates a policy's recurrent network on sequences of N lanes. PURE, as losses are."""

    def __init__(self, policy: TorchPolicy) -> None:
        self._network = policy.pure
        self.observation = tuple(policy.env_spec.observation)
        """Paths of the observations."""
        self.state = tuple(policy.state)
        """Names of the state's arrays."""

    def unroll(self, vector: Tensor, frames: Tensors, state: Tensors) -> tuple[Heads, Tensors]:
        """Return the heads of L frames, [L, N, ...], and the state after each, [L, N, size].

        ``frames``: observations and ``IS_FIRST``, [N, L, ...]; ``state``: before them, by name, [N, size].
        """
        observation = {path: frames[path].transpose(0, 1) for path in self.observation}
        return self._network.unroll(vector, observation, state, frames[IS_FIRST].transpose(0, 1))

    def after_burn_in(self, vector: Tensor, rows: Tensors, burn_in: int) -> Heads:
        """Return the heads of the frames after the first ``burn_in``, [L - burn_in, N, ...].

        The first frames only give the state with which the others are seen, without gradients (Kapturowski et al. 2019,
        section 3.1).

        ``rows``: observations and ``IS_FIRST``, [N, L, ...]; ``state/...`` before the first frame, or after the burn-in
        where ``HAS_BURN_IN`` is False.
        """
        state = {name: rows[state_field(name)] for name in self.state}
        frames = {path: rows[path] for path in (*self.observation, IS_FIRST)}
        if burn_in:
            before = {path: tensor[:, :burn_in] for path, tensor in frames.items()}
            frames = {path: tensor[:, burn_in:] for path, tensor in frames.items()}
            _, states = self.unroll(vector.detach(), before, state)
            has = rows[HAS_BURN_IN].unsqueeze(-1)
            state = {name: torch.where(has, states[name][-1], tensor) for name, tensor in state.items()}
        heads, _ = self.unroll(vector, frames, state)
        return heads
