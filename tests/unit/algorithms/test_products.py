"""Compiled products of matrices: large ones come from oneDNN, and all have torch's values and gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from rlsrl.algorithms.compiled import compiled, compiling
from rlsrl.policies.products import MKL_OPERATIONS

CALL = "linear_pointwise("
"""A product by oneDNN in generated code."""
KINDS: dict[str, tuple[Callable[..., Tensor], int]] = {
    "mm": (lambda a, b, _: a @ b, 1),
    "addmm": (lambda a, b, bias: torch.addmm(bias, a, b), 1),
    "addmm with a matrix": (lambda a, b, bias: torch.addmm(bias.expand(len(a), -1).contiguous(), a, b), 1),
    "linear": (lambda a, b, bias: torch.nn.functional.linear(a, b.t().contiguous(), bias), 1),
    "bmm": (lambda a, b, _: torch.bmm(torch.stack([a, -a]), torch.stack([b, 2 * b])), 2),
    "baddbmm": (
        lambda a, b, bias: torch.baddbmm(bias.expand(2, 1, -1), torch.stack([a, -a]), torch.stack([b, 2 * b])),
        2,
    ),
}
"""By name: a product of a [N, in], b [in, out] and bias [out], and its number of matrices."""


def products_in(function: Callable[..., object], *inputs: Tensor) -> tuple[object, int]:
    """Return the compiled function's result, and its number of products by oneDNN."""
    with compiling():
        found, code = run_and_get_code(compiled(function, torch.device("cpu")), *inputs)
    return found, sum(each.count(CALL) for each in code)


def matrices(num_rows: int, num_inputs: int, num_outputs: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = (num_rows, num_inputs), (num_inputs, num_outputs), (num_outputs,)
    a, b, bias = (torch.randn(shape, generator=generator) for shape in shapes)
    return a, b, bias


@pytest.mark.parametrize("kind", KINDS)
def test_a_large_product_is_computed_by_onednn(kind: str) -> None:
    product, number = KINDS[kind]
    inputs = matrices(128, 96, 130)

    found, by_onednn = products_in(product, *inputs)

    torch.testing.assert_close(found, product(*inputs), rtol=1e-4, atol=1e-4)
    assert by_onednn == number


def test_gradients_are_computed_by_onednn() -> None:
    weights, inputs, bias = matrices(256, 200, 200)[0], *matrices(200, 256, 200)[::2]

    def gradient(weights: Tensor, inputs: Tensor, bias: Tensor) -> Tensor:
        def loss(weights: Tensor) -> Tensor:
            hidden = torch.nn.functional.linear(inputs, weights.t(), bias).tanh()
            return (hidden @ weights.t()).square().mean()

        found: Tensor = torch.func.grad(loss)(weights)
        return found

    found, by_onednn = products_in(gradient, weights, inputs, bias)

    torch.testing.assert_close(found, gradient(weights, inputs, bias), rtol=1e-3, atol=1e-6)
    assert by_onednn == 5  # two forward, three backward


@pytest.mark.parametrize(
    ("num_rows", "dtype", "by_onednn"),
    [
        (MKL_OPERATIONS // (2 * 64 * 64), torch.float32, 0),
        (MKL_OPERATIONS // (2 * 64 * 64) + 1, torch.float32, 1),
        (1024, torch.float64, 0),
    ],
)
def test_small_products_and_other_numbers_stay_with_torch(num_rows: int, dtype: torch.dtype, by_onednn: int) -> None:
    a, b, _ = (tensor.to(dtype) for tensor in matrices(num_rows, 64, 64))

    found, counted = products_in(torch.mm, a, b)

    torch.testing.assert_close(found, a @ b, rtol=1e-4, atol=1e-4)
    assert counted == by_onednn
