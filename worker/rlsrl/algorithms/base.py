"""The interface between an algorithm and the Learner: prepare a batch, cut it into minibatches, compute losses.

Algorithms are pure functions, except that ``schedule`` draws from the random generator it is given.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rlsrl.algorithms.adam import Adam
from rlsrl.algorithms.schedules import Scheduled
from rlsrl.data.specs import Arrays

Tensors = Mapping[str, Tensor]
"""Tensors by path."""

Reduce = Callable[[NDArray[np.float64]], NDArray[np.float64]]
"""Sums a small array over the data-parallel ranks. All ranks call it, in the same order."""

Evaluate = Callable[[Tensors, Tensors], Tensors]
"""``Algorithm.evaluate``, or a function that computes the same in parts or compiled."""

Loss = Callable[[Tensors, Tensors, Tensors], tuple[Tensor, Tensors]]
"""``(params, state, minibatch) -> (loss, metrics)``: what ``ParameterGroup.loss`` describes."""

POLICY = "policy"
"""The parameter group that every algorithm has: the parameters of the policy's network, which actors get."""
LEARNING_RATE = "learning_rate"
"""The spec's learning rate, as a coefficient."""

INDEX = "index"
"""A key of every schedule: [K, M] int64, the batch rows of each of K minibatches of M rows."""
WEIGHT = "weight"
"""A key of every schedule: [K, M] float32, above 0 where the row of ``INDEX`` is a transition, else 0. Where rows are
sequences of L steps: [K, M, L], for each step."""
ERRORS = "errors"
"""A key of one loss's metrics, for draws by priority: the errors of the minibatch's rows, [M]. It is no metric."""


def one_rank(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sum over a single rank: the values."""
    return values


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """The rows that this rank trains on in one step."""

    rows: Tensors
    """Inputs of the loss, one row for each step of a lane, each [T * B, ...]; or one for each sequence of L steps, each
    [T / L * B, ...]."""
    schedule_inputs: Arrays
    """Inputs of ``Algorithm.schedule``, which the loss does not read: one entry for each row."""
    num_transitions: int
    """Steps that are transitions."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics known before training, over all ranks."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ParameterGroup:
    """Parameters, one flat vector, that follow the gradient of a loss of their own by an optimizer of their own."""

    loss: Loss
    """Gets all groups' parameters, the state and a minibatch. Its gradient changes this group alone.

    Returns this rank's share of the loss: the shares of all ranks add up to the loss of the whole minibatch. Beside it
    it returns metrics: scalars without gradients, this rank's shares, as the loss is. Each group's have other names.
    An array among them, [M], is no metric: it has a value for each row. The losses of the groups after this one find it
    in the minibatch, under its name. ``ERRORS`` is one that draws by priority need.

    The losses of microbatches add up in the same way: each term is a sum over rows.

    PURE: a function of its arguments alone, with static shapes and without branches on values, so that it compiles.
    The minibatch holds the rows that ``INDEX`` selects, the schedule's other arrays for this minibatch, and the
    coefficients, each [].
    """
    initial: Tensor | None = None
    """The first values, float32 [P], equal on all ranks. None for ``POLICY``, whose values are a version's."""
    learning_rate: str = LEARNING_RATE
    """The coefficient that is the step size: the spec's learning rate, or one of ``Algorithm.coefficients``."""
    optimizer: Adam | None = None
    """None: with the spec's settings."""
    every: int = 1
    """The group is updated with every so many minibatches. 1 for the first group, and where the loss has ``ERRORS``."""


class Algorithm(ABC):
    """Defines losses and their inputs; the Learner makes the gradient steps.

    ``params`` are the parameter groups' flat vectors by name; the network of the policy is a function of
    ``params[POLICY]``.
    """

    @property
    @abstractmethod
    def groups(self) -> Mapping[str, ParameterGroup]:
        """The parameter groups by name, ``POLICY`` among them: the same at each call.

        On each minibatch those that are due are updated in this order, and each sees what those before it changed. If a
        loss or gradient is not finite, its group and those after it keep their parameters.

        Actors get only ``POLICY``: the parameters of critics, for example, are a group that stays with the trainers.
        """

    def initial_state(self, params: Tensors) -> Tensors:  # noqa: ARG002 - for algorithms that have a state
        """Return the state kept beside parameters and optimizers, for example target networks."""
        return {}

    @abstractmethod
    def prepare(self, params: Tensors, slots: Arrays, reduce: Reduce, evaluate: Evaluate) -> Batch:
        """Turn slots (B lanes under the field names of ``data.slots``) into rows, with these parameters, once a step.

        ``evaluate`` computes what ``Algorithm.evaluate`` does; it is called at most once.

        Raises:
            ValueError: the lanes do not fit the algorithm's settings.
        """

    def evaluate(self, params: Tensors, rows: Tensors) -> Tensors:  # noqa: ARG002 - for algorithms that need some
        """Return the networks' outputs that ``prepare`` needs, row by row: each [N, ...] -> each [N, ...].

        PURE, as losses are. The caller may evaluate some rows at a time.
        """
        return {}

    @property
    def compiles_evaluation(self) -> bool:
        """Whether ``evaluate`` is compiled. False where it unrolls whole rollouts: its graph would be too large."""
        return True

    @abstractmethod
    def schedule(self, batch: Batch, rng: np.random.Generator, reduce: Reduce) -> Tensors:
        """Return the step's K minibatches at once: ``INDEX``, ``WEIGHT`` and other inputs, each [K, ...], on the CPU.

        An array [K, M, ...] has one entry for each of the M rows: microbatches split it along M.

        With replay each rank's ``rng`` draws other numbers. One that all ranks are to share comes from ``reduce``, for
        example as the sum of what each has drawn.

        Sums and means over all ranks that a minibatch needs are computed here, by one ``reduce`` for the whole step, so
        that losses stay pure.
        """

    def coefficients(self, env_steps: int) -> Mapping[str, float]:  # noqa: ARG002 - for algorithms that have some
        """Return the losses' scheduled coefficients by name, after ``env_steps`` env steps.

        Each is an input of every minibatch of the step. It is a tensor there, so that a compiled step sees it change.
        """
        return {}

    def acting_scalars(self, env_steps: int) -> Mapping[str, float]:  # noqa: ARG002 - for algorithms that have some
        """Return what actors need beside the weights, by name in ``Parameters.statistics``.

        They are those of the version that is published after ``env_steps`` env steps. The names are always the same.
        """
        return {}

    def adopt(self, coefficients: Mapping[str, Scheduled]) -> None:  # noqa: B027 - for algorithms that have some
        """Replace the schedules of all ``coefficients`` and ``acting_scalars``."""

    def update_state(self, params: Tensors, state: Tensors) -> Tensors:  # noqa: ARG002 - for algorithms that have one
        """Return the state after the minibatch that led to ``params``. PURE, as losses are.

        It is used after a minibatch with which the last group and the state (``state_every``) were due, if all groups
        that were due were updated. Else the state stays as it is.
        """
        return state

    @property
    def state_every(self) -> int:
        """The state is due with every so many minibatches. A state that is seldom due costs nothing in between."""
        return 1
