"""All metrics of the operator, declared in one place, and the page that shows them.

Dashboards are made from them. Whoever sets one is handed the method to call, and knows nothing of Prometheus.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.process_collector import ProcessCollector

from rlsrl.api.status import ExperimentStatus

PORT = 8080
"""Where the operator's pod serves ``/metrics``."""
_PREFIX = "rlsrl_operator_"
_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_Key = TypeVar("_Key")


class Queue(Protocol):
    """What is shown of the queue: ``rlsrl_operator.keyed_queue.KeyedQueue``."""

    @property
    def length(self) -> int:
        """Keys in line."""

    @property
    def num_failing(self) -> int:
        """Keys whose last attempt failed."""

    @property
    def oldest_seconds(self) -> float:
        """For how long the oldest key has been in line or worked on."""


class OperatorMetrics:
    """The instruments of one operator, on the registry it was given. Only for the event loop's thread."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        """Where the instruments are; the process's own figures (CPU, memory, descriptors) are on it as well."""
        self.reconciles = Counter(
            f"{_PREFIX}reconciles_total",
            "Looks at experiments, by how they ended (succeeded, failed).",
            ["outcome"],
            registry=registry,
        )
        self.reconcile_seconds = Histogram(
            f"{_PREFIX}reconcile_seconds", "Duration of one look.", buckets=_SECONDS, registry=registry
        )
        self.last_success_timestamp_seconds = Gauge(
            f"{_PREFIX}last_success_timestamp_seconds",
            "When a look last succeeded, in seconds since 1970.",
            registry=registry,
        )
        self.queue_length = Gauge(f"{_PREFIX}queue_length", "Experiments that wait to be looked at.", registry=registry)
        self.oldest_key_seconds = Gauge(
            f"{_PREFIX}oldest_key_seconds",
            "For how long the oldest experiment in the queue has waited or been looked at.",
            registry=registry,
        )
        self.failing_experiments = Gauge(
            f"{_PREFIX}failing_experiments", "Experiments at which the last look failed.", registry=registry
        )
        self.api_writes = Counter(
            f"{_PREFIX}api_writes_total",
            "Writes that the API server was asked for, by kind and verb.",
            ["kind", "verb"],
            registry=registry,
        )
        self.experiments = Experiments()
        registry.register(self.experiments)
        ProcessCollector(registry=registry)
        for outcome in ("succeeded", "failed"):
            self.reconciles.labels(outcome=outcome)

    def measured(self, look: Callable[[_Key], Awaitable[float | None]]) -> Callable[[_Key], Awaitable[float | None]]:
        """The same work, counted and timed."""

        async def measured(key: _Key) -> float | None:
            with self.reconcile_seconds.time():
                try:
                    again_in = await look(key)
                except Exception:
                    self.reconciles.labels(outcome="failed").inc()
                    raise
            self.reconciles.labels(outcome="succeeded").inc()
            self.last_success_timestamp_seconds.set_to_current_time()
            return again_in

        return measured

    def watch(self, queue: Queue) -> None:
        """Show the queue, as it is whenever somebody asks."""
        self.queue_length.set_function(lambda: queue.length)
        self.oldest_key_seconds.set_function(lambda: queue.oldest_seconds)
        self.failing_experiments.set_function(lambda: queue.num_failing)

    def wrote(self, kind: str, verb: str) -> None:
        """The API server is asked to write."""
        self.api_writes.labels(kind=kind, verb=verb).inc()


class Experiments:
    """Shows how the experiments stand. Levels, not events: an operator that was started anew shows the same."""

    def __init__(self) -> None:
        self._statuses: dict[tuple[str, str], ExperimentStatus] = {}

    def set_status(self, namespace: str, name: str, status: ExperimentStatus | None) -> None:
        """How an experiment stands; None when it is gone."""
        if status is None:
            self._statuses.pop((namespace, name), None)
        else:
            self._statuses[namespace, name] = status

    def collect(self) -> Iterable[Metric]:
        """The families, without samples while there is no experiment."""
        labels = ["namespace", "experiment"]
        phase = GaugeMetricFamily(
            "rlsrl_experiment_phase", "1 for the phase that the experiment is in.", labels=[*labels, "phase"]
        )
        restarts = CounterMetricFamily(
            "rlsrl_experiment_gang_restarts_total",
            "Times the trainers were started anew, for any reason.",
            labels=labels,
        )
        for key, status in sorted(self._statuses.items()):
            phase.add_metric([*key, status.phase or "Pending"], 1)
            restarts.add_metric(key, status.restarts or 0)
        yield phase
        yield restarts


@asynccontextmanager
async def serving(registry: CollectorRegistry, *, host: str, port: int) -> AsyncIterator[int]:
    """Answer ``GET /metrics`` meanwhile, from the event loop: one that hangs shows. Gives the port (0: any free one).

    Raises:
        OSError: the address is taken or not ours.
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
