"""Transfers as pure values: chunks restore the sent data, and other chunks are refused."""

from __future__ import annotations

import errno
import random
from collections.abc import Iterable
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsrl.data.version import Version
from rlsrl.parameters.protocols import (
    Corrupt,
    NonFinite,
    ParameterError,
    Parameters,
    StaleAttempt,
    VersionExists,
    VersionNotFound,
)
from rlsrl.parameters.service.failures import (
    MAX_TEXT,
    ServiceRefused,
    TransferRefused,
    error_of,
    failure_of,
)
from rlsrl.parameters.service.live_server import replaces
from rlsrl.parameters.service.messages import live_version_messages, read_live_version
from rlsrl.parameters.service.transfers import Transfer, TransferReceiver, cut, receive
from rlsrl.rpc.codec import encode
from rlsrl.rpc.v1 import parameters_pb2 as pb

LIMIT = 10_000_000


def assemble(messages: list[bytes]) -> bytes:
    (transfer,) = receive(messages, pb.Upload, max_nbytes=LIMIT)
    assert transfer.messages == tuple(messages)
    return transfer.content()


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2000), st.integers(1, 20))
def test_a_receiver_restores_the_sent_data(nbytes: int, chunk_lines: int) -> None:
    content = random.Random(nbytes).randbytes(nbytes)
    messages = list(cut(pb.Upload(nbytes=nbytes), content, chunk_bytes=16 * chunk_lines))
    assert len(messages) == max(1, -(-nbytes // (16 * chunk_lines)))
    assert assemble(messages) == content


def body(nbytes: int, header: bytes = b"") -> bytes:
    return encode(header, [np.ones(nbytes, np.uint8)])


@pytest.mark.parametrize(
    ("nbytes", "first", "later", "reason"),
    [
        (32, 0, [], "a chunk of 0 bytes, where 32 are missing"),
        (32, 16, [body(0)], "a chunk of 0 bytes, where 16 are missing"),
        (32, 16, [body(32)], "a chunk of 32 bytes, where 16 are missing"),
        (32, 48, [], "a chunk of 48 bytes, where 32 are missing"),
        (5, 16, [body(16)], "a chunk of 16 bytes, where 0 are missing"),
        (0, 16, [], "a chunk of 16 bytes, where 0 are missing"),
        (32, 16, [body(16, b"header")], "a second header"),
        (32, 16, [b"garbage"], "shorter than its prefix"),
        (32, 16, [b"rls0" + bytes(100)], "begins with"),
        (32, 16, [body(16)[:-1]], "says that it has"),
        (32, 16, [], "ended inside a transfer of 32 bytes: 16 are missing"),
        (LIMIT + 1, 16, [], f"is over the limit of {LIMIT}"),
        (-1, 16, [], "is over the limit"),
    ],
)
def test_unannounced_data_is_refused(nbytes: int, first: int, later: list[bytes], reason: str) -> None:
    messages = [body(first, pb.Upload(nbytes=nbytes).SerializeToString()), *later]
    with pytest.raises(TransferRefused, match=reason):
        list(receive(messages, pb.Upload, max_nbytes=LIMIT))


def test_a_header_of_another_kind_is_refused() -> None:
    with pytest.raises(TransferRefused, match="a header that is not Upload"):
        list(receive([body(16, b"header")], pb.Upload, max_nbytes=LIMIT))


def test_an_announcement_allocates_no_memory() -> None:
    announced = body(16, pb.Upload(nbytes=2**62).SerializeToString())
    assert TransferReceiver(pb.Upload, max_nbytes=2**62).add(announced) is None


def test_one_stream_carries_several_transfers() -> None:
    contents = [b"first", b"", bytes(100)]
    messages = [message for content in contents for message in cut(pb.Live(nbytes=len(content)), content)]
    assert [transfer.content() for transfer in receive(messages, pb.Live, max_nbytes=LIMIT)] == contents


def live_transfer(parameters: Parameters) -> Transfer[pb.Live]:
    return received(live_version_messages(parameters))


def received(messages: Iterable[bytes]) -> Transfer[pb.Live]:
    (transfer,) = receive(messages, pb.Live, max_nbytes=LIMIT)
    return transfer


def test_a_live_version_arrives_bit_for_bit_and_read_only() -> None:
    rng = np.random.default_rng(0)
    sent = Parameters(
        version=Version(2, 7),
        vector=rng.standard_normal(700_001, dtype=np.float32),
        layout="abc",
        statistics={
            "mean": rng.standard_normal((2, 3)),
            "count": np.array(2**53 + 1),
            "strided": np.arange(12.0)[::2],
            "empty": np.zeros((0, 3), np.float16),
            "seen": np.array([True, False]),
        },
    )
    transfer = live_transfer(sent)
    assert len(transfer.messages) == 3
    got = read_live_version(transfer)
    assert (got.version, got.layout, got.vector.tobytes()) == (sent.version, "abc", sent.vector.tobytes())
    assert got.statistics.keys() == sent.statistics.keys()
    for name, array in sent.statistics.items():
        there = got.statistics[name]
        assert (there.dtype, there.shape, there.tobytes()) == (array.dtype, array.shape, array.tobytes())
    with pytest.raises(ValueError, match="read-only"):
        got.vector[0] = 1


def test_a_version_without_weights_is_one_message() -> None:
    transfer = live_transfer(Parameters(version=Version(1, 1), vector=np.zeros(0, np.float32), layout="abc"))
    assert (len(transfer.messages), transfer.header.nbytes) == (1, 0)
    assert read_live_version(transfer).vector.size == 0


def test_every_changed_bit_of_a_live_version_is_detected() -> None:
    transfer = live_transfer(Parameters(version=Version(1, 1), vector=np.ones(2, np.float32), layout="abc"))
    (message,) = transfer.messages
    for place in range(len(message) - transfer.header.nbytes, len(message)):
        for bit in range(8):
            spoilt = bytearray(message)
            spoilt[place] ^= 1 << bit
            with pytest.raises(Corrupt, match="checksum"):
                read_live_version(received([bytes(spoilt)]))


@pytest.mark.parametrize(
    "specs", ["", "[]", "{}", '{"vector": {"shape": [9], "dtype": "float32"}}', '{"vector": {"dtype": "object"}}', "{"]
)
def test_a_live_version_whose_arrays_differ_from_its_header_is_corrupt(specs: str) -> None:
    transfer = live_transfer(Parameters(version=Version(1, 1), vector=np.ones(2, np.float32), layout="abc"))
    transfer.header.version.specs = specs
    with pytest.raises(Corrupt, match=r"version 1\.1"):
        read_live_version(transfer)


@pytest.mark.parametrize(
    ("version", "newest", "expected"),
    [
        (Version(1, 0), None, True),
        (Version(1, 6), Version(1, 5), True),
        (Version(2, 0), Version(1, 5), True),
        (Version(1, 5), Version(1, 5), False),
        (Version(1, 4), Version(1, 5), ParameterError),
        (Version(1, 99), Version(2, 0), StaleAttempt),
    ],
)
def test_live_versions_never_move_back(
    version: Version, newest: Version | None, expected: bool | type[Exception]
) -> None:
    if isinstance(expected, bool):
        assert replaces(version, newest) is expected
    else:
        with pytest.raises(expected) as raised:
            replaces(version, newest)
        assert type(raised.value) is expected


class Failed(grpc.RpcError):
    """A failed call, as gRPC raises it."""

    def __init__(self, code: grpc.StatusCode, details: str, metadata: Any) -> None:
        self.code, self.details, self.trailing_metadata = lambda: code, lambda: details, lambda: metadata


def arrived(error: Exception) -> Exception | None:
    failure = failure_of(error)
    return error_of(Failed(failure.code, failure.text, failure.metadata))


@pytest.mark.parametrize(
    "error",
    [
        VersionNotFound("no 'x' (did you mean 'y'?)"),
        VersionExists("there"),
        StaleAttempt("attempt 2"),
        NonFinite("vector"),
        Corrupt("file"),
        TransferRefused("long"),
        ParameterError("races"),
        ValueError("allowed are ü"),
        TimeoutError("another writer"),
        OSError("no number"),
        OSError(errno.ENOSPC, "No space left on device", "/x/y"),
        PermissionError(errno.EACCES, "Permission denied"),
    ],
    ids=repr,
)
def test_an_error_arrives_with_its_type(error: Exception) -> None:
    there = arrived(error)
    assert type(there) is type(error)
    assert str(there) == str(error)
    assert getattr(there, "errno", None) == getattr(error, "errno", None)


def test_a_subclass_of_an_error_arrives_as_the_nearest_known_type() -> None:
    assert type(arrived(UnicodeError("name"))) is ValueError
    assert type(arrived(KeyError("bug"))) is ParameterError
    assert "KeyError('bug')" in str(arrived(KeyError("bug")))
    assert (failure_of(KeyError("bug")).expected, failure_of(ValueError("bad")).expected) == (False, True)
    assert len(failure_of(ValueError("x" * 10**6)).text) == MAX_TEXT


def test_each_status_of_grpc_is_final_or_retried() -> None:
    final = {code.name for code in grpc.StatusCode if error_of(Failed(code, "details", None)) is not None}
    assert final == {"UNAUTHENTICATED", "UNIMPLEMENTED", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"}
    assert isinstance(error_of(Failed(grpc.StatusCode.UNAUTHENTICATED, "no token", None)), ServiceRefused)
