"""The gradient of a parameter group's loss with respect to its flat vector: on one rank, or summed over all ranks."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from rlsrl.algorithms.base import INDEX, Loss, Tensors
from rlsrl.algorithms.spare_core import SpareCore

MICROBATCH_ELEMENTS = 1 << 22
"""Array elements of the largest microbatch: a convolutional network's 16 MiB of float32 pixels. A core computes their
gradient for tens of milliseconds."""
SHARED_WORK = 1 << 24
"""Rows times weights of the smallest minibatch that is cut in two for an idle core, which computes its half of a dense
network's gradient for about a millisecond."""


class Gradients(Protocol):
    """Computes the gradient of a group's loss of a whole minibatch: the sum of the gradients of the ranks' shares."""

    def __call__(
        self, params: Tensors, state: Tensors, rows: Tensors, minibatch: Tensors
    ) -> tuple[Tensor, Tensors, Tensor]:
        """Return (total_loss, metrics, gradient [P]) of the minibatch ``gathered(rows, minibatch)``.

        ``total_loss`` [] is the loss of the whole minibatch, the same on every rank. If it is not finite, the step is
        not taken. ``metrics`` are this rank's shares, and arrays of its rows.
        """


def gathered(rows: Tensors, minibatch: Tensors) -> Tensors:
    """Return a minibatch's tensors for the loss: the batch's rows that ``INDEX`` selects, and its other inputs."""
    index = minibatch[INDEX]
    chosen = {path: _selected(tensor, index) for path, tensor in rows.items()}
    return chosen | {name: tensor for name, tensor in minibatch.items() if name != INDEX}


def microbatches(rows: Tensors, minibatch: Tensors, *, num_weights: int) -> Sequence[Tensors]:
    """Split a minibatch into equal parts of at most ``MICROBATCH_ELEMENTS`` each, or in two if it is much work.

    A minibatch stays whole if it is small and little work, has no such equal parts, or is on a GPU.

    The losses of the microbatches add up to the minibatch's, as the losses of ranks do (``ParameterGroup.loss``).

    Args:
        rows: The batch.
        minibatch: The minibatch of its rows.
        num_weights: Number of the parameters that the gradient is of.
    """
    size = len(minibatch[INDEX])
    if minibatch[INDEX].device.type != "cpu":
        return [minibatch]
    least = -(-size * sum(tensor[0].numel() for tensor in rows.values()) // MICROBATCH_ELEMENTS)
    if size * num_weights >= SHARED_WORK:
        least = max(2, least)
    best_first = sorted(range(least, 2 * least), key=lambda number: number % 2)  # two cores share an even number
    number = next((number for number in best_first if size % number == 0), 1)
    if number == 1:
        return [minibatch]
    split = {
        name: torch.split(tensor, size // number) for name, tensor in minibatch.items() if tensor.shape[:1] == (size,)
    }
    return [{**minibatch, **{name: parts[index] for name, parts in split.items()}} for index in range(number)]


def of_rows(metrics: Tensors) -> dict[str, Tensor]:
    """Return those of a loss's metrics that have a value for each row: later groups' losses get them."""
    return {name: tensor for name, tensor in metrics.items() if tensor.dim() == 1}


def other_groups(params: Tensors, name: str) -> Tensors:
    """Return the parameters of all groups but one."""
    return {group: vector for group, vector in params.items() if group != name}


def _selected(tensor: Tensor, index: Tensor) -> Tensor:
    """Select rows and keep the tensor's memory order; torch would copy number by number into the default order."""
    if tensor.is_contiguous():
        return tensor.index_select(0, index)
    strides = tensor.stride()
    order = [0, *sorted(range(1, tensor.dim()), key=lambda dim: -strides[dim])]
    inverse = [order.index(dim) for dim in range(tensor.dim())]
    return tensor.permute(order).index_select(0, index).permute(inverse)


class LocalGradients(Gradients):
    """Gradients on one rank. ``total_loss`` is its loss."""

    def __init__(self, name: str, loss: Loss) -> None:
        self._name = name
        self._loss = loss

    @override
    def __call__(
        self, params: Tensors, state: Tensors, rows: Tensors, minibatch: Tensors
    ) -> tuple[Tensor, Tensors, Tensor]:
        own = params[self._name].detach().requires_grad_()
        loss, metrics = self._loss({**params, self._name: own}, state, gathered(rows, minibatch))
        (gradient,) = torch.autograd.grad(loss, own)
        return loss.detach(), metrics, gradient


class PureGradients(Gradients):
    """``LocalGradients`` as a pure function of tensors: it compiles together with its caller, and is slower eagerly."""

    def __init__(self, name: str, loss: Loss) -> None:
        self._name = name
        self._loss = loss

    @override
    def __call__(
        self, params: Tensors, state: Tensors, rows: Tensors, minibatch: Tensors
    ) -> tuple[Tensor, Tensors, Tensor]:
        def loss_of(own: Tensor) -> tuple[Tensor, tuple[Tensor, Tensors]]:
            loss, metrics = self._loss({**params, self._name: own}, state, gathered(rows, minibatch))
            return loss, (loss.detach(), metrics)

        gradient, (loss, metrics) = torch.func.grad(loss_of, has_aux=True)(params[self._name])
        return loss, metrics, gradient


class MicrobatchGradients(Gradients):
    """Gradients on one rank, microbatch by microbatch; an idle core computes some of them.

    The microbatches and the order of their sum never change. So the result has the same bits, whichever thread computed
    them. ``total_loss`` is the sum of their losses.
    """

    def __init__(self, name: str, gradients: Gradients, spare_core: SpareCore) -> None:
        """Use the group's ``gradients`` for each microbatch; two threads call it at once."""
        self._name = name
        self._gradients = gradients
        self._spare_core = spare_core

    @override
    def __call__(
        self, params: Tensors, state: Tensors, rows: Tensors, minibatch: Tensors
    ) -> tuple[Tensor, Tensors, Tensor]:
        parts = microbatches(rows, minibatch, num_weights=params[self._name].numel())
        if len(parts) == 1:
            return self._gradients(params, state, rows, minibatch)
        tasks = [partial(self._gradients, params, state, rows, microbatch) for microbatch in parts]
        losses, metrics, gradients = zip(*self._spare_core.run(tasks), strict=True)
        whole = {name: _whole([part[name] for part in metrics]) for name in metrics[0]}
        total = gradients[0]
        for gradient in gradients[1:]:
            total += gradient
        return torch.stack(losses).sum(), whole, total


def _whole(parts: Sequence[Tensor]) -> Tensor:
    """Return a minibatch's metric, or an array of its rows, from those of its microbatches."""
    return torch.cat([*parts]) if parts[0].dim() else torch.stack([*parts]).sum()


class FlatLoss(nn.Module):
    """A group's loss as a module with one parameter: the group's vector and an element that carries the loss."""

    def __init__(self, name: str, loss: Loss, params: Tensors) -> None:
        """Make room for parameters of the form of ``params``, on their device."""
        super().__init__()
        self.name = name
        self._loss = loss
        own = params[name]
        self.flat = nn.Parameter(torch.ones(own.numel() + 1, device=own.device))

    @override
    def forward(self, others: Tensors, state: Tensors, rows: Tensors, minibatch: Tensors) -> tuple[Tensor, Tensors]:
        """Return (loss, metrics), by this module's vector and those of the other groups.

        The gradient with respect to the parameter's last element is the loss itself.
        """
        loss, metrics = self._loss({**others, self.name: self.flat[:-1]}, state, gathered(rows, minibatch))
        # The term added has the value 0, and its gradient with respect to the last element is `loss`.
        carrier = self.flat[-1]
        return loss + (carrier - carrier.detach()) * loss.detach(), metrics


class ParallelGradients(Gradients):
    """Gradients over all ranks of torch's default process group, by ``DistributedDataParallel`` on one flat parameter.

    DDP's hooks run in ``backward`` only: with ``autograd.grad`` the ranks would diverge silently (pytorch #47562). DDP
    averages, so its result times the number of ranks is the sum of the shares.

    One more element of the parameter has the loss as its gradient. So each rank learns the sum of all losses, which is
    ``total_loss``, and all ranks skip the same steps.
    """

    def __init__(self, loss: FlatLoss) -> None:
        """Make DDP for the module: a collective call, which all ranks make together."""
        self._module = loss
        self._parallel = _parallel(loss)
        self._world_size = torch.distributed.get_world_size()

    @override
    def __call__(
        self, params: Tensors, state: Tensors, rows: Tensors, minibatch: Tensors
    ) -> tuple[Tensor, Tensors, Tensor]:
        flat = self._module.flat
        with torch.no_grad():
            flat[:-1].copy_(params[self._module.name])
        if flat.grad is not None:
            flat.grad.zero_()
        loss, metrics = self._parallel(other_groups(params, self._module.name), state, rows, minibatch)
        loss.backward()
        assert flat.grad is not None, "backward leaves one"
        total = flat.grad * self._world_size
        return total[-1], metrics, total[:-1]


def _parallel(module: nn.Module) -> DistributedDataParallel:
    """Wrap the module in DDP without importing torch's compiler (docs/decisions/0044).

    DDP imports it twice: its constructor queries how graphs are split, and its first call excludes a function of DDP
    from tracing. The import takes 1.4 seconds and 145 MB in each rank, for nothing: the module inside DDP is compiled
    by itself, and DDP is never traced.
    """
    if "torch._dynamo" not in sys.modules:
        marked = inspect.unwrap(DistributedDataParallel._inside_ddp_forward)  # noqa: SLF001 - see above
        setattr(marked, "__dynamo_disable", marked)
        torch._dynamo = SimpleNamespace(  # type: ignore[assignment]  # noqa: SLF001 - see above
            utils=SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer")
        )
        try:
            return DistributedDataParallel(module, gradient_as_bucket_view=True)
        except AttributeError:
            pass  # another version of torch, which queries more
        finally:
            del torch._dynamo  # noqa: SLF001 - so that an import finds the real one
    return DistributedDataParallel(module, gradient_as_bucket_view=True)
