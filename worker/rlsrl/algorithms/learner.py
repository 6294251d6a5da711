"""The loop that all algorithms share: prepare a batch, step the parameter groups on each of its minibatches."""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlsrl.algorithms.adam import Adam, AdamState
from rlsrl.algorithms.base import (
    ERRORS,
    INDEX,
    LEARNING_RATE,
    POLICY,
    WEIGHT,
    Algorithm,
    Batch,
    Evaluate,
    ParameterGroup,
    Reduce,
    Tensors,
    one_rank,
)
from rlsrl.algorithms.evaluation import compiled_evaluation, evaluated_in_parts
from rlsrl.algorithms.minibatch import (
    Due,
    Inputs,
    LocalSteps,
    MinibatchStep,
    ParallelSteps,
    StepFor,
    due_groups,
    group_updates,
    state_after,
)
from rlsrl.algorithms.normalizer import Normalizer, ReplayNormalizer, SampleMoments
from rlsrl.algorithms.schedules import Scheduled, value_at
from rlsrl.data.specs import Arrays
from rlsrl.data.version import Version
from rlsrl.parameters.protocols import Parameters
from rlsrl.policies.device import CPU, all_to_device, to_device, to_host
from rlsrl.policies.exported import LayoutMismatch


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The result of one call of ``Learner.step``."""

    step: int
    """Calls of ``step`` so far, including this one."""
    optimizer_steps: int
    """Optimizer steps of the policy's parameters so far."""
    taken: tuple[bool, ...]
    """For each minibatch of this call, in order: False if it was skipped, since a loss or gradient was not finite."""
    num_transitions: int
    """Transitions of this rank's batch."""
    num_untrained: int
    """Transitions of this rank's batch whose every minibatch was skipped."""
    trained_rows: NDArray[np.int64] | None = None
    """The rows of this rank's batch that are in a minibatch that was not skipped; None: no minibatch was skipped."""
    errors: NDArray[np.float32] | None = None
    """``ERRORS`` of this rank's rows, each from the last minibatch with it; NaN in rows that no minibatch that was not
    skipped contained. None: no loss says them."""
    metrics: Mapping[str, float]
    """Means over the minibatches that were not skipped. Loss terms are missing if all were skipped."""

    @property
    def skipped(self) -> int:
        """Number of minibatches that were skipped."""
        return self.taken.count(False)


class Learner:
    """Owns the parameters, a flat vector for each group, and the state that training needs. One thread uses it.

    Deterministic: equal parameters, seed and batches give bit-identical results on one machine, also across
    ``state_dict`` and ``load_state_dict`` into a new process. Compiled and eager results differ in their last bits.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        initial: Parameters,
        *,
        learning_rate: Scheduled,
        optimizer: Adam,
        seed: int,
        normalizer: Normalizer | None = None,
        reduce: Reduce = one_rank,
        parallel: bool = False,
        stream: int = 0,
        device: torch.device = CPU,
        threads: int = 1,
    ) -> None:
        """Start from ``initial``, the parameters of ``POLICY``; ``seed`` decides what schedules draw at random.

        ``optimizer`` is that of groups which name none.

        ``normalizer`` normalises the slots before the algorithm sees them. It belongs to this Learner alone.

        ``reduce`` sums over the ranks of a gang. ``parallel`` says that these are torch's default process group. The
        defaults are for one rank.

        ``stream`` has schedules draw other numbers with the same seed, so that each rank may have its own.

        ``device`` is the device to train on, and that of the algorithm's network.

        ``threads`` are torch's intra-op threads of the thread that calls ``use_threads``, which compiles and makes the
        steps. All others have one.
        """
        torch.set_num_threads(1)
        self._threads = threads
        self._algorithm = algorithm
        self._layout = initial.layout
        self._device = device
        groups = algorithm.groups
        self._params = first_parameters(groups, initial, device)
        self._learning_rate = learning_rate
        self._normalizer = normalizer if normalizer is not None else Normalizer()
        self._reduce = reduce
        updates = group_updates(algorithm, groups, optimizer)
        self._steps = ParallelSteps(updates, self._params) if parallel else LocalSteps(updates)
        self._updates = updates
        self._optimizers = {update.name: update.optimizer for update in updates}
        self._evaluate = evaluated_in_parts(algorithm.evaluate)
        self._step_for: StepFor | None = None
        """None until the first step: all ranks of a gang make theirs together."""
        self._compiled: tuple[Evaluate, Callable[[], StepFor]] | None = None
        self._rng = np.random.default_rng(seed)
        self._seed, self._stream = seed, stream
        self._adam = {name: AdamState.zeros(self._optimizers[name], vector) for name, vector in self._params.items()}
        self._state: Tensors = {name: tensor.clone() for name, tensor in algorithm.initial_state(self._params).items()}
        self._step = 0
        self._minibatches = 0
        self._env_steps = 0

    def use_threads(self) -> None:
        """Have the calling thread compile and make the steps with the learner's number of intra-op threads.

        OpenMP and MKL keep a number for each thread. Only one thread of a process may have more than one: with a second
        team OpenMP counts more threads than cores, and those that wait for each other sleep instead of spinning.
        """
        torch.set_num_threads(self._threads)

    @property
    def normalizer(self) -> Normalizer:
        """What normalises the slots or rows."""
        return self._normalizer

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the policy's parameters so far."""
        return int(self._adam[POLICY].num_steps)

    def count_env_steps(self, env_steps: int) -> None:
        """Count env steps of all ranks that were gathered without a batch to train on."""
        self._env_steps += env_steps

    def learn_statistics(self, moments: SampleMoments | None) -> None:
        """Have a ``ReplayNormalizer`` learn from all ranks' new transitions, of which ``moments`` are this rank's.

        All ranks call this together, as often as they count env steps: so a saved state has learned from those that it
        counts. None: ``step`` learns from its batch, or there are no statistics.
        """
        if moments is not None:
            assert isinstance(self._normalizer, ReplayNormalizer), "it made the moments"
            self._normalizer.learn(moments, self._reduce)

    def step(self, slots: Arrays, *, env_steps: int | None = None) -> StepResult:
        """Train on one batch, with all its epochs and minibatches.

        ``env_steps``: transitions that this rank has gathered since the batch before. By default those of the batch.

        Raises:
            ValueError: the batch does not fit the algorithm.
        """
        with _zero_for_subnormal():
            return self._train(slots, env_steps)

    def _train(self, slots: Arrays, env_steps: int | None) -> StepResult:
        with np.errstate(invalid="ignore", over="ignore"):  # optimizer steps skip and count what is not finite
            normalized, counts = self._normalizer.step(slots, self._reduce)
            batch = self._algorithm.prepare(self._params, normalized, self._reduce, self._evaluate)
            schedule = self._algorithm.schedule(batch, self._generator(), self._reduce)
        settings = self._settings()
        if self._step_for is None:
            self._step_for = self._steps.eager()
        outcomes = []
        step: MinibatchStep | None = None
        state = self._state
        for inputs in self._inputs(batch, schedule, settings):
            self._minibatches += 1
            due = due_groups(self._updates, self._minibatches)
            # Between two minibatches of a batch only the state can change its form.
            if step is None or not _are_same(inputs.state, state):
                step, state = self._step_for(inputs), inputs.state
            metrics, norms, is_taken, self._state = step(inputs, due)
            outcomes.append((metrics, norms, is_taken))
            if self._is_state_due(due):
                self._state = state_after(self._algorithm, self._params, self._state, is_taken)
        self._step += 1
        gathered = batch.num_transitions if env_steps is None else env_steps
        self._env_steps += int(self._reduce(np.array([gathered], np.float64))[0])
        all_metrics, all_norms, all_taken = zip(*outcomes, strict=True)
        taken = to_host(torch.stack(all_taken))
        trained = None if taken.all() else _trained_rows(schedule, taken)
        return StepResult(
            step=self._step,
            optimizer_steps=self.optimizer_steps,
            taken=tuple(taken.tolist()),
            num_transitions=batch.num_transitions,
            trained_rows=trained,
            errors=_errors(batch, schedule, all_metrics, taken),
            num_untrained=0 if trained is None else batch.num_transitions - _num_transitions(schedule, trained),
            metrics={**counts, **settings, **batch.metrics, **self._means(all_metrics, all_norms, taken)},
        )

    def _is_state_due(self, due: Due) -> bool:
        """Return whether a state that is seldom due is so now; ``GroupUpdate`` updates others."""
        every = self._algorithm.state_every
        return every > 1 and self._minibatches % every == 0 and self._updates[-1].name in due

    def compile(self, slots: Arrays) -> None:
        """Compile this rank's step for batches of the form of ``slots``; ``use_compiled`` then switches to it.

        Nothing else changes. Compiling takes seconds with a warm cache, and up to a minute without.

        Raises:
            Exception: see ``Steps.compile``.
        """
        normalized, _ = copy.deepcopy(self._normalizer).step(slots, one_rank)
        evaluate: Evaluate = self._algorithm.evaluate
        if self._algorithm.compiles_evaluation:
            evaluate = compiled_evaluation(evaluate, self._device)
        evaluate = evaluated_in_parts(evaluate)
        batch = self._algorithm.prepare(self._params, normalized, one_rank, evaluate)
        schedule = self._algorithm.schedule(batch, np.random.default_rng(0), one_rank)
        example = next(self._inputs(batch, schedule, self._settings()))
        params = {name: vector.clone() for name, vector in self._params.items()}
        adam = {name: state.copy() for name, state in self._adam.items()}
        self._compiled = evaluate, self._steps.compile(example._replace(params=params, adam=adam))

    def use_compiled(self) -> None:
        """Use the compiled step from the next step on. All ranks call this together, after ``compile``."""
        assert self._compiled is not None, "compiled before"
        (self._evaluate, step_for), self._compiled = self._compiled, None
        self._step_for = step_for()

    def _generator(self) -> np.random.Generator:
        """Return what this step's schedule draws from.

        Only rank 0's state is stored, so the other streams have none: each step begins one anew.
        """
        return self._rng if self._stream == 0 else np.random.default_rng((self._seed, self._stream, self._step))

    def _settings(self) -> dict[str, float]:
        """Return the current learning rate and coefficients, by name."""
        return {
            LEARNING_RATE: value_at(self._learning_rate, self._env_steps),
            **self._algorithm.coefficients(self._env_steps),
        }

    def _inputs(self, batch: Batch, schedule: Tensors, settings: Mapping[str, float]) -> Iterator[Inputs]:
        """Yield each minibatch's inputs, in order. The state in them is that after the step before."""
        device = self._device
        tensors = {name: torch.tensor(value, dtype=torch.float32, device=device) for name, value in settings.items()}
        schedule = {name: tensor.to(device) for name, tensor in schedule.items()}
        for arrays in zip(*(tensor.unbind() for tensor in schedule.values()), strict=True):
            yield Inputs(
                params=self._params,
                adam=self._adam,
                state=self._state,
                rows=batch.rows,
                minibatch=dict(zip(schedule, arrays, strict=True)) | tensors,
            )

    def _means(
        self, metrics: Sequence[Tensors], norms: Sequence[Tensors], taken: NDArray[np.bool_]
    ) -> dict[str, float]:
        """Return each metric's mean over the minibatches taken, summed over ranks; nothing if none was taken."""
        if not taken.any():
            return {}
        shares = _means_of(metrics, taken)
        whole = dict(zip(shares, self._reduce(np.array([*shares.values()], np.float64)).tolist(), strict=True))
        of_groups = {
            "gradient_norm" if name == POLICY else f"{name}_gradient_norm": float(norm)
            for name, norm in _means_of(norms, taken).items()
        }
        return {**whole, **of_groups}

    def adopt(self, learning_rate: Scheduled, coefficients: Mapping[str, Scheduled]) -> None:
        """Use another learning rate and other coefficients of the loss from the next step on."""
        self._learning_rate = learning_rate
        self._algorithm.adopt(coefficients)

    def parameters(self, version: Version) -> Parameters:
        """Return a copy of the current parameters as ``version``, with the statistics that actors need."""
        vector = to_host(self._params[POLICY]).copy()
        vector.flags.writeable = False
        scalars = self._algorithm.acting_scalars(self._env_steps)
        statistics = {**self._normalizer.statistics, **{name: _scalar(value) for name, value in scalars.items()}}
        return Parameters(version=version, vector=vector, layout=self._layout, statistics=statistics)

    def digest(self) -> str:
        """Return a hash of all groups' parameters and of the algorithm's state: equal on all ranks of a gang."""
        found = hashlib.sha256()
        for tensor in (*self._params.values(), *self._state.values()):
            found.update(np.ascontiguousarray(to_host(tensor)).tobytes())
        return found.hexdigest()

    def state_dict(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """Return copies of what resuming needs beside the policy's parameters: (arrays by path, JSON values)."""
        tensors = {
            f"{_place(group)}optimizer/{name}": tensor
            for group, adam in self._adam.items()
            for name, tensor in adam.stored().items()
        }
        tensors |= {f"{_place(group)}parameters": self._params[group] for group in self._params if group != POLICY}
        tensors |= {f"state/{name}": tensor for name, tensor in self._state.items()}
        arrays = {path: to_host(tensor).copy() for path, tensor in tensors.items()}
        arrays |= {f"normalizer/{path}": array for path, array in self._normalizer.state_dict().items()}
        counts = {"step": self._step, "minibatches": self._minibatches, "env_steps": self._env_steps}
        return arrays, counts | {"layout": self._layout, "schedule_rng": self._rng.bit_generator.state}

    def start_from(self, arrays: Arrays) -> None:
        """Take over the arrays of another run's state: moments, further groups, statistics. All counts begin at 0.

        The Learner must have been made with the parameters of that state's version.

        Raises:
            KeyError, ValueError: the state is of another algorithm; nothing has changed.
        """
        _, own = self.state_dict()
        self.load_state_dict(arrays, own)

    def load_state_dict(self, arrays: Arrays, values: Mapping[str, Any]) -> None:
        """Continue from a saved state. The Learner must have been made with the parameters of the same version.

        Raises:
            LayoutMismatch: the state is of another network.
            KeyError, ValueError: the state is of another algorithm; nothing has changed.
        """
        if values["layout"] != self._layout:
            raise LayoutMismatch(f"the saved state has layout {values['layout']}, but the network has {self._layout}")
        own, _ = self.state_dict()
        if (found := _shapes(arrays)) != (expected := _shapes(own)):
            raise ValueError(f"the saved state has arrays {found}; this algorithm needs {expected}")
        step, env_steps, generator = int(values["step"]), int(values["env_steps"]), np.random.PCG64()
        generator.state = values["schedule_rng"]
        copies = {path: arrays[path].astype(array.dtype) for path, array in own.items()}  # a file's order may be any
        for group, vector in self._params.items():
            stored = all_to_device(_below(f"{_place(group)}optimizer/", copies), self._device)
            self._adam[group] = AdamState.of(self._optimizers[group], **stored)
            if group != POLICY:
                vector.copy_(to_device(copies[f"{_place(group)}parameters"], self._device))
        self._state = all_to_device(_below("state/", copies), self._device)
        self._normalizer.load_state_dict(_below("normalizer/", copies))
        self._rng = np.random.Generator(generator)
        self._step, self._env_steps = step, env_steps
        self._minibatches = int(values.get("minibatches", 0))  # a state of before they were counted has none


def first_parameters(
    groups: Mapping[str, ParameterGroup], initial: Parameters, device: torch.device
) -> dict[str, Tensor]:
    """Return each group's first values on the device, as tensors of their own; ``initial`` are the policy's."""
    own = {POLICY: to_device(initial.vector.copy(), device)}
    for name, group in groups.items():
        if name != POLICY:
            assert group.initial is not None, "a group beside the policy's has values of its own"
            own[name] = group.initial.detach().clone().to(device)
    return {name: own[name] for name in groups}


@contextlib.contextmanager
def _zero_for_subnormal() -> Iterator[None]:
    """Let this thread, and those that it starts, compute with zero instead of subnormal numbers inside the block.

    The moments of a parameter whose gradient is zero decay to such numbers, and a step with many takes twice as long.
    """
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def _place(group: str) -> str:
    """Return the path in a saved state below which a group's arrays are."""
    return "" if group == POLICY else f"groups/{group}/"


def _means_of(values: Sequence[Tensors], taken: NDArray[np.bool_]) -> dict[str, np.floating[Any]]:
    """Return each number's mean over the minibatches taken that have it; arrays of rows have none."""
    of_taken: dict[str, list[Tensor]] = {}
    for each in compress(values, taken):
        for name, tensor in each.items():
            if tensor.dim() == 0:
                of_taken.setdefault(name, []).append(tensor)
    return {name: to_host(torch.stack(tensors)).mean() for name, tensors in of_taken.items()}


def _scalar(value: float) -> NDArray[np.float32]:
    array = np.array(value, np.float32)
    array.flags.writeable = False
    return array


def _trained_rows(schedule: Tensors, taken: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the rows with transitions that are in at least one minibatch taken."""
    index, weight = (to_host(schedule[name])[taken] for name in (INDEX, WEIGHT))
    rows: NDArray[np.int64] = np.unique(index[_num_positive(weight) > 0])
    return rows


def _num_transitions(schedule: Tensors, rows: NDArray[np.int64]) -> int:
    """Return the number of transitions in these rows."""
    index, weight = (to_host(schedule[name]) for name in (INDEX, WEIGHT))
    of_rows = np.zeros(index.max(initial=-1) + 1, np.int64)
    np.maximum.at(of_rows, index, _num_positive(weight))  # a row without transitions has the index of another
    return int(of_rows[rows].sum())


def _num_positive(weight: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return the number of transitions of each row in each minibatch, [K, M]."""
    positive: NDArray[np.int64] = (weight > 0.0).sum(axis=tuple(range(2, weight.ndim)))
    return positive


def _are_same(tensors: Tensors, others: Tensors) -> bool:
    """Return whether both hold the same tensors, not only equal ones."""
    return all(tensor is others[name] for name, tensor in tensors.items())


def _errors(
    batch: Batch, schedule: Tensors, metrics: Sequence[Tensors], taken: NDArray[np.bool_]
) -> NDArray[np.float32] | None:
    """Return ``StepResult.errors``."""
    if not any(ERRORS in each for each in metrics):
        return None
    errors = np.full(len(next(iter(batch.rows.values()))), np.nan, np.float32)
    known = taken & np.array([ERRORS in each for each in metrics])
    if known.any():
        found = to_host(torch.stack([each[ERRORS] for each in compress(metrics, known)]))
        errors[to_host(schedule[INDEX])[known].reshape(-1)] = found.reshape(-1)
    return errors


def _shapes(arrays: Arrays) -> dict[str, tuple[int, ...]]:
    return {path: arrays[path].shape for path in sorted(arrays)}


def _below(prefix: str, arrays: Arrays) -> dict[str, NDArray[Any]]:
    return {path.removeprefix(prefix): array for path, array in arrays.items() if path.startswith(prefix)}
