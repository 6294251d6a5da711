"""How a policy worker answers: in the thread that receives requests, or in two threads of its own.

Of the two threads, one waits for requests and evaluates the policy for those that the newest weights satisfy. The other
sends the results. A policy that takes less time than waking a thread is evaluated where requests are received. In both
cases the worker's main thread gets the weights.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from typing_extensions import override

from rlsrl.data.inference import RolloutResult
from rlsrl.parameters.protocols import Parameters
from rlsrl.policies.acting import Policy
from rlsrl.runtime.mapping_thread import MappingThread, StageFailed
from rlsrl.runtime.metrics import Metrics
from rlsrl.runtime.pipe import Pipe, PipeClosed
from rlsrl.streams.inference import InferenceBatch, InferenceServer
from rlsrl.workers.latest_parameters import LatestParameters
from rlsrl.workers.received_requests import ReceivedRequests

WAKE_SECONDS = 0.2
"""How long the evaluating thread waits for requests between two checks for its end."""
STAGES = ("queueing", "parameters", "compute", "response")
"""The stages of an answer's time."""
MAX_ANSWERED = 2
"""Batches that may wait to be sent. More would not be faster: evaluation would only run ahead of sending."""


@dataclass(frozen=True, kw_only=True)
class Answered:
    """A batch with its results, before it is sent."""

    batch: InferenceBatch
    results: Sequence[RolloutResult]
    seconds: dict[str, float]
    """Seconds that it waited as requests (``queueing``), for weights (``parameters``), and took (``compute``)."""
    finished_at: float


@dataclass(kw_only=True)
class InferenceTally:
    """Counts of answered batches and requests, and their times."""

    batches: int = 0
    requests: int = 0
    environments: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    """Sums over batches, by stage."""

    def add(self, other: InferenceTally) -> None:
        """Add the counts of another tally."""
        self.batches += other.batches
        self.requests += other.requests
        self.environments += other.environments
        for stage, spent in other.seconds.items():
            self.seconds[stage] = self.seconds.get(stage, 0.0) + spent

    def statistics(self) -> dict[str, float]:
        """Return the counts, and means per batch."""
        means = {f"{stage}_seconds": total / self.batches for stage, total in self.seconds.items()}
        if self.batches:
            means["batch_environments"] = self.environments / self.batches
        return {"batches": self.batches, "requests": self.requests, "environments": self.environments, **means}


class BatchPredictor:
    """Evaluates batches with the newest weights, sends the results and counts both."""

    def __init__(self, policy: Policy, latest: LatestParameters, *, metrics: Metrics, now: Callable[[], float]) -> None:
        """``now`` returns monotonic seconds."""
        self._policy = policy
        self._latest = latest
        self._requests = metrics.inference_requests
        self._batch_environments = metrics.inference_batch_environments
        # By stage. Looking up a label takes longer than counting, so it is done once.
        self._seconds = {stage: metrics.inference_seconds.labels(stage=stage) for stage in STAGES}
        self._now = now
        self._lock = threading.Lock()
        self._tally = InferenceTally()

    def take_tally(self) -> InferenceTally:
        """Return the counts since the last call."""
        with self._lock:
            tally, self._tally = self._tally, InferenceTally()
            return tally

    def predict(self, batch: InferenceBatch) -> Answered:
        """Return results by the newest weights, which are as new as every request asks for.

        The time since the requests were taken counts as waiting for weights.

        Raises:
            PipeClosed: the worker ends.
            Exception: the policy raised; the batch's clients have the error.
        """
        newer = self._latest.take()
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
        """Send the results to the clients. Return the seconds since the evaluation, for ``count``."""
        answered.batch.respond(answered.results)
        return self._now() - answered.finished_at

    def count(self, sent: Answered, response: float) -> None:
        """Count a batch whose results were sent within ``response`` seconds."""
        batch, seconds = sent.batch, {**sent.seconds, "response": response}
        done = InferenceTally(batches=1, requests=len(batch.requests), environments=batch.num_lanes, seconds=seconds)
        self._requests.inc(len(batch.requests))
        self._batch_environments.observe(batch.num_lanes)
        for stage, spent in seconds.items():
            self._seconds[stage].observe(spent)
        with self._lock:
            self._tally.add(done)


class Inference(Protocol):
    """Answers a server's requests by a ``BatchPredictor``, from ``start`` to ``close``. The main thread owns it."""

    def start(self) -> None:
        """Answer requests from now on."""

    def put(self, parameters: Parameters) -> None:
        """Evaluate with these weights, the newest, from now on."""

    def check(self) -> None:
        """Raise the error that ended the answering. Call it periodically: nothing else reports it.

        Raises:
            StageFailed: the policy or the sending failed; its error is the cause.
        """

    def close(self, timeout: float) -> None:
        """Stop evaluating, and send the results that exist. Waiting requests go to other servers. Idempotent.

        Raises:
            TimeoutError: an evaluation took longer than ``timeout`` seconds.
        """


class OnArrivalInference(Inference):
    """Answers in the thread that receives requests: for policies that take less time than waking another thread.

    Requests that ask for newer weights wait for these; others are answered meanwhile.
    """

    def __init__(
        self,
        predictor: BatchPredictor,
        server: InferenceServer,
        latest: LatestParameters,
        *,
        max_batch_size: int,
        waiting: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        """``max_batch_size``: lanes that are evaluated together at most. ``waiting`` counts waits by their reason."""
        self._predictor = predictor
        self._server = server
        self._latest = latest
        self._requests = ReceivedRequests(server, latest, max_batch_size=max_batch_size)
        self._waiting = waiting
        self._uncounted: list[tuple[Answered, float]] = []
        """Batches that were sent but not counted, each with the seconds of sending."""
        self._failure: Exception | None = None
        self._working = threading.Lock()
        """Held by a thread while it answers or counts. ``close`` takes it for good."""
        self._is_closed = False
        self._waiting_for_requests = ExitStack()
        """Counts the wait for requests; closing it ends the count."""

    @override
    def start(self) -> None:
        self._server.call_on_arrival(self._answer_requests, self._count_answers)
        self._server.wake()  # answers requests that came before

    @override
    def put(self, parameters: Parameters) -> None:
        self._latest.put(parameters)
        self._server.wake()

    @override
    def check(self) -> None:
        if self._failure is not None:
            raise StageFailed(f"inference failed: {self._failure!r}") from self._failure
        self._server.wake()  # counts the time without requests now, not when the next request comes

    @override
    def close(self, timeout: float) -> None:
        if self._is_closed:
            return
        self._server.call_on_arrival(None)
        self._latest.close()
        if not self._working.acquire(timeout=timeout):
            raise TimeoutError(f"a policy is still being evaluated {timeout} s after the wait began")
        self._is_closed = True
        self._waiting_for_requests.close()
        self._count()

    def _answer_requests(self) -> None:
        """Answer all waiting requests for which the weights are new enough."""
        self._unless_closed(self._answer)

    def _count_answers(self) -> None:
        """Count the answers, once they are on their way: nothing waits for the counting."""
        self._unless_closed(self._count_and_wait)

    def _unless_closed(self, work: Callable[[], None]) -> None:
        """Do the work, unless this object is being closed."""
        if not self._working.acquire(blocking=False):
            return
        try:
            work()
        except PipeClosed:
            pass
        except Exception as error:  # noqa: BLE001 - check() raises it in the main thread
            self._failure = error
            self._server.call_on_arrival(None)
        finally:
            self._working.release()

    def _answer(self) -> None:
        self._waiting_for_requests.close()
        while (batch := self._next()) is not None:
            answered = self._predictor.predict(batch)
            self._uncounted.append((answered, self._predictor.send(answered)))

    def _count_and_wait(self) -> None:
        self._count()
        if not self._requests:  # else the main thread counts the wait for weights
            self._waiting_for_requests.enter_context(self._waiting("requests"))

    def _count(self) -> None:
        uncounted, self._uncounted = self._uncounted, []
        for answered, response in uncounted:
            self._predictor.count(answered, response)

    def _next(self) -> InferenceBatch | None:
        """Return the next batch that can be answered now, or None."""
        while (batch := self._requests.next_batch()) is None and self._requests.receive(timeout=0):
            pass
        return batch


class InferencePipeline(Inference):
    """Answers in two threads of its own: one batch is evaluated while another is received or sent."""

    def __init__(
        self,
        predictor: BatchPredictor,
        server: InferenceServer,
        latest: LatestParameters,
        *,
        max_batch_size: int,
        waiting: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        """The arguments are those of ``OnArrivalInference``."""
        self._predictor = predictor
        self._server = server
        self._latest = latest
        self._batches = _Batches(ReceivedRequests(server, latest, max_batch_size=max_batch_size), waiting)
        answered: Pipe[Answered] = Pipe(MAX_ANSWERED)
        self._rollout = MappingThread(
            "rollout", self._evaluate, upstream_queue=self._batches, downstream_queue=answered
        )
        self._respond: MappingThread[Answered, None] = MappingThread("respond", self._send, upstream_queue=answered)

    @override
    def start(self) -> None:
        self._rollout.start()
        self._respond.start()

    @override
    def put(self, parameters: Parameters) -> None:
        self._latest.put(parameters)
        self._server.wake()

    @override
    def check(self) -> None:
        self._rollout.check()
        self._respond.check()

    @override
    def close(self, timeout: float) -> None:
        self._batches.close()
        self._latest.close()
        self._rollout.join(timeout)
        self._respond.join(timeout)

    def _send(self, answered: Answered) -> None:
        self._predictor.count(answered, self._predictor.send(answered))

    def _evaluate(self, batch: InferenceBatch) -> Answered | None:
        try:
            return self._predictor.predict(batch)
        except PipeClosed:
            return None


class _Batches:
    """Batches that can be answered, as the upstream of a stage: each is formed when the stage is ready for it."""

    def __init__(self, requests: ReceivedRequests, waiting: Callable[[str], AbstractContextManager[None]]) -> None:
        self._requests = requests
        self._waiting = waiting
        self._closed = False

    def get(self) -> InferenceBatch:
        """Wait for the next batch and return it. A request, newer weights (``InferencePipeline.put``) or ``close`` end
        the wait."""
        while not self._closed:
            if (batch := self._requests.next_batch()) is not None:
                return batch
            # While requests wait for weights, the main thread counts that wait.
            with nullcontext() if self._requests else self._waiting("requests"):
                self._requests.receive(WAKE_SECONDS)
        raise PipeClosed("this worker takes no more batches")

    def close(self) -> None:
        """Take no more batches. ``get`` notices within ``WAKE_SECONDS``."""
        self._closed = True
