"""What tests of several parts share."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlsrl.api.process_environment import PROCESS_ENVIRONMENT
from rlsrl.rpc.channels import open_channel
from rlsrl.testing.s3_server import S3Server

# What is tested in these processes is what a worker is: gRPC as they have it, and one thread each for torch and numpy,
# with two of which the first weights are others. Each looks when it is first used.
os.environ.update(PROCESS_ENVIRONMENT)

REPOSITORY = Path(__file__).parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="put what tests/golden sees on record")


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are to be written instead of compared with."""
    return bool(request.config.getoption("update_golden"))


@pytest.fixture(scope="session", autouse=True)
def _grpc_stays_up() -> Iterator[None]:
    """gRPC's core is up as long as the process, as it is in a worker by its channel to the coordinator.

    Otherwise it is taken down with the last channel of one test and set up with the first of the next, hundreds of
    times. In one of its threads a process of tests aborted once, seconds after that; why was not found.
    """
    with open_channel("unix-abstract:nobody"):  # it connects to nobody before it is used
        yield


@pytest.fixture(scope="session")
def s3_server_binary() -> Path:
    """The real S3 server, which `make test` builds once; without it these tests fail, they are not skipped."""
    printed = subprocess.run([REPOSITORY / "hack" / "s3-server", "--path"], capture_output=True, text=True, check=True)
    binary = Path(printed.stdout.strip())
    if not binary.exists():
        pytest.fail(f"there is no S3 server at {binary}: `make s3-server` builds it, once, with Go", pytrace=False)
    return binary


@pytest.fixture(scope="session")
def s3_server(s3_server_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A server that all tests share; whoever harms it starts one of their own."""
    with S3Server(s3_server_binary, tmp_path_factory.mktemp("s3") / "buckets") as server:
        yield server
