"""What suites over several transports share."""

from __future__ import annotations

import pytest

from rlsrl.rpc.tls import TLS_FOLDER_VARIABLE, TLS_NAME_VARIABLE
from rlsrl.testing.certificates import PEER_NAME, Authority, mounted


@pytest.fixture(scope="session")
def tls_variables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What is in the environment of workers that talk over TLS."""
    folder = tmp_path_factory.mktemp("certificates")
    authority = Authority.new(folder)
    secret = mounted(folder / "tls", authority.issue(), authority)
    return {TLS_FOLDER_VARIABLE: str(secret.folder), TLS_NAME_VARIABLE: PEER_NAME}


@pytest.fixture
def certificates(tls_variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """This test, and processes that it starts, talk over TLS."""
    for name, value in tls_variables.items():
        monkeypatch.setenv(name, value)
