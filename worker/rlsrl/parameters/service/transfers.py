"""The one transfer protocol for stored and live weights and states: bytes of any length as a stream of messages.

The first message's header announces the number of bytes; each message carries at most ``CHUNK_BYTES`` of them, so that
other calls on the same connection are not delayed. The receiver trusts nothing: a transfer is exactly the announced
bytes, or it is refused. Both ends use the four calls that ``TransferStub`` and ``add_transfers`` declare.
"""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc
import numpy as np
from google.protobuf.message import DecodeError
from grpc import aio

from rlsrl.parameters.service.failures import TransferRefused
from rlsrl.rpc.codec import ALIGNMENT, Malformed, encode, split
from rlsrl.rpc.v1 import parameters_pb2 as pb

H = TypeVar("H", pb.Upload, pb.Download, pb.Live)
"""A transfer's header. Its field ``nbytes`` announces the content's length."""

TRANSFERS = "rlsrl.rpc.v1.ParameterTransfers"
"""Service name of the calls that carry transfers. Their messages are not protobuf."""
READS = (f"/{TRANSFERS}/Download", "/rlsrl.rpc.v1.Parameters/Versions")
"""The methods that read stored versions and their states, for which the reading token is enough."""
CHUNK_BYTES = 1024 * 1024
"""Content bytes of one message; a multiple of the codec's alignment."""
MAX_TRANSFER_BYTES = 4 * 1024**3
"""Default limit of one transfer: the weights of a billion parameters."""


class TransferStub:
    """A client's calls over one channel, in the style of the stubs that gRPC generates."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.upload = channel.stream_unary(
            f"/{TRANSFERS}/Upload", request_serializer=None, response_deserializer=pb.Stored.FromString
        )
        self.download = channel.unary_stream(
            f"/{TRANSFERS}/Download",
            request_serializer=pb.DownloadRequest.SerializeToString,
            response_deserializer=None,
        )
        self.publish = channel.stream_stream(
            f"/{TRANSFERS}/Publish", request_serializer=None, response_deserializer=pb.Published.FromString
        )
        self.watch = channel.unary_stream(
            f"/{TRANSFERS}/Watch", request_serializer=pb.WatchRequest.SerializeToString, response_deserializer=None
        )


def add_transfers(
    server: aio.Server,
    *,
    upload: Callable[..., Any],
    download: Callable[..., Any],
    publish: Callable[..., Any],
    watch: Callable[..., Any],
) -> None:
    """Let a server answer the four calls with these coroutine functions."""
    handlers: dict[str, Any] = {
        "Upload": grpc.stream_unary_rpc_method_handler(upload, response_serializer=pb.Stored.SerializeToString),
        "Download": grpc.unary_stream_rpc_method_handler(download, request_deserializer=pb.DownloadRequest.FromString),
        "Publish": grpc.stream_stream_rpc_method_handler(publish, response_serializer=pb.Published.SerializeToString),
        "Watch": grpc.unary_stream_rpc_method_handler(watch, request_deserializer=pb.WatchRequest.FromString),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(TRANSFERS, handlers),))


def cut(
    header: pb.Upload | pb.Download | pb.Live, content: bytes | bytearray, *, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[bytes]:
    """Yield the messages of a transfer, each made when it is needed. The header announces ``len(content)``.

    ``chunk_bytes``: content bytes of one message; a multiple of the codec's alignment.
    """
    array = np.frombuffer(content, dtype=np.uint8)
    yield encode(header.SerializeToString(), [array[:chunk_bytes]])
    for start in range(chunk_bytes, array.size, chunk_bytes):
        yield encode(b"", [array[start : start + chunk_bytes]])


@dataclass(frozen=True, kw_only=True, eq=False)
class Transfer(Generic[H]):
    """One complete transfer."""

    header: H
    messages: tuple[bytes, ...]
    """The messages as they arrived. The coordinator forwards live weights in this form."""
    chunks: tuple[memoryview, ...]
    """The content, as views of ``messages``."""

    def content(self) -> bytes:
        """Return the content in one piece. This copies it."""
        return b"".join(self.chunks)

    def checksum(self) -> int:
        """Return the CRC-32 of the content."""
        checksum = 0
        for chunk in self.chunks:
            checksum = zlib.crc32(chunk, checksum)
        return checksum


class TransferReceiver(Generic[H]):
    """Assembles one stream's transfers. It allocates nothing for announced bytes that have not arrived."""

    def __init__(self, header_type: type[H], *, max_nbytes: int) -> None:
        """``header_type`` is the header of every transfer in the stream; ``max_nbytes`` limits each content."""
        self._header_type: type[H] = header_type
        self._max_nbytes = max_nbytes
        self._header: H | None = None
        self._messages: list[bytes] = []
        self._chunks: list[memoryview] = []
        self._missing = 0

    def add(self, message: bytes) -> Transfer[H] | None:
        """Take the stream's next message; return the transfer that it completes, or None if more messages must follow.

        Raises:
            TransferRefused: the message is malformed, or not what was announced, or over the limit.
        """
        try:
            head, chunk = split(message)
        except Malformed as error:
            raise TransferRefused(str(error)) from error
        if self._header is None:
            self._header = self._announced(head)
            self._missing = self._header.nbytes
        elif head:
            raise TransferRefused(f"a second header, where {self._missing} bytes are missing")
        if self._missing or chunk.nbytes:
            self._add_chunk(chunk)
        self._messages.append(message)
        if self._missing:
            return None
        transfer = Transfer(header=self._header, messages=tuple(self._messages), chunks=tuple(self._chunks))
        self._header, self._messages, self._chunks = None, [], []
        return transfer

    def finish(self) -> None:
        """Check that the stream did not end inside a transfer.

        Raises:
            TransferRefused: announced bytes are missing.
        """
        if self._header is not None:
            raise TransferRefused(
                f"the stream ended inside a transfer of {self._header.nbytes} bytes: {self._missing} are missing"
            )

    def _announced(self, head: bytes) -> H:
        try:
            header = self._header_type.FromString(head)
        except DecodeError as error:
            raise TransferRefused(
                f"a transfer begins with a header that is not {self._header_type.__name__}"
            ) from error
        if not 0 <= header.nbytes <= self._max_nbytes:
            raise TransferRefused(f"a transfer of {header.nbytes} bytes is over the limit of {self._max_nbytes}")
        return header

    def _add_chunk(self, chunk: memoryview) -> None:
        padded = self._missing + -self._missing % ALIGNMENT
        if not 0 < chunk.nbytes <= padded:
            raise TransferRefused(f"a chunk of {chunk.nbytes} bytes, where {self._missing} are missing")
        self._chunks.append(chunk[: self._missing])
        self._missing -= self._chunks[-1].nbytes


def receive(messages: Iterable[bytes], header_type: type[H], *, max_nbytes: int) -> Iterator[Transfer[H]]:
    """Yield the transfers of a call that a client reads.

    Raises:
        TransferRefused: see ``TransferReceiver``.
    """
    receiver = TransferReceiver(header_type, max_nbytes=max_nbytes)
    for message in messages:
        if (transfer := receiver.add(message)) is not None:
            yield transfer
    receiver.finish()


async def receive_on_server(
    context: aio.ServicerContext[Any, Any], header_type: type[H], *, max_nbytes: int
) -> AsyncIterator[Transfer[H]]:
    """Yield the transfers of a call that a server reads.

    Raises:
        TransferRefused: see ``TransferReceiver``.
    """
    receiver = TransferReceiver(header_type, max_nbytes=max_nbytes)
    while isinstance(message := await context.read(), bytes):
        if (transfer := receiver.add(message)) is not None:
            yield transfer
    receiver.finish()
