"""A cluster for commands, shown by a kubectl that is a program of the tests'."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlsrl.testing.kubectl_standin import KubectlStandIn


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KubectlStandIn:
    """The only kubectl on the PATH."""
    folder = tmp_path / "kubectl"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return KubectlStandIn(folder)
