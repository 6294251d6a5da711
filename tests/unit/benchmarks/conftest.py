"""Peers of the benchmarks that count as installed: no test downloads gigabytes."""

from __future__ import annotations

import peer_environments
import pytest


@pytest.fixture(autouse=True)
def installed_peers(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path_factory.mktemp("peer")
    (home / peer_environments.COMPLETE).touch()
    monkeypatch.setattr(peer_environments, "home_of", lambda peer: home)
