"""What an algorithm is to the Learner: how a batch is prepared, cut up and judged. Pure but for the generator given."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rlsrl.algorithms.schedules import Scheduled
from rlsrl.data.specs import Arrays

Tensors = Mapping[str, Tensor]
"""Tensors by path."""

Reduce = Callable[[NDArray[np.float64]], NDArray[np.float64]]
"""Sums a small array over the data-parallel ranks; all of them call it, in the same order."""

Evaluate = Callable[[Tensor, Tensors], Tensors]
"""``Algorithm.evaluate``, or what computes the same otherwise: in parts, compiled."""

INDEX = "index"
"""The schedule's one required entry: [K, M] int64, the batch rows of each of K minibatches of M."""


def one_rank(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The sum over a single rank."""
    return values


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """What is trained in one step, on this rank."""

    rows: Tensors
    """What the loss reads, one row an entry: each [T * B, ...]."""
    aside: Arrays
    """What only the schedule reads: each [T * B]."""
    num_transitions: int
    """Rows that are transitions."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What is known before training, over all ranks."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Aux:
    """What a loss says beside its value."""

    metrics: Tensors
    """Scalars, without gradients; this rank's shares, as the loss."""
    priorities: Tensor | None = None
    """New priorities of the minibatch's rows, [M]; None where rows are not drawn by priority."""


class Algorithm(ABC):
    """Decides what a gradient step is made of; the Learner makes it."""

    def initial_state(self, params: Tensor) -> Tensors:  # noqa: ARG002 - for those that have one
        """What is kept from step to step beside parameters and optimizer (target networks and the like)."""
        return {}

    @abstractmethod
    def prepare(self, params: Tensor, slots: Arrays, reduce: Reduce, evaluate: Evaluate) -> Batch:
        """Turn slots (B lanes under the field names of ``data.slots``) into rows, with these parameters, once a step.

        ``evaluate`` is called once, and does what the method of that name does.

        Raises:
            ValueError: the lanes do not fit what the algorithm was made for.
        """

    @abstractmethod
    def evaluate(self, params: Tensor, rows: Tensors) -> Tensors:
        """What ``prepare`` has to know of the network, of each row by itself: each [N, ...] -> each [N, ...].

        PURE, as ``loss`` is. Rows may be evaluated a part at a time.
        """

    @abstractmethod
    def schedule(self, batch: Batch, rng: np.random.Generator, reduce: Reduce) -> Tensors:
        """The step's K minibatches, all at once: ``INDEX`` and whatever else a minibatch needs, each [K, ...].

        What is [K, M, ...] is of the M rows, one by one: a minibatch may be cut into pieces between them.

        What a minibatch has to know of its counterparts on other ranks (sums, means) is found here, in one ``reduce``
        a step, so the loss stays pure.
        """

    def coefficients(self, env_steps: int) -> Mapping[str, float]:  # noqa: ARG002 - for those that have some
        """Numbers of the loss that may change as training goes on, by name, once ``env_steps`` transitions are trained.

        Each is an entry of all the step's minibatches: a tensor, so that a compiled step sees it change.
        """
        return {}

    def adopt(self, coefficients: Mapping[str, Scheduled]) -> None:  # noqa: B027 - for those that have some
        """Go on with other ``coefficients``, all of them by name."""

    @abstractmethod
    def loss(self, params: Tensor, state: Tensors, minibatch: Tensors) -> tuple[Tensor, Aux]:
        """This rank's share of the loss: shares add up over the ranks to the loss of the whole minibatch.

        So do those of the pieces that a rank's minibatch may be cut into: each term is a sum over rows.

        PURE: a function of its arguments alone, of static shapes, without branches on values, so that it compiles.
        ``minibatch`` holds the rows that ``INDEX`` names, the schedule's other entries for this minibatch, and the
        ``coefficients``, each [].
        """

    def update_state(self, params: Tensor, state: Tensors) -> Tensors:  # noqa: ARG002 - for those that have one
        """The state after a gradient step that led to ``params``."""
        return state
