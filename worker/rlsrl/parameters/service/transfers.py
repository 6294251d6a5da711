"""Bytes of any length as a stream of messages, and back.

The first message says in its header how many bytes there are, and in what form; no message is so long that it keeps
others waiting. Nothing is believed of what arrives: a transfer is exactly the bytes that were announced, or refused.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message
from grpc import aio

from rlsrl.parameters.service.failures import TransferRefused
from rlsrl.rpc.codec import ALIGNMENT, Malformed, encode, split

M = TypeVar("M", bound=Message)

TRANSFERS = "rlsrl.rpc.v1.ParameterTransfers"
"""Name of the calls that carry transfers, whose messages are no protobuf."""
CHUNK_BYTES = 1024 * 1024
"""Bytes of one message; a multiple of the codec's alignment."""
MAX_TRANSFER_BYTES = 4 * 1024**3
"""Default limit of one transfer: a version of a billion parameters."""


def cut(header: bytes, content: bytes | bytearray) -> Iterator[bytes]:
    """The messages of a transfer, made one by one as they are asked for. The header announces ``len(content)``."""
    array = np.frombuffer(content, dtype=np.uint8)
    yield encode(header, [array[:CHUNK_BYTES]])
    for start in range(CHUNK_BYTES, array.size, CHUNK_BYTES):
        yield encode(b"", [array[start : start + CHUNK_BYTES]])


def open_message(message: bytes) -> tuple[bytes, memoryview]:
    """A message's header and body.

    Raises:
        TransferRefused: it is none of ours.
    """
    try:
        return split(message)
    except Malformed as error:
        raise TransferRefused(str(error)) from error


def parse_header(header_type: type[M], data: bytes) -> M:
    """The header of a transfer's first message.

    Raises:
        TransferRefused: it is none.
    """
    try:
        return header_type.FromString(data)
    except DecodeError as error:
        raise TransferRefused(f"a transfer begins with a header that is no {header_type.__name__}") from error


async def next_message(context: aio.ServicerContext[Any, Any]) -> bytes | None:
    """The next message of a call that a server takes; None at the stream's end."""
    message = await context.read()
    return message if isinstance(message, bytes) else None


class Assembly:
    """One transfer while it arrives."""

    def __init__(self, nbytes: int, first: memoryview, *, max_nbytes: int) -> None:
        """For ``nbytes`` announced bytes, of which ``first`` came with the header. Announcing them allocates nothing.

        Raises:
            TransferRefused: ``nbytes`` are over the limit, or ``first`` is not how they begin.
        """
        if not 0 <= nbytes <= max_nbytes:
            raise TransferRefused(f"a transfer of {nbytes} bytes is over the limit of {max_nbytes}")
        self._missing = nbytes
        self._chunks: list[memoryview] = []
        if nbytes or first.nbytes:
            self._add(first)

    @property
    def complete(self) -> bool:
        """Whether all announced bytes are there."""
        return self._missing == 0

    def add_message(self, message: bytes) -> None:
        """Take the next message.

        Raises:
            TransferRefused: it is not how this transfer goes on.
        """
        header, chunk = open_message(message)
        if header:
            raise TransferRefused(f"a second header, where {self._missing} bytes are missing")
        self._add(chunk)

    def content(self) -> bytes:
        """The bytes of a complete transfer."""
        assert self.complete, "asked for before it was complete"  # noqa: S101 - an invariant of our own
        return b"".join(self._chunks)

    def checksum(self) -> int:
        """CRC-32 of the bytes so far."""
        checksum = 0
        for chunk in self._chunks:
            checksum = zlib.crc32(chunk, checksum)
        return checksum

    def _add(self, chunk: memoryview) -> None:
        padded = self._missing + -self._missing % ALIGNMENT
        if not 0 < chunk.nbytes <= padded:
            raise TransferRefused(f"a chunk of {chunk.nbytes} bytes, where {self._missing} are missing")
        self._chunks.append(chunk[: self._missing])
        self._missing -= self._chunks[-1].nbytes
