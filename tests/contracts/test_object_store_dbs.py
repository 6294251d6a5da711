"""The parameter database in an object store passes the conformance suite: in this process, and on a real S3 server."""

from __future__ import annotations

import secrets
from typing import Literal

import obstore
import pytest
from obstore.store import MemoryStore, ObjectStore

from rlsrl.data.version import Version
from rlsrl.parameters.names import file_stem
from rlsrl.parameters.object_store import ObjectStoreParameterDB
from rlsrl.parameters.objects import Objects
from rlsrl.parameters.protocols import ParameterDB
from rlsrl.testing.clock import ManualClock
from rlsrl.testing.parameter_dbs import ParameterDBConformance, StoreUnderTest
from rlsrl.testing.s3_server import CREDENTIALS, REGION, S3Server

FOLDERS = {"parameters": "versions", "state": "states"}


def flip_last_bit(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


class ObstoreStore:
    """obstore's object store in this process."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self.clock = ManualClock()

    def open(self) -> ParameterDB:
        return ObjectStoreParameterDB(Objects(self.store, root="runs/1", name="memory"), clock=self.clock)

    def corrupt(self, policy: str, version: Version, what: Literal["parameters", "state"]) -> None:
        (key,) = (
            meta["path"]
            for meta in obstore.list(self.store, f"runs/1/{policy}/{FOLDERS[what]}").collect()
            if f"/{file_stem(version)}." in meta["path"]
        )
        obstore.put(self.store, key, flip_last_bit(bytes(obstore.get(self.store, key).bytes())))


class S3Store:
    """A new bucket of a real S3 server, whose objects are files."""

    def __init__(self, server: S3Server) -> None:
        self.bucket = f"bucket-{secrets.token_hex(8)}"
        self.folder = server.create_bucket(self.bucket) / "runs" / "1"
        self.endpoint = server.endpoint
        self.clock = ManualClock()

    def open(self) -> ParameterDB:
        objects = Objects.s3(f"s3://{self.bucket}/runs/1", endpoint=self.endpoint, region=REGION, answer_seconds=30.0)
        return ObjectStoreParameterDB(objects, clock=self.clock)

    def corrupt(self, policy: str, version: Version, what: Literal["parameters", "state"]) -> None:
        (path,) = (self.folder / policy / FOLDERS[what]).glob(f"{file_stem(version)}.*")
        path.write_bytes(flip_last_bit(path.read_bytes()))


class TestObjectStoreInMemory(ParameterDBConformance):
    @pytest.fixture
    def store(self) -> StoreUnderTest:
        return ObstoreStore(MemoryStore())


class TestS3(ParameterDBConformance):
    @pytest.fixture
    def store(self, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> StoreUnderTest:
        for name, value in CREDENTIALS.items():
            monkeypatch.setenv(name, value)
        return S3Store(s3_server)
