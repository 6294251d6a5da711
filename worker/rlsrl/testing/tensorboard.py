"""Reads what TensorBoard would show of a run. Tests of the writer check the checksums."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tensorboardX.proto.event_pb2 import Event

from rlsrl.api.role_names import ACTOR, BUFFER, EVALUATOR, POLICY, TRAINER

WORK_METRICS: Mapping[str, str] = {
    ACTOR: "env_steps_per_second",
    BUFFER: "rollouts_per_second",
    EVALUATOR: "evaluations_per_second/stored",
    POLICY: "inference_requests_per_second",
    TRAINER: "train_steps_per_second",
}
"""By role: the metric that is above 0 while the role's workers do their work. The coordinator shows none of its own."""


def shown_scalars(run_folder: Path) -> list[tuple[str, int, float]]:
    """Return tag, step and value of each scalar in the run's event files, in order. The run may be writing."""
    return [
        (value.tag, step, value.simple_value) for step, value in _values(run_folder) if value.HasField("simple_value")
    ]


def worker_series(run_folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return step and value of each value of the workers' own metrics, by tag."""
    series: dict[str, list[tuple[int, float]]] = {}
    for tag, step, value in shown_scalars(run_folder):
        if tag.startswith("workers/"):
            series.setdefault(tag, []).append((step, value))
    return series


def roles_at_work(run_folder: Path) -> set[str]:
    """Return the roles whose first worker shows work after the first training step, by ``WORK_METRICS``."""
    series = worker_series(run_folder)
    return {
        role
        for role, metric in WORK_METRICS.items()
        if any(step > 0 and value > 0 for step, value in series.get(f"workers/{role}/0/{metric}", ()))
    }


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
