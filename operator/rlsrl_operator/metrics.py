"""Declare all metrics of the operator in one place, and serve them.

The dashboards are generated from them. Other modules get methods to call and do not import Prometheus.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.process_collector import ProcessCollector

from rlsrl.api.status import ExperimentStatus
from rlsrl_operator.keyed_queue import KeyedQueue

PORT = 8080
"""The port of ``/metrics`` in the operator's pod."""
_PREFIX = "rlsrl_operator_"
_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_Key = TypeVar("_Key")


class OperatorMetrics:
    """The instruments of one operator, on a given registry. Only for the event loop's thread."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        """The registry of the instruments and of the process's figures (CPU, memory, descriptors)."""
        self.reconciles = Counter(
            f"{_PREFIX}reconciles_total",
            "Passes over experiments, by outcome (succeeded, failed).",
            ["outcome"],
            registry=registry,
        )
        self.reconcile_seconds = Histogram(
            f"{_PREFIX}reconcile_seconds", "Duration of one pass.", buckets=_SECONDS, registry=registry
        )
        self.last_success_timestamp_seconds = Gauge(
            f"{_PREFIX}last_success_timestamp_seconds",
            "When a pass last succeeded, in seconds since 1970.",
            registry=registry,
        )
        self.queue_length = Gauge(f"{_PREFIX}queue_length", "Experiments that wait for a pass.", registry=registry)
        self.oldest_key_seconds = Gauge(
            f"{_PREFIX}oldest_key_seconds",
            "How long the oldest experiment in the queue has waited or been worked on.",
            registry=registry,
        )
        self.failing_experiments = Gauge(
            f"{_PREFIX}failing_experiments", "Experiments whose last pass failed.", registry=registry
        )
        self.api_writes = Counter(
            f"{_PREFIX}api_writes_total",
            "Write requests to the API server, by kind and verb.",
            ["kind", "verb"],
            registry=registry,
        )
        self.experiments = Experiments()
        registry.register(self.experiments)
        ProcessCollector(registry=registry)
        for outcome in ("succeeded", "failed"):
            self.reconciles.labels(outcome=outcome)

    def measured(self, work: Callable[[_Key], Awaitable[float | None]]) -> Callable[[_Key], Awaitable[float | None]]:
        """Return the same function, counted and timed."""

        async def measured(key: _Key) -> float | None:
            with self.reconcile_seconds.time():
                try:
                    requeue_after = await work(key)
                except Exception:
                    self.reconciles.labels(outcome="failed").inc()
                    raise
            self.reconciles.labels(outcome="succeeded").inc()
            self.last_success_timestamp_seconds.set_to_current_time()
            return requeue_after

        return measured

    def watch(self, queue: KeyedQueue[Any]) -> None:
        """Show the figures of the queue at each scrape."""
        self.queue_length.set_function(lambda: queue.length)
        self.oldest_key_seconds.set_function(lambda: queue.oldest_seconds)
        self.failing_experiments.set_function(lambda: queue.num_failing)

    def count_write(self, kind: str, verb: str) -> None:
        """Count a write request to the API server."""
        self.api_writes.labels(kind=kind, verb=verb).inc()


class Experiments:
    """Collects the status of all experiments at each scrape. A restarted operator shows the same values."""

    def __init__(self) -> None:
        self._statuses: dict[tuple[str, str], ExperimentStatus] = {}

    def set_status(self, namespace: str, name: str, status: ExperimentStatus | None) -> None:
        """Set the status of an experiment, or remove the experiment with None."""
        if status is None:
            self._statuses.pop((namespace, name), None)
        else:
            self._statuses[namespace, name] = status

    def collect(self) -> Iterable[Metric]:
        """Return the metric families; they have no samples if there is no experiment."""
        labels = ["namespace", "experiment"]
        phase = GaugeMetricFamily("rlsrl_experiment_phase", "1 for the experiment's phase.", labels=[*labels, "phase"])
        restarts = CounterMetricFamily(
            "rlsrl_experiment_gang_restarts_total",
            "Restarts of the trainer gang after failures.",
            labels=labels,
        )
        for key, status in sorted(self._statuses.items()):
            phase.add_metric([*key, status.phase or "Pending"], 1)
            restarts.add_metric(key, status.restarts or 0)
        yield phase
        yield restarts


@asynccontextmanager
async def serving(registry: CollectorRegistry, *, host: str, port: int) -> AsyncIterator[int]:
    """Serve ``GET /metrics`` from the event loop, so that a blocked loop shows. Yields the port (0 chooses a free one).

    Raises:
        OSError: the address is in use or belongs to another host.
    """

    async def page(request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(registry), headers={"Content-Type": content_type})

    application = web.Application()
    application.router.add_get("/metrics", page)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()
