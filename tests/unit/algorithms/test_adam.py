from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from rlsrl.algorithms.adam import Adam, AdamState, RAdam, adam_step_

ADAM = Adam(epsilon=1e-5, max_gradient_norm=0.5)
RATE = {"learning_rate": torch.tensor(0.01)}
LOSS = torch.tensor(1.0)


@pytest.mark.parametrize(("kind", "its"), [(Adam, torch.optim.Adam), (RAdam, torch.optim.RAdam)], ids=["adam", "radam"])
def test_agrees_with_torchs_clip_and_optimizer(kind: type[Adam], its: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    ours = torch.randn(50, generator=generator)
    theirs = torch.nn.Parameter(ours.clone())
    adam, optimizer = kind(epsilon=1e-5, max_gradient_norm=0.5), its([theirs], lr=0.01, eps=1e-5)
    state = AdamState.zeros(adam, ours)
    for step in range(40):
        gradient = torch.randn(50, generator=generator) * (0.01 if step % 2 else 3.0)
        theirs.grad = gradient.clone()
        expected_norm = torch.nn.utils.clip_grad_norm_([theirs], 0.5)
        before = ours.clone()
        optimizer.step()
        norm, is_taken = adam_step_(adam, ours, gradient, LOSS, state, **RATE)
        assert bool(is_taken)
        assert not torch.equal(ours, before)
        torch.testing.assert_close(norm, expected_norm)
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-6)
    assert int(state.num_steps) == 40


def test_radams_first_steps_are_shorter() -> None:
    gradient, moved = torch.full((3,), 1e-3), []
    for adam in (Adam(), RAdam()):
        params = torch.zeros(3)
        state = AdamState.zeros(adam, params)
        for _ in range(10):
            adam_step_(adam, params, gradient, LOSS, state, **RATE)
        moved.append(float(-params[0]))
    assert moved[1] < 0.2 * moved[0]


@pytest.mark.parametrize(
    ("gradient", "loss"),
    [
        (torch.tensor([0.1, float("nan"), 0.2]), LOSS),
        (torch.tensor([0.1, float("inf"), 0.2]), LOSS),
        (torch.tensor([3e38, 3e38, 3e38]), LOSS),
        (torch.tensor([0.1, 0.1, 0.1]), torch.tensor(float("nan"))),
        (torch.tensor([0.1, 0.1, 0.1]), torch.tensor(float("-inf"))),
    ],
)
@pytest.mark.parametrize("steps_before", [0, 3])
def test_a_non_finite_gradient_or_loss_changes_nothing(
    gradient: torch.Tensor, loss: torch.Tensor, steps_before: int
) -> None:
    params = torch.tensor([1.0, 2.0, 3.0])
    state = AdamState.zeros(ADAM, params)
    for _ in range(steps_before):
        adam_step_(ADAM, params, torch.tensor([0.1, -0.2, 0.3]), LOSS, state, **RATE)
    everything = [params, *vars(state).values()]
    before = [tensor.clone() for tensor in everything]
    _, is_taken = adam_step_(ADAM, params, gradient, loss, state, **RATE)
    assert not bool(is_taken)
    assert all(torch.equal(old, new) for old, new in zip(before, everything, strict=True))


def test_a_stored_state_is_restored_exactly() -> None:
    params, generator = torch.ones(3), torch.Generator().manual_seed(0)
    state = AdamState.zeros(ADAM, params)
    for _ in range(4):
        adam_step_(ADAM, params, torch.randn(3, generator=generator), LOSS, state, **RATE)
    again = AdamState.of(ADAM, **{name: tensor.clone() for name, tensor in state.stored().items()})
    assert vars(again).keys() == vars(state).keys()
    assert all(torch.equal(mine, its) for mine, its in zip(vars(state).values(), vars(again).values(), strict=True))


def test_a_gradient_of_zero_moves_nothing() -> None:
    params = torch.ones(3)
    _, is_taken = adam_step_(ADAM, params, torch.zeros(3), LOSS, AdamState.zeros(ADAM, params), **RATE)
    assert bool(is_taken)
    assert torch.equal(params, torch.ones(3))


@pytest.mark.parametrize(("adam", "first"), [(ADAM, 1.0), (RAdam(max_gradient_norm=0.5), 0.5 / 3**0.5)])
def test_the_step_compiles_once_for_all_learning_rates(adam: Adam, first: float) -> None:
    """Adam's first step has the learning rate's length, RAdam's the gradient's, too."""
    counter = CompileCounter()
    compiled = torch.compile(adam_step_, fullgraph=True, backend=counter)
    moves = []
    for learning_rate in (0.1, 0.01, 0.0):
        params = torch.ones(3)
        compiled(
            adam,
            params,
            torch.ones(3),
            LOSS,
            AdamState.zeros(adam, params),
            **RATE | {"learning_rate": torch.tensor(learning_rate)},
        )
        moves.append(float(1.0 - params[0]))
    assert moves == pytest.approx([0.1 * first, 0.01 * first, 0.0], abs=1e-5)
    assert counter.frame_count == 1
