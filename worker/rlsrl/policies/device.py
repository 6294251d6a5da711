"""Chooses the device of a network, and copies arrays to it and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlsrl.api.spec import Device
from rlsrl.data.specs import Arrays
from rlsrl.runtime.errors import ConfigurationError

CPU = torch.device("cpu")


def device_for(wanted: Device, *, field: str, is_small: bool = False, place: int = 0, places: int = 1) -> torch.device:
    """Return the device of process ``place`` (from 0) of the ``places`` processes of this machine that need one each.

    ``is_small``: the network is faster on the CPU, so ``auto`` means the CPU.

    For a GPU it makes convolutions deterministic and computes them in full float32: cuDNN's defaults do neither.

    Raises:
        ConfigurationError: ``cuda`` is wanted, but there are fewer GPUs than processes; the text names ``field``.
    """
    if wanted == "cpu" or (wanted == "auto" and is_small):
        return CPU
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_gpus >= places:
        torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32 = True, False
        return torch.device("cuda", place)
    if wanted == "cuda":
        raise ConfigurationError(
            f"{field} is cuda, which needs {places} GPUs on this machine, and torch {torch.__version__} sees "
            f"{num_gpus}; use auto, which takes the CPU then, or cpu"
        )
    return CPU


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return the array as a tensor on the device. On the CPU the tensor shares the memory of a writable array.

    A copy to a GPU goes through page-locked memory, so that it runs while this process continues. torch caches such
    memory, and reuses it when the copy is done.
    """
    if device.type == "cpu":
        return torch.from_numpy(np.require(array, requirements="W"))  # torch has no read-only tensors
    pinned = torch.empty(array.shape, dtype=getattr(torch, array.dtype.name), pin_memory=True)
    np.copyto(pinned.numpy(), array)
    return pinned.to(device, non_blocking=True)


def all_to_device(arrays: Arrays, device: torch.device) -> Mapping[str, Tensor]:
    """Return each array as a tensor on the device, by path."""
    return {path: to_device(array, device) for path, array in arrays.items()}


def assign(tensor: Tensor, array: NDArray[Any]) -> None:
    """Copy the array's values into the tensor."""
    if tensor.device.type == "cpu":
        np.copyto(tensor.numpy(), array)
    else:
        tensor.copy_(to_device(array, tensor.device))


def to_host(tensor: Tensor) -> NDArray[Any]:
    """Return the values as an array: the tensor's own memory on the CPU, else a copy. Waits for the GPU."""
    array: NDArray[Any] = tensor.cpu().numpy()
    return array
