"""Every parameter database passes the conformance suite."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import pytest

from rlsrl.data.version import Version
from rlsrl.parameters.filesystem import FilesystemParameterDB
from rlsrl.parameters.names import file_stem
from rlsrl.parameters.protocols import ParameterDB
from rlsrl.parameters.service import ServiceParameterDB
from rlsrl.rpc.tls import tls_from_environment
from rlsrl.testing.clock import ManualClock
from rlsrl.testing.memory_parameter_db import MemoryBlobs, MemoryParameterDB
from rlsrl.testing.parameter_dbs import ParameterDBConformance, StoreUnderTest
from rlsrl.testing.process_driver import DrivenProcess

TOKEN = "the-token"
FOLDERS = {"parameters": "versions", "state": "states"}


def flip_last_bit(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


class FolderStore:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.clock = ManualClock()

    def open(self) -> ParameterDB:
        return FilesystemParameterDB(self.root, clock=self.clock)

    def corrupt(self, policy: str, version: Version, what: Literal["parameters", "state"]) -> None:
        path = self.root / policy / FOLDERS[what] / f"{file_stem(version)}.safetensors"
        path.write_bytes(flip_last_bit(path.read_bytes()))


class MemoryStore:
    def __init__(self) -> None:
        self.blobs = MemoryBlobs()
        self.clock = ManualClock()

    def open(self) -> ParameterDB:
        return MemoryParameterDB(self.blobs, clock=self.clock)

    def corrupt(self, policy: str, version: Version, what: Literal["parameters", "state"]) -> None:
        path = f"{policy}/{FOLDERS[what]}/{file_stem(version)}.safetensors"
        self.blobs.content[path] = flip_last_bit(self.blobs.content[path])


class RemoteClock(ManualClock):
    """A clock that advances the server's clock as well."""

    def __init__(self, advance: Callable[[float], object]) -> None:
        super().__init__()
        self._advance_there = advance

    def advance(self, seconds: float) -> None:
        super().advance(seconds)
        self._advance_there(seconds)


class ServedStore(FolderStore):
    """A folder that another process serves."""

    def __init__(self, root: Path, server: DrivenProcess, address: str, closing: ExitStack) -> None:
        super().__init__(root)
        self.address = server.call("serve", address=address, token=TOKEN, folder=str(root))
        closing.callback(server.call, "end", address=self.address)
        self.clock = RemoteClock(lambda seconds: server.call("advance", address=self.address, seconds=seconds))
        self.closing = closing

    def open(self) -> ParameterDB:
        db = ServiceParameterDB(self.address, TOKEN, tls=tls_from_environment())
        self.closing.callback(db.close)
        return db


@pytest.fixture(scope="module")
def server() -> Iterator[DrivenProcess]:
    server = DrivenProcess("rlsrl.testing.parameter_process")
    yield server
    server.close()


@pytest.fixture(scope="module")
def tls_server(tls_variables: dict[str, str]) -> Iterator[DrivenProcess]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in tls_variables.items():
            patch.setenv(name, value)
        server = DrivenProcess("rlsrl.testing.parameter_process")
    yield server
    server.close()


class TestFilesystem(ParameterDBConformance):
    @pytest.fixture
    def store(self, tmp_path: Path) -> StoreUnderTest:
        return FolderStore(tmp_path / "not" / "there" / "yet")


class TestMemory(ParameterDBConformance):
    @pytest.fixture
    def store(self) -> StoreUnderTest:
        return MemoryStore()


class TestServiceOverTcp(ParameterDBConformance):
    @pytest.fixture
    def store(self, tmp_path: Path, server: DrivenProcess) -> Iterator[StoreUnderTest]:
        with ExitStack() as closing:
            yield ServedStore(tmp_path / "there", server, "127.0.0.1:0", closing)


class TestServiceOverAnAbstractSocket(ParameterDBConformance):
    @pytest.fixture
    def store(self, tmp_path: Path, server: DrivenProcess) -> Iterator[StoreUnderTest]:
        with ExitStack() as closing:
            yield ServedStore(tmp_path / "there", server, f"unix-abstract:rlsrl-test-{uuid.uuid4()}", closing)


class TestServiceOverTls(ParameterDBConformance):
    @pytest.fixture
    def store(self, tmp_path: Path, tls_server: DrivenProcess, certificates: None) -> Iterator[StoreUnderTest]:
        with ExitStack() as closing:
            yield ServedStore(tmp_path / "there", tls_server, "127.0.0.1:0", closing)
