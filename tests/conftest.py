"""Fixtures and options of all tests."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlsrl.api.process_environment import PROCESS_ENVIRONMENT
from rlsrl.rpc.channels import open_channel
from rlsrl.testing.s3_server import S3Server

# Tests run with the environment of a worker: its gRPC settings, and one thread each for torch and numpy, because two
# threads draw other initial weights. The libraries read these variables at their first use.
os.environ.update(PROCESS_ENVIRONMENT)

REPOSITORY = Path(__file__).parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write the results of tests/golden as its expected files"
    )


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether to write golden files instead of comparing with them."""
    return bool(request.config.getoption("update_golden"))


@pytest.fixture(scope="session", autouse=True)
def _grpc_stays_up() -> Iterator[None]:
    """Keep gRPC's core alive for the whole process, as a worker's channel to the coordinator does.

    Otherwise gRPC shuts down with the last channel of each test and starts with the first channel of the next, hundreds
    of times. A test process once aborted in a gRPC thread seconds after a shutdown; the cause is unknown.
    """
    with open_channel("unix-abstract:nobody"):  # an unused channel does not connect
        yield


@pytest.fixture(scope="session")
def s3_server_binary() -> Path:
    """Return the real S3 server, which `make test` builds once. Without it, tests fail instead of being skipped."""
    printed = subprocess.run([REPOSITORY / "hack" / "s3-server", "--path"], capture_output=True, text=True, check=True)
    binary = Path(printed.stdout.strip())
    if not binary.exists():
        pytest.fail(f"there is no S3 server at {binary}: `make s3-server` builds it, once, with Go", pytrace=False)
    return binary


@pytest.fixture(scope="session")
def s3_server(s3_server_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """Yield a server that all tests share. A test that kills or freezes a server starts its own."""
    with S3Server(s3_server_binary, tmp_path_factory.mktemp("s3") / "buckets") as server:
        yield server
