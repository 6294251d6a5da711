"""The trainer ranks as one: what they tell each other at step boundaries, so that they act alike.

Ranks of a gang run the same code on different lanes. Whatever could make one of them act otherwise (a wish to stop, a
batch that has not come, a checkpoint that is due) is put before all of them and decided by the same rule from the same
values. A rank that dies breaks the connection, so every collective call of the others fails: the gang falls as one.
On GPUs the sum of gradients is NCCL's, which notices nothing: there the launcher ends the others, or the time-out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

STORE_VARIABLE = "RLSRL_GANG_STORE"
"""Environment variable with the path of the file by which the ranks of one machine meet."""
CAPACITY = 4096
"""Bytes of an agreement that fit into one collective call; a longer one takes a second."""
_LENGTH_BYTES = 8


class Gang(Protocol):
    """Collective calls: every rank makes the same ones in the same order, and each waits for all ranks."""

    @property
    def rank(self) -> int:
        """This rank, from 0."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def agree(self, mine: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What every rank says, by rank; JSON values.

        Raises:
            RuntimeError: a rank is gone, or did not call within the gang's time-out.
        """

    def reduce(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """The sum over all ranks; satisfies ``algorithms.base.Reduce``. Raises as ``agree``."""

    def close(self) -> None:
        """Leave; the others must be leaving too."""


class SoloGang:
    """A gang of one: nothing to agree with anybody."""

    rank = 0
    size = 1

    def agree(self, mine: Mapping[str, Any]) -> list[dict[str, Any]]:
        """See ``Gang``."""
        return [dict(mine)]

    def reduce(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """See ``Gang``."""
        return values

    def close(self) -> None:
        """See ``Gang``."""


class ProcessGroupGang:
    """The ranks of torch's default process group: met by a file of their launcher's, or as torchrun's variables say."""

    def __init__(self, *, timeout_seconds: float, on_gpus: bool = False) -> None:
        """Meet the others; waits for all of them. ``on_gpus``: gradients are summed there.

        Raises:
            RuntimeError: some did not come within ``timeout_seconds``.
        """
        timeout = timedelta(seconds=timeout_seconds)
        backend = "cpu:gloo,cuda:nccl" if on_gpus else "gloo"
        if (path := os.environ.get(STORE_VARIABLE)) is None:
            dist.init_process_group(backend, timeout=timeout)
        else:
            rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            store = dist.FileStore(path, size)  # type: ignore[attr-defined] # documented, but not exported
            dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=size)
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

    def agree(self, mine: Mapping[str, Any]) -> list[dict[str, Any]]:
        """See ``Gang``."""
        payload = json.dumps(mine, separators=(",", ":")).encode()
        messages = self._gather(_framed(payload, CAPACITY))
        longest = max(int(message[:_LENGTH_BYTES].view(np.int64)[0]) for message in messages)
        if longest > CAPACITY:
            messages = self._gather(_framed(payload, longest))
        return [_unframed(message) for message in messages]

    def _gather(self, message: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
        gathered = [torch.empty(message.size, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(gathered, torch.from_numpy(message))
        return [tensor.numpy() for tensor in gathered]

    def reduce(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """See ``Gang``."""
        total = torch.from_numpy(np.array(values, dtype=np.float64))
        dist.all_reduce(total)
        return total.numpy()

    def close(self) -> None:
        """See ``Gang``."""
        dist.destroy_process_group()


def _framed(payload: bytes, capacity: int) -> NDArray[np.uint8]:
    """The payload's length and as much of it as fits, in an array of fixed size."""
    message = np.zeros(_LENGTH_BYTES + capacity, dtype=np.uint8)
    message[:_LENGTH_BYTES].view(np.int64)[0] = len(payload)
    part = np.frombuffer(payload[:capacity], dtype=np.uint8)
    message[_LENGTH_BYTES : _LENGTH_BYTES + part.size] = part
    return message


def _unframed(message: NDArray[np.uint8]) -> dict[str, Any]:
    length = int(message[:_LENGTH_BYTES].view(np.int64)[0])
    value: dict[str, Any] = json.loads(message[_LENGTH_BYTES : _LENGTH_BYTES + length].tobytes())
    return value
