"""Where tensors live: in this process's memory or on a GPU; and the way from one to the other and back."""

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
    """The device of one of the ``places`` processes of this machine that want one each: ``place`` counts from 0.

    ``is_small``: of a network that is faster on the CPU, where ``auto`` leaves it.

    On a GPU convolutions are made to repeat themselves, and to be as exact as they are said to be: cuDNN's own choice
    is neither.

    Raises:
        ConfigurationError: ``cuda`` is wanted, and there are fewer GPUs; the text names ``field``.
    """
    if wanted == "cpu" or (wanted == "auto" and is_small):
        return CPU
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if there >= places:
        torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32 = True, False
        return torch.device("cuda", place)
    if wanted == "cuda":
        raise ConfigurationError(
            f"{field} is cuda, which takes a GPU for each of {places} on this machine, and torch {torch.__version__} "
            f"sees {there}; allowed: auto, which takes the CPU then, or cpu"
        )
    return CPU


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """The array there. On the CPU it is the array's own memory, if that can be written.

    To a GPU it goes by way of page-locked memory, from which it is copied while this process goes on: torch keeps and
    reuses such memory, and knows when a copy is done with it.
    """
    if device.type == "cpu":
        return torch.from_numpy(np.require(array, requirements="W"))  # torch knows no memory that is read-only
    pinned = torch.empty(array.shape, dtype=getattr(torch, array.dtype.name), pin_memory=True)
    np.copyto(pinned.numpy(), array)
    return pinned.to(device, non_blocking=True)


def all_to_device(arrays: Arrays, device: torch.device) -> Mapping[str, Tensor]:
    """Each of them, by its path."""
    return {path: to_device(array, device) for path, array in arrays.items()}


def assign(tensor: Tensor, array: NDArray[Any]) -> None:
    """Give the tensor the array's values."""
    if tensor.device.type == "cpu":
        np.copyto(tensor.numpy(), array)
    else:
        tensor.copy_(to_device(array, tensor.device))


def to_host(tensor: Tensor) -> NDArray[Any]:
    """The values in this process's memory: the tensor's own if they are there. Waits for a GPU to have made them."""
    array: NDArray[Any] = tensor.cpu().numpy()
    return array
