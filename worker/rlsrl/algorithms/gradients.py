"""The gradient of a loss by the flat parameters: on one rank, or summed over all of them."""

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

from rlsrl.algorithms.base import INDEX, Algorithm, Tensors
from rlsrl.algorithms.spare_core import SpareCore

PIECE = 1 << 22
"""Numbers of a minibatch from which on it is cut into pieces: a convolutional network's 16 MiB of float32 pixels, of
which a core has something for tens of milliseconds."""


class Gradients(Protocol):
    """Computes the whole minibatch's gradient; the loss is this rank's share of it."""

    def __call__(self, params: Tensor, state: Tensors, rows: Tensors, entry: Tensors) -> tuple[Tensor, Tensors, Tensor]:
        """(witness, metrics, gradient [num_parameters]) of the minibatch that ``gathered`` makes of rows and entry.

        The witness is finite exactly if the step may be taken, and the same on every rank.
        """


def gathered(rows: Tensors, entry: Tensors) -> Tensors:
    """A minibatch: of the batch's rows those that the schedule's entry names, and what else stands in the entry."""
    index = entry[INDEX]
    chosen = {path: _selected(tensor, index) for path, tensor in rows.items()}
    return chosen | {name: tensor for name, tensor in entry.items() if name != INDEX}


def pieces(rows: Tensors, entry: Tensors) -> Sequence[Tensors]:
    """The entry cut into equal ones of at most ``PIECE`` numbers each; as it is where it is small, has no such parts or
    is a GPU's.

    The loss of a minibatch is the sum of the pieces' losses, as it is of several ranks' (``Algorithm.loss``).
    """
    size = len(entry[INDEX])
    if entry[INDEX].device.type != "cpu":
        return [entry]
    least = -(-size * sum(tensor[0].numel() for tensor in rows.values()) // PIECE)
    best_first = sorted(range(least, 2 * least), key=lambda number: number % 2)  # even ones are fair to two cores
    number = next((number for number in best_first if size % number == 0), 1)
    if number == 1:
        return [entry]
    cut = {name: torch.split(tensor, size // number) for name, tensor in entry.items() if tensor.shape[:1] == (size,)}
    return [{**entry, **{name: parts[each] for name, parts in cut.items()}} for each in range(number)]


def _selected(tensor: Tensor, index: Tensor) -> Tensor:
    """Rows of a tensor, in its own order of memory: torch would bring them into the usual one, number by number."""
    if tensor.is_contiguous():
        return tensor.index_select(0, index)
    strides = tensor.stride()
    order = [0, *sorted(range(1, tensor.dim()), key=lambda dim: -strides[dim])]
    inverse = [order.index(dim) for dim in range(tensor.dim())]
    return tensor.permute(order).index_select(0, index).permute(inverse)


class LocalGradients:
    """One rank: its loss is the whole."""

    def __init__(self, algorithm: Algorithm) -> None:
        self._algorithm = algorithm

    def __call__(self, params: Tensor, state: Tensors, rows: Tensors, entry: Tensors) -> tuple[Tensor, Tensors, Tensor]:
        """See ``Gradients``; the witness is the loss."""
        params = params.detach().requires_grad_()
        loss, aux = self._algorithm.loss(params, state, gathered(rows, entry))
        (gradient,) = torch.autograd.grad(loss, params)
        return loss.detach(), aux.metrics, gradient


class PureGradients:
    """The same as a function of tensors alone, which compiles together with what is around it; slower as it stands."""

    def __init__(self, algorithm: Algorithm) -> None:
        self._algorithm = algorithm

    def __call__(self, params: Tensor, state: Tensors, rows: Tensors, entry: Tensors) -> tuple[Tensor, Tensors, Tensor]:
        """See ``Gradients``; the witness is the loss."""

        def loss_of(params: Tensor) -> tuple[Tensor, tuple[Tensor, Tensors]]:
            loss, aux = self._algorithm.loss(params, state, gathered(rows, entry))
            return loss, (loss.detach(), aux.metrics)

        gradient, (loss, metrics) = torch.func.grad(loss_of, has_aux=True)(params)
        return loss, metrics, gradient


class PiecedGradients:
    """One rank whose minibatches are cut into pieces, some of them for a core that is idle.

    Always the same pieces, added up in the same order: who computed them makes no difference, not to the last bit.
    """

    def __init__(self, gradients: Gradients) -> None:
        """``gradients`` of a piece; two threads call it at once."""
        self._gradients = gradients
        self._spare_core = SpareCore()

    def __call__(self, params: Tensor, state: Tensors, rows: Tensors, entry: Tensors) -> tuple[Tensor, Tensors, Tensor]:
        """See ``Gradients``; the witness is the sum of the pieces' losses."""
        work = [partial(self._gradients, params, state, rows, piece) for piece in pieces(rows, entry)]
        losses, metrics, gradients = zip(*self._spare_core.do(work), strict=True)
        sums = {name: torch.stack([each[name] for each in metrics]).sum() for name in metrics[0]}
        total = gradients[0]
        for gradient in gradients[1:]:
            total += gradient
        return torch.stack(losses).sum(), sums, total


class FlatLoss(nn.Module):
    """An algorithm's loss as a module with one parameter: the flat vector, and a one for the loss to ride on."""

    def __init__(self, algorithm: Algorithm, params: Tensor) -> None:
        """For parameters of that form, [num_parameters], and where they are."""
        super().__init__()
        self._algorithm = algorithm
        self.flat = nn.Parameter(torch.ones(params.numel() + 1, device=params.device))

    def forward(self, state: Tensors, rows: Tensors, entry: Tensors) -> tuple[Tensor, Tensors]:
        """(loss, metrics). The gradient by the parameter's last element is the loss itself."""
        loss, aux = self._algorithm.loss(self.flat[:-1], state, gathered(rows, entry))
        # Adds nothing to the value: what is added has the value 0 and the gradient `loss` by the last element.
        rider = self.flat[-1]
        return loss + (rider - rider.detach()) * loss.detach(), aux.metrics


class ParallelGradients:
    """All ranks of torch's default process group, by ``DistributedDataParallel`` over one flat parameter.

    DDP's hooks fire in ``backward`` only (``autograd.grad`` would leave the ranks apart without a word, pytorch
    #47562), and it averages, so its result times the number of ranks is the sum of the shares. The loss itself rides
    along in one more element of the parameter, whose gradient is the loss: each rank learns the whole, and all of them
    skip the same steps.
    """

    def __init__(self, loss: FlatLoss) -> None:
        """A collective call: all ranks make theirs together."""
        self._module = loss
        self._parallel = _parallel(loss)
        self._world_size = torch.distributed.get_world_size()

    def __call__(self, params: Tensor, state: Tensors, rows: Tensors, entry: Tensors) -> tuple[Tensor, Tensors, Tensor]:
        """See ``Gradients``; the witness is the sum of all ranks' losses."""
        flat = self._module.flat
        with torch.no_grad():
            flat[:-1].copy_(params)
        if flat.grad is not None:
            flat.grad.zero_()
        loss, metrics = self._parallel(state, rows, entry)
        loss.backward()
        assert flat.grad is not None, "backward leaves one"  # noqa: S101 - an invariant of torch
        total = flat.grad * self._world_size
        return total[-1], metrics, total[:-1]


def _parallel(module: nn.Module) -> DistributedDataParallel:
    """The module in DDP, without importing torch's compiler.

    DDP imports it to ask how it splits graphs, when it is made, and to tell it to leave a function of DDP's alone, when
    it is called first: a second and a half of a gang's start in each rank, for nothing where nothing is compiled. The
    module within is compiled by itself, so that DDP is never traced.
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
            pass  # another torch, which asks for more
        finally:
            del torch._dynamo  # noqa: SLF001 - so that an import finds the real one
    return DistributedDataParallel(module, gradient_as_bucket_view=True)
