"""Reads what TensorBoard would show of a run. Tests of the writer check the checksums."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tensorboardX.proto.event_pb2 import Event


def shown_scalars(run_folder: Path) -> list[tuple[str, int, float]]:
    """Return tag, step and value of each scalar in the run's event files, in order. The run may be writing."""
    return [
        (value.tag, step, value.simple_value) for step, value in _values(run_folder) if value.HasField("simple_value")
    ]


def shown_pictures(run_folder: Path) -> list[tuple[str, int, tuple[int, int], bytes]]:
    """Return tag, step, width and height, and the file of each picture in the run's event files, in order."""
    return [
        (value.tag, step, (value.image.width, value.image.height), value.image.encoded_image_string)
        for step, value in _values(run_folder)
        if value.HasField("image")
    ]


def _values(run_folder: Path) -> Iterator[tuple[int, Any]]:
    for path in sorted((run_folder / "tensorboard").rglob("events.out.tfevents.*")):
        for event in map(Event.FromString, _payloads(path.read_bytes())):
            for value in event.summary.value:
                yield event.step, value


def _payloads(data: bytes) -> Iterator[bytes]:
    position = 0
    while position + 16 <= len(data):
        (length,) = struct.unpack_from("<Q", data, position)
        if position + 16 + length > len(data):
            return
        yield data[position + 12 : position + 12 + length]
        position += 16 + length
