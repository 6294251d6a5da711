"""Checks what rlsrl relies on in an algorithm. For users' own tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlsrl.algorithms.adam import Adam
from rlsrl.algorithms.base import ERRORS, INDEX, POLICY, WEIGHT, Algorithm, Batch, ParameterGroup, Tensors, one_rank
from rlsrl.algorithms.catalog import implementation_of
from rlsrl.algorithms.evaluation import evaluated_in_parts
from rlsrl.algorithms.gradients import LocalGradients, of_rows
from rlsrl.algorithms.learner import Learner, first_parameters
from rlsrl.api.spec import AlgorithmSettings, AlgorithmSpec
from rlsrl.buffers.replay.draws import UniformDraws
from rlsrl.buffers.replay.layout import ReplayLayout
from rlsrl.buffers.replay.rows import IMPORTANCE, RowForm, rows_of
from rlsrl.buffers.replay.segments import Segments
from rlsrl.data.random_slots import random_slot
from rlsrl.data.slots import ProducerId, Slot, rollout_layout
from rlsrl.data.specs import Arrays, EnvSpec
from rlsrl.data.version import Version
from rlsrl.policies.build import build_network, seeded
from rlsrl.policies.device import CPU
from rlsrl.policies.torch_policy import TorchPolicy
from rlsrl.runtime.errors import ConfigurationError

TOLERANCE = 1e-3
"""Largest difference of gradients that are equal in exact arithmetic, relative to the larger norm."""


def check_algorithm(
    spec: AlgorithmSpec,
    env_spec: EnvSpec,
    network: Callable[..., nn.Module],
    kwargs: Mapping[str, Any] | None = None,
    *,
    num_lanes: int = 8,
    seed: int = 0,
) -> None:
    """Train one step on a random batch of one minibatch for each pass, and check the parts of the step.

    With ``needs.replay`` the batch has the rows of one minibatch, as they are drawn from a store.

    Checks that the algorithm can be built; that its schedule has ``needs.epochs`` minibatches of
    ``needs.minibatchSize`` rows; that rows that are no transitions have no influence; that the losses of parts of a
    minibatch add up to its own, as those of several ranks do; that losses change nothing and have metrics of different
    names; and that steps of the optimizers are taken.

    Args:
        spec: The section ``algorithm`` of the experiment. Its minibatch size must be a multiple of ``num_lanes``.
        env_spec: What ``check_environment`` returns.
        network: The factory of the network.
        kwargs: The factory's further arguments.
        num_lanes: Environments of the batch.
        seed: Decides the batch and the weights.

    Raises:
        ConfigurationError: the algorithm has problems; the text lists all of them, one per line.
        ValueError: ``num_lanes`` does not divide the minibatch size.
    """
    rows = spec.chosen.minibatch_rows
    if rows % num_lanes:
        raise ValueError(f"num_lanes is {num_lanes}: a divisor of the minibatch size {rows} is needed")
    outputs = spec.chosen.outputs
    module = build_network(network, env_spec, kwargs or {}, seed=seed, outputs=outputs)
    policy = TorchPolicy(module, env_spec, outputs=outputs)
    if policy.state:
        raise ConfigurationError(
            f"the network is recurrent, with the state {sorted(policy.state)}; the check takes networks without a state"
        )
    rng = np.random.default_rng(seed)
    slot = random_slot(env_spec, num_steps=rows // num_lanes, num_lanes=num_lanes, rng=rng)
    batch = slot.arrays if spec.chosen.draws_from is None else _drawn(env_spec, slot, spec.chosen, rng)
    if problems := list(_problems(spec, policy, batch)):
        raise ConfigurationError(
            "\n".join(
                [f"algorithm.{spec.name} breaks the interface of algorithms:", *(f"- {line}" for line in problems)]
            )
        )


def _problems(spec: AlgorithmSpec, policy: TorchPolicy, slots: Arrays) -> Iterator[str]:
    with seeded(0):
        algorithm = implementation_of(spec).build(spec.chosen, policy, 1, None)
    initial = policy.parameters(Version(attempt=0, step=0))
    params = first_parameters(algorithm.groups, initial, CPU)
    before = {name: vector.clone() for name, vector in params.items()}
    batch, schedule = _step_inputs(algorithm, params, slots)
    replays = spec.chosen.draws_from is not None
    expected = (1 if replays else spec.chosen.passes, spec.chosen.minibatch_rows)
    if (found := tuple(schedule[INDEX].shape)) != expected:
        yield f"schedule: {INDEX!r} has the shape {found}; passes and rows of a minibatch are {expected}"
        return
    number = spec.chosen.minibatch_rows if replays else int(np.count_nonzero(slots["mask"]))
    if number != batch.num_transitions:
        yield f"prepare: num_transitions is {batch.num_transitions}, and the batch has {number}"
    without = _step_inputs(algorithm, params, slots if replays else _without_gaps(slots))
    minibatch, gapless = _Minibatch(algorithm, params, batch, schedule), _Minibatch(algorithm, params, *without)
    halves = [_Minibatch(algorithm, params, batch, part) for part in _parts(schedule, spec.chosen.minibatch_rows)]
    names: list[str] = []
    for name, group in algorithm.groups.items():
        where = "loss" if name == POLICY else f"loss of the group {name!r}"
        whole, metrics = minibatch.gradient(name, group)
        names += metrics
        if ERRORS in metrics and group.every != 1:
            yield f"{where}: it has {ERRORS!r} among its metrics, and the group is not updated with every minibatch"
        if any(not torch.equal(params[each], before[each]) for each in params):
            yield f"{where}: it changes the parameters"
        if not bool(torch.isfinite(whole).all()):
            yield f"{where}: its gradient is not finite"
            return
        first, second = (half.gradient(name, group)[0] for half in halves)
        if _differ(whole, first + second):
            yield f"{where}: the gradients of a minibatch's halves do not add up to its own: each term must be a sum"
        if _differ(whole, gapless.gradient(name, group)[0]):
            yield f"prepare or schedule: steps that are no transitions have an influence; they need a {WEIGHT!r} of 0"
    store = spec.chosen.draws_from
    if store is not None and store.priorities is not None and ERRORS not in names:
        yield f"losses: none has {ERRORS!r} among its metrics, and the store is drawn from by priority"
    if twice := sorted({name for name in names if names.count(name) > 1}):
        yield f"losses: several groups have the metrics {twice}"
    learner = Learner(algorithm, initial, learning_rate=1e-3, optimizer=Adam(max_gradient_norm=1.0), seed=0)
    # Steps until each group was due.
    num_steps = max(group.every for group in algorithm.groups.values())
    taken = [each for _ in range(num_steps) for each in learner.step(slots).taken]
    if not all(taken):
        yield f"{taken.count(False)} of {len(taken)} minibatches were skipped: a loss or gradient is not finite"
    elif np.array_equal(learner.parameters(initial.version).vector, initial.vector):
        yield "loss: a step changes no parameter"


def _drawn(env_spec: EnvSpec, slot: Slot, settings: AlgorithmSettings, rng: np.random.Generator) -> Arrays:
    """Return the rows of a minibatch, drawn from a store with this slot."""
    assert settings.draws_from is not None, "asked before"
    slot.producer = ProducerId(0, 0)
    num_steps, num_lanes = slot.arrays["mask"].shape
    of_slot = rollout_layout(env_spec, num_steps=num_steps, num_lanes=num_lanes)
    layout = ReplayLayout.of(of_slot, capacity=num_steps * num_lanes)
    segments = Segments(layout, bytearray(layout.nbytes))
    segments.insert(slot)
    drawn = UniformDraws(segments).draw(settings.minibatch_rows, rng)
    rows = rows_of(segments, drawn.keys, RowForm(num_steps=settings.draws_from.n_step, discount=settings.discount))
    return {**rows, IMPORTANCE: np.ones(len(drawn.keys), np.float32)}


def _without_gaps(slots: Arrays) -> Arrays:
    """Return the same batch with other contents where a step is no transition."""
    other = {name: array.copy() for name, array in slots.items()}
    for name in ("action", "reward", "behavior_log_prob"):
        other[name][~slots["mask"]] = 0
    return other


def _step_inputs(algorithm: Algorithm, params: Tensors, slots: Arrays) -> tuple[Batch, Tensors]:
    batch = algorithm.prepare(params, slots, one_rank, evaluated_in_parts(algorithm.evaluate))
    return batch, algorithm.schedule(batch, np.random.default_rng(0), one_rank)


class _Minibatch:
    """The first minibatch of a schedule, for the losses of all groups in order."""

    def __init__(self, algorithm: Algorithm, params: Tensors, batch: Batch, schedule: Tensors) -> None:
        self._params = params
        self._state = algorithm.initial_state(params)
        self._rows = batch.rows
        self._inputs = {name: tensor[0] for name, tensor in schedule.items()}
        self._inputs |= {name: torch.tensor(value) for name, value in algorithm.coefficients(0).items()}

    def gradient(self, name: str, group: ParameterGroup) -> tuple[Tensor, Tensors]:
        """Return the gradient of that group's loss, and the metrics."""
        _, metrics, gradient = LocalGradients(name, group.loss)(self._params, self._state, self._rows, self._inputs)
        self._inputs |= of_rows(metrics)
        return gradient, metrics


def _parts(schedule: Tensors, num_rows: int) -> Iterator[Tensors]:
    """Yield both halves of each minibatch. Arrays [K, M, ...] have an entry for each row."""
    half = num_rows // 2
    for part in (slice(half), slice(half, None)):
        yield {
            name: tensor[:, part] if tensor.dim() > 1 and tensor.shape[1] == num_rows else tensor
            for name, tensor in schedule.items()
        }


def _differ(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).norm() > TOLERANCE * torch.maximum(one.norm(), other.norm()))
