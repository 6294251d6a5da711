"""Compile a function of tensors into one graph, for inputs of one form, without torch's checks before each call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor


@contextmanager
def compiling() -> Iterator[None]:
    """Allow this process to compile within the block; after it, functions run compiled or eagerly, never recompiled."""
    torch.compiler.set_stance("default")
    try:
        yield
    finally:
        torch.compiler.set_stance("eager_on_recompile")


def compiled(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Return the function compiled; its first call compiles it.

    The first call raises:
        Exception: torch's compiler or one of its helpers failed; their errors have no narrower base.

    torch caches compiled code by code object, and the guards are off. So each call of ``compiled`` makes a code object
    of its own: two functions with the same code never share a graph.
    """

    def called(*inputs: Any) -> Any:
        return function(*inputs)

    own = FunctionType(called.__code__.replace(), called.__globals__, called.__name__, None, called.__closure__)
    return _Direct(own, torch.compile(own, fullgraph=True, dynamic=False, options=_options(device)))


class _Direct:
    """A compiled function whose code is called directly.

    torch would look the code up at each call. The lookup evaluates guards, all of which ``_options`` removes, and takes
    a tenth of the time of a small network's step.
    """

    def __init__(self, function: FunctionType, lazily: Callable[..., Any]) -> None:
        """``lazily`` is what ``torch.compile`` made of the function."""
        self._function = function
        self._lazily = lazily
        self._call: Callable[..., Any] | None = None

    def __call__(self, *inputs: Any) -> Any:
        if self._call is not None:
            return self._call(*inputs)
        outputs = self._lazily(*inputs)
        self._call = self._found()
        return outputs

    def _found(self) -> Callable[..., Any]:
        from torch._dynamo.eval_frame import _debug_get_cache_entry_list  # nothing else shows the code

        made = [entry.code for entry in _debug_get_cache_entry_list(self._function.__code__)]
        if len(made) != 1:
            return self._lazily  # a function without operations has none
        own = self._function
        return FunctionType(made[0], own.__globals__, own.__name__, None, own.__closure__)


def of_products() -> dict[str, Any]:
    """Return the options for torch.compile that have large products of matrices on the CPU computed by oneDNN."""
    from rlsrl.algorithms.products import LargeProductsByOneDnn  # inductor takes a second to import

    return {"post_grad_custom_post_pass": LargeProductsByOneDnn()}


def form(tensors: Iterable[Tensor], named: Iterable[Mapping[str, Tensor]]) -> list[Any]:
    """Return names, shapes, strides and dtypes: all that compiled code depends on except the values."""
    every = [*tensors, *(tensor for mapping in named for tensor in mapping.values())]
    names = [name for mapping in named for name in mapping]
    return [names, [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in every]]


def _options(device: torch.device) -> dict[str, Any]:
    """Return the options for torch.compile."""
    return {
        **of_products(),
        # C++ calls the kernels: that saves a tenth of a small network's step. On a GPU it would need CUDA's headers.
        "cpp_wrapper": device.type == "cpu",
        # Before each call torch evaluates some hundred guards. Compiled code is pure, so only the inputs' form can
        # change, and the callers compare that.
        "guard_filter_fn": lambda guards: [False] * len(guards),
    }
