"""Functions of tensors compiled as one graph each, for inputs of one form, without asking anything before each call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor


@contextmanager
def compiling() -> Iterator[None]:
    """Where this process may compile; from then on it uses what it has compiled, and is eager otherwise."""
    torch.compiler.set_stance("default")
    try:
        yield
    finally:
        torch.compiler.set_stance("eager_on_recompile")


def compiled(function: Callable[..., Any], device: torch.device) -> Any:
    """Compiled where it is first called, by itself: torch keeps what it compiled by the code, and nothing asks whose
    that is, or whether the inputs are of another ``form``."""

    def called(*inputs: Any) -> Any:
        return function(*inputs)

    own = FunctionType(called.__code__.replace(), called.__globals__, called.__name__, None, called.__closure__)
    return torch.compile(own, fullgraph=True, dynamic=False, options=_options(device))


def form(tensors: Iterable[Tensor], named: Iterable[Mapping[str, Tensor]]) -> list[Any]:
    """All that what is compiled depends on but the values."""
    every = [*tensors, *(tensor for each in named for tensor in each.values())]
    names = [name for each in named for name in each]
    return [names, [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in every]]


def _options(device: torch.device) -> dict[str, Any]:
    """Of torch.compile."""
    return {
        # Kernels are called from C++: of a small network's step that is a tenth. A GPU's would take CUDA's headers.
        "cpp_wrapper": device.type == "cpu",
        # Before each call torch asks a hundred things of the inputs and of what is around them. What may change is
        # their form alone, which callers look at: what is compiled is pure.
        "guard_filter_fn": lambda guards: [False] * len(guards),
    }
