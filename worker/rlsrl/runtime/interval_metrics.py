"""A process's metrics as plain numbers over an interval, for trackers such as TensorBoard.

Prometheus computes rates from counters and means from histograms when it is asked. A tracker draws what it gets. So the
process itself turns each metric into one number for each of its label values.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry

from rlsrl.runtime.metrics import NAMESPACE

MAX_INTERVAL_METRICS = 256
"""Most numbers of one interval. Further ones are left out, in the order in which the metrics were first set."""
MAX_NAME_LENGTH = 200
"""Most characters of a number's name. Numbers with longer names, which only label values make, are left out."""
_PROCESS = "process_"
_PROCESS_METRICS = frozenset({"process_cpu_seconds", "process_resident_memory_bytes", "process_open_fds"})
"""The shown ones of the process's own metrics. The others are constants, or cost nothing."""

_Sample = tuple[str, str]
"""Suffix in its family, and name with label values."""


class IntervalMetrics:
    """The metrics of a registry over intervals that follow each other. Thread-safe.

    A counter gives ``<name>_per_second``, a histogram the mean of its observations, a gauge its present value. Label
    values follow the name after a slash. A histogram without an observation in the interval gives nothing, and neither
    does a value that is not finite.
    """

    def __init__(self, registry: CollectorRegistry, *, now: Callable[[], float] = time.monotonic) -> None:
        """``now`` returns monotonic seconds. No interval is due before ``repeat``."""
        self._registry = registry
        self._now = now
        self._lock = threading.Lock()
        self._seconds = 0.0
        self._since = 0.0
        self._before: dict[_Sample, float] = {}

    def repeat(self, seconds: float) -> None:
        """Let intervals last ``seconds`` from now on; 0 ends them. The present interval keeps its beginning."""
        with self._lock:
            if seconds and not self._seconds:
                self._since, self._before = self._now(), dict(self._samples())
            self._seconds = seconds

    def due(self) -> dict[str, float]:
        """Return the numbers of the present interval, by name, and begin the next one. Empty while it lasts."""
        with self._lock:
            now = self._now()
            elapsed = now - self._since
            if not self._seconds or elapsed < self._seconds:
                return {}
            samples = dict(self._samples())
            grown = {sample: value - self._before.get(sample, 0.0) for sample, value in samples.items()}
            self._since, self._before = now, samples
        found = (
            (name, value)
            for name, value in _numbers(samples, grown, elapsed)
            if math.isfinite(value) and len(name) <= MAX_NAME_LENGTH
        )
        return dict(itertools.islice(found, MAX_INTERVAL_METRICS))

    def _samples(self) -> Iterator[tuple[_Sample, float]]:
        for family in self._registry.collect():
            if family.name.startswith(_PROCESS) and family.name not in _PROCESS_METRICS:
                continue
            for sample in family.samples:
                name = "/".join((family.name.removeprefix(f"{NAMESPACE}_"), *sample.labels.values()))
                yield (sample.name.removeprefix(family.name), name), sample.value


def _numbers(samples: dict[_Sample, float], grown: dict[_Sample, float], elapsed: float) -> Iterator[tuple[str, float]]:
    """Yield name and value of each number. ``grown``: the growth of each sample in ``elapsed`` seconds."""
    for (suffix, name), value in samples.items():
        if suffix == "":
            yield name, value
        elif suffix == "_total":
            metric, *labels = name.split("/", 1)
            yield "/".join((f"{metric}_per_second", *labels)), grown[suffix, name] / elapsed
        elif suffix == "_count" and (count := grown[suffix, name]) > 0:
            yield name, grown["_sum", name] / count
