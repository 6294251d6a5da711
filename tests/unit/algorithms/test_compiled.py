"""Compiled functions are called directly."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlsrl.algorithms.compiled import compiled, compiling

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("tracing_only")


class Doubling:
    """Counts the calls that are not compiled."""

    eager_calls = 0

    def __call__(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        if not torch.compiler.is_compiling():
            self.eager_calls += 1
        return {name: 2 * tensor for name, tensor in inputs.items()}


def test_a_call_asks_torch_neither_for_guards_nor_for_its_stance() -> None:
    function = Doubling()
    with compiling():
        doubled = compiled(function, CPU)
        doubled({"x": torch.zeros(3)})
    torch.compiler.set_stance("force_eager")  # what torch looks up obeys
    assert torch.equal(doubled({"x": torch.arange(3.0)})["x"], torch.tensor([0.0, 2.0, 4.0]))
    assert function.eager_calls == 0


def test_a_function_without_operations_is_compiled() -> None:
    with compiling():
        same = compiled(lambda inputs: {"y": inputs["x"]}, CPU)
        for values in (torch.zeros(3), torch.ones(3)):
            assert torch.equal(same({"x": values})["y"], values)


def test_what_cannot_be_compiled_raises_at_the_first_call() -> None:
    def of_values(tensor: Tensor) -> Tensor:
        return tensor if tensor.sum() > 0 else -tensor

    with compiling(), pytest.raises(torch._dynamo.exc.TorchDynamoException, match="branching"):
        compiled(of_values, CPU)(torch.ones(3))
