"""One optimizer step on one minibatch, eager or compiled: gather, loss, gradient, clip, Adam, the algorithm's state.

Both compute the same, though not to the last bit: a compiler sums in another order. Compiled, small networks are
trained several times as fast, since what an eager step spends its time with is calling many small kernels.

On one rank the whole step is one graph. On several, what comes before the ranks' gradients are summed is one graph,
what comes after it another, and DDP sums between the two. So it is on one whose minibatches are cut into pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from rlsrl.algorithms.adam import AdamState, adam_step_
from rlsrl.algorithms.base import Algorithm, Tensors
from rlsrl.algorithms.compiled import compiled, compiling, form
from rlsrl.algorithms.gradients import (
    FlatLoss,
    Gradients,
    LocalGradients,
    ParallelGradients,
    PiecedGradients,
    PureGradients,
    pieces,
)


class Inputs(NamedTuple):
    """What a step is made from. Names, shapes and dtypes stay the same over a Learner's life."""

    params: Tensor
    """The flat vector, [P]; changed in place."""
    adam: AdamState
    """Changed in place."""
    state: Tensors
    """The algorithm's own."""
    rows: Tensors
    """The batch, each [T * B, ...]."""
    entry: Tensors
    """The schedule's entry for this minibatch, and the coefficients of the loss."""
    learning_rate: Tensor
    """float32 []."""


class Outcome(NamedTuple):
    """What came of a step."""

    metrics: Tensors
    """What the loss says beside its value, this rank's shares: each []."""
    norm: Tensor
    """Of the gradient before clipping, []."""
    finite: Tensor
    """Whether the step was taken, [] bool."""
    state: Tensors
    """The algorithm's own, from now on."""


Step = Callable[[Inputs], Outcome]
"""One optimizer step."""


class Steps(Protocol):
    """Makes a Learner's step."""

    def eager(self) -> Step:
        """The step as it stands. All ranks make theirs together."""

    def compile(self, example: Inputs) -> Callable[[], Step]:
        """Compile the step and try it on ``example``, whose params and Adam state it may spoil; for this rank alone.

        What is returned makes a step of it; all ranks call theirs together. That step never compiles again: for inputs
        of another form it does without.

        Raises:
            Exception: what torch's compiler and its helpers raise has no other root.
        """


class LocalSteps:
    """Steps of one rank: its minibatch is the whole."""

    def __init__(self, algorithm: Algorithm, *, adam_epsilon: float, max_gradient_norm: float) -> None:
        self._algorithm = algorithm
        self._descend = _Descent(algorithm, adam_epsilon=adam_epsilon, max_gradient_norm=max_gradient_norm)

    def eager(self) -> Step:
        """See ``Steps``."""
        return _step_of(LocalGradients(self._algorithm), self._descend)

    def compile(self, example: Inputs) -> Callable[[], Step]:
        """See ``Steps``."""
        gradients, device = PureGradients(self._algorithm), example.params.device
        step = _step_of(gradients, self._descend)
        with compiling():
            cut = pieces(example.rows, example.entry)
            if len(cut) == 1:
                graph: Step = compiled(step, device)
            else:
                # By two threads at once: what is compiled no longer changes the network while it runs (PureNetwork).
                of_a_piece: Gradients = compiled(gradients, device)
                of_a_piece(example.params, example.state, example.rows, cut[0])  # or each of them would compile it
                graph = _step_of(PiecedGradients(of_a_piece), compiled(self._descend, device))
            graph(example)
        known = _form(example)
        return lambda: lambda inputs: (graph if _form(inputs) == known else step)(inputs)


class ParallelSteps:
    """Steps of all ranks of torch's default process group, each with its part of the minibatch."""

    def __init__(self, algorithm: Algorithm, params: Tensor, *, adam_epsilon: float, max_gradient_norm: float) -> None:
        """Of parameters like these, and where they are."""
        self._algorithm = algorithm
        self._params = params
        self._descend = _Descent(algorithm, adam_epsilon=adam_epsilon, max_gradient_norm=max_gradient_norm)

    def eager(self) -> Step:
        """See ``Steps``."""
        return _step_of(ParallelGradients(FlatLoss(self._algorithm, self._params)), self._descend)

    def compile(self, example: Inputs) -> Callable[[], Step]:
        """See ``Steps``."""
        loss = FlatLoss(self._algorithm, self._params)
        loss.compile(fullgraph=True, dynamic=False)
        with compiling():
            descend: _Descend = torch.compile(self._descend.__call__, fullgraph=True, dynamic=False)
            # Without DDP, whose hooks would wait for ranks that may have failed to compile.
            value, metrics = loss(example.state, example.rows, example.entry)
            value.backward()
            total = loss.flat.grad
            assert total is not None, "backward leaves one"  # noqa: S101 - an invariant of torch
            descend(example, total[-1], metrics, total[:-1])
        loss.flat.grad = None
        return lambda: _step_of(ParallelGradients(loss), descend)


_Descend = Callable[[Inputs, Tensor, Tensors, Tensor], Outcome]
"""What follows the gradient, of what ``Gradients`` give."""


class _Descent:
    """Clip, Adam, and the algorithm's state."""

    def __init__(self, algorithm: Algorithm, *, adam_epsilon: float, max_gradient_norm: float) -> None:
        self._algorithm = algorithm
        self._adam_epsilon = adam_epsilon
        self._max_gradient_norm = max_gradient_norm

    def __call__(self, inputs: Inputs, witness: Tensor, metrics: Tensors, gradient: Tensor) -> Outcome:
        with torch.no_grad():
            norm, finite = adam_step_(
                inputs.params,
                gradient,
                witness,
                inputs.adam,
                learning_rate=inputs.learning_rate,
                epsilon=self._adam_epsilon,
                max_gradient_norm=self._max_gradient_norm,
            )
            state = self._algorithm.update_state(inputs.params, inputs.state)
        return Outcome(metrics=metrics, norm=norm, finite=finite, state=state)


def _form(inputs: Inputs) -> list[Any]:
    """All that a compiled step depends on but the values."""
    return form([inputs.params, inputs.learning_rate], [vars(inputs.adam), inputs.state, inputs.rows, inputs.entry])


def _step_of(gradients: Gradients, descend: _Descend) -> Step:
    def step(inputs: Inputs) -> Outcome:
        witness, metrics, gradient = gradients(inputs.params, inputs.state, inputs.rows, inputs.entry)
        return descend(inputs, witness, metrics, gradient)

    return step
