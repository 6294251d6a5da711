"""An actor with policy workers. Its streams stay within the process, and the test answers its requests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from prometheus_client import generate_latest

from rlsrl.api.resolved import ActorConfig
from rlsrl.data.inference import InferenceLayout, RolloutResult
from rlsrl.data.slots import ProducerId, Slot, rollout_layout
from rlsrl.data.version import Version
from rlsrl.envs.factory import EnvironmentSource, make_environment
from rlsrl.envs.faults import EnvironmentFaults
from rlsrl.envs.vector import LoopVectorEnv
from rlsrl.policies.remote import MAX_FAILURES, RemoteActor, RemotePolicy
from rlsrl.runtime.ledger import ActorLedger, TrainerLedger
from rlsrl.runtime.worker import PollResult
from rlsrl.streams.consumer_core import ConsumerOptions
from rlsrl.streams.inference import InferenceBatch, InferenceFailed
from rlsrl.streams.producer_core import ProducerOptions
from rlsrl.streams.protocols import StreamClosed
from rlsrl.testing.contexts import TOKEN, RecordingSession, make_context
from rlsrl.testing.inline_inference import InlineInferenceChannel, InlineInferenceClient, InlineInferenceServer
from rlsrl.testing.inline_samples import InlineChannel, InlineConsumer, InlineProducer
from rlsrl.testing.waiting import until
from rlsrl.workers.actor import ActorWorker
from rlsrl.workers.build.actor import ActorParts
from rlsrl.workers.env_groups import LockstepEnvGroup

STEPS, LANES = 3, 2
V1, V2 = Version(1, 1), Version(1, 2)
CARTPOLE = EnvironmentSource(id="CartPole-v1", factory=None, kwargs={})


class Bench:
    """An actor with two env groups. The test acts as its trainer and its policy worker."""

    def __init__(self, folder: Path, resources: ExitStack) -> None:
        self.join_session = RecordingSession()
        self.context = make_context("actor", folder, join_session=self.join_session)
        all_envs = [self._envs(seed, resources) for seed in (0, 1)]
        env_spec = all_envs[0].spec
        layout = rollout_layout(env_spec, num_steps=STEPS, num_lanes=LANES)
        samples, inference = InlineChannel("samples"), InlineInferenceChannel("inference")
        trainer = TrainerLedger(resources.enter_context(make_context("trainer", folder).open_ledger_page()))
        trainer.resume(None)
        self.consumer = InlineConsumer(
            samples,
            ConsumerOptions(token=TOKEN, layout_digest=layout.step_digest, ledger=trainer, slots_per_producer=4),
        )
        resources.callback(self.consumer.close)
        answers = InferenceLayout.of(env_spec)
        self.server = InlineInferenceServer(inference, layout=answers, on_refused=print)
        resources.callback(self.server.close)
        self.client = InlineInferenceClient(inference, layout=answers)
        policy = RemotePolicy(
            self.client,
            waiting=self.context.waiting,
            report_version=self.context.report_version,
            log=self.context.log,
        )
        groups = tuple(self._group(number, envs, policy) for number, envs in enumerate(all_envs))
        ledger = ActorLedger(self.context.open_ledger_page())
        ledger.begin(0)
        producer = InlineProducer(
            samples, ProducerOptions(token=TOKEN, layout=layout, producer_id=ProducerId(0, 0), ledger=ledger)
        )
        closing = resources.enter_context(ExitStack())
        closing.callback(producer.close)
        closing.callback(self.client.close)
        self.parts = ActorParts(
            groups=groups,
            producer=producer,
            policy=policy,
            ledger=ledger,
            faults=EnvironmentFaults(),
            resources=closing,
        )
        self.worker = ActorWorker(self.context, build=lambda config, context, *, still_wanted: self.parts)
        self.worker.configure(cast("ActorConfig", None))
        self.worker.start()

    def _envs(self, seed: int, resources: ExitStack) -> LoopVectorEnv:
        envs = LoopVectorEnv(lambda _: make_environment(CARTPOLE), seeds=[10 * seed, 10 * seed + 1])
        resources.callback(envs.close)
        return envs

    def _group(self, number: int, envs: LoopVectorEnv, policy: RemotePolicy) -> LockstepEnvGroup:
        rng = np.random.default_rng(number)
        actor = RemoteActor(policy, envs.spec, group=number, num_steps=STEPS, num_lanes=LANES, rng=rng)
        return LockstepEnvGroup(envs, actor, num_steps=STEPS)

    def poll(self) -> PollResult:
        """Poll the worker once, and let its consumer do its part."""
        self.consumer.receive(0, 0.0)
        result = self.worker._poll()
        self.consumer.receive(0, 0.0)
        return result

    def rest(self) -> bool:
        """As ``poll``, for a paused worker. Return whether it has come to rest."""
        self.consumer.receive(0, 0.0)
        rests = self.worker._rest()
        self.consumer.receive(0, 0.0)
        return rests

    def asked_at_rest(self) -> InferenceBatch:
        """Return the paused worker's present requests."""
        assert not self.rest()
        batch = self.server.next_batch(1000, 0.0)
        assert batch is not None
        return batch

    def asked(self) -> InferenceBatch:
        """Return the worker's present requests."""
        self.poll()  # finds no answer, waits, and sends the requests
        batch = self.server.next_batch(1000, 0.0)
        assert batch is not None
        return batch

    def posted(self) -> list[Slot]:
        return list(self.consumer.receive(10, 0.0))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with ExitStack() as resources:
        yield Bench(tmp_path, resources)


def answer(batch: InferenceBatch, version: Version = V1) -> None:
    """Answer with logits that always choose action 1."""
    logits = np.tile(np.array([-100.0, 100.0], np.float32), (LANES, 1))
    batch.respond([RolloutResult(distribution=logits, version=version) for _ in batch.requests])


def start(bench: Bench, num_slots: int, min_version: Version = V1) -> None:
    """Grant credits, and poll until the worker has sent requests."""
    bench.consumer.grant(num_slots * LANES, min_version)
    while not bench.server.num_waiting:
        bench.poll()


def test_all_groups_with_a_credit_send_requests_before_the_first_answer(bench: Bench) -> None:
    start(bench, 2)
    batch = bench.asked()
    assert len(batch.requests) == 2
    assert [request.num_lanes for request in batch.requests] == [LANES, LANES]
    assert batch.min_version == V1
    frames = [request.observation["observation"] for request in batch.requests]
    assert not np.array_equal(frames[0], frames[1]), "each group has environments of its own"


def test_a_group_steps_while_the_other_waits(bench: Bench) -> None:
    start(bench, 2)
    slow = bench.server.next_batch(1, 0.0)
    assert slow is not None
    for _ in range(STEPS):
        answer(bench.asked())
        bench.poll()
    (slot,) = bench.posted()
    assert (slot.sequence, slot.num_transitions) == (0, STEPS * LANES)
    assert (slot.arrays["action"] == 1).all()
    assert (slot.arrays["version_step"] == 1).all()
    np.testing.assert_allclose(slot.arrays["behavior_log_prob"], 0.0, atol=1e-6)
    for step in range(STEPS):
        answer(bench.asked() if step else slow)
        bench.poll()
    assert [slot.sequence for slot in bench.posted()] == [1]
    assert b"rlsrl_rollouts_total 2.0" in generate_latest(bench.context.metrics.registry)


def test_groups_that_were_answered_together_send_separate_requests_afterwards(bench: Bench) -> None:
    start(bench, 2)
    answer(bench.asked())
    bench.poll()  # the first group steps and submits a request
    assert bench.server.num_waiting == 0
    bench.poll()  # the second does the same, while the first group's request is under way
    batch = bench.server.next_batch(1000, 0.0)
    assert batch is not None
    questions = (*batch.requests, *bench.asked().requests)
    assert len(questions) == 2
    frames = [request.observation["observation"] for request in questions]
    for group, frame in zip(bench.parts.groups, frames, strict=True):
        np.testing.assert_array_equal(cast("Any", group)._slot.arrays["observation"][1], frame)


def test_a_paused_worker_fills_its_slots_and_hands_its_credits_back(bench: Bench) -> None:
    start(bench, 3)
    bench.worker.pause()
    for _ in range(STEPS):
        answer(bench.asked_at_rest())
        for _ in bench.parts.groups:
            assert not bench.rest()
    slots = bench.posted()
    assert [slot.sequence for slot in slots] == [0, 1]
    for slot in slots:
        bench.consumer.release(slot)
    until(bench.rest, "the worker rests")
    assert bench.consumer.producers == ()
    assert not bench.consumer.outstanding
    assert bench.rest()
    assert bench.consumer.producers == (), "it does not connect while it rests"

    bench.worker.start()
    while not bench.server.num_waiting:
        bench.poll()
    assert len(bench.consumer.outstanding) == 1, "the third credit"

    bench.worker.pause()
    for _ in range(STEPS):
        answer(bench.asked_at_rest())
        assert not bench.rest()
    for slot in bench.posted():
        bench.consumer.release(slot)
    until(bench.rest, "the worker rests again")
    assert bench.consumer.producers == ()


def test_few_credits_are_shared_in_turn(bench: Bench) -> None:
    turns = []
    for _ in range(4):
        start(bench, 1)
        turns.append([group.is_idle for group in bench.parts.groups].index(False))
        for _ in range(STEPS):
            answer(bench.asked())
            bench.poll()
        for slot in bench.posted():
            bench.consumer.release(slot)
    assert turns == [0, 1, 0, 1]


def test_each_step_has_the_version_that_answered_it(bench: Bench) -> None:
    start(bench, 1)
    for version in (V1, V2, V2):
        answer(bench.asked(), version)
        bench.poll()
    (slot,) = bench.posted()
    assert slot.arrays["version_step"].tolist() == [1, 2, 2]
    assert bench.join_session.reported("version") == [V1, V2]


def test_an_answer_by_weights_older_than_the_credit_allows_is_discarded(bench: Bench) -> None:
    start(bench, 1, min_version=V2)
    answer(bench.asked(), V1)
    with pytest.raises(RuntimeError, match=r"answered with version 1\.1; the slot allows 1\.2"):
        bench.poll()


def test_a_failed_request_is_retried_a_limited_number_of_times(bench: Bench) -> None:
    start(bench, 1)
    bench.asked().fail(ArithmeticError("once"))
    bench.poll()
    answer(bench.asked())
    bench.poll()
    for _ in range(MAX_FAILURES - 1):
        bench.asked().fail(ArithmeticError("again"))
        bench.poll()
    bench.asked().fail(ArithmeticError("too often"))
    with pytest.raises(InferenceFailed, match="too often"):
        bench.poll()


def test_touches_its_liveness_and_reports_its_wait(bench: Bench) -> None:
    start(bench, 1)
    touched = bench.parts.producer.touch
    calls: list[Any] = []
    bench.parts.producer.touch = lambda: calls.append(touched())  # type: ignore[method-assign]
    bench.poll()
    assert bench.join_session.turns[-2:] == ["inference", "working"]
    assert len(calls) == 1


def test_ends_between_two_steps_and_gives_the_slots_back(bench: Bench) -> None:
    start(bench, 2)
    bench.worker.exit()
    bench.worker.run()
    with pytest.raises(StreamClosed):
        bench.client.wait(0.0)
    assert bench.posted() == []
    assert bench.consumer.outstanding == ()
