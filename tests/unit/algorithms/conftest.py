"""Fixtures for tests of compiled code."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

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


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the test a cache of compiled code of its own, and compile in its process."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
