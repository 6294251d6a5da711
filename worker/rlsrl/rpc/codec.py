"""Messages that carry arrays: a small header and raw buffers, in one piece of bytes.

Used by every gRPC stream that moves tensors, with the identity as gRPC serializer: protobuf would copy each buffer once
more and check it byte by byte. A message is a prefix (magic, length of the header, length of the body), the header, and
the body: the arrays' own bytes, little-endian, each starting on a multiple of ``ALIGNMENT``. What the arrays are
(names, dtypes, shapes) is not repeated in every message: both ends agree on a ``MessageLayout`` in their handshake.

Nothing in a message is trusted: lengths are compared with what is there before anything is read.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlsrl.data.specs import Arrays, ArraySpec, digest
from rlsrl.rpc.settings import MAX_MESSAGE_BYTES

ALIGNMENT = 16
"""Arrays of a body start on multiples of this, which is also how Python aligns the contents of ``bytes``."""
MAX_HEADER_BYTES = 64 * 1024
"""A longer header is refused: what is large belongs into the body."""

_MAGIC = b"rls1"
_PREFIX = struct.Struct("<4sIQ")
"""Magic, bytes of the header, bytes of the body. Its size is a multiple of ``ALIGNMENT``."""
_PADDING = [bytes(-length % ALIGNMENT) for length in range(ALIGNMENT)]
"""By length modulo ``ALIGNMENT``."""

if sys.byteorder != "little":
    raise ImportError("messages hold little-endian arrays, and this machine is big-endian")


class Malformed(ValueError):
    """A message is not what both ends agreed on; the text says in what."""


class MessageTooLong(ValueError):
    """A message is longer than either end would take."""


def encode(header: bytes, arrays: Iterable[NDArray[Any]] = ()) -> bytes:
    """One message of a header and arrays; their bytes are copied once.

    Raises:
        MessageTooLong: header or message are over their limits.
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
    """A message's header and body; the body is a read-only view of ``message``.

    Raises:
        Malformed: the message is none of ours, or its length is not what it says.
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
    """The arrays of one kind of message: names, dtypes and whole shapes, in the order of the body."""

    def __init__(self, specs: Mapping[str, ArraySpec]) -> None:
        """``specs``: by path; shapes with all their axes."""
        self.specs = dict(specs)
        self._places: list[tuple[str, np.dtype[Any], tuple[int, ...], int]] = []
        position = 0
        for name, spec in self.specs.items():
            self._places.append((name, np.dtype(spec.dtype), spec.shape, position))
            position += spec.nbytes + -spec.nbytes % ALIGNMENT
        self.nbytes = position
        """Bytes of the body, padding included."""

    @property
    def digest(self) -> str:
        """A short hash of names, dtypes, shapes and order: equal at both ends, or they do not understand each other."""
        return digest([[name, spec.to_json()] for name, spec in self.specs.items()])

    def encode(self, header: bytes, arrays: Arrays) -> bytes:
        """A message of these arrays, by the layout's names.

        Raises:
            Malformed: an array is missing or is not of its dtype or shape.
            MessageTooLong: header or message are over their limits.
        """
        return encode(header, [self._checked(arrays, name, dtype, shape) for name, dtype, shape, _ in self._places])

    def decode(self, message: bytes) -> tuple[bytes, dict[str, NDArray[Any]]]:
        """A message's header, and its arrays as read-only views of ``message``: nothing is copied.

        Raises:
            Malformed: the message is none of ours, or its body is not of this layout's length.
        """
        header, body = split(message)
        return header, self.view(body)

    def view(self, body: memoryview) -> dict[str, NDArray[Any]]:
        """The arrays of a body that ``split`` returned, as read-only views.

        Raises:
            Malformed: the body is not of this layout's length.
        """
        if body.nbytes != self.nbytes:
            raise Malformed(f"a body of {body.nbytes} bytes does not hold {self}")
        return {
            name: np.ndarray(shape, dtype=dtype, buffer=body, offset=offset)
            for name, dtype, shape, offset in self._places
        }

    def __str__(self) -> str:
        arrays = ", ".join(f"{name} {dtype.name}{list(shape)}" for name, dtype, shape, _ in self._places)
        return f"({arrays}) of {self.nbytes} bytes"

    @staticmethod
    def _checked(arrays: Arrays, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        array = arrays.get(name)
        if array is None:
            raise Malformed(f"{name} is missing; there are {', '.join(arrays) or 'no arrays'}")
        if array.shape != shape or array.dtype != dtype:
            raise Malformed(f"{name} is {array.dtype.name}{list(array.shape)}, not {dtype.name}{list(shape)}")
        return array
