"""All metrics of all roles, declared in one table, and the instruments of one process.

Dashboards and documentation are generated from the table: ``Metrics.declared()``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar, overload

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector

from rlsrl.api.role_names import ACTOR, BUFFER, COORDINATOR, EVALUATOR, POLICY, TRAINER
from rlsrl.runtime.ledger import PageRecord

NAMESPACE = "rlsrl"

Instrument = TypeVar("Instrument", Counter, Gauge, Histogram)

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_DELAYS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_SIZES = tuple(float(1 << power) for power in range(14))
_VIDEOS = (
    "Videos of evaluated versions (evaluators.video), by outcome. Of evaluators: sent; no_pictures: the "
    "environment does not render, or a package is missing, so none is recorded any more; failed: the environment "
    "or ffmpeg failed; too_large: the file was too large to send; unsent: several waited for the coordinator; "
    "died: the process ended during two recordings in a row, so none is recorded until it starts again. Of the "
    "coordinator: taken; not_written: the disk failed; not_shown: a tracker did not take it; refused: videos came "
    "too fast."
)
_STEPS = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0, 64.0)


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """One metric: its name, its meaning, and the roles that set it."""

    name: str
    """With the prefix ``rlsrl_``, the unit and ``_total``, without other suffixes such as ``_bucket``."""
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    unit: str
    """Unit of one count or observation; empty for plain counts."""
    labels: tuple[str, ...]
    roles: tuple[str, ...]
    """Roles whose processes set it."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets."""


class _Declared(Generic[Instrument]):
    """An attribute of ``Metrics``: the declaration on the class, the instrument on an object.

    An instrument is created at its first use, so a process exposes only the metrics that it sets.
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


class ReplayMetrics:
    """The part of ``Metrics`` about replay stores, and the pace of training from them."""

    replay_transitions = _Declared(
        Gauge,
        "replay_transitions",
        "Transitions in the replay store of this process.",
        unit="transitions",
        roles=(TRAINER, BUFFER),
    )
    replay_capacity = _Declared(
        Gauge,
        "replay_capacity_transitions",
        "Transitions for which the replay store of this process has room.",
        unit="transitions",
        roles=(TRAINER, BUFFER),
    )
    replay_bytes = _Declared(
        Gauge,
        "replay_bytes",
        "Size of the file of this process's replay store, which is allocated whole at the start.",
        unit="bytes",
        roles=(TRAINER, BUFFER),
    )
    replay_age = _Declared(
        Gauge,
        "replay_age_steps",
        "Mean number of env steps that were stored in this process after the transitions of the last draw.",
        unit="steps",
        roles=(TRAINER, BUFFER),
    )
    replay_drawn = _Declared(
        Counter,
        "replay_drawn_total",
        "Transitions drawn from the replay store of this process. Each draw of the same transition counts.",
        roles=(TRAINER, BUFFER),
    )
    replay_evicted = _Declared(
        Counter,
        "replay_evicted_total",
        "Transitions that newer ones replaced in the store of this process, by whether they were ever trained "
        "(trained, untrained).",
        labels=("outcome",),
        roles=(TRAINER, BUFFER),
    )
    replay_shards_away = _Declared(
        Gauge,
        "replay_shards_away",
        "Buffer workers with a part of this rank's replay store that are not connected.",
        roles=(TRAINER,),
    )
    replay_start_missing = _Declared(
        Gauge,
        "replay_start_missing_transitions",
        "Transitions that this rank's store lacks until training begins (replay.start); 0 from then on.",
        unit="transitions",
        roles=(TRAINER,),
    )
    replay_ratio_wanted = _Declared(
        Gauge,
        "replay_ratio_wanted",
        "Minibatches to make for each transition of all actors: pacing.trainStepsPerEnvStep.",
        roles=(TRAINER,),
    )
    train_steps_behind = _Declared(
        Gauge, "train_steps_behind", "Minibatches due for what was gathered, and not trained yet.", roles=(TRAINER,)
    )
    train_steps_behind_limit = _Declared(
        Gauge, "train_steps_behind_limit", "Minibatches behind with which actors must wait.", roles=(TRAINER,)
    )


class Metrics(ReplayMetrics):
    """The instruments of one process, on the registry it was given. Any thread may use them."""

    env_steps = _Declared(Counter, "env_steps_total", "Environment steps that produced a transition.", roles=(ACTOR,))
    rollouts = _Declared(
        Counter, "rollouts_total", "Slots that an actor filled or a buffer worker forwarded.", roles=(ACTOR, BUFFER)
    )
    environment_faults = _Declared(
        Counter,
        "environment_faults_total",
        "Environment faults, by reason. non_finite: a reward or an observation is NaN or infinite. environment_error: "
        "the environment raised an error and was made again. unreachable: its server (environment.http) did not answer "
        "or had lost the episode. vector_reset: an episode truncated because another "
        "environment of its vector had a fault. hang: a call has reached environment.stepSeconds or "
        "environment.resetSeconds, and its worker was ended.",
        labels=("reason",),
        roles=(ACTOR, COORDINATOR),
    )
    waiting_seconds = _Declared(
        Counter,
        "waiting_seconds_total",
        "Time spent waiting, by reason (environment, trainer, credit, parameters, inference, requests, samples, batch, "
        "buffer workers, other ranks, version, compiler, store, resume).",
        unit="seconds",
        labels=("reason",),
        roles=(ACTOR, BUFFER, TRAINER, EVALUATOR, POLICY),
    )
    working_seconds = _Declared(
        Counter,
        "working_seconds_total",
        "Time spent working, by stage (environment, inference, update, copy). Counted when a slot or step is complete.",
        unit="seconds",
        labels=("stage",),
        roles=(ACTOR, TRAINER),
    )
    train_steps = _Declared(Counter, "train_steps_total", "Calls of Learner.step.", roles=(TRAINER,))
    transitions_trained = _Declared(
        Counter,
        "transitions_trained_total",
        "Transitions trained. Each counts once, whatever the number of epochs.",
        roles=(TRAINER,),
    )
    minibatches = _Declared(
        Counter,
        "minibatches_total",
        "Minibatches, by outcome: taken, or skipped because the loss or gradient was not finite.",
        labels=("outcome",),
        roles=(TRAINER,),
    )
    episodes = _Declared(Counter, "episodes_total", "Episodes that ended in counted env steps.", roles=(TRAINER,))
    episode_info = _Declared(
        Counter,
        "episode_info_total",
        "Episodes that ended in counted env steps with a value of this key of info (environment.episodeInfo).",
        labels=("key",),
        roles=(TRAINER,),
    )
    policy_lag = _Declared(
        Histogram,
        "policy_lag_steps",
        "Trainer step minus the step of a batch's oldest action.",
        unit="steps",
        buckets=_STEPS,
        roles=(TRAINER,),
    )
    policy_lag_exceeded = _Declared(
        Counter,
        "policy_lag_exceeded_total",
        "Batches whose oldest action lagged by more than pacing.maxPolicyLag. It must stay 0.",
        roles=(TRAINER,),
    )
    step_seconds = _Declared(
        Histogram, "step_seconds", "Duration of Learner.step.", unit="seconds", buckets=_SECONDS, roles=(TRAINER,)
    )
    compiled = _Declared(Gauge, "compiled", "1 if the training step is compiled, else 0.", roles=(TRAINER,))
    return_mean = _Declared(
        Gauge, "return_mean", "Mean undiscounted return of the last finished episodes.", roles=(TRAINER,)
    )
    episode_length_mean = _Declared(
        Gauge, "episode_length_mean", "Mean number of steps of the last finished episodes.", roles=(TRAINER,)
    )
    episode_info_mean = _Declared(
        Gauge,
        "episode_info_mean",
        "Mean of the last values of this key of info at the ends of episodes (environment.episodeInfo).",
        labels=("key",),
        roles=(TRAINER,),
    )
    version_attempt = _Declared(
        Gauge,
        "version_attempt",
        "Attempt of the newest version that the process made or uses.",
        roles=(ACTOR, TRAINER, POLICY, EVALUATOR),
    )
    version_step = _Declared(
        Gauge,
        "version_step",
        "Step of the newest version that the process made or uses.",
        roles=(ACTOR, TRAINER, POLICY, EVALUATOR),
    )
    durable_version_step = _Declared(
        Gauge, "durable_version_step", "Step of the newest version that survives a power loss.", roles=(TRAINER,)
    )
    durable_version_timestamp_seconds = _Declared(
        Gauge,
        "durable_version_timestamp_seconds",
        "Unix time at which the newest durable version was stored.",
        unit="seconds",
        roles=(TRAINER,),
    )
    checkpoint_period_seconds = _Declared(
        Gauge,
        "checkpoint_period_seconds",
        "The interval at which versions become durable: parameters.everySeconds.",
        unit="seconds",
        roles=(TRAINER,),
    )
    checkpoints_failed = _Declared(
        Counter, "checkpoints_failed_total", "Failed attempts to store a version.", roles=(TRAINER,)
    )
    evaluations = _Declared(
        Counter,
        "evaluations_total",
        "Evaluations of versions, by outcome (stored, played, unfinished, pruned, corrupt, failed).",
        labels=("outcome",),
        roles=(EVALUATOR,),
    )
    evaluation_seconds = _Declared(
        Histogram,
        "evaluation_seconds",
        "Duration of the evaluation of one version.",
        unit="seconds",
        buckets=_SECONDS,
        roles=(EVALUATOR,),
    )
    videos = _Declared(Counter, "videos_total", _VIDEOS, labels=("outcome",), roles=(EVALUATOR, COORDINATOR))
    evaluation_return_mean = _Declared(
        Gauge,
        "evaluation_return_mean",
        "Mean undiscounted return of the last evaluation whose episodes all ended.",
        roles=(EVALUATOR,),
    )
    evaluation_length_mean = _Declared(
        Gauge,
        "evaluation_length_mean",
        "Mean number of steps of the episodes of the last evaluation whose episodes all ended.",
        roles=(EVALUATOR,),
    )
    evaluation_info_mean = _Declared(
        Gauge,
        "evaluation_info_mean",
        "Mean of the values of this key of info in the last evaluation whose episodes all ended.",
        labels=("key",),
        roles=(EVALUATOR,),
    )
    inference_requests = _Declared(Counter, "inference_requests_total", "Answered requests of actors.", roles=(POLICY,))
    inference_batch_environments = _Declared(
        Histogram,
        "inference_batch_environments",
        "Environments in one inference batch.",
        unit="environments",
        buckets=_SIZES,
        roles=(POLICY,),
    )
    inference_seconds = _Declared(
        Histogram,
        "inference_seconds",
        "Duration of one batch, by stage: queueing (mean over its requests), parameters, compute, response.",
        unit="seconds",
        labels=("stage",),
        buckets=_DELAYS,
        roles=(POLICY,),
    )
    inference_refused = _Declared(
        Counter,
        "inference_refused_total",
        "Refused clients of a policy worker, by reason.",
        labels=("kind",),
        roles=(POLICY,),
    )
    workers = _Declared(Gauge, "workers", "Workers that hold a lease.", labels=("worker_role",), roles=(COORDINATOR,))
    workers_wanted = _Declared(
        Gauge,
        "workers_wanted",
        "Workers that the experiment asks for.",
        labels=("worker_role",),
        roles=(COORDINATOR,),
    )
    stalled_seconds = _Declared(
        Gauge,
        "stalled_seconds",
        "Time since the last step of a run that stands still; 0 while it takes steps, is paused or has finished.",
        unit="seconds",
        roles=(COORDINATOR,),
    )
    paused = _Declared(
        Gauge,
        "paused",
        "1 while workers without which no step is taken are paused (spec.paused), else 0.",
        roles=(COORDINATOR,),
    )
    environment_server_waits = _Declared(
        Gauge,
        "environment_server_waits",
        "Environments that wait for their server (environment.http), which is away.",
        roles=(COORDINATOR,),
    )
    heartbeat_age_seconds = _Declared(
        Gauge,
        "heartbeat_age_seconds",
        "Time since the last message of the role's worker that has been silent longest.",
        unit="seconds",
        labels=("worker_role",),
        roles=(COORDINATOR,),
    )
    joins = _Declared(
        Counter,
        "joins_total",
        "Leases granted, at first starts and at restarts.",
        labels=("worker_role",),
        roles=(COORDINATOR,),
    )
    joins_refused = _Declared(
        Counter,
        "joins_refused_total",
        "Workers whose Join the coordinator refused.",
        labels=("worker_role",),
        roles=(COORDINATOR,),
    )
    parameter_calls_refused = _Declared(
        Counter,
        "parameter_calls_refused_total",
        "Calls of the parameter service that failed by an error of the store or of the caller, by kind of error.",
        labels=("kind",),
        roles=(COORDINATOR,),
    )
    strangers_refused = _Declared(
        Counter,
        "strangers_refused_total",
        "Refused calls and requests, by reason. call: a gRPC call without the token. Of HTTP requests: without the "
        "token (token), invalid (malformed), too slow (slow), or closed because there were too many (crowded).",
        labels=("kind",),
        roles=(COORDINATOR, TRAINER, BUFFER, POLICY, ACTOR, EVALUATOR),
    )
    tracking_failures = _Declared(
        Counter,
        "tracking_failures_total",
        "Failures to mirror the learning curve to a tracker, by tracker (wandb).",
        labels=("tracker",),
        roles=(COORDINATOR,),
    )
    worker_metrics_lost = _Declared(
        Counter,
        "worker_metrics_lost_total",
        "Rows of the workers' own metrics (tracking.workerSeconds) that a tracker did not take, by tracker "
        "(tensorboard, wandb).",
        labels=("tracker",),
        roles=(COORDINATOR,),
    )

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        """Holds the instruments and the process's own metrics: CPU, memory, file descriptors."""
        self._lock = threading.Lock()
        self._instruments: dict[str, Any] = {}
        ProcessCollector(registry=registry)

    @classmethod
    def declared(cls) -> tuple[Declaration, ...]:
        """Return all declarations in the order of the table, then replay's; ``LEDGER_TRANSITIONS`` is the last."""
        attributes = (each for owner in cls.__mro__ for each in vars(owner).values())
        return (*(metric.declaration for metric in attributes if isinstance(metric, _Declared)), LEDGER_TRANSITIONS)

    def instrument(self, declaration: Declaration, make: type[Instrument]) -> Instrument:
        """Return the instrument of the declaration. The first call creates it."""
        # Read without the lock first, so that the hot path takes only a dictionary lookup.
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
    help="Transitions on this process's ledger page, by term. passed_on, outlived and outlived.buffer are not part of "
    "the sum.",
    unit="transitions",
    labels=("term",),
    roles=(ACTOR, BUFFER, TRAINER),
)


class LedgerCollector:
    """Exposes a ledger page as metrics. Each scrape reads the page, so no second copy of the counts exists."""

    def __init__(self, record: Callable[[], PageRecord], registry: CollectorRegistry) -> None:
        self._record = record
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """Return the page's terms as one metric family."""
        family = GaugeMetricFamily(
            LEDGER_TRANSITIONS.name, LEDGER_TRANSITIONS.help, labels=list(LEDGER_TRANSITIONS.labels)
        )
        for term, count in self._record().counters.items():
            family.add_metric([term], count)
        yield family
