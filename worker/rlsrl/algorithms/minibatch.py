"""One step on one minibatch, eager or compiled: for each parameter group gather rows, loss, gradient, clip, Adam.

The compiled step computes the same values, but for the last bits: a compiler sums in another order. Compiled, a small
network trains several times as fast, since an eager step spends most of its time on calls of small kernels.

One rank compiles the whole step into one graph. Several ranks compile the part before the sum of gradients and the part
after it into one graph each, for each group, and DDP sums between them. So does one rank whose minibatches are split
into microbatches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, combinations
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from rlsrl.algorithms.adam import Adam, AdamState, adam_step_
from rlsrl.algorithms.base import Algorithm, ParameterGroup, Tensors
from rlsrl.algorithms.compiled import compiled, compiling, form, of_products
from rlsrl.algorithms.gradients import (
    FlatLoss,
    Gradients,
    LocalGradients,
    MicrobatchGradients,
    ParallelGradients,
    PureGradients,
    microbatches,
    of_rows,
    other_groups,
)


class Inputs(NamedTuple):
    """The inputs of a step. Names, shapes and dtypes stay the same over a Learner's life."""

    params: Tensors
    """The groups' flat vectors, each [P]; changed in place."""
    adam: Mapping[str, AdamState]
    """By group; changed in place."""
    state: Tensors
    """The algorithm's state."""
    rows: Tensors
    """The batch, each [T * B, ...]."""
    minibatch: Tensors
    """The schedule's arrays for this minibatch, and the coefficients, learning rates among them."""


class MinibatchOutcome(NamedTuple):
    """The results of a step."""

    metrics: Tensors
    """The metrics of the groups that were due, this rank's shares: each []; and their arrays of rows, each [M]."""
    norms: Tensors
    """The norms of the gradients before clipping, by group that was due: each []."""
    is_taken: Tensor
    """Whether the step was taken, [] bool. False if a loss or gradient was not finite: that group and those after it
    did not change, nor did the state."""
    state: Tensors
    """The algorithm's state after the step."""


Due = tuple[str, ...]
"""The groups that a minibatch updates, in order."""
MinibatchStep = Callable[[Inputs, Due], MinibatchOutcome]
"""One optimizer step of each group that is due."""
StepFor = Callable[[Inputs], MinibatchStep]
"""Returns the step for inputs of the form of those given."""


class Steps(Protocol):
    """Makes a Learner's step."""

    def eager(self) -> StepFor:
        """Return the eager step, for inputs of every form. All ranks call this together."""

    def compile(self, example: Inputs) -> Callable[[], StepFor]:
        """Compile the step for this rank and run it on ``example``, whose params and Adam state it may overwrite.

        Returns a function that makes the step; all ranks call theirs together. The step never compiles again: inputs of
        another form are trained eagerly.

        Raises:
            Exception: torch's compiler or one of its helpers failed; their errors have no narrower base.
        """


class LocalSteps(Steps):
    """Steps of one rank, which holds the whole minibatch."""

    def __init__(self, updates: Sequence[GroupUpdate]) -> None:
        self._updates = updates

    @override
    def eager(self) -> StepFor:
        step = _step_of([(LocalGradients(update.name, update.loss), update) for update in self._updates])
        return lambda _: step

    @override
    def compile(self, example: Inputs) -> Callable[[], StepFor]:
        parts = [(PureGradients(update.name, update.loss), update) for update in self._updates]
        step, device = _step_of(parts), _device(example)
        with compiling():
            first, *others = microbatches(example.rows, example.minibatch)
            if not others:
                graph = _graph_of(step, device, all_due(self._updates))
            else:
                # Two threads call it at once. They may: compiled code does not change the network (PureNetwork).
                of_microbatches: list[Gradients] = [compiled(gradients, device) for gradients, _ in parts]
                for gradients in of_microbatches:
                    # Compile it here, or each of the two threads would.
                    _, found, _ = gradients(example.params, example.state, example.rows, first)
                    first = {**first, **of_rows(found)}
                graph = _step_of([
                    (MicrobatchGradients(gradients), compiled(update, device))
                    for gradients, (_, update) in zip(of_microbatches, parts, strict=True)
                ])  # fmt: skip
            for due in all_due(self._updates):
                graph(example, due)
        compiled_form = _form(example)
        return lambda: lambda inputs: graph if _form(inputs) == compiled_form else step


class ParallelSteps(Steps):
    """Steps of all ranks of torch's default process group, each with its share of the minibatch."""

    def __init__(self, updates: Sequence[GroupUpdate], params: Tensors) -> None:
        """Make steps for parameters of the form of ``params``, on their device."""
        self._updates = updates
        self._params = params

    @override
    def eager(self) -> StepFor:
        step = _step_of([(ParallelGradients(self._flat_loss(update)), update) for update in self._updates])
        return lambda _: step

    @override
    def compile(self, example: Inputs) -> Callable[[], StepFor]:
        parts: list[tuple[FlatLoss, _Apply]] = []
        with compiling():
            for update in self._updates:
                loss, apply, found = self._compiled(update, example)
                parts.append((loss, apply))
                example = example._replace(minibatch={**example.minibatch, **of_rows(found)})

        def together() -> StepFor:
            step = _step_of([(ParallelGradients(loss), apply) for loss, apply in parts])
            return lambda _: step

        return together

    def _flat_loss(self, update: GroupUpdate) -> FlatLoss:
        return FlatLoss(update.name, update.loss, self._params)

    def _compiled(self, update: GroupUpdate, example: Inputs) -> tuple[FlatLoss, _Apply, Tensors]:
        """Return the parts of a group's update before and after the sum over ranks, compiled, and its metrics."""
        loss = self._flat_loss(update)
        loss.compile(fullgraph=True, dynamic=False, options=of_products())
        apply: _Apply = torch.compile(update.__call__, fullgraph=True, dynamic=False)
        # Without DDP: its hooks would wait for ranks that may have failed to compile.
        others = other_groups(example.params, update.name)
        value, metrics = loss(others, example.state, example.rows, example.minibatch)
        value.backward()
        total = loss.flat.grad
        assert total is not None, "backward leaves one"
        apply(example, total[-1], total[:-1], None if update.is_first else torch.ones_like(total[-1]).bool())
        loss.flat.grad = None
        return loss, apply, metrics


_Apply = Callable[[Inputs, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor, Tensors]]
"""``GroupUpdate.__call__``, or the same compiled."""


class GroupUpdate:
    """Clips a group's gradient and applies Adam. With the last group it may update the algorithm's state."""

    def __init__(
        self, name: str, group: ParameterGroup, default: Adam, *, is_first: bool, after: Algorithm | None
    ) -> None:
        """``default`` is the optimizer of a group without one. ``after``: the algorithm whose state it updates."""
        self.name = name
        self.loss = group.loss
        self.optimizer = group.optimizer or default
        self.is_first = is_first
        self.every = group.every
        self._learning_rate = group.learning_rate
        self._after = after

    def __call__(
        self, inputs: Inputs, total_loss: Tensor, gradient: Tensor, is_taken: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensors]:
        """Apply the gradient, unless it or ``total_loss`` is not finite, or a group before was not updated.

        ``is_taken``: whether those before were updated; None for the first. Returns (norm of the gradient, whether all
        up to this one were updated, the algorithm's state).
        """
        with torch.no_grad():
            if is_taken is not None:
                total_loss = torch.where(is_taken, total_loss, math.nan)
            norm, is_taken = adam_step_(
                self.optimizer,
                inputs.params[self.name],
                gradient,
                total_loss,
                inputs.adam[self.name],
                learning_rate=inputs.minibatch[self._learning_rate],
            )
            state = inputs.state
            if self._after is not None and state:
                state = state_after(self._after, inputs.params, state, is_taken)
        return norm, is_taken, state


def group_updates(algorithm: Algorithm, groups: Mapping[str, ParameterGroup], default: Adam) -> list[GroupUpdate]:
    """Return the updates of an algorithm's groups, in order. ``default`` is the optimizer of groups without one.

    The last group's also updates a state that is due with each minibatch; see ``state_after`` for others.
    """
    last = len(groups) - 1
    after = algorithm if algorithm.state_every == 1 else None
    return [
        GroupUpdate(name, group, default, is_first=place == 0, after=after if place == last else None)
        for place, (name, group) in enumerate(groups.items())
    ]


def state_after(algorithm: Algorithm, params: Tensors, state: Tensors, is_taken: Tensor) -> dict[str, Tensor]:
    """Return the state after a minibatch with which it was due, as tensors of its own."""
    with torch.no_grad():
        new = algorithm.update_state(params, state)
        return {name: torch.where(is_taken, new[name], old) for name, old in state.items()}


def due_groups(updates: Sequence[GroupUpdate], number: int) -> Due:
    """Return which groups are due with the minibatch of that number, from 1."""
    return tuple(update.name for update in updates if number % update.every == 0)


def all_due(updates: Sequence[GroupUpdate]) -> list[Due]:
    """Return each way in which groups are due.

    With a minibatch those periods end that divide its number, which are those that divide their least common multiple.
    """
    periods = sorted({update.every for update in updates})
    chosen = chain.from_iterable(combinations(periods, number) for number in range(len(periods) + 1))
    return list(dict.fromkeys(due_groups(updates, math.lcm(*each)) for each in chosen))


def _device(inputs: Inputs) -> torch.device:
    return next(iter(inputs.params.values())).device


def _form(inputs: Inputs) -> list[Any]:
    """Return all that a compiled step depends on except the values."""
    adam = [vars(state) for state in inputs.adam.values()]
    return form([], [inputs.params, *adam, inputs.state, inputs.rows, inputs.minibatch])


def _graph_of(step: MinibatchStep, device: torch.device, ways: Sequence[Due]) -> MinibatchStep:
    """Return the step compiled into a graph for each way in which groups are due."""

    def with_due(due: Due) -> Callable[[Inputs], MinibatchOutcome]:
        graph: Callable[[Inputs], MinibatchOutcome] = compiled(lambda inputs: step(inputs, due), device)
        return graph

    graphs = {due: with_due(due) for due in ways}
    return lambda inputs, due: graphs[due](inputs)


def _step_of(parts: Sequence[tuple[Gradients, _Apply]]) -> MinibatchStep:
    """Return the step that updates the groups, in the order of ``Inputs.params``: gradients, then what applies them."""

    def step(inputs: Inputs, due: Due) -> MinibatchOutcome:
        metrics: dict[str, Tensor] = {}
        norms: dict[str, Tensor] = {}
        minibatch = inputs.minibatch
        is_taken, state = None, inputs.state
        for name, (gradients, apply) in zip(inputs.params, parts, strict=True):
            if name not in due:
                continue
            total_loss, found, gradient = gradients(inputs.params, inputs.state, inputs.rows, minibatch)
            norms[name], is_taken, state = apply(inputs, total_loss, gradient, is_taken)
            metrics |= found
            minibatch = {**minibatch, **of_rows(found)}
        assert is_taken is not None, "the first group is always due"
        return MinibatchOutcome(metrics=metrics, norms=norms, is_taken=is_taken, state=state)

    return step
