"""Rows of a batch, and their minibatches: for algorithms that train on each rollout once, as it arrives.

A row is one step of a lane. A batch of T steps of B lanes has T * B rows, time first.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlsrl.algorithms.base import INDEX, WEIGHT, Reduce, Tensors
from rlsrl.data.specs import Arrays
from rlsrl.policies.device import to_device
from rlsrl.policies.functional import PureNetwork


def as_rows(array: NDArray[Any]) -> NDArray[Any]:
    """Reshape [T, B, ...] to rows [T * B, ...]: a view if the memory order allows."""
    return array.reshape(-1, *array.shape[2:])


def frame_rows(slots: Arrays, observation: Iterable[str], network: PureNetwork, device: torch.device) -> Tensors:
    """Return ``action`` and the observations at these paths, of all T + 1 frames: each [(T + 1) * B, ...].

    The first T * B are the batch's rows. The last B are the frames that the last steps led to, with actions of zeros.
    """
    frames = network.to_preferred_layout({path: to_device(as_rows(slots[path]), device) for path in observation})
    return {**frames, "action": to_device(as_rows(_actions(slots)), device)}


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

    Returns ``(index, valid)``, each [K, size]: the minibatches' rows, and which of them are transitions by ``mask``,
    [T * B]. The index of others is that of a transition, so that their contents are never read; they weigh nothing.
    """
    order = np.tile(np.arange(mask.size), (passes, 1))
    index = rng.permuted(order, axis=1).reshape(-1, size)
    valid = mask[index]
    index[~valid] = np.argmax(mask)
    return index, valid


def mean_schedule(
    mask: NDArray[np.bool_], rng: np.random.Generator, reduce: Reduce, *, passes: int, size: int
) -> Tensors:
    """Return the schedule of ``minibatches`` whose weights make weighted sums means over the transitions of all ranks.

    It has ``INDEX`` and ``WEIGHT``, [K, size] each. ``mask`` is [T * B].
    """
    index, valid = minibatches(mask, rng, passes=passes, size=size)
    count = reduce(valid.sum(axis=1).astype(np.float64))[:, np.newaxis]
    weight = (valid / np.maximum(count, 1.0)).astype(np.float32)
    return {INDEX: torch.from_numpy(index), WEIGHT: torch.from_numpy(weight)}


def _actions(slots: Arrays) -> NDArray[Any]:
    """Return an action for each frame, [T+1, B, ...]; zeros where none was taken: the slot's value may be invalid."""
    action, mask = slots["action"], slots["mask"]
    of_frames = np.zeros((len(action) + 1, *action.shape[1:]), action.dtype)
    np.copyto(of_frames[:-1], action, where=mask.reshape(mask.shape + (1,) * (action.ndim - mask.ndim)))
    return of_frames
