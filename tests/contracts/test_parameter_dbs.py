"""The parameter databases against their common contract."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from rlsrl.data.version import Version
from rlsrl.parameters.filesystem import FilesystemParameterDB
from rlsrl.parameters.memory import MemoryBlobs, MemoryParameterDB
from rlsrl.parameters.names import file_stem
from rlsrl.parameters.protocols import ParameterDB
from rlsrl.testing.clock import ManualClock
from rlsrl.testing.parameter_dbs import ParameterDBConformance, ParameterStore

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


class TestFilesystem(ParameterDBConformance):
    @pytest.fixture
    def store(self, tmp_path: Path) -> ParameterStore:
        return FolderStore(tmp_path / "not" / "there" / "yet")


class TestMemory(ParameterDBConformance):
    @pytest.fixture
    def store(self) -> ParameterStore:
        return MemoryStore()
