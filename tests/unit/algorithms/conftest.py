"""Fixtures for tests of compiled code."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch


@pytest.fixture
def own_compiler() -> Iterator[None]:
    """Remove all compiled code after the test."""
    yield
    torch.compiler.reset()
    torch.compiler.set_stance("default")


@pytest.fixture
def tracing_only(own_compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace graphs as usual but run them with torch, which saves a C++ compiler's seconds."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
