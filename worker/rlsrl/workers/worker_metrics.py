"""The workers' own metrics on their way from heartbeats to the trackers, in the coordinator.

Trackers keep every series for ever, and slow down with thousands of them. So a role with many workers has a mean, a
minimum and a maximum of each metric in the place of one series a worker.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Self

MAX_SHOWN_WORKERS = 16
"""Most workers of a role with series of their own."""
WORKERS_PREFIX = "workers/"
"""All names of workers' metrics at trackers begin with it, and no other names do."""


@dataclass(frozen=True, kw_only=True)
class WorkerMetricsRow:
    """The metrics of all workers over one interval, as trackers show them."""

    step: int
    """The training step of the learning curve's newest row."""
    wall: float
    """Unix seconds."""
    scalars: Mapping[str, float]
    """By ``workers/<role>/<index>/<metric>``, or ``mean``, ``min`` and ``max`` in the place of the index."""

    def to_line(self) -> bytes:
        """Return one line of JSON."""
        return json.dumps(asdict(self), separators=(",", ":")).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Self:
        """Read a line of ``to_line``."""
        return cls(**json.loads(line))


class WorkerMetrics:
    """Collects each worker's newest metrics for the next row. One thread uses it."""

    def __init__(self, *, seconds: float, now: float) -> None:
        """A row is due every ``seconds``, from ``now`` (monotonic seconds) on; 0: never."""
        self._seconds = seconds
        self._since = now
        self._newest: dict[tuple[str, int], Mapping[str, float]] = {}

    def put(self, role: str, index: int, metrics: Mapping[str, float]) -> None:
        """Take a worker's metrics for the next row. They replace those that it sent since the last row."""
        if self._seconds:
            self._newest[role, index] = metrics

    def due(self, now: float, num_workers: Mapping[str, int]) -> dict[str, float]:
        """Return the scalars of the row that is due at ``now``; empty if none is, or if no worker has sent anything.

        ``num_workers`` is the wanted number of workers of each role.
        """
        if now - self._since < self._seconds:
            return {}
        self._since = now
        newest, self._newest = self._newest, {}
        return worker_scalars(newest, num_workers)


def worker_scalars(
    metrics: Mapping[tuple[str, int], Mapping[str, float]], num_workers: Mapping[str, int]
) -> dict[str, float]:
    """Return the scalars for trackers, by name.

    Args:
        metrics: by role and index of the worker, then by name.
        num_workers: the wanted number of workers of each role. It decides together with the number in ``metrics``, so
            that the names stay the same while some of many workers are absent.
    """
    present = Counter(role for role, _ in metrics)
    scalars: dict[str, float] = {}
    of_many: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for (role, index), values in sorted(metrics.items()):
        if max(present[role], num_workers.get(role, 0)) <= MAX_SHOWN_WORKERS:
            scalars |= {f"{WORKERS_PREFIX}{role}/{index}/{name}": value for name, value in values.items()}
        else:
            for name, value in values.items():
                of_many[role, name].append(value)
    for (role, name), found in of_many.items():
        for kind, value in (("mean", sum(found) / len(found)), ("min", min(found)), ("max", max(found))):
            scalars[f"{WORKERS_PREFIX}{role}/{kind}/{name}"] = value
    return scalars
