"""Reads what TensorBoard would show of a run. Tests of the writer check the checksums."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event


def shown_scalars(run_folder: Path) -> list[tuple[str, int, float]]:
    """Return tag, step and value of each scalar in the run's event files, in order. The run may be writing."""
    return [
        (value.tag, event.step, value.simple_value)
        for path in sorted((run_folder / "tensorboard").rglob("events.out.tfevents.*"))
        for event in map(Event.FromString, _payloads(path.read_bytes()))
        for value in event.summary.value
    ]


def _payloads(data: bytes) -> Iterator[bytes]:
    position = 0
    while position + 16 <= len(data):
        (length,) = struct.unpack_from("<Q", data, position)
        if position + 16 + length > len(data):
            return
        yield data[position + 12 : position + 12 + length]
        position += 16 + length
