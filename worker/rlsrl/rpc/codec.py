"""Messages that carry arrays: a small header and raw buffers, as one bytes object.

Every gRPC stream that carries arrays uses this codec instead of a protobuf serializer, which would copy each buffer
once more. A message has three parts: a prefix (magic, header length, body length), the header, and the body. The body
is the arrays' bytes, little-endian, each array at a multiple of ``ALIGNMENT``. Messages do not repeat the arrays'
names, dtypes and shapes: both ends agree on a ``MessageLayout`` in their handshake.

The decoder trusts nothing: it checks all lengths before it reads.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from rlsrl.data.specs import Arrays, ArraySpec, digest
from rlsrl.rpc.settings import MAX_MESSAGE_BYTES

ALIGNMENT = 16
"""Every array of a body starts at a multiple of this. Python aligns the content of ``bytes`` in the same way."""
MAX_HEADER_BYTES = 64 * 1024
"""Longest header. Large content belongs in the body."""

_MAGIC = b"rls1"
_PREFIX = struct.Struct("<4sIQ")
"""Magic, header length, body length. Its size is a multiple of ``ALIGNMENT``."""
_PADDING = [bytes(-length % ALIGNMENT) for length in range(ALIGNMENT)]
"""Padding by length modulo ``ALIGNMENT``."""

if sys.byteorder != "little":
    raise ImportError("messages contain little-endian arrays, but this machine is big-endian")


class Malformed(ValueError):
    """A message breaks the format or the agreed layout; the text says how."""


class MessageTooLong(ValueError):
    """A message is longer than the limit of both ends."""


def encode(header: bytes, arrays: Iterable[NDArray[Any]] = ()) -> bytes:
    """Return a message of a header and arrays. The arrays' bytes are copied once.

    Raises:
        MessageTooLong: the header or the message is over its limit.
    """
    if len(header) > MAX_HEADER_BYTES:
        raise MessageTooLong(f"a header of {len(header)} bytes is over the limit of {MAX_HEADER_BYTES}")
    parts: list[Any] = [b"", header, _PADDING[len(header) % ALIGNMENT]]
    length = 0
    for array in arrays:
        parts.append(array if array.flags.c_contiguous else np.ascontiguousarray(array))
        padding = _PADDING[array.nbytes % ALIGNMENT]
        parts.append(padding)
        length += array.nbytes + len(padding)
    parts[0] = _PREFIX.pack(_MAGIC, len(header), length)
    total = _PREFIX.size + len(header) + len(parts[2]) + length
    if total > MAX_MESSAGE_BYTES:
        raise MessageTooLong(f"a message of {total} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    return b"".join(parts)


def split(message: bytes) -> tuple[bytes, memoryview]:
    """Return a message's header and body. The body is a read-only view of ``message``.

    Raises:
        Malformed: the message has another format, or another length than its prefix says.
    """
    if len(message) < _PREFIX.size:
        raise Malformed(f"a message of {len(message)} bytes is shorter than its prefix of {_PREFIX.size}")
    magic, header_length, body_length = _PREFIX.unpack_from(message)
    if magic != _MAGIC:
        raise Malformed(f"a message begins with {magic!r}, not with {_MAGIC!r}")
    if header_length > MAX_HEADER_BYTES:
        raise Malformed(f"a header of {header_length} bytes is over the limit of {MAX_HEADER_BYTES}")
    body_start = _PREFIX.size + header_length + -header_length % ALIGNMENT
    if len(message) != body_start + body_length:
        raise Malformed(f"a message of {len(message)} bytes says that it has {body_start + body_length}")
    return message[_PREFIX.size : _PREFIX.size + header_length], memoryview(message)[body_start:].toreadonly()


class MessageLayout:
    """The arrays of one kind of message: names, dtypes and complete shapes, in the order of the body."""

    def __init__(self, specs: Mapping[str, ArraySpec]) -> None:
        """``specs`` has the arrays by path; shapes include all axes."""
        self.specs = dict(specs)
        self._fields: list[tuple[str, np.dtype[Any], tuple[int, ...], int]] = []
        position = 0
        for name, spec in self.specs.items():
            self._fields.append((name, np.dtype(spec.dtype), spec.shape, position))
            position += spec.nbytes + -spec.nbytes % ALIGNMENT
        self.nbytes = position
        """Size of the body in bytes, including padding."""

    @property
    def digest(self) -> str:
        """A short hash of names, dtypes, shapes and order. Both ends must have the same one."""
        return digest([[name, spec.to_json()] for name, spec in self.specs.items()])

    def encode(self, header: bytes, arrays: Arrays) -> bytes:
        """Return a message of these arrays.

        Raises:
            Malformed: an array is missing, or has another dtype or shape than the layout.
            MessageTooLong: the header or the message is over its limit.
        """
        return encode(header, [self._checked(arrays, name, dtype, shape) for name, dtype, shape, _ in self._fields])

    def decode(self, message: bytes) -> tuple[bytes, dict[str, NDArray[Any]]]:
        """Return a message's header, and its arrays as read-only views of ``message``. Nothing is copied.

        Raises:
            Malformed: the message has another format, or its body has another length than this layout.
        """
        header, body = split(message)
        return header, self.view(body)

    def view(self, body: memoryview) -> dict[str, NDArray[Any]]:
        """Return the arrays of a body from ``split``, as read-only views.

        Raises:
            Malformed: the body has another length than this layout.
        """
        if body.nbytes != self.nbytes:
            raise Malformed(f"a body of {body.nbytes} bytes does not hold {self}")
        return {
            name: np.ndarray(shape, dtype=dtype, buffer=body, offset=offset)
            for name, dtype, shape, offset in self._fields
        }

    @override
    def __str__(self) -> str:
        arrays = ", ".join(f"{name} {dtype.name}{list(shape)}" for name, dtype, shape, _ in self._fields)
        return f"({arrays}) of {self.nbytes} bytes"

    @staticmethod
    def _checked(arrays: Arrays, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        array = arrays.get(name)
        if array is None:
            raise Malformed(f"{name} is missing; there are {', '.join(arrays) or 'no arrays'}")
        if array.shape != shape or array.dtype != dtype:
            raise Malformed(f"{name} is {array.dtype.name}{list(array.shape)}, not {dtype.name}{list(shape)}")
        return array
