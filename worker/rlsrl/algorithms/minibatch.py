"""One optimizer step on one minibatch, eager or compiled: gather rows, loss, gradient, clip, Adam, algorithm state.

The compiled step computes the same values, but for the last bits: a compiler sums in another order. Compiled, a small
network trains several times as fast, since an eager step spends most of its time on calls of small kernels.

One rank compiles the whole step into one graph. Several ranks compile the part before the sum of gradients and the part
after it into one graph each, and DDP sums between them. So does one rank whose minibatches are split into microbatches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from rlsrl.algorithms.adam import AdamState, adam_step_
from rlsrl.algorithms.base import Algorithm, Tensors
from rlsrl.algorithms.compiled import compiled, compiling, form
from rlsrl.algorithms.gradients import (
    FlatLoss,
    Gradients,
    LocalGradients,
    MicrobatchGradients,
    ParallelGradients,
    PureGradients,
    microbatches,
)


class Inputs(NamedTuple):
    """The inputs of a step. Names, shapes and dtypes stay the same over a Learner's life."""

    params: Tensor
    """The flat vector, [P]; changed in place."""
    adam: AdamState
    """Changed in place."""
    state: Tensors
    """The algorithm's state."""
    rows: Tensors
    """The batch, each [T * B, ...]."""
    minibatch: Tensors
    """The schedule's arrays for this minibatch, and the coefficients of the loss."""
    learning_rate: Tensor
    """float32 []."""


class MinibatchOutcome(NamedTuple):
    """The results of a step."""

    metrics: Tensors
    """The loss's metrics, this rank's shares: each []."""
    norm: Tensor
    """The norm of the gradient before clipping, []."""
    is_taken: Tensor
    """Whether the step was taken, [] bool. False if the loss or the gradient was not finite: nothing changed."""
    state: Tensors
    """The algorithm's state after the step."""


MinibatchStep = Callable[[Inputs], MinibatchOutcome]
"""One optimizer step."""


class Steps(Protocol):
    """Makes a Learner's step."""

    def eager(self) -> MinibatchStep:
        """Return the eager step. All ranks call this together."""

    def compile(self, example: Inputs) -> Callable[[], MinibatchStep]:
        """Compile the step for this rank and run it on ``example``, whose params and Adam state it may overwrite.

        Returns a function that makes the step; all ranks call theirs together. The step never compiles again: inputs of
        another form are trained eagerly.

        Raises:
            Exception: torch's compiler or one of its helpers failed; their errors have no narrower base.
        """


class LocalSteps(Steps):
    """Steps of one rank, which holds the whole minibatch."""

    def __init__(self, algorithm: Algorithm, *, adam_epsilon: float, max_gradient_norm: float) -> None:
        self._algorithm = algorithm
        self._update = OptimizerStep(algorithm, adam_epsilon=adam_epsilon, max_gradient_norm=max_gradient_norm)

    @override
    def eager(self) -> MinibatchStep:
        return _step_of(LocalGradients(self._algorithm), self._update)

    @override
    def compile(self, example: Inputs) -> Callable[[], MinibatchStep]:
        gradients, device = PureGradients(self._algorithm), example.params.device
        step = _step_of(gradients, self._update)
        with compiling():
            parts = microbatches(example.rows, example.minibatch)
            if len(parts) == 1:
                graph: MinibatchStep = compiled(step, device)
            else:
                # Two threads call it at once. They may: compiled code does not change the network (PureNetwork).
                microbatch_gradients: Gradients = compiled(gradients, device)
                # Compile it here, or each of the two threads would.
                microbatch_gradients(example.params, example.state, example.rows, parts[0])
                graph = _step_of(MicrobatchGradients(microbatch_gradients), compiled(self._update, device))
            graph(example)
        compiled_form = _form(example)
        return lambda: lambda inputs: (graph if _form(inputs) == compiled_form else step)(inputs)


class ParallelSteps(Steps):
    """Steps of all ranks of torch's default process group, each with its share of the minibatch."""

    def __init__(self, algorithm: Algorithm, params: Tensor, *, adam_epsilon: float, max_gradient_norm: float) -> None:
        """Make steps for parameters of the form of ``params``, on their device."""
        self._algorithm = algorithm
        self._params = params
        self._update = OptimizerStep(algorithm, adam_epsilon=adam_epsilon, max_gradient_norm=max_gradient_norm)

    @override
    def eager(self) -> MinibatchStep:
        return _step_of(ParallelGradients(FlatLoss(self._algorithm, self._params)), self._update)

    @override
    def compile(self, example: Inputs) -> Callable[[], MinibatchStep]:
        loss = FlatLoss(self._algorithm, self._params)
        loss.compile(fullgraph=True, dynamic=False)
        with compiling():
            update: _Update = torch.compile(self._update.__call__, fullgraph=True, dynamic=False)
            # Without DDP: its hooks would wait for ranks that may have failed to compile.
            value, metrics = loss(example.state, example.rows, example.minibatch)
            value.backward()
            total = loss.flat.grad
            assert total is not None, "backward leaves one"
            update(example, total[-1], metrics, total[:-1])
        loss.flat.grad = None
        return lambda: _step_of(ParallelGradients(loss), update)


_Update = Callable[[Inputs, Tensor, Tensors, Tensor], MinibatchOutcome]
"""Applies what ``Gradients`` return: (inputs, total_loss, metrics, gradient)."""


class OptimizerStep:
    """Clips the gradient, applies Adam and updates the algorithm's state."""

    def __init__(self, algorithm: Algorithm, *, adam_epsilon: float, max_gradient_norm: float) -> None:
        self._algorithm = algorithm
        self._adam_epsilon = adam_epsilon
        self._max_gradient_norm = max_gradient_norm

    def __call__(self, inputs: Inputs, total_loss: Tensor, metrics: Tensors, gradient: Tensor) -> MinibatchOutcome:
        """Apply the gradient, unless it or ``total_loss`` is not finite."""
        with torch.no_grad():
            norm, is_taken = adam_step_(
                inputs.params,
                gradient,
                total_loss,
                inputs.adam,
                learning_rate=inputs.learning_rate,
                epsilon=self._adam_epsilon,
                max_gradient_norm=self._max_gradient_norm,
            )
            state = self._algorithm.update_state(inputs.params, inputs.state)
        return MinibatchOutcome(metrics=metrics, norm=norm, is_taken=is_taken, state=state)


def _form(inputs: Inputs) -> list[Any]:
    """Return all that a compiled step depends on except the values."""
    return form([inputs.params, inputs.learning_rate], [vars(inputs.adam), inputs.state, inputs.rows, inputs.minibatch])


def _step_of(gradients: Gradients, update: _Update) -> MinibatchStep:
    def step(inputs: Inputs) -> MinibatchOutcome:
        total_loss, metrics, gradient = gradients(inputs.params, inputs.state, inputs.rows, inputs.minibatch)
        return update(inputs, total_loss, metrics, gradient)

    return step
