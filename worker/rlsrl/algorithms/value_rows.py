"""What losses of action values compute with: drawn transitions, or for recurrent networks drawn sequences of steps.

Losses compute with steps alone: a minibatch of M transitions has M of them, one of M sequences T each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from rlsrl.algorithms.base import INDEX, WEIGHT, Batch, Reduce, Tensors
from rlsrl.algorithms.rows import IMPORTANCE_EXPONENT, corrected_weights, drawn_batch, drawn_schedule
from rlsrl.algorithms.unrolling import Unrolling
from rlsrl.buffers.replay.rows import FOLLOWING, IMPORTANCE, NEXT
from rlsrl.data.sequences import HAS_BURN_IN
from rlsrl.data.specs import Arrays
from rlsrl.policies.device import to_device
from rlsrl.policies.networks import Heads
from rlsrl.policies.torch_policy import TorchPolicy

_MASK = "mask"


@dataclass(frozen=True, kw_only=True, eq=False)
class ValuedSteps:
    """S steps of a minibatch, with what networks say of them."""

    heads: Heads
    """Of the network, for the observations that were acted on, [S, ...]."""
    following: Heads
    """Of the target network, for those that the steps led to, without gradients."""
    chooser: Heads
    """Those that choose the next action, for the same observations, without gradients: see ``ValueRows.valued``."""
    steps: Tensors
    """``action``, ``reward`` and ``discount``, [S, ...]: see ``rlsrl.buffers.replay.rows``."""
    mean: Tensor
    """Weights, [S], with which sums over all ranks are means."""
    weight: Tensor
    """The same, corrected for draws by priority."""


class ValueRows(ABC):
    """Makes minibatches of rows that were drawn from a store, and evaluates a network on them."""

    def __init__(self, policy: TorchPolicy, *, minibatch_size: int, num_ranks: int, double: bool) -> None:
        """Use the network of ``policy``.

        Args:
            policy: Whose network is trained.
            minibatch_size: Steps of a minibatch, of all ranks together.
            num_ranks: Ranks that share each minibatch evenly.
            double: Whether the network chooses the actions that the target network values.
        """
        self._network = policy.pure
        self._device = policy.device
        self._observation = tuple(policy.env_spec.observation)
        self._share = minibatch_size // num_ranks
        self._num_ranks = num_ranks
        self._double = double

    @abstractmethod
    def batch(self, rows: Arrays) -> Batch:
        """Return the batch of rows as they were drawn.

        Raises:
            ValueError: they do not fill minibatches.
        """

    @abstractmethod
    def schedule(self, batch: Batch, reduce: Reduce) -> Tensors:
        """Return the minibatches of a batch, in the order of its rows."""

    @abstractmethod
    def valued(self, vector: Tensor, target: Tensor, minibatch: Tensors) -> ValuedSteps:
        """Evaluate the network with the parameters ``vector`` and with those of its ``target``. PURE, as losses are."""

    @abstractmethod
    def errors(self, of_steps: Tensor, minibatch: Tensors) -> Tensor:
        """Return the error by which each row is drawn again, [M], from those of its steps, [S]."""


class TransitionRows(ValueRows):
    """A row is a transition, and a step."""

    @override
    def batch(self, rows: Arrays) -> Batch:
        return drawn_batch(rows, self._device)

    @override
    def schedule(self, batch: Batch, reduce: Reduce) -> Tensors:
        return drawn_schedule(batch, size=self._share, num_ranks=self._num_ranks)

    @override
    def valued(self, vector: Tensor, target: Tensor, minibatch: Tensors) -> ValuedSteps:
        heads = self._network(vector, minibatch)
        with torch.no_grad():
            following = {name: minibatch[NEXT + name] for name in self._observation}
            of_target = self._network(target, following)
            chooser = self._network(vector, following) if self._double else of_target
        return ValuedSteps(
            heads=heads,
            following=of_target,
            chooser=chooser,
            steps=minibatch,
            mean=minibatch[WEIGHT],
            weight=corrected_weights(minibatch),
        )

    @override
    def errors(self, of_steps: Tensor, minibatch: Tensors) -> Tensor:
        return of_steps


class DrawnSequences(ValueRows):
    """A row is a sequence of T steps.

    R2D2 (Kapturowski et al. 2019, "Recurrent experience replay in distributed reinforcement learning"). The network and
    its target each unroll it from the state with which the actor began it, after a burn-in if there is one.
    """

    def __init__(
        self,
        policy: TorchPolicy,
        *,
        minibatch_size: int,
        num_ranks: int,
        double: bool,
        largest_error_weight: float,
    ) -> None:
        """See ``ValueRows``.

        Args:
            policy: Whose network is trained.
            minibatch_size: Steps of a minibatch, of all ranks together.
            num_ranks: Ranks that share each minibatch evenly.
            double: Whether the network chooses the actions that the target network values.
            largest_error_weight: Of a sequence's largest error in the one by which it is drawn; its mean error has the
                rest.
        """
        super().__init__(policy, minibatch_size=minibatch_size, num_ranks=num_ranks, double=double)
        self._unrolling = Unrolling(policy)
        self._largest_error_weight = largest_error_weight

    @override
    def batch(self, rows: Arrays) -> Batch:
        mask = rows[_MASK]
        if self._share % mask.shape[1]:
            raise ValueError(f"sequences of {mask.shape[1]} steps must divide minibatches of {self._share}")
        inputs = {IMPORTANCE: rows[IMPORTANCE], _MASK: mask}
        return Batch(
            rows={name: to_device(array, self._device) for name, array in rows.items() if name not in inputs},
            schedule_inputs=inputs,
            num_transitions=int(np.count_nonzero(mask)),
        )

    @override
    def schedule(self, batch: Batch, reduce: Reduce) -> Tensors:
        """As ``ValueRows.schedule``: ``WEIGHT`` has the steps of each row, [K, M, T]."""
        mask = batch.schedule_inputs[_MASK]
        size = self._share // mask.shape[1]
        valid = mask.reshape(-1, size, mask.shape[1])
        count = np.maximum(reduce(valid.sum(axis=(1, 2)).astype(np.float64)), 1.0)
        return {
            INDEX: torch.arange(len(mask)).reshape(-1, size),
            WEIGHT: torch.from_numpy((valid / count[:, np.newaxis, np.newaxis]).astype(np.float32)),
            IMPORTANCE: torch.from_numpy(batch.schedule_inputs[IMPORTANCE].reshape(-1, size)),
        }

    @override
    def valued(self, vector: Tensor, target: Tensor, minibatch: Tensors) -> ValuedSteps:
        burn_in = minibatch["reward"].shape[1] if HAS_BURN_IN in minibatch else 0
        heads = self._unrolling.after_burn_in(vector, minibatch, burn_in)
        place = minibatch[FOLLOWING].T
        with torch.no_grad():
            of_target = _frames_at(self._unrolling.after_burn_in(target, minibatch, burn_in), place)
            own = {name: tensor.detach() for name, tensor in heads.items()}
            chooser = _frames_at(own, place) if self._double else of_target
        importance = minibatch[IMPORTANCE] ** minibatch[IMPORTANCE_EXPONENT]
        return ValuedSteps(
            heads={name: tensor[:-1].flatten(0, 1) for name, tensor in heads.items()},
            following=of_target,
            chooser=chooser,
            steps={name: _steps(minibatch[name]) for name in ("action", "reward", "discount")},
            mean=_steps(minibatch[WEIGHT]),
            weight=_steps(minibatch[WEIGHT] * importance.unsqueeze(-1)),
        )

    @override
    def errors(self, of_steps: Tensor, minibatch: Tensors) -> Tensor:
        """As ``ValueRows.errors``: ``eta max_t |error_t| + (1 - eta) mean_t |error_t|`` (section 2.3)."""
        is_transition = (minibatch[WEIGHT] > 0.0).T
        error = of_steps.reshape(is_transition.shape) * is_transition
        mean = error.sum(dim=0) / is_transition.sum(dim=0).clamp(min=1)
        return torch.lerp(mean, error.amax(dim=0), self._largest_error_weight)


def _steps(tensor: Tensor) -> Tensor:
    """Return the steps of sequences, [M, T, ...], as [T * M, ...]."""
    return tensor.transpose(0, 1).flatten(0, 1)


def _frames_at(heads: Heads, place: Tensor) -> Heads:
    """Return the heads, each [T + 1, M, ...], of the frames at these places, [T, M], as [T * M, ...]."""
    found = {}
    for name, tensor in heads.items():
        index = place.reshape(*place.shape, *(1,) * (tensor.dim() - 2)).expand(*place.shape, *tensor.shape[2:])
        found[name] = tensor.gather(0, index).flatten(0, 1)
    return found
