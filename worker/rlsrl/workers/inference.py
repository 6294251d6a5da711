"""How a policy worker answers: where requests are received, or in two threads of its own.

Of two threads one waits for requests, and within a batch for weights as new as its requests ask for; it evaluates, and
the other sends the answers. Where the policy takes less time than waking a thread does, it is evaluated by whoever
receives. In either case another thread, the worker's main one, gets the weights.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Protocol

from rlsrl.data.inference import RolloutResult
from rlsrl.parameters.protocols import Parameters
from rlsrl.policies.acting import Policy
from rlsrl.runtime.mapping_thread import MappingThread, StageFailed
from rlsrl.runtime.metrics import Metrics
from rlsrl.runtime.pipe import Pipe, PipeClosed
from rlsrl.streams.inference import InferenceBatch, InferenceServer
from rlsrl.workers.latest_parameters import LatestParameters

WAKE_SECONDS = 0.2
"""How long the evaluating thread waits for requests before it looks whether it should end."""
STAGES = ("queueing", "parameters", "compute", "response")
"""What an answer's time is made of."""
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


class BatchPredictor:
    """Evaluates batches with the newest weights, sends the answers and counts both."""

    def __init__(self, policy: Policy, fresh: LatestParameters, *, metrics: Metrics, now: Callable[[], float]) -> None:
        """``now`` gives monotonic seconds."""
        self._policy = policy
        self._fresh = fresh
        self._requests = metrics.inference_requests
        self._batch_environments = metrics.inference_batch_environments
        # By stage, looked up once: labels cost more than what they count.
        self._seconds = {stage: metrics.inference_seconds.labels(stage=stage) for stage in STAGES}
        self._now = now
        self._lock = threading.Lock()
        self._tally = InferenceTally()

    def take_tally(self) -> InferenceTally:
        """What was done since the last call."""
        with self._lock:
            tally, self._tally = self._tally, InferenceTally()
            return tally

    def predict(self, batch: InferenceBatch) -> Answered:
        """Results by the newest weights; waits for some that are as new as any of the requests asks for.

        From when the batch was taken it counts as waiting for weights.

        Raises:
            PipeClosed: none will come.
            Exception: what the policy raised, once the clients were told.
        """
        newer = self._fresh.take(batch.min_version)
        try:
            if newer is not None:
                self._policy.load(newer)
            loaded = self._now()
            results = self._policy.predict(batch.requests)
        except Exception as error:
            batch.fail(error)
            raise
        finished = self._now()
        seconds = {
            "queueing": batch.queueing_seconds,
            "parameters": loaded - batch.taken_at,
            "compute": finished - loaded,
        }
        return Answered(batch=batch, results=results, seconds=seconds, finished_at=finished)

    def send(self, answered: Answered) -> float:
        """Answer the clients; returns the seconds since it was evaluated, for ``count``."""
        answered.batch.respond(answered.results)
        return self._now() - answered.finished_at

    def count(self, sent: Answered, response: float) -> None:
        """Count what was sent, in so many seconds."""
        batch, seconds = sent.batch, {**sent.seconds, "response": response}
        done = InferenceTally(batches=1, requests=len(batch.requests), environments=batch.num_lanes, seconds=seconds)
        self._requests.inc(len(batch.requests))
        self._batch_environments.observe(batch.num_lanes)
        for stage, spent in seconds.items():
            self._seconds[stage].observe(spent)
        with self._lock:
            self._tally.add(done)


class Inference(Protocol):
    """Has an predictor answer what a server is asked, from ``start`` to ``close``. The worker's main thread has it."""

    def start(self) -> None:
        """Begin."""

    def put(self, parameters: Parameters) -> None:
        """These are the newest weights."""

    def check(self) -> None:
        """Return if nothing failed; to be called every now and then.

        Raises:
            StageFailed: the policy did, or sending; its error is the cause.
        """

    def close(self, timeout: float) -> None:
        """Evaluate nothing more and send what was; requests that wait are left to other servers.

        Raises:
            TimeoutError: an evaluation took longer than ``timeout`` seconds.
        """


class PromptInference:
    """In the thread that receives the requests: for policies that take less time than to wake another thread.

    A batch that asks for weights which are not there yet is put aside, and those behind it wait: they would, too, where
    a thread waited for those weights.
    """

    def __init__(
        self,
        predictor: BatchPredictor,
        server: InferenceServer,
        fresh: LatestParameters,
        *,
        max_batch_size: int,
        waiting: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        """``max_batch_size``: lanes that are evaluated together at most; ``waiting`` is told what is waited for."""
        self._evaluator = predictor
        self._server = server
        self._fresh = fresh
        self._max_batch_size = max_batch_size
        self._waiting = waiting
        self._aside: InferenceBatch | None = None
        """A batch that weights are missing for."""
        self._uncounted: list[tuple[Answered, float]] = []
        """What was sent, and in how many seconds."""
        self._failure: Exception | None = None
        self._at_work = threading.Lock()
        """Held by who answers or counts, and for good by who closes."""
        self._is_closed = False
        self._idle = ExitStack()
        """Closed, it counts no longer as waiting for requests."""

    def start(self) -> None:
        """See ``Inference``."""
        self._server.call_on_arrival(self._take, self._settle)
        self._server.wake()  # what came before is answered, too

    def put(self, parameters: Parameters) -> None:
        """See ``Inference``."""
        self._fresh.put(parameters)
        self._server.wake()

    def check(self) -> None:
        """See ``Inference``."""
        if self._failure is not None:
            raise StageFailed(f"inference failed: {self._failure!r}") from self._failure
        self._server.wake()  # the time without requests is counted now, not when one comes

    def close(self, timeout: float) -> None:
        """See ``Inference``."""
        if self._is_closed:
            return
        self._server.call_on_arrival(None)
        self._fresh.close()
        if not self._at_work.acquire(timeout=timeout):
            raise TimeoutError(f"a policy is still being evaluated {timeout} s after the wait began")
        self._is_closed = True
        self._idle.close()
        self._count()

    def _take(self) -> None:
        """Answer all that waits and can be answered."""
        self._unless_closed(self._answer)

    def _settle(self) -> None:
        """Count what was answered: it is on its way, and nobody waits for this."""
        self._unless_closed(self._count_and_wait)

    def _unless_closed(self, work: Callable[[], None]) -> None:
        """Do that, unless it is being closed."""
        if not self._at_work.acquire(blocking=False):
            return
        try:
            work()
        except PipeClosed:
            pass
        except Exception as error:  # noqa: BLE001 - raised by check(), in the thread that can act on it
            self._failure = error
            self._server.call_on_arrival(None)
        finally:
            self._at_work.release()

    def _answer(self) -> None:
        self._idle.close()
        while (batch := self._next()) is not None:
            answered = self._evaluator.predict(batch)
            self._uncounted.append((answered, self._evaluator.send(answered)))

    def _count_and_wait(self) -> None:
        self._count()
        if self._aside is None:  # else the main thread counts what is waited for
            self._idle.enter_context(self._waiting("requests"))

    def _count(self) -> None:
        uncounted, self._uncounted = self._uncounted, []
        for answered, response in uncounted:
            self._evaluator.count(answered, response)

    def _next(self) -> InferenceBatch | None:
        """What can be answered now."""
        batch, self._aside = self._aside or self._server.next_batch(self._max_batch_size, timeout=0), None
        if batch is None or self._fresh.has(batch.min_version):
            return batch
        self._aside = batch
        return None


class InferencePipeline:
    """In two threads of its own, so that one batch is evaluated while another is received or sent."""

    def __init__(
        self,
        predictor: BatchPredictor,
        server: InferenceServer,
        fresh: LatestParameters,
        *,
        max_batch_size: int,
        waiting: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        """See ``PromptInference``."""
        self._evaluator = predictor
        self._fresh = fresh
        self._batches = _Batches(server, max_batch_size, waiting)
        answered: Pipe[Answered] = Pipe(MAX_ANSWERED)
        self._rollout = MappingThread(
            "rollout", self._evaluate, upstream_queue=self._batches, downstream_queue=answered
        )
        self._respond: MappingThread[Answered, None] = MappingThread("respond", self._send, upstream_queue=answered)

    def start(self) -> None:
        """See ``Inference``."""
        self._rollout.start()
        self._respond.start()

    def put(self, parameters: Parameters) -> None:
        """See ``Inference``."""
        self._fresh.put(parameters)

    def check(self) -> None:
        """See ``Inference``."""
        self._rollout.check()
        self._respond.check()

    def close(self, timeout: float) -> None:
        """See ``Inference``."""
        self._batches.close()
        self._fresh.close()
        self._rollout.join(timeout)
        self._respond.join(timeout)

    def _send(self, answered: Answered) -> None:
        self._evaluator.count(answered, self._evaluator.send(answered))

    def _evaluate(self, batch: InferenceBatch) -> Answered | None:
        try:
            return self._evaluator.predict(batch)
        except PipeClosed:
            return None


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
