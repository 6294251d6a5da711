"""What the tests of compiled code share."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch


@pytest.fixture
def own_compiler() -> Iterator[None]:
    """Leaves nothing compiled behind."""
    yield
    torch.compiler.reset()
    torch.compiler.set_stance("default")


@pytest.fixture
def tracing_only(own_compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are made as ever and run by torch, without a C++ compiler's seconds."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
