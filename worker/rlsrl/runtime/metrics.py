"""All metrics of all roles, declared in one table, and how a process shows its own.

Dashboards and documentation are made from the table: ``Metrics.declared()``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar, overload

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector

from rlsrl.runtime.ledger import PageRecord

NAMESPACE = "rlsrl"

Instrument = TypeVar("Instrument", Counter, Gauge, Histogram)

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_DELAYS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_SIZES = tuple(float(1 << power) for power in range(14))
_STEPS = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0, 64.0)


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """One metric: what it is called, what it means and who sets it."""

    name: str
    """With prefix and unit, without the suffixes of the exposition format (``_total`` is part of it)."""
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    unit: str
    """Of one count or observation; empty for plain counts."""
    labels: tuple[str, ...]
    roles: tuple[str, ...]
    """Whose processes set it."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets."""


class _Declared(Generic[Instrument]):
    """An attribute of ``Metrics``: the declaration on the class, the instrument on an object.

    Instruments are made when first used, so a process shows only what it sets.
    """

    def __init__(
        self,
        make: type[Instrument],
        name: str,
        text: str,
        *,
        roles: tuple[str, ...],
        unit: str = "",
        labels: tuple[str, ...] = (),
        buckets: tuple[float, ...] = (),
    ) -> None:
        self._make: type[Instrument] = make
        kinds: dict[type, Literal["counter", "gauge", "histogram"]] = {
            Counter: "counter",
            Gauge: "gauge",
            Histogram: "histogram",
        }
        self.declaration = Declaration(
            name=f"{NAMESPACE}_{name}",
            kind=kinds[make],
            help=text,
            unit=unit,
            labels=labels,
            roles=roles,
            buckets=buckets,
        )

    @overload
    def __get__(self, instance: None, owner: type[Any]) -> Declaration: ...
    @overload
    def __get__(self, instance: Metrics, owner: type[Any]) -> Instrument: ...
    def __get__(self, instance: Metrics | None, owner: type[Any]) -> Declaration | Instrument:
        if instance is None:
            return self.declaration
        return instance.instrument(self.declaration, self._make)


class Metrics:
    """The instruments of one process, on the registry it was given. Any thread may use them."""

    env_steps = _Declared(Counter, "env_steps_total", "Environment steps that made a transition.", roles=("actor",))
    rollouts = _Declared(
        Counter, "rollouts_total", "Slots filled, or passed on, and posted.", roles=("actor", "buffer")
    )
    waiting_seconds = _Declared(
        Counter,
        "waiting_seconds_total",
        "Time spent waiting, by what for (credit, parameters, inference, requests, samples, batch, version, compiler).",
        unit="seconds",
        labels=("reason",),
        roles=("actor", "buffer", "trainer", "evaluator", "policy"),
    )
    working_seconds = _Declared(
        Counter,
        "working_seconds_total",
        "Time spent working, by what on (environment, inference, update, copy); told when a slot or step is done.",
        unit="seconds",
        labels=("stage",),
        roles=("actor", "trainer"),
    )
    train_steps = _Declared(Counter, "train_steps_total", "Calls of Learner.step.", roles=("trainer",))
    transitions_trained = _Declared(
        Counter, "transitions_trained_total", "Transitions trained, each once however many epochs.", roles=("trainer",)
    )
    episodes = _Declared(Counter, "episodes_total", "Episodes that ended in trained batches.", roles=("trainer",))
    policy_lag = _Declared(
        Histogram,
        "policy_lag_steps",
        "Trainer step minus the step of a batch's oldest action.",
        unit="steps",
        buckets=_STEPS,
        roles=("trainer",),
    )
    policy_lag_exceeded = _Declared(
        Counter,
        "policy_lag_exceeded_total",
        "Batches whose oldest action was further behind than pacing.maxPolicyLag; there should be none.",
        roles=("trainer",),
    )
    step_seconds = _Declared(
        Histogram, "step_seconds", "Duration of Learner.step.", unit="seconds", buckets=_SECONDS, roles=("trainer",)
    )
    compiled = _Declared(Gauge, "compiled", "Whether the training step is compiled: 1 or 0.", roles=("trainer",))
    return_mean = _Declared(
        Gauge, "return_mean", "Mean undiscounted return of the last finished episodes.", roles=("trainer",)
    )
    version_attempt = _Declared(
        Gauge,
        "version_attempt",
        "Attempt of the newest version made or acted with.",
        roles=("actor", "trainer", "policy", "evaluator"),
    )
    version_step = _Declared(
        Gauge,
        "version_step",
        "Step of the newest version made or acted with.",
        roles=("actor", "trainer", "policy", "evaluator"),
    )
    durable_version_step = _Declared(
        Gauge, "durable_version_step", "Step of the newest version that a power loss cannot take.", roles=("trainer",)
    )
    durable_version_timestamp_seconds = _Declared(
        Gauge,
        "durable_version_timestamp_seconds",
        "When the newest durable version was stored, in seconds since 1970.",
        unit="seconds",
        roles=("trainer",),
    )
    checkpoint_period_seconds = _Declared(
        Gauge,
        "checkpoint_period_seconds",
        "How often a version should become durable: parameters.everySeconds.",
        unit="seconds",
        roles=("trainer",),
    )
    checkpoints_failed = _Declared(
        Counter, "checkpoints_failed_total", "Versions that the disk did not take.", roles=("trainer",)
    )
    evaluations = _Declared(
        Counter,
        "evaluations_total",
        "Versions played, by what came of it (stored, unfinished, pruned, corrupt, failed).",
        labels=("outcome",),
        roles=("evaluator",),
    )
    evaluation_seconds = _Declared(
        Histogram,
        "evaluation_seconds",
        "Duration of the evaluation of one version.",
        unit="seconds",
        buckets=_SECONDS,
        roles=("evaluator",),
    )
    evaluation_return_mean = _Declared(
        Gauge, "evaluation_return_mean", "Mean undiscounted return of the last evaluation.", roles=("evaluator",)
    )
    inference_requests = _Declared(
        Counter, "inference_requests_total", "Requests of actors that were answered.", roles=("policy",)
    )
    inference_batch_environments = _Declared(
        Histogram,
        "inference_batch_environments",
        "Environments that were evaluated together.",
        unit="environments",
        buckets=_SIZES,
        roles=("policy",),
    )
    inference_seconds = _Declared(
        Histogram,
        "inference_seconds",
        "Time of one batch, by stage: queueing (mean of its requests), parameters, compute, response.",
        unit="seconds",
        labels=("stage",),
        buckets=_DELAYS,
        roles=("policy",),
    )
    inference_refused = _Declared(
        Counter,
        "inference_refused_total",
        "Clients of a policy worker that were sent away, by what was wrong.",
        labels=("kind",),
        roles=("policy",),
    )
    workers = _Declared(Gauge, "workers", "Workers that hold a lease.", labels=("worker_role",), roles=("coordinator",))
    workers_wanted = _Declared(
        Gauge,
        "workers_wanted",
        "Workers that there should be.",
        labels=("worker_role",),
        roles=("coordinator",),
    )
    heartbeat_age_seconds = _Declared(
        Gauge,
        "heartbeat_age_seconds",
        "Age of the oldest last sign of life among the workers of a role.",
        unit="seconds",
        labels=("worker_role",),
        roles=("coordinator",),
    )
    joins = _Declared(
        Counter,
        "joins_total",
        "Leases given: first starts and restarts.",
        labels=("worker_role",),
        roles=("coordinator",),
    )
    joins_refused = _Declared(
        Counter,
        "joins_refused_total",
        "Workers refused at the Join stream.",
        labels=("worker_role",),
        roles=("coordinator",),
    )
    parameter_calls_refused = _Declared(
        Counter,
        "parameter_calls_refused_total",
        "Calls of the parameter service that ended with an error of the store or of the caller, by its kind.",
        labels=("kind",),
        roles=("coordinator",),
    )

    strangers_refused = _Declared(
        Counter,
        "strangers_refused_total",
        "Who was refused at the door, by why: calls without the token (call), and over HTTP requests without it "
        "(token), that are none (malformed), that took too long (slow), or the oldest of too many (crowded).",
        labels=("kind",),
        roles=("coordinator", "trainer", "buffer", "policy", "actor", "evaluator"),
    )

    tracking_failures = _Declared(
        Counter,
        "tracking_failures_total",
        "Failures to show the learning curve elsewhere, by where (wandb).",
        labels=("tracker",),
        roles=("coordinator",),
    )

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        """Where the instruments are; the process's own figures (CPU, memory, descriptors) are on it as well."""
        self._lock = threading.Lock()
        self._instruments: dict[str, Any] = {}
        ProcessCollector(registry=registry)

    @classmethod
    def declared(cls) -> tuple[Declaration, ...]:
        """The whole table, in its order; ``ledger_transitions`` is there too."""
        attributes = vars(cls).values()
        return (*(each.declaration for each in attributes if isinstance(each, _Declared)), LEDGER_TRANSITIONS)

    def instrument(self, declaration: Declaration, make: type[Instrument]) -> Instrument:
        """The instrument of that declaration, made at the first call."""
        # Reading first without the lock: the hot path pays a dictionary lookup.
        found: Instrument | None = self._instruments.get(declaration.name)
        if found is not None:
            return found
        with self._lock:
            if declaration.name not in self._instruments:
                options: dict[str, Any] = {"buckets": declaration.buckets} if declaration.buckets else {}
                self._instruments[declaration.name] = make(
                    declaration.name, declaration.help, declaration.labels, registry=self.registry, **options
                )
            made: Instrument = self._instruments[declaration.name]
            return made


LEDGER_TRANSITIONS = Declaration(
    name=f"{NAMESPACE}_ledger_transitions",
    kind="gauge",
    help="Transitions on this process's ledger page, by term; passed_on and outlived are beside the sum.",
    unit="transitions",
    labels=("term",),
    roles=("actor", "buffer", "trainer"),
)


class LedgerCollector:
    """Shows a ledger page. The page is read when it is asked for, so nothing has to be kept in step with it."""

    def __init__(self, record: Callable[[], PageRecord], registry: CollectorRegistry) -> None:
        self._record = record
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """The page's terms as one family."""
        family = GaugeMetricFamily(
            LEDGER_TRANSITIONS.name, LEDGER_TRANSITIONS.help, labels=list(LEDGER_TRANSITIONS.labels)
        )
        for term, count in self._record().counters.items():
            family.add_metric([term], count)
        yield family
