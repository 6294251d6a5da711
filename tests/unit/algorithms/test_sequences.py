"""Recurrent networks are trained on sequences, whose first states are those that the rollout had."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlsrl.algorithms.adam import Adam
from rlsrl.algorithms.base import INDEX, POLICY, WEIGHT, Algorithm, Batch, one_rank
from rlsrl.algorithms.learner import Learner
from rlsrl.algorithms.ppo import build as build_ppo
from rlsrl.algorithms.returns import generalized_advantages
from rlsrl.algorithms.sequences import Sequences, StepRows, rows_of
from rlsrl.algorithms.vtrace import build as build_vtrace
from rlsrl.api.spec import Mlp, Network, PpoSpec, Recurrent, VtraceSpec
from rlsrl.data.random_slots import random_slot
from rlsrl.data.slots import state_field
from rlsrl.data.specs import Arrays
from rlsrl.data.version import Version
from rlsrl.policies.networks import unrolled
from rlsrl.policies.torch_policy import TorchPolicy
from rlsrl.testing.rollouts import discrete_env_spec
from rlsrl.workers.build.common import torch_policy

ENV_SPEC = discrete_env_spec(num_features=3, num_actions=4)
NUM_STEPS, NUM_LANES, LENGTH, SIZE = 24, 4, 6, 5
MINIBATCH = 2 * LENGTH
KINDS = ("gru", "lstm")
ALGORITHMS = ("ppo", "vtrace")


def policy_of(kind: str) -> TorchPolicy:
    network = Network(mlp=Mlp(hidden_sizes=(6,)), recurrent=Recurrent(kind=kind, size=SIZE))  # type: ignore[arg-type]
    return torch_policy(network, ENV_SPEC, outputs="policyAndValue", seed=0)


def params_of(policy: TorchPolicy, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {POLICY: 0.7 * torch.randn(policy.layout.num_parameters, generator=generator)}


def slots_of(policy: TorchPolicy, *, end_probability: float = 0.15) -> Arrays:
    rng = np.random.default_rng(0)
    return random_slot(
        ENV_SPEC,
        num_steps=NUM_STEPS,
        num_lanes=NUM_LANES,
        rng=rng,
        end_probability=end_probability,
        state=policy.state,
    ).arrays


def algorithm_of(name: str, policy: TorchPolicy, *, burn_in: int = 0, **settings: Any) -> Algorithm:
    known = {"minibatch_size": MINIBATCH, "sequence_length": LENGTH, "burn_in": burn_in, **settings}
    if name == "ppo":
        return build_ppo(PpoSpec(**known), policy, 1, None)
    return build_vtrace(VtraceSpec(**known), policy, 1, None)


def whole_rollout(policy: TorchPolicy, params: dict[str, Tensor], slots: Arrays) -> dict[str, Tensor]:
    """Return the heads of all frames, [T + 1, B, ...], unrolled in one go from the states in the slots."""
    policy.load(replace(policy.parameters(Version(1, 0)), vector=params[POLICY].numpy()))
    frames = {path: torch.from_numpy(slots[path].copy()) for path in ENV_SPEC.observation}
    state = {name: torch.from_numpy(slots[state_field(name)].copy()) for name in policy.state}
    is_first = torch.zeros(NUM_STEPS + 1, NUM_LANES, dtype=torch.bool)
    is_first[1:] = torch.from_numpy(~slots["mask"])
    with torch.no_grad():
        heads, _ = unrolled(policy.network, frames, state, is_first)
    return dict(heads)


def prepared(algorithm: Algorithm, params: dict[str, Tensor], slots: Arrays) -> Batch:
    return algorithm.prepare(params, slots, one_rank, algorithm.evaluate)


def steps_of(lane: int, start: int) -> tuple[slice, int]:
    return slice(start, start + LENGTH), lane


@pytest.mark.parametrize("burn_in", [0, 2, LENGTH])
@pytest.mark.parametrize("kind", KINDS)
def test_sequences_give_the_heads_of_the_whole_rollout(kind: str, burn_in: int) -> None:
    """By the weights that the step starts with, wherever episodes begin and with any burn-in."""
    policy = policy_of(kind)
    params, slots = params_of(policy), slots_of(policy)
    rows = rows_of(policy, minibatch_size=MINIBATCH, sequences=Sequences(length=LENGTH, burn_in=burn_in))
    algorithm = algorithm_of("ppo", policy, burn_in=burn_in)
    batch = prepared(algorithm, params, slots)
    whole = whole_rollout(policy, params, slots)
    for row in range(len(batch.rows["action"])):
        minibatch = {name: tensor[[row]] for name, tensor in batch.rows.items()}
        heads, steps = rows.heads(params[POLICY], minibatch)
        start, lane = row // NUM_LANES * LENGTH, row % NUM_LANES
        place = steps_of(lane, start)
        for name in ("policy", "value"):
            torch.testing.assert_close(heads[name], whole[name][place], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(steps["value"], whole["value"][place], rtol=1e-4, atol=1e-5)
        valid = slots["mask"][place]
        np.testing.assert_array_equal(steps["action"].numpy()[valid], slots["action"][place][valid])
    assert not slots["mask"].all()
    assert row + 1 == NUM_STEPS * NUM_LANES // LENGTH


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_of_a_minibatch_is_that_of_its_sequences_one_by_one(kind: str, name: str) -> None:
    """Each sequence is unrolled by itself, from its first state, and weighs as much as its transitions."""
    policy = policy_of(kind)
    params, slots = params_of(policy), slots_of(policy)
    algorithm = algorithm_of(name, policy)
    batch = prepared(algorithm, params, slots)
    schedule = algorithm.schedule(batch, np.random.default_rng(0), one_rank)
    coefficients = {key: torch.tensor(value) for key, value in algorithm.coefficients(0).items()}
    loss = algorithm.groups[POLICY].loss
    moved = params[POLICY] + 0.01 * params_of(policy, 1)[POLICY]

    def gradient(rows: list[int], place: int) -> tuple[float, Tensor]:
        vector = moved.clone().requires_grad_()
        index = schedule[INDEX][place][rows]
        arrays = {key: entry[place][rows] for key, entry in schedule.items() if key != INDEX}
        minibatch = {key: tensor[index] for key, tensor in batch.rows.items()} | arrays | coefficients
        found, _ = loss({POLICY: vector}, {}, minibatch)
        (of_vector,) = torch.autograd.grad(found, vector)
        return float(found.detach()), of_vector

    for place in range(len(schedule[INDEX])):
        whole, of_whole = gradient([0, 1], place)
        parts = [gradient([row], place) for row in (0, 1)]
        assert whole == pytest.approx(sum(part for part, _ in parts), rel=1e-4, abs=1e-6)
        torch.testing.assert_close(of_whole, parts[0][1] + parts[1][1], rtol=1e-4, atol=1e-6)
    weights = schedule[WEIGHT].numpy()
    np.testing.assert_allclose(weights.sum(axis=(1, 2)), 1.0, rtol=1e-5)


def by_a_loop(
    policy: TorchPolicy,
    vector: Tensor,
    slots: Arrays,
    first: dict[str, Tensor],
    row: int,
    burn_in: int,
    *,
    is_cut: bool = False,
) -> dict[str, Tensor]:
    """Return the heads of a row, [L, ...], by a loop over steps; its first state is that before the burn-in.

    ``is_cut``: no gradient flows from one step into the one before.
    """
    weights = dict(zip(policy.layout.shapes, policy.layout.split(vector), strict=True))
    start, lane = row // NUM_LANES * LENGTH, row % NUM_LANES
    state, heads = {name: array[[row]] for name, array in first.items()}, []
    for step in range(start - burn_in if start else 0, start + LENGTH):
        if step and not slots["mask"][step - 1, lane]:
            state = {name: torch.zeros_like(array) for name, array in state.items()}
        frame = {path: torch.from_numpy(slots[path][step, [lane]].copy()) for path in ENV_SPEC.observation}
        found, state = torch.func.functional_call(policy.network, weights, (frame, state))
        if is_cut or step < start:
            state = {name: array.detach() for name, array in state.items()}
        if step >= start:
            heads.append(found)
    return {name: torch.cat([each[name] for each in heads]) for name in heads[0]}


@pytest.mark.parametrize("burn_in", [0, 2, LENGTH])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_flow_through_a_sequence_and_not_through_its_burn_in(kind: str, burn_in: int) -> None:
    policy = policy_of(kind)
    params, slots = params_of(policy), slots_of(policy)
    batch = prepared(algorithm_of("ppo", policy, burn_in=burn_in), params, slots)
    rows = rows_of(policy, minibatch_size=MINIBATCH, sequences=Sequences(length=LENGTH, burn_in=burn_in))
    first = {name: batch.rows[state_field(name)] for name in policy.state}
    moved = params[POLICY] + 0.1 * params_of(policy, 1)[POLICY]
    weights = torch.randn(LENGTH, ENV_SPEC.action.num_actions + 1, generator=torch.Generator().manual_seed(2))

    def gradient(heads: dict[str, Tensor], vector: Tensor) -> Tensor:
        outputs = torch.cat([heads["policy"], heads["value"].unsqueeze(-1)], dim=-1)
        (found,) = torch.autograd.grad((outputs * weights).sum(), vector)
        return found

    differs = 0.0
    for row in range(len(batch.rows["action"])):
        mine, theirs = (moved.clone().requires_grad_() for _ in range(2))
        heads, _ = rows.heads(mine, {name: tensor[[row]] for name, tensor in batch.rows.items()})
        expected = by_a_loop(policy, theirs, slots, first, row, burn_in)
        for name, tensor in expected.items():
            torch.testing.assert_close(heads[name], tensor, rtol=1e-4, atol=1e-5)
        through_time = gradient(dict(heads), mine)
        torch.testing.assert_close(through_time, gradient(expected, theirs), rtol=1e-3, atol=1e-4)
        cut = moved.clone().requires_grad_()
        of_steps = gradient(by_a_loop(policy, cut, slots, first, row, burn_in, is_cut=True), cut)
        differs = max(differs, float((through_time - of_steps).abs().max()))
    assert differs > 0.01, "gradients through the states are of consequence"


@pytest.mark.parametrize("kind", KINDS)
def test_returns_are_those_of_the_whole_rollouts_values(kind: str) -> None:
    policy = policy_of(kind)
    params, slots = params_of(policy), slots_of(policy)
    batch = prepared(algorithm_of("ppo", policy), params, slots)
    settings = PpoSpec()
    _, returns = generalized_advantages(
        reward=slots["reward"],
        value=whole_rollout(policy, params, slots)["value"].numpy(),
        terminated=slots["terminated"],
        truncated=slots["truncated"],
        mask=slots["mask"],
        discount=settings.discount,
        gae_lambda=settings.gae_lambda,
    )
    rows = rows_of(policy, minibatch_size=MINIBATCH, sequences=Sequences(length=LENGTH))
    np.testing.assert_allclose(batch.rows["return"].numpy(), rows.of_steps(returns), rtol=1e-4, atol=1e-5)


def test_a_step_that_was_skipped_counts_the_transitions_of_its_sequences() -> None:
    policy = policy_of("gru")
    slots = slots_of(policy)
    algorithm = algorithm_of("ppo", policy, epochs=1)
    learner = Learner(
        algorithm,
        policy.parameters(Version(1, 0)),
        learning_rate=1e-3,
        optimizer=Adam(epsilon=1e-5, max_gradient_norm=0.5),
        seed=0,
    )
    slots["reward"][0, 1] = np.inf  # of lane 1: its returns before that step are not finite, thus only its first ones
    result = learner.step(slots)
    assert 0 < result.skipped < len(result.taken)
    assert result.trained_rows is not None
    mask = rows_of(policy, minibatch_size=MINIBATCH, sequences=Sequences(length=LENGTH)).of_steps(slots["mask"])
    assert result.num_transitions == slots["mask"].sum()
    assert result.num_untrained == slots["mask"].sum() - mask[result.trained_rows].sum()
    assert result.num_untrained > 0


def test_rows_without_transitions_are_never_read() -> None:
    policy = policy_of("lstm")
    params, slots = params_of(policy), slots_of(policy)
    slots["mask"][:LENGTH, 2] = False
    algorithm = algorithm_of("ppo", policy)
    batch = prepared(algorithm, params, slots)
    schedule = algorithm.schedule(batch, np.random.default_rng(0), one_rank)
    assert 2 not in schedule[INDEX]
    assert schedule[INDEX].shape[1:] == (MINIBATCH // LENGTH,)
    assert schedule[WEIGHT].shape == (*schedule[INDEX].shape, LENGTH)
    positive = int((schedule[WEIGHT] > 0).sum())
    assert positive == slots["mask"].sum() * len(schedule[INDEX]) // (NUM_STEPS * NUM_LANES // MINIBATCH)


@pytest.mark.parametrize(("steps", "size"), [(NUM_STEPS - 1, MINIBATCH), (NUM_STEPS, MINIBATCH + 2)])
def test_a_batch_that_does_not_divide_is_refused(steps: int, size: int) -> None:
    policy = policy_of("gru")
    rows = rows_of(policy, minibatch_size=size, sequences=Sequences(length=LENGTH))
    with pytest.raises(ValueError, match=r"sequences of 6 steps|no multiple of the minibatch size"):
        rows.check(np.ones((steps, size), np.bool_))


def test_networks_without_memory_are_trained_on_steps() -> None:
    network = Network(mlp=Mlp(hidden_sizes=(6,)))
    policy = torch_policy(network, ENV_SPEC, outputs="policyAndValue", seed=0)
    assert isinstance(rows_of(policy, minibatch_size=MINIBATCH, sequences=Sequences(length=LENGTH)), StepRows)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_compiled_step_equals_an_eager_one(name: str, tracing_only: None) -> None:
    policy = policy_of("lstm")
    slots = slots_of(policy)
    found = []
    for compiles in (False, True):
        learner = Learner(
            algorithm_of(name, policy, burn_in=2),
            policy.parameters(Version(1, 0)),
            learning_rate=1e-3,
            optimizer=Adam(epsilon=1e-5, max_gradient_norm=0.5),
            seed=0,
        )
        if compiles:
            learner.compile(slots)
            learner.use_compiled()
        for _ in range(3):
            learner.step(slots)
        found.append(learner.parameters(Version(1, 3)).vector)
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4, atol=1e-6)
    assert np.abs(found[0] - policy.parameters(Version(1, 0)).vector).max() > 1e-3
