"""Collective calls of the trainer ranks: they exchange values at step boundaries, so that all act alike.

Ranks of a gang run the same code on different lanes. Anything that could make one rank act differently (a request to
stop, a missing batch, a due checkpoint) is sent to all ranks. All decide by the same rule from the same values. A rank
that dies breaks the connection, every collective call of the others fails, and the whole gang ends. On GPUs NCCL sums
the gradients and does not notice a dead rank: there the launcher ends the others, or the timeout does.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from typing_extensions import override

from rlsrl.runtime.errors import RankLost

STORE_VARIABLE = "RLSRL_GANG_STORE"
"""Environment variable with the path of the file at which the ranks of one machine meet."""
CAPACITY = 4096
"""Bytes of a message that fit into the first collective call; a longer message needs a second call."""
_LENGTH_BYTES = 8


class Gang(Protocol):
    """Collective calls: every rank makes the same calls in the same order, and each call waits for all ranks."""

    rank: int
    """This rank's number, from 0."""
    size: int
    """Number of ranks."""

    def agree(self, mine: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the values of every rank, by rank: JSON values.

        Raises:
            RankLost: a rank is gone, or did not call within the gang's timeout.
        """

    def reduce(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the sum over all ranks. Implements ``algorithms.base.Reduce``; raises as ``agree`` does."""

    def close(self) -> None:
        """Leave the gang. All ranks leave together."""


class SoloGang(Gang):
    """A gang of one rank."""

    rank, size = 0, 1

    @override
    def agree(self, mine: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [dict(mine)]

    @override
    def reduce(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        return values

    @override
    def close(self) -> None:
        pass


class ProcessGroupGang(Gang):
    """The ranks of torch's default process group, which meet at the launcher's file or as torchrun's variables say."""

    def __init__(self, *, timeout_seconds: float, on_gpus: bool = False) -> None:
        """Join the process group; wait for all ranks. With ``on_gpus`` GPUs sum the gradients.

        Raises:
            RankLost: a rank did not join within ``timeout_seconds``.
        """
        timeout = timedelta(seconds=timeout_seconds)
        backend = "cpu:gloo,cuda:nccl" if on_gpus else "gloo"
        with _lost_ranks():
            if (path := os.environ.get(STORE_VARIABLE)) is None:
                dist.init_process_group(backend, timeout=timeout)
            else:
                rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
                store = dist.FileStore(path, size)  # type: ignore[attr-defined] # documented, but not exported
                dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=size)
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

    @override
    def agree(self, mine: Mapping[str, Any]) -> list[dict[str, Any]]:
        payload = json.dumps(mine, separators=(",", ":")).encode()
        messages = self._gather(_framed(payload, CAPACITY))
        longest = max(int(message[:_LENGTH_BYTES].view(np.int64)[0]) for message in messages)
        if longest > CAPACITY:
            messages = self._gather(_framed(payload, longest))
        return [_unframed(message) for message in messages]

    def _gather(self, message: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
        gathered = [torch.empty(message.size, dtype=torch.uint8) for _ in range(self.size)]
        with _lost_ranks():
            dist.all_gather(gathered, torch.from_numpy(message))
        return [tensor.numpy() for tensor in gathered]

    @override
    def reduce(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        total = torch.from_numpy(np.array(values, dtype=np.float64))
        with _lost_ranks():
            dist.all_reduce(total)
        return total.numpy()

    @override
    def close(self) -> None:
        dist.destroy_process_group()


@contextlib.contextmanager
def _lost_ranks() -> Iterator[None]:
    """Raise ``RankLost`` if a collective call fails: its arguments are our own, so another rank is the cause."""
    try:
        yield
    except RuntimeError as error:
        raise RankLost("another rank of the gang has ended, or did not answer in time") from error


def _framed(payload: bytes, capacity: int) -> NDArray[np.uint8]:
    """Return the payload's length and as many of its bytes as fit, in an array of fixed size."""
    message = np.zeros(_LENGTH_BYTES + capacity, dtype=np.uint8)
    message[:_LENGTH_BYTES].view(np.int64)[0] = len(payload)
    part = np.frombuffer(payload[:capacity], dtype=np.uint8)
    message[_LENGTH_BYTES : _LENGTH_BYTES + part.size] = part
    return message


def _unframed(message: NDArray[np.uint8]) -> dict[str, Any]:
    length = int(message[:_LENGTH_BYTES].view(np.int64)[0])
    value: dict[str, Any] = json.loads(message[_LENGTH_BYTES : _LENGTH_BYTES + length].tobytes())
    return value
