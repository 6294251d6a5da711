"""Transfers as pure values: what is cut comes together again, and nothing else does."""

from __future__ import annotations

import errno
import random
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
from rlsrl.parameters.service import transfers
from rlsrl.parameters.service.failures import (
    MAX_TEXT,
    ServiceRefused,
    TransferRefused,
    error_of,
    failure_of,
)
from rlsrl.parameters.service.live import read_version, version_messages
from rlsrl.parameters.service.live_server import is_news
from rlsrl.parameters.service.transfers import Assembly, cut, open_message, parse_header
from rlsrl.rpc.codec import encode
from rlsrl.rpc.v1 import parameters_pb2 as pb

LIMIT = 10_000_000


def assemble(messages: list[bytes]) -> bytes:
    head, chunk = open_message(messages[0])
    assembly = Assembly(parse_header(pb.Upload, head).nbytes, chunk, max_nbytes=LIMIT)
    for message in messages[1:]:
        assembly.add_message(message)
    assert assembly.complete
    return assembly.content()


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2000), st.integers(1, 20))
def test_what_is_cut_comes_together_again(nbytes: int, chunk_lines: int) -> None:
    content = random.Random(nbytes).randbytes(nbytes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfers, "CHUNK_BYTES", 16 * chunk_lines)
        messages = list(cut(pb.Upload(nbytes=nbytes).SerializeToString(), content))
        assert len(messages) == max(1, -(-nbytes // (16 * chunk_lines)))
    assert assemble(messages) == content


def body(nbytes: int, header: bytes = b"") -> bytes:
    return encode(header, [np.ones(nbytes, np.uint8)])


@pytest.mark.parametrize(
    ("nbytes", "first", "later", "reason"),
    [
        (32, b"", [], "a chunk of 0 bytes, where 32 are missing"),
        (32, bytes(16), [body(0)], "a chunk of 0 bytes, where 16 are missing"),
        (32, bytes(16), [body(32)], "a chunk of 32 bytes, where 16 are missing"),
        (32, bytes(48), [], "a chunk of 48 bytes, where 32 are missing"),
        (5, bytes(16), [body(16)], "a chunk of 16 bytes, where 0 are missing"),
        (0, bytes(16), [], "a chunk of 16 bytes, where 0 are missing"),
        (32, bytes(16), [body(16, b"header")], "a second header"),
        (32, bytes(16), [b"garbage"], "shorter than its prefix"),
        (32, bytes(16), [b"rls0" + bytes(100)], "begins with"),
        (32, bytes(16), [body(16)[:-1]], "says that it has"),
        (LIMIT + 1, bytes(16), [], f"is over the limit of {LIMIT}"),
        (-1, bytes(16), [], "is over the limit"),
    ],
)
def test_what_was_not_announced_is_refused(nbytes: int, first: bytes, later: list[bytes], reason: str) -> None:
    def receive() -> None:
        assembly = Assembly(nbytes, memoryview(first), max_nbytes=LIMIT)
        for message in later:
            assembly.add_message(message)

    with pytest.raises(TransferRefused, match=reason):
        receive()


def test_what_is_announced_takes_no_memory() -> None:
    assert not Assembly(2**62, memoryview(bytes(16)), max_nbytes=2**62).complete


def live_transfer(parameters: Parameters) -> tuple[pb.LiveVersion, list[bytes], int]:
    messages = list(version_messages(parameters))
    header = parse_header(pb.Live, open_message(messages[0])[0])
    return header.version, messages, header.nbytes


def received(messages: list[bytes], nbytes: int) -> Assembly:
    assembly = Assembly(nbytes, open_message(messages[0])[1], max_nbytes=LIMIT)
    for message in messages[1:]:
        assembly.add_message(message)
    return assembly


def test_a_live_version_comes_back_to_the_bit_and_read_only() -> None:
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
    header, messages, nbytes = live_transfer(sent)
    assert len(messages) == 3
    got = read_version(header, received(messages, nbytes))
    assert (got.version, got.layout, got.vector.tobytes()) == (sent.version, "abc", sent.vector.tobytes())
    assert got.statistics.keys() == sent.statistics.keys()
    for name, array in sent.statistics.items():
        there = got.statistics[name]
        assert (there.dtype, there.shape, there.tobytes()) == (array.dtype, array.shape, array.tobytes())
    with pytest.raises(ValueError, match="read-only"):
        got.vector[0] = 1


def test_a_version_without_weights_is_one_message() -> None:
    header, messages, nbytes = live_transfer(
        Parameters(version=Version(1, 1), vector=np.zeros(0, np.float32), layout="abc")
    )
    assert (len(messages), nbytes) == (1, 0)
    assert read_version(header, received(messages, nbytes)).vector.size == 0


def test_every_changed_bit_of_a_live_version_is_noticed() -> None:
    header, (message,), nbytes = live_transfer(
        Parameters(version=Version(1, 1), vector=np.ones(2, np.float32), layout="abc")
    )
    for place in range(len(message) - nbytes, len(message)):
        for bit in range(8):
            spoilt = bytearray(message)
            spoilt[place] ^= 1 << bit
            with pytest.raises(Corrupt, match="checksum"):
                read_version(header, received([bytes(spoilt)], nbytes))


@pytest.mark.parametrize(
    "specs", ["", "[]", "{}", '{"vector": {"shape": [9], "dtype": "float32"}}', '{"vector": {"dtype": "object"}}', "{"]
)
def test_a_live_version_with_other_arrays_than_it_says_is_corrupt(specs: str) -> None:
    header, messages, nbytes = live_transfer(
        Parameters(version=Version(1, 1), vector=np.ones(2, np.float32), layout="abc")
    )
    header.specs = specs
    with pytest.raises(Corrupt, match=r"version 1\.1"):
        read_version(header, received(messages, nbytes))


@pytest.mark.parametrize(
    ("version", "newest", "news"),
    [
        (Version(1, 0), None, True),
        (Version(1, 6), Version(1, 5), True),
        (Version(2, 0), Version(1, 5), True),
        (Version(1, 5), Version(1, 5), False),
        (Version(1, 4), Version(1, 5), ParameterError),
        (Version(1, 99), Version(2, 0), StaleAttempt),
    ],
)
def test_live_versions_never_move_back(version: Version, newest: Version | None, news: bool | type[Exception]) -> None:
    if isinstance(news, bool):
        assert is_news(version, newest) is news
    else:
        with pytest.raises(news) as raised:
            is_news(version, newest)
        assert type(raised.value) is news


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
def test_an_error_arrives_as_what_it_was(error: Exception) -> None:
    there = arrived(error)
    assert type(there) is type(error)
    assert str(there) == str(error)
    assert getattr(there, "errno", None) == getattr(error, "errno", None)


def test_what_is_more_special_arrives_as_the_nearest_kind_there_is() -> None:
    assert type(arrived(UnicodeError("name"))) is ValueError
    assert type(arrived(KeyError("bug"))) is ParameterError
    assert "KeyError('bug')" in str(arrived(KeyError("bug")))
    assert (failure_of(KeyError("bug")).expected, failure_of(ValueError("bad")).expected) == (False, True)
    assert len(failure_of(ValueError("x" * 10**6)).text) == MAX_TEXT


def test_what_grpc_itself_says_is_final_or_tried_again() -> None:
    final = {code.name for code in grpc.StatusCode if error_of(Failed(code, "details", None)) is not None}
    assert final == {"UNAUTHENTICATED", "UNIMPLEMENTED", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"}
    assert isinstance(error_of(Failed(grpc.StatusCode.UNAUTHENTICATED, "no token", None)), ServiceRefused)
