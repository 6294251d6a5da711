"""How the steps of a batch become rows: one for each step, or, for recurrent networks, one for each sequence.

Algorithms compute with steps alone: for a recurrent network only its evaluation differs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from rlsrl.algorithms.base import Tensors
from rlsrl.algorithms.rows import actions_of_frames, as_rows, check_divides, frame_rows, step_rows
from rlsrl.algorithms.unrolling import Unrolling
from rlsrl.api.spec import ActorCriticSettings
from rlsrl.data.sequences import HAS_BURN_IN, IS_FIRST, first_frames
from rlsrl.data.slots import is_state_field, state_field
from rlsrl.data.specs import Arrays
from rlsrl.policies.device import to_device, to_host
from rlsrl.policies.networks import Heads
from rlsrl.policies.torch_policy import TorchPolicy

StepOutputs = Callable[[Heads, Tensors], Tensors]
"""Computes what is needed of steps, each [N], from their heads and rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequences:
    """What a recurrent network is trained on."""

    length: int
    """Steps of a sequence."""
    burn_in: int = 0
    """Frames before each sequence, at most its length."""


class TrainingRows(ABC):
    """Makes the rows of T steps of B lanes, and evaluates the policy's network on them."""

    compiles_evaluation: bool
    """See ``Algorithm.compiles_evaluation``."""

    def __init__(self, policy: TorchPolicy) -> None:
        self._network = policy.pure
        self._device = policy.device
        self._observation = tuple(policy.env_spec.observation)

    @abstractmethod
    def check(self, mask: NDArray[np.bool_]) -> None:
        """Raise an error unless the batch of this ``mask``, [T, B], has whole minibatches.

        Raises:
            ValueError: the batch does not divide.
        """

    @property
    @abstractmethod
    def minibatch_rows(self) -> int:
        """Rows of a minibatch."""

    @abstractmethod
    def frames(self, slots: Arrays) -> Tensors:
        """Return what ``evaluate`` needs of all T + 1 frames of B lanes: actions, observations, states."""

    @abstractmethod
    def evaluate(self, vector: Tensor, frames: Tensors, outputs: StepOutputs) -> Tensors:
        """Return ``outputs`` for each frame, by the policy's parameters. PURE, as losses are."""

    @abstractmethod
    def of_frames(self, evaluated: Tensor, num_steps: int) -> NDArray[Any]:
        """Return one of the ``outputs`` of ``evaluate`` as [T + 1, B]."""

    @abstractmethod
    def batch_rows(
        self, frames: Tensors, evaluated: Tensors, num_steps: int, *, outputs: Collection[str] = ()
    ) -> dict[str, Tensor]:
        """Return the rows of the batch: actions, what ``heads`` needs, and those ``outputs`` of ``evaluate``."""

    @abstractmethod
    def of_steps(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return an array of steps, [T, B], by row."""

    @abstractmethod
    def heads(self, vector: Tensor, minibatch: Tensors) -> tuple[Heads, Tensors]:
        """Return the network's heads for each step of a minibatch, and the minibatch by step. PURE, as losses are.

        All tensors of steps are [N, ...]; the coefficients are as they were.
        """

    def to_device(self, array: NDArray[Any]) -> Tensor:
        """Return an array of steps, [T, B], as a tensor by row."""
        return to_device(self.of_steps(array), self._device)


class StepRows(TrainingRows):
    """A row is a step, time first."""

    compiles_evaluation = True

    def __init__(self, policy: TorchPolicy, *, minibatch_size: int) -> None:
        """``minibatch_size``: steps of this rank's share of a minibatch."""
        super().__init__(policy)
        self._minibatch_size = minibatch_size

    @override
    def check(self, mask: NDArray[np.bool_]) -> None:
        check_divides(mask, self._minibatch_size)

    @property
    @override
    def minibatch_rows(self) -> int:
        return self._minibatch_size

    @override
    def frames(self, slots: Arrays) -> Tensors:
        return frame_rows(slots, self._observation, self._network, self._device)

    @override
    def evaluate(self, vector: Tensor, frames: Tensors, outputs: StepOutputs) -> Tensors:
        return outputs(self._network(vector, frames), frames)

    @override
    def of_frames(self, evaluated: Tensor, num_steps: int) -> NDArray[Any]:
        return to_host(evaluated).reshape(num_steps + 1, -1)

    @override
    def batch_rows(
        self, frames: Tensors, evaluated: Tensors, num_steps: int, *, outputs: Collection[str] = ()
    ) -> dict[str, Tensor]:
        num_lanes = len(frames["action"]) // (num_steps + 1)
        return dict(step_rows({**frames, **{name: evaluated[name] for name in outputs}}, num_steps * num_lanes))

    @override
    def of_steps(self, array: NDArray[Any]) -> NDArray[Any]:
        return as_rows(array)

    @override
    def heads(self, vector: Tensor, minibatch: Tensors) -> tuple[Heads, Tensors]:
        return self._network(vector, minibatch), minibatch


class SequenceRows(TrainingRows):
    """A row is a sequence of L steps of a lane, with the state before its first frame.

    The states of a rollout start from the actor's, and are computed by the weights with which the training step starts.
    With burn-in the network first sees the frames before the sequence, if they are in the same rollout. It does so
    without gradients, to compute the state by the weights in training (Kapturowski et al. 2019, section 3.1).
    """

    compiles_evaluation = False

    def __init__(self, policy: TorchPolicy, *, minibatch_size: int, sequences: Sequences) -> None:
        """``minibatch_size``: steps of this rank's share of a minibatch."""
        super().__init__(policy)
        self._unrolling = Unrolling(policy)
        self._state = self._unrolling.state
        self._minibatch_size = minibatch_size
        self._length = sequences.length
        self._burn_in = sequences.burn_in

    @override
    def check(self, mask: NDArray[np.bool_]) -> None:
        check_divides(mask, self._minibatch_size)
        if len(mask) % self._length or self._minibatch_size % self._length:
            raise ValueError(
                f"sequences of {self._length} steps must divide rollouts of {len(mask)} steps and minibatches of "
                f"{self._minibatch_size}"
            )

    @property
    @override
    def minibatch_rows(self) -> int:
        return self._minibatch_size // self._length

    @override
    def frames(self, slots: Arrays) -> Tensors:
        mask = slots["mask"]
        is_first = np.zeros((len(mask) + 1, mask.shape[1]), np.bool_)
        is_first[1:] = first_frames(mask)  # the states in the slot are those with which frame 0 was acted on
        by_frame = {path: slots[path] for path in self._observation}
        by_frame |= {"action": actions_of_frames(slots), IS_FIRST: is_first}
        frames = {
            path: to_device(np.ascontiguousarray(array.swapaxes(0, 1)), self._device)
            for path, array in by_frame.items()
        }
        states = {state_field(name): to_device(slots[state_field(name)], self._device) for name in self._state}
        return {**frames, **states}

    @override
    def evaluate(self, vector: Tensor, frames: Tensors, outputs: StepOutputs) -> Tensors:
        """See ``TrainingRows``. The states before the rows are outputs, too: by field, [B, rows of a lane, size]."""
        state = {name: frames[state_field(name)] for name in self._state}
        heads, states = self._unrolling.unroll(vector, frames, state)
        is_first = frames[IS_FIRST]
        flat = {name: tensor.flatten(0, 1) for name, tensor in frames.items() if not is_state_field(name)}
        found = outputs({name: _by_lane(tensor).flatten(0, 1) for name, tensor in heads.items()}, flat)
        by_frame = {name: tensor.reshape(*is_first.shape, *tensor.shape[1:]) for name, tensor in found.items()}
        starts = range(-self._burn_in, is_first.shape[1] - 1 - self._burn_in, self._length)
        first = {
            state_field(name): torch.stack([before if at <= 0 else states[name][at - 1] for at in starts], dim=1)
            for name, before in state.items()
        }
        return {**by_frame, **first}

    @override
    def of_frames(self, evaluated: Tensor, num_steps: int) -> NDArray[Any]:
        return to_host(evaluated).T

    @override
    def batch_rows(
        self, frames: Tensors, evaluated: Tensors, num_steps: int, *, outputs: Collection[str] = ()
    ) -> dict[str, Tensor]:
        observed = {path: frames[path] for path in (*self._observation, IS_FIRST)}
        rows = {path: self._with_burn_in(tensor[:, :-1]) for path, tensor in observed.items()}
        of_steps = {"action": frames["action"], **{name: evaluated[name] for name in outputs}}
        rows |= {name: _sequences(tensor[:, :-1], self._length) for name, tensor in of_steps.items()}
        for field in map(state_field, self._state):
            rows[field] = evaluated[field].transpose(0, 1).flatten(0, 1)
        if self._burn_in:
            is_known = torch.arange(0, num_steps, self._length, device=self._device) >= self._burn_in
            rows[HAS_BURN_IN] = is_known.repeat_interleave(len(frames[IS_FIRST]))
        return rows

    @override
    def of_steps(self, array: NDArray[Any]) -> NDArray[Any]:
        num_steps, num_lanes = array.shape[:2]
        by_sequence = array.reshape(num_steps // self._length, self._length, num_lanes, *array.shape[2:])
        return np.ascontiguousarray(by_sequence.swapaxes(1, 2)).reshape(-1, self._length, *array.shape[2:])

    @override
    def heads(self, vector: Tensor, minibatch: Tensors) -> tuple[Heads, Tensors]:
        heads = self._unrolling.after_burn_in(vector, minibatch, self._burn_in)
        known = {*self._observation, IS_FIRST, HAS_BURN_IN, *map(state_field, self._state)}
        steps = {
            name: tensor if tensor.dim() < 2 else tensor.transpose(0, 1).flatten(0, 1)
            for name, tensor in minibatch.items()
            if name not in known
        }
        return {name: tensor.flatten(0, 1) for name, tensor in heads.items()}, steps

    def _with_burn_in(self, tensor: Tensor) -> Tensor:
        """Return the sequences of [B, T, ...], each with the frames before it.

        Before the first sequences there are arbitrary frames: ``HAS_BURN_IN`` is False there.
        """
        sequences = _sequences(tensor, self._length)
        if not self._burn_in:
            return sequences
        earlier = torch.cat([tensor[:, : self._burn_in], tensor[:, : -self._burn_in]], dim=1)
        return torch.cat([_sequences(earlier, self._length)[:, : self._burn_in], sequences], dim=1)


def rows_of(policy: TorchPolicy, *, minibatch_size: int, sequences: Sequences | None) -> TrainingRows:
    """Return how the steps of a batch become rows for the network of ``policy``.

    Args:
        policy: Whose network is trained.
        minibatch_size: Steps of this rank's share of a minibatch.
        sequences: What a recurrent network is trained on; others are trained on steps.
    """
    if not policy.pure.is_recurrent:
        return StepRows(policy, minibatch_size=minibatch_size)
    if sequences is None:
        raise ValueError("a recurrent network is trained on sequences; none are given")
    return SequenceRows(policy, minibatch_size=minibatch_size, sequences=sequences)


def sequences_of(settings: ActorCriticSettings) -> Sequences:
    """Return the sequences that a spec asks for."""
    return Sequences(length=settings.sequence_length, burn_in=settings.burn_in)


def _by_lane(tensor: Tensor) -> Tensor:
    """[L, N, ...] -> [N, L, ...]."""
    return tensor.transpose(0, 1)


def _sequences(tensor: Tensor, length: int) -> Tensor:
    """Return the sequences of [B, T, ...] as [T / L * B, L, ...], time first."""
    by_sequence = tensor.reshape(len(tensor), -1, length, *tensor.shape[2:])
    return by_sequence.transpose(0, 1).flatten(0, 1)
