from __future__ import annotations

import pytest
import torch

from rlsrl.algorithms.base import Tensors
from rlsrl.algorithms.evaluation import compiled_evaluation, evaluated_in_parts

PARAMS = {"w": torch.tensor(3.0)}
CPU = torch.device("cpu")


class Counting:
    """Evaluates each row, and records the number of rows of each eager call."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, params: Tensors, rows: Tensors) -> Tensors:
        if not torch.compiler.is_compiling():
            self.sizes.append(len(rows["observation"]))
        return {"sum": rows["observation"].sum(-1) + params["w"], "doubled": 2 * rows["action"]}


def rows_of(count: int) -> Tensors:
    return {"observation": torch.randn(count, 3), "action": torch.arange(count)}


@pytest.mark.parametrize(("numbers", "sizes"), [(4 * 9, [7, 7, 7]), (1, [1] * 20), (4 * 10, [10, 10]), (4 * 20, [20])])
def test_many_rows_are_evaluated_in_equal_parts(numbers: int, sizes: list[int]) -> None:
    evaluate, rows = Counting(), rows_of(20)
    found = evaluated_in_parts(evaluate, max_elements=numbers)(PARAMS, rows)
    assert evaluate.sizes == sizes
    torch.testing.assert_close(found, evaluate(PARAMS, rows))


def test_no_gradients_are_kept() -> None:
    found = evaluated_in_parts(Counting())({"w": PARAMS["w"].clone().requires_grad_()}, rows_of(4))
    assert not found["sum"].requires_grad


@pytest.mark.usefixtures("tracing_only")
def test_rows_of_another_form_are_evaluated_eagerly() -> None:
    evaluate = Counting()
    compiled = compiled_evaluation(evaluate, CPU)
    for count, eager in ((8, []), (8, []), (5, [5]), (8, []), (3, [3])):
        evaluate.sizes.clear()
        rows = rows_of(count)
        params = {"w": PARAMS["w"] + count}
        found = compiled(params, rows)
        assert evaluate.sizes == eager
        torch.testing.assert_close(found, Counting()(params, rows))


@pytest.mark.usefixtures("tracing_only")
def test_every_part_is_evaluated_compiled() -> None:
    evaluate = Counting()
    compiled = evaluated_in_parts(compiled_evaluation(evaluate, CPU), max_elements=4 * 9)
    for seed in range(2):
        torch.manual_seed(seed)
        rows = rows_of(20)
        torch.testing.assert_close(compiled(PARAMS, rows), Counting()(PARAMS, rows))
    assert evaluate.sizes == []


@pytest.mark.usefixtures("tracing_only")
def test_two_compiled_evaluations_share_no_graph() -> None:
    one, other = (
        compiled_evaluation(function, CPU)
        for function in (
            lambda params, rows: {"x": rows["x"] + params["w"]},
            lambda params, rows: {"x": rows["x"] * params["w"]},
        )
    )
    rows = {"x": torch.arange(4.0)}
    for _ in range(2):
        assert one(PARAMS, rows)["x"].tolist() == [3.0, 4.0, 5.0, 6.0]
        assert other(PARAMS, rows)["x"].tolist() == [0.0, 3.0, 6.0, 9.0]
