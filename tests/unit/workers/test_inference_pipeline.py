"""The threads of a policy worker that answer requests. Only the policy is a fake."""

from __future__ import annotations

import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from rlsrl.api.resolved import PolicyWorkerConfig
from rlsrl.data.inference import RolloutRequest, RolloutResult
from rlsrl.data.version import INITIAL, Version
from rlsrl.parameters.broadcast import BroadcastPublisher, BroadcastReader
from rlsrl.parameters.protocols import Parameters
from rlsrl.policies.acting import Policy
from rlsrl.policies.exported import ExportedActor
from rlsrl.runtime.mapping_thread import StageFailed
from rlsrl.runtime.metrics import Metrics
from rlsrl.runtime.pipe import PipeClosed
from rlsrl.streams.inference import InferenceFailed
from rlsrl.testing.contexts import TOKEN, RecordingSession, make_context
from rlsrl.testing.inference_bench import (
    InferenceBench,
    UnixInferenceTransport,
    answer_of,
    request,
    result,
    until,
    value_of,
)
from rlsrl.workers.build.policy import PolicyParts
from rlsrl.workers.inference import BatchPredictor, InferencePipeline, OnArrivalInference
from rlsrl.workers.latest_parameters import LatestParameters
from rlsrl.workers.policy import RESUME, PolicyWorker

DEADLINE = 30.0
V1, V2, V3 = Version(1, 1), Version(1, 2), Version(1, 3)


def parameters(version: Version) -> Parameters:
    return Parameters(version=version, vector=np.zeros(1, np.float32), layout="fake")


class FakePolicy(Policy):
    """Answers with the request's value and the loaded version. The test makes it wait or fail."""

    def __init__(self) -> None:
        self.loaded: list[Version] = []
        self.batches: list[list[int]] = []
        self.failure: Exception | None = None
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.evaluating = threading.Event()

    def load(self, parameters: Parameters) -> None:
        self.loaded.append(parameters.version)

    def predict(self, requests: Sequence[RolloutRequest]) -> list[RolloutResult]:
        self.evaluating.set()
        assert self.may_answer.wait(DEADLINE)
        if self.failure is not None:
            raise self.failure
        self.batches.append([value_of(each) for each in requests])
        return [result(value_of(each), num_lanes=each.num_lanes, version=self.loaded[-1]) for each in requests]

    def export(self) -> ExportedActor | None:
        return None


KINDS = {"two threads": InferencePipeline, "where received": OnArrivalInference}


class Bench:
    def __init__(self, kind: str = "two threads", max_batch_size: int = 64, *, starts: bool = True) -> None:
        self.ends = InferenceBench(UnixInferenceTransport())
        self.policy = FakePolicy()
        self.server = self.ends.server()
        self.client = self.ends.client()
        self.latest = LatestParameters()
        self.metrics = Metrics(CollectorRegistry())
        self.clock_ahead = 0.0
        """Seconds by which the predictor's clock is ahead of the server's."""
        self.predictor = BatchPredictor(
            self.policy, self.latest, metrics=self.metrics, now=lambda: time.monotonic() + self.clock_ahead
        )
        self.waits: list[str] = []
        self.inference = KINDS[kind](
            self.predictor,
            self.server,
            self.latest,
            max_batch_size=max_batch_size,
            waiting=self.waiting,
        )
        if starts:
            self.inference.start()

    def ask(self, *values: int, min_version: Version = INITIAL) -> list[Future[RolloutResult]]:
        return self.client.submit_all([request(value, min_version=min_version) for value in values])

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        self.waits.append(what)
        try:
            yield
        finally:
            self.waits.append("")

    def close(self) -> None:
        self.policy.may_answer.set()
        self.inference.close(DEADLINE)
        self.ends.close()


@pytest.fixture
def make_bench() -> Iterator[Callable[..., Bench]]:
    benches: list[Bench] = []

    def make(**arguments: Any) -> Bench:
        benches.append(Bench(**arguments))
        return benches[-1]

    yield make
    for bench in benches:
        bench.close()


@pytest.fixture(params=KINDS)
def bench(make_bench: Callable[..., Bench], request: pytest.FixtureRequest) -> Bench:
    return make_bench(kind=request.param)


def test_answers_with_the_newest_weights(bench: Bench) -> None:
    bench.inference.put(parameters(V1))
    assert bench.ask(1)[0].result(DEADLINE).version == V1
    bench.inference.put(parameters(V2))
    bench.inference.put(parameters(V3))
    assert bench.ask(2)[0].result(DEADLINE).version == V3
    assert bench.ask(3)[0].result(DEADLINE).version == V3
    assert bench.policy.loaded == [V1, V3], "each version is loaded once, and only the newest"


def test_waiting_for_requests_is_counted_as_waiting(bench: Bench) -> None:
    until(lambda: bench.waits[-1:] == ["requests"])
    bench.policy.may_answer.clear()
    bench.inference.put(parameters(V1))
    (future,) = bench.ask(1)
    assert bench.policy.evaluating.wait(DEADLINE)
    assert bench.waits[-1] == ""
    bench.policy.may_answer.set()
    assert future.result(DEADLINE).version == V1


def test_never_answers_with_weights_older_than_requested(bench: Bench) -> None:
    bench.inference.put(parameters(V1))
    (future,) = bench.ask(1, min_version=V3)
    assert bench.latest.wanted(DEADLINE) == V3
    bench.inference.put(parameters(V2))
    assert bench.latest.wanted(0.0) == V3
    assert bench.policy.batches == []
    bench.inference.put(parameters(V3))
    assert future.result(DEADLINE).version == V3
    assert bench.latest.wanted(0.0) is None


def test_before_the_first_weights_any_version_is_loaded(bench: Bench) -> None:
    (future,) = bench.ask(1)
    assert bench.latest.wanted(DEADLINE) == INITIAL
    bench.inference.put(parameters(V1))
    assert answer_of(future.result(DEADLINE)) == 1


def test_requests_during_an_evaluation_form_the_next_batch_up_to_the_maximum(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(max_batch_size=6)
    bench.inference.put(parameters(V1))
    bench.policy.may_answer.clear()
    futures = bench.ask(0)
    assert bench.policy.evaluating.wait(DEADLINE)
    for value in range(1, 6):
        futures += bench.ask(value)
    until(lambda: bench.server.num_waiting == 5)
    bench.policy.may_answer.set()
    assert [answer_of(future.result(DEADLINE)) for future in futures] == [*range(6)]
    assert bench.policy.batches == [[0], [1, 2, 3], [4, 5]]


@pytest.mark.parametrize("kind", KINDS)
def test_requests_from_before_the_start_are_answered(make_bench: Callable[..., Bench], kind: str) -> None:
    bench = make_bench(kind=kind, starts=False)
    (future,) = bench.ask(1)
    until(lambda: bench.server.num_waiting == 1)
    bench.inference.start()
    assert bench.latest.wanted(DEADLINE) == INITIAL
    bench.inference.put(parameters(V1))
    assert answer_of(future.result(DEADLINE)) == 1


def test_the_wait_for_weights_is_counted(bench: Bench) -> None:
    (future,) = bench.ask(1)
    assert bench.latest.wanted(DEADLINE) == INITIAL
    waited = 0.2
    time.sleep(waited)  # the test needs time to pass
    bench.inference.put(parameters(V1))
    future.result(DEADLINE)
    until(lambda: (found := bench.predictor.take_tally()).batches == 1 and found.seconds["parameters"] >= waited)


def test_the_time_without_requests_is_counted_while_it_lasts(bench: Bench) -> None:
    def looks() -> int:
        bench.inference.check()
        return bench.waits.count("")

    before = looks()
    until(lambda: looks() > before + 1)
    bench.ask(1)
    assert bench.latest.wanted(DEADLINE) == INITIAL
    until(lambda: bench.waits[-1:] == [""])
    bench.inference.check()
    bench.inference.put(parameters(V1))
    until(lambda: bench.waits[-1:] == ["requests"])


@pytest.mark.parametrize("kind", KINDS)
def test_requests_that_wait_for_weights_are_answered_together_when_weights_arrive(
    make_bench: Callable[..., Bench], kind: str
) -> None:
    bench = make_bench(kind=kind, max_batch_size=6)
    bench.inference.put(parameters(V1))
    futures = []
    for value in range(5):
        futures += bench.ask(value, min_version=V2)
    assert answer_of(bench.ask(9)[0].result(DEADLINE)) == 9, "the others have arrived before"
    bench.inference.put(parameters(V2))
    assert [answer_of(future.result(DEADLINE)) for future in futures] == [*range(5)]
    assert bench.policy.batches == [[9], [0, 1, 2], [3, 4]]


def test_requests_that_the_weights_satisfy_do_not_wait_for_newer_weights(bench: Bench) -> None:
    bench.inference.put(parameters(V1))
    (newest,) = bench.ask(0, min_version=V3)
    assert bench.latest.wanted(DEADLINE) == V3
    mixed = bench.client.submit_all(
        [request(value, min_version=version) for value, version in enumerate([V2, V1, V3, V1], start=1)]
    )
    for future in (mixed[1], mixed[3], *bench.ask(5, min_version=V1)):
        assert future.result(DEADLINE).version == V1
    assert bench.latest.wanted(DEADLINE) == V2, "the oldest of the weights that are waited for"
    bench.inference.put(parameters(V2))
    assert mixed[0].result(DEADLINE).version == V2
    until(lambda: bench.latest.wanted(0.0) == V3)
    assert not newest.done()
    assert not mixed[2].done()
    bench.inference.put(parameters(V3))
    assert {newest.result(DEADLINE).version, mixed[2].result(DEADLINE).version} == {V3}
    assert bench.policy.batches[-1] == [0, 3]


@pytest.mark.parametrize("kind", KINDS)
def test_new_requests_do_not_delay_those_that_wait_for_weights(make_bench: Callable[..., Bench], kind: str) -> None:
    bench = make_bench(kind=kind, max_batch_size=2)
    bench.inference.put(parameters(V1))
    (waits,) = bench.ask(0, min_version=V2)
    assert bench.latest.wanted(DEADLINE) == V2
    bench.policy.may_answer.clear()
    (present,) = bench.ask(1)
    assert bench.policy.evaluating.wait(DEADLINE)
    later = bench.ask(2, 3)
    bench.latest.put(parameters(V2))
    bench.policy.may_answer.set()
    for future in (present, waits, *later):
        future.result(DEADLINE)
    assert bench.policy.batches == [[1], [0], [2], [3]]


def test_counts_requests_rows_and_batches(bench: Bench) -> None:
    bench.inference.put(parameters(V1))
    for value in range(3):
        bench.ask(value)[0].result(DEADLINE)
    counted = bench.predictor.take_tally()
    until(lambda: counted.batches == 3 or counted.add(bench.predictor.take_tally()) is not None)
    assert (counted.batches, counted.requests, counted.environments) == (3, 3, 6)
    statistics = counted.statistics()
    assert statistics["batch_environments"] == 2.0
    assert {name for name in statistics if name.endswith("_seconds")} == {
        "queueing_seconds",
        "parameters_seconds",
        "compute_seconds",
        "response_seconds",
    }
    assert all(value >= 0 for value in statistics.values())
    assert bench.predictor.take_tally().statistics() == {"batches": 0, "requests": 0, "environments": 0}
    shown = generate_latest(bench.metrics.registry)
    assert b"rlsrl_inference_requests_total 3.0" in shown
    assert b'rlsrl_inference_seconds_count{stage="compute"} 3.0' in shown
    assert b"rlsrl_inference_batch_environments_sum 6.0" in shown


def test_the_error_of_a_policy_reaches_its_clients_and_ends_the_worker(bench: Bench) -> None:
    bench.inference.put(parameters(V1))
    bench.policy.failure = ArithmeticError("not a number")
    with pytest.raises(InferenceFailed, match="ArithmeticError: not a number"):
        bench.ask(1)[0].result(DEADLINE)

    def failure() -> BaseException | None:
        try:
            bench.inference.check()
        except StageFailed as failed:
            return failed.__cause__
        return None

    until(lambda: isinstance(failure(), ArithmeticError))


def test_closing_sends_evaluated_answers_and_drops_waiting_requests(bench: Bench) -> None:
    bench.inference.put(parameters(V1))
    bench.policy.may_answer.clear()
    (evaluated,) = bench.ask(1)
    assert bench.policy.evaluating.wait(DEADLINE)
    (left,) = bench.ask(2)
    with ThreadPoolExecutor(max_workers=1) as pool:
        closing = pool.submit(bench.inference.close, DEADLINE)
        until(lambda: _is_closed(bench.latest))
        bench.policy.may_answer.set()
        closing.result(DEADLINE)
    assert answer_of(evaluated.result(DEADLINE)) == 1
    until(lambda: bench.server.num_waiting == 1)
    assert not left.done()
    bench.inference.check()


def test_answers_are_counted_even_at_the_end(make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make_bench(kind="where received", starts=False)
    call_on_arrival = bench.server.call_on_arrival
    monkeypatch.setattr(bench.server, "call_on_arrival", lambda take, _=None: call_on_arrival(take))
    bench.inference.start()
    bench.inference.put(parameters(V1))
    (future,) = bench.ask(1)
    assert answer_of(future.result(DEADLINE)) == 1
    assert bench.predictor.take_tally().batches == 0
    for batches in (1, 0):
        bench.inference.close(DEADLINE)
        assert bench.predictor.take_tally().batches == batches


def test_closing_wakes_a_thread_that_waits_for_weights(bench: Bench) -> None:
    bench.ask(1)
    assert bench.latest.wanted(DEADLINE) == INITIAL
    bench.inference.close(DEADLINE)
    bench.inference.check()


class RunningWorker:
    """A policy worker that runs in a thread, with the bench's threads, and the publisher of its weights."""

    def __init__(self, bench: Bench, folder: Path, resources: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
        name = f"rlsrl-test-{uuid.uuid4()}"
        self.publisher = resources.enter_context(closing(BroadcastPublisher(name, TOKEN, {})))
        parts = PolicyParts(
            parameters=resources.enter_context(closing(BroadcastReader(name, TOKEN))),
            latest=bench.latest,
            predictor=bench.predictor,
            inference=bench.inference,
            resources=ExitStack(),
        )
        monkeypatch.setattr("rlsrl.workers.policy.build_policy_worker", lambda *_, **__: parts)
        monkeypatch.setattr(sys, "setswitchinterval", lambda _: None)  # else other tests would have it, too
        self.join_session = RecordingSession()
        self.rests = threading.Event()
        self._worker = PolicyWorker(make_context("policy", folder, join_session=self.join_session))
        running = resources.enter_context(ThreadPoolExecutor(max_workers=1)).submit(self._run)
        resources.callback(running.result, DEADLINE)
        resources.callback(self._worker.exit)

    def _run(self) -> None:
        self._worker.start()
        self._worker.configure(cast("PolicyWorkerConfig", SimpleNamespace(parameter_pull_seconds=0.01)))
        self._worker.run(on_rest=lambda rests: self.rests.set() if rests else self.rests.clear())

    def pause(self) -> None:
        """Pause the worker, and return once it rests."""
        self._worker.pause()
        assert self.rests.wait(DEADLINE)

    def resume(self) -> None:
        self._worker.start()


@pytest.mark.parametrize("kind", KINDS)
def test_a_paused_worker_answers_by_the_weights_that_it_has_and_other_requests_wait_for_its_resume(
    make_bench: Callable[..., Bench], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench(kind=kind, starts=False)
    with ExitStack() as resources:
        running = RunningWorker(bench, tmp_path, resources, monkeypatch)
        running.publisher.publish(parameters(V1))
        assert bench.ask(1)[0].result(DEADLINE).version == V1

        running.pause()
        running.publisher.publish(parameters(V2))
        (waits,) = bench.ask(3, min_version=V2)
        assert bench.ask(2, min_version=V1)[0].result(DEADLINE).version == V1
        until(lambda: waits.done() or RESUME in running.join_session.turns)
        assert (waits.done(), running.join_session.reported("version"), bench.policy.loaded) == (False, [V1], [V1])

        running.resume()
        assert waits.result(DEADLINE).version == V2
        assert running.join_session.turns[-1] != RESUME


def _is_closed(fresh: LatestParameters) -> bool:
    try:
        fresh.take()
    except PipeClosed:
        return True
    return False
