"""Rows of a batch, and their minibatches.

A row is one step of a lane. A batch of T steps of B lanes has T * B rows, time first. Rows that were drawn from a store
are in the order of their minibatches. ``sequences`` has rows of several steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlsrl.algorithms.base import INDEX, WEIGHT, Batch, Reduce, Tensors
from rlsrl.buffers.replay.rows import IMPORTANCE
from rlsrl.data.specs import Arrays
from rlsrl.policies.device import to_device
from rlsrl.policies.exported import MASKED_LOGIT
from rlsrl.policies.functional import PureNetwork

IMPORTANCE_EXPONENT = "importance_exponent"
"""The coefficient that says how far draws by priority are corrected for."""


def as_rows(array: NDArray[Any]) -> NDArray[Any]:
    """Reshape [T, B, ...] to rows [T * B, ...]: a view if the memory order allows."""
    return array.reshape(-1, *array.shape[2:])


def frame_rows(slots: Arrays, observation: Iterable[str], network: PureNetwork, device: torch.device) -> Tensors:
    """Return ``action`` and the observations at these paths, of all T + 1 frames: each [(T + 1) * B, ...].

    The first T * B are the batch's rows. The last B are the frames that the last steps led to, with actions of zeros.
    """
    frames = network.to_preferred_layout({path: to_device(as_rows(slots[path]), device) for path in observation})
    return {**frames, "action": to_device(as_rows(actions_of_frames(slots)), device)}


def step_rows(frames: Tensors, num_rows: int) -> Tensors:
    """Return the batch's rows of tensors that have one for each frame."""
    return {path: tensor[:num_rows] for path, tensor in frames.items()}


def check_divides(mask: NDArray[np.bool_], minibatch_size: int) -> None:
    """Raise an error unless the batch of this ``mask``, [T, B], has whole minibatches.

    Raises:
        ValueError: the number of rows is no multiple of the minibatch size.
    """
    if mask.size % minibatch_size:
        raise ValueError(
            f"a batch of {mask.shape[0]} steps x {mask.shape[1]} lanes has {mask.size} rows, no multiple of the "
            f"minibatch size {minibatch_size}"
        )


def minibatches(
    mask: NDArray[np.bool_], rng: np.random.Generator, *, passes: int, size: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Cut a new permutation of all rows into minibatches of ``size``, in each of the ``passes``.

    Returns ``(index, valid)``: the minibatches' rows, [K, size], and which of their steps are transitions by ``mask``,
    [rows] or [rows, steps of a row]. The index of a row without transitions is that of one with some, so that its
    contents are never read; it weighs nothing.
    """
    order = np.tile(np.arange(len(mask)), (passes, 1))
    index = rng.permuted(order, axis=1).reshape(-1, size)
    valid = mask[index]
    has_some = np.asarray(mask.any(axis=tuple(range(1, mask.ndim))))
    index[~has_some[index]] = np.argmax(has_some)
    return index, valid


def mean_schedule(
    mask: NDArray[np.bool_], rng: np.random.Generator, reduce: Reduce, *, passes: int, size: int
) -> Tensors:
    """Return the schedule of ``minibatches`` whose weights make weighted sums means over the transitions of all ranks.

    It has ``INDEX``, [K, size], and ``WEIGHT``, [K, size] or [K, size, steps of a row].
    """
    index, valid = minibatches(mask, rng, passes=passes, size=size)
    count = reduce(valid.sum(axis=tuple(range(1, valid.ndim))).astype(np.float64))
    weight = (valid / np.maximum(count, 1.0).reshape(-1, *(1,) * (valid.ndim - 1))).astype(np.float32)
    return {INDEX: torch.from_numpy(index), WEIGHT: torch.from_numpy(weight)}


def chosen_values(values: Tensor, action: Tensor) -> Tensor:
    """Return the values, [N], of the actions [N] int64 among those of all, [N, A]."""
    return values.gather(-1, action.unsqueeze(-1)).squeeze(-1)


def has_choice(values: Tensor) -> Tensor:
    """Return where any action is legal, [N], by the values of all, [N, A]: a truncated episode may end without one."""
    return values.amax(dim=-1) > MASKED_LOGIT


def drawn_batch(rows: Arrays, device: torch.device) -> Batch:
    """Return the batch of rows that were drawn from a store: those of ``rlsrl.buffers.replay.rows``."""
    return Batch(
        rows={name: to_device(array, device) for name, array in rows.items() if name != IMPORTANCE},
        schedule_inputs={IMPORTANCE: rows[IMPORTANCE]},
        num_transitions=len(rows[IMPORTANCE]),
    )


def drawn_schedule(batch: Batch, *, size: int, num_ranks: int) -> Tensors:
    """Return the schedule of a ``drawn_batch``: minibatches in the order of its rows, which were drawn at random.

    Each has [K, size]: ``INDEX``; ``WEIGHT``, with which weighted sums over all ranks are means; and ``IMPORTANCE``,
    the importance ratios, of which each minibatch's largest is 1 over all ranks. A loss that multiplies ``WEIGHT`` by a
    power of it corrects for draws by priority (Schaul et al. 2016, section 3.4): ``(w_i / max w) ** beta`` has the
    exponent beta in the loss, where it may change during training.

    Args:
        batch: K * size rows.
        size: Rows of this rank's share of a minibatch.
        num_ranks: Ranks that share each minibatch evenly.
    """
    importance = batch.schedule_inputs[IMPORTANCE].reshape(-1, size)
    return {
        INDEX: torch.arange(importance.size).reshape(-1, size),
        WEIGHT: torch.full(importance.shape, 1.0 / (size * num_ranks)),
        IMPORTANCE: torch.from_numpy(importance),
    }


def corrected_weights(minibatch: Tensors) -> Tensor:
    """Return the weights of the rows of a ``drawn_schedule``, [M], corrected for draws by priority as
    ``IMPORTANCE_EXPONENT`` says."""
    return minibatch[WEIGHT] * minibatch[IMPORTANCE] ** minibatch[IMPORTANCE_EXPONENT]


def actions_of_frames(slots: Arrays) -> NDArray[Any]:
    """Return an action for each frame, [T+1, B, ...]; zeros where none was taken: the slot's value may be invalid."""
    action, mask = slots["action"], slots["mask"]
    of_frames = np.zeros((len(action) + 1, *action.shape[1:]), action.dtype)
    np.copyto(of_frames[:-1], action, where=mask.reshape(mask.shape + (1,) * (action.ndim - mask.ndim)))
    return of_frames
