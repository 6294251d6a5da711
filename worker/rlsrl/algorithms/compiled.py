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
    lazily = torch.compile(own, fullgraph=True, dynamic=False, options=_options(device))
    return _AheadOfTime(lazily) if device.type == "cpu" else lazily  # with a GPU that is not measured


class _AheadOfTime:
    """A function that torch compiles ahead of time, at the first call.

    The call of such a function passes 80 functions of torch less than one that is compiled lazily: that is a tenth of
    the time of a small network's step.
    """

    def __init__(self, lazily: Callable[..., Any]) -> None:
        """Compile what ``torch.compile`` returned."""
        self._lazily = lazily
        self._call: Callable[..., Any] | None = None

    def __call__(self, *inputs: Any) -> Any:
        if self._call is None:
            self._call = self._compiled_for(inputs)
        return self._call(*inputs)

    def _compiled_for(self, inputs: tuple[Any, ...]) -> Callable[..., Any]:
        try:
            compiled = self._lazily.aot_compile((inputs, {}))  # type: ignore[attr-defined]  # torch declares none
        except Exception:  # noqa: BLE001 - torch's errors have no narrower base
            # A function without operations, for one, is compiled lazily alone. If that fails, too, its call says so.
            return self._lazily
        return compiled.fn  # type: ignore[no-any-return]  # without the guards, which ``_options`` drops


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
