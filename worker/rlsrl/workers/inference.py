"""The two busy threads of a policy worker: one evaluates batches, one sends the answers.

The first waits for requests, and within a batch for weights as new as its requests ask for; the second waits for the
first. A third thread, the worker's main one, gets the weights.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from rlsrl.data.inference import RolloutResult
from rlsrl.data.version import Version
from rlsrl.policies.base import Policy
from rlsrl.runtime.clock import Clock
from rlsrl.runtime.mapping_thread import MappingThread
from rlsrl.runtime.metrics import Metrics
from rlsrl.runtime.pipe import Pipe, PipeClosed
from rlsrl.streams.inference import InferenceBatch, InferenceServer
from rlsrl.workers.fresh import FreshParameters

WAKE_SECONDS = 0.2
"""How long the evaluating thread waits for requests before it looks whether it should end."""
MAX_ANSWERED = 2
"""Batches that wait to be sent. More would be no faster: whoever evaluates would only be ahead of who sends."""


@dataclass(frozen=True, kw_only=True)
class Answered:
    """A batch with its results, to be sent."""

    batch: InferenceBatch
    results: Sequence[RolloutResult]
    seconds: dict[str, float]
    """How long it waited as requests (``queueing``) and for weights (``parameters``), and took (``compute``)."""
    finished_at: float


@dataclass(kw_only=True)
class InferenceTally:
    """What was done since the last look."""

    batches: int = 0
    requests: int = 0
    environments: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    """Sums over batches."""

    def add(self, other: InferenceTally) -> None:
        """Count what another tally counted, too."""
        self.batches += other.batches
        self.requests += other.requests
        self.environments += other.environments
        for stage, spent in other.seconds.items():
            self.seconds[stage] = self.seconds.get(stage, 0.0) + spent

    def statistics(self) -> dict[str, float]:
        """Counts, and means of a batch."""
        means = {f"{stage}_seconds": total / self.batches for stage, total in self.seconds.items()}
        if self.batches:
            means["batch_environments"] = self.environments / self.batches
        return {"batches": self.batches, "requests": self.requests, "environments": self.environments, **means}


class InferencePipeline:
    """Evaluates what a server is asked, from ``start`` to ``close``."""

    def __init__(
        self,
        policy: Policy,
        server: InferenceServer,
        fresh: FreshParameters,
        *,
        max_batch_size: int,
        metrics: Metrics,
        clock: Clock,
        waiting: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        """``max_batch_size``: lanes that are evaluated together at most; ``waiting`` is told what is waited for."""
        self._policy = policy
        self._fresh = fresh
        self._metrics = metrics
        self._now = clock.monotonic
        self._lock = threading.Lock()
        self._tally = InferenceTally()
        self._version: Version | None = None
        self._batches = _Batches(server, max_batch_size, waiting)
        answered: Pipe[Answered] = Pipe(MAX_ANSWERED)
        self._rollout = MappingThread(
            "rollout", self._evaluate, upstream_queue=self._batches, downstream_queue=answered
        )
        self._respond: MappingThread[Answered, None] = MappingThread("respond", self._send, upstream_queue=answered)

    @property
    def version(self) -> Version | None:
        """The weights that were evaluated last."""
        return self._version

    def start(self) -> None:
        """Start both threads."""
        self._rollout.start()
        self._respond.start()

    def check(self) -> None:
        """Return if nothing failed.

        Raises:
            StageFailed: one of the threads did; its error is the cause.
        """
        self._rollout.check()
        self._respond.check()

    def take_tally(self) -> InferenceTally:
        """What was done since the last call."""
        with self._lock:
            tally, self._tally = self._tally, InferenceTally()
            return tally

    def close(self, timeout: float) -> None:
        """Evaluate nothing more, send what was, and end both threads; requests that wait are left to other servers.

        Raises:
            TimeoutError: an evaluation took longer than ``timeout`` seconds.
        """
        self._batches.close()
        self._fresh.close()
        self._rollout.join(timeout)
        self._respond.join(timeout)

    def _evaluate(self, batch: InferenceBatch) -> Answered | None:
        """Answer with the newest weights, which are at least as new as any of the requests asks for."""
        taken = self._now()
        try:
            newer = self._fresh.take(batch.min_version)
        except PipeClosed:
            return None
        try:
            if newer is not None:
                self._policy.load(newer)
                self._version = newer.version
            loaded = self._now()
            results = self._policy.rollout(batch.requests)
        except Exception as error:
            batch.fail(error)
            raise
        finished = self._now()
        seconds = {
            "queueing": batch.queueing_seconds,
            "parameters": loaded - taken,
            "compute": finished - loaded,
        }
        return Answered(batch=batch, results=results, seconds=seconds, finished_at=finished)

    def _send(self, answered: Answered) -> None:
        batch = answered.batch
        batch.respond(answered.results)
        seconds = {**answered.seconds, "response": self._now() - answered.finished_at}
        done = InferenceTally(batches=1, requests=len(batch.requests), environments=batch.num_lanes, seconds=seconds)
        with self._lock:
            self._tally.add(done)
        metrics = self._metrics
        metrics.inference_requests.inc(len(batch.requests))
        metrics.inference_batch_environments.observe(batch.num_lanes)
        for stage, spent in seconds.items():
            metrics.inference_seconds.labels(stage=stage).observe(spent)


class _Batches:
    """A server's batches as a stage's upstream: each is formed when the stage is ready for it."""

    def __init__(
        self, server: InferenceServer, max_size: int, waiting: Callable[[str], AbstractContextManager[None]]
    ) -> None:
        self._server = server
        self._max_size = max_size
        self._waiting = waiting
        self._closed = False

    def get(self) -> InferenceBatch:
        """The next batch."""
        while not self._closed:
            with self._waiting("requests"):
                batch = self._server.next_batch(self._max_size, WAKE_SECONDS)
            if batch is not None:
                return batch
        raise PipeClosed("no more batches are taken")

    def close(self) -> None:
        """Take no more batches; seen within ``WAKE_SECONDS``."""
        self._closed = True
