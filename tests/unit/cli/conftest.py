"""A fake cluster for commands: a program of the tests replaces kubectl."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlsrl.testing.kubectl_standin import KubectlStandIn


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KubectlStandIn:
    """Yield the fake kubectl, the only one on the PATH."""
    folder = tmp_path / "kubectl"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return KubectlStandIn(folder)
