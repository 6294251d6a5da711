"""Writes and reads TensorBoard's event files, with scalars and animated GIFs.

A file consists of length-prefixed records with checksums, each a protobuf ``Event``. tensorboardX can write such files,
but imports torch where it is installed, and the coordinator must not import torch. So this module writes the bytes, and
a test reads them with tensorboardX.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

_SUFFIX = ".rlsrl"
"""Suffix of the files of this module. It does not read other files in the folder."""

# Event: wall_time = 1 (double), step = 2 (varint), file_version = 3, summary = 5, session_log = 7.
# Summary: value = 1. Value: tag = 1, simple_value = 2 (float), image = 4. SessionLog: status = 1 (varint), START = 1.
# Image: height = 1, width = 2, colorspace = 3 (RGB = 3), encoded_image_string = 4.
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_SESSION_START = b"\x08\x01"
_RGB = 3
GIF_HEADER = struct.Struct("<6sHH")
"""The beginning of a GIF: its signature, its width and its height."""


class EventFile:
    """Appends to a new event file. One thread uses it.

    TensorBoard reads the files of a folder in the order of their names, so a new file continues the earlier ones.
    """

    def __init__(self, folder: Path, *, now: float) -> None:
        """Create a file in ``folder``, and the folder if it is absent. ``now`` is in Unix seconds.

        Raises:
            OSError: the folder cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        number = len(_event_files(folder))
        path = folder / f"events.out.tfevents.{now:010.0f}.{number:06d}{_SUFFIX}"
        self._file = path.open("xb")
        self._file.write(_record(_event(now, 0, 3, b"brain.Event:2")))

    def write_scalars(self, step: int, wall_time: float, scalars: Mapping[str, float]) -> None:
        """Add one event with all the scalars."""
        values = b"".join(
            _field(1, _BYTES, _bytes(_field(1, _BYTES, _bytes(tag.encode())) + _field(2, _FIXED32, _float(value))))
            for tag, value in scalars.items()
        )
        self._file.write(_record(_event(wall_time, step, 5, values)))

    def write_restart(self, step: int, wall_time: float) -> None:
        """Record that training resumes before ``step``: TensorBoard drops the older values from that step on."""
        self._file.write(_record(_event(wall_time, step, 7, _SESSION_START)))

    def write_record(self, record: bytes) -> None:
        """Add a record of ``gif_record``."""
        self._file.write(record)

    def flush(self) -> None:
        """Pass all data to the operating system, so that a kill of this process cannot lose it."""
        self._file.flush()

    def close(self) -> None:
        """Flush and close. Idempotent."""
        self._file.close()


def gif_record(step: int, wall_time: float, tag: str, gif: bytes) -> bytes:
    """Return the record of an event with an animated GIF. It takes a tenth of a second for a megabyte."""
    _, width, height = GIF_HEADER.unpack_from(gif)
    sizes = _field(1, _VARINT, _varint(height)) + _field(2, _VARINT, _varint(width)) + _field(3, _VARINT, _varint(_RGB))
    image = sizes + _field(4, _BYTES, _bytes(gif))
    value = _field(1, _BYTES, _bytes(tag.encode())) + _field(4, _BYTES, _bytes(image))
    return _record(_event(wall_time, step, 5, _field(1, _BYTES, _bytes(value))))


def count_scalar_events(folder: Path, *, but_for: tuple[str, ...]) -> int:
    """Return the number of complete events of ``write_scalars`` in the folder's files.

    Events whose first tag begins with one of ``but_for`` do not count: those of ``gif_record`` must be among them.
    """
    prefixes = tuple(prefix.encode() for prefix in but_for)
    tags = (tag for path in _event_files(folder) for tag in _first_tags(path))
    return sum(1 for tag in tags if tag is not None and not tag.startswith(prefixes))


def _event_files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"events.out.tfevents.*{_SUFFIX}"))


def _first_tags(path: Path) -> Iterator[bytes | None]:
    """Yield ``_first_tag`` of the complete records of a file, without reading GIFs into memory."""
    with path.open("rb") as file:
        if not file.seek(0, 2):
            return  # An empty file cannot be mapped.
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data, memoryview(data) as view:
            for start, end in _payloads(view):
                with view[start:end] as payload:
                    yield _first_tag(payload)


def _payloads(data: memoryview) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of the complete records of a file. A kill may have cut the last one short."""
    position = 0
    while position + 16 <= len(data):
        (length,) = struct.unpack_from("<Q", data, position)
        if position + 16 + length > len(data):
            return
        yield position + 12, position + 12 + length
        position += 16 + length


def _first_tag(payload: memoryview) -> bytes | None:
    """Return the first tag of an event with values, b"" if it has none; None for another event."""
    _, position = _read_varint(payload, 10)  # the step, after the wall time
    if payload[position] >> 3 != 5:
        return None
    length, position = _read_varint(payload, position + 1)
    if not length:
        return b""
    _, position = _read_varint(payload, position + 1)  # the length of the first value
    length, position = _read_varint(payload, position + 1)
    return bytes(payload[position : position + length])


def _read_varint(data: memoryview, position: int) -> tuple[int, int]:
    """Return the number at ``position`` and the position after it."""
    value = shift = 0
    while data[position] & 0x80:
        value |= (data[position] & 0x7F) << shift
        shift, position = shift + 7, position + 1
    return value | data[position] << shift, position + 1


def _event(wall_time: float, step: int, number: int, content: bytes) -> bytes:
    time_and_step = _field(1, _FIXED64, struct.pack("<d", wall_time)) + _field(2, _VARINT, _varint(step))
    return time_and_step + _field(number, _BYTES, _bytes(content))


def _field(number: int, kind: int, content: bytes) -> bytes:
    return bytes([number << 3 | kind]) + content


def _bytes(content: bytes) -> bytes:
    return _varint(len(content)) + content


def _float(value: float) -> bytes:
    try:
        return struct.pack("<f", value)
    except OverflowError:
        return struct.pack("<f", float("inf") if value > 0 else float("-inf"))


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _record(payload: bytes) -> bytes:
    length = struct.pack("<Q", len(payload))
    return length + _checksum(length) + payload + _checksum(payload)


def _checksum(data: bytes) -> bytes:
    """Return CRC-32C, masked as in TFRecord, because the data contains checksums itself."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC_TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _crc_entry(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    return byte


_CRC_TABLE = tuple(_crc_entry(byte) for byte in range(256))
