"""Fixtures of the suites that run over several transports."""

from __future__ import annotations

import pytest

from rlsrl.rpc.tls import TLS_FOLDER_VARIABLE, TLS_NAME_VARIABLE
from rlsrl.testing.certificates import PEER_NAME, Authority, MountedSecret


@pytest.fixture(scope="session")
def tls_variables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the environment variables of workers that use TLS."""
    folder = tmp_path_factory.mktemp("certificates")
    authority = Authority.new(folder)
    secret = MountedSecret(folder / "tls", authority.issue(), authority)
    return {TLS_FOLDER_VARIABLE: str(secret.folder), TLS_NAME_VARIABLE: PEER_NAME}


@pytest.fixture
def certificates(tls_variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this test and its child processes use TLS."""
    for name, value in tls_variables.items():
        monkeypatch.setenv(name, value)
