"""The training thread with its real buffer, limiter, ledger and stream; only the learner is a fake."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typing_extensions import override

from rlsrl.algorithms.learner import StepResult
from rlsrl.algorithms.normalizer import SampleMoments
from rlsrl.buffers.fifo import FifoBuffer
from rlsrl.buffers.limiter import RateLimiter
from rlsrl.data.episodes import EndedEpisodes
from rlsrl.data.slots import ProducerId, Slot, rollout_layout
from rlsrl.data.version import Version
from rlsrl.parameters.protocols import Parameters
from rlsrl.parameters.terminal import UPDATES_SKIPPED
from rlsrl.runtime.frequency import FrequencyControl
from rlsrl.runtime.ledger import ActorLedger, TrainerLedger, balance, read_pages
from rlsrl.streams.consumer_core import ConsumerOptions
from rlsrl.streams.producer_core import ProducerOptions
from rlsrl.streams.protocols import StreamTimeout
from rlsrl.testing.clock import ManualClock
from rlsrl.testing.contexts import TOKEN, RecordingSession, make_context
from rlsrl.testing.inline_samples import InlineChannel, InlineConsumer, InlineProducer
from rlsrl.testing.rollouts import discrete_env_spec
from rlsrl.testing.waiting import until
from rlsrl.workers.compiling import StepCompiler
from rlsrl.workers.experience import OnPolicyExperience, TrainingBatch
from rlsrl.workers.gang import Gang, SoloGang
from rlsrl.workers.progress import Progress, SkipWindow, StopConditions
from rlsrl.workers.status import NO_MORE_SAMPLES
from rlsrl.workers.training import (
    OTHER_RANKS,
    Cadence,
    Checkpoint,
    Learning,
    Outputs,
    StartingPoint,
    TrainingSettings,
    TrainingThread,
)

ENV = discrete_env_spec()
STEPS, LANES = 4, 2
SLOT = STEPS * LANES
"""Number of transitions in a slot; one slot is one batch."""
ABSENT = {"incarnation": 3, "counters": {"trained": 80}, "marks": {}}
"""The ledger of a rank that existed only in an earlier attempt of the gang."""
DEADLINE_SECONDS = 30.0


class FakeLearner:
    """A learner whose only weight is its number of steps. It fails or waits on request."""

    def __init__(self, steps: int = 0) -> None:
        self.steps = steps
        self.failure: Exception | None = None
        self.taken = (True,)
        self.num_untrained = 0
        self.env_steps_without_a_step = 0
        self.may_step = threading.Event()
        self.may_step.set()
        self.stepping = threading.Event()
        self.adopted: list[tuple[int, float, Mapping[str, float]]] = []
        self.prepared: list[str] = []
        """Names of the threads that are prepared for steps."""

    def use_threads(self) -> None:
        self.prepared.append(threading.current_thread().name)

    def learn_statistics(self, moments: SampleMoments | None) -> None:
        assert moments is None

    def count_env_steps(self, env_steps: int) -> None:
        self.env_steps_without_a_step += env_steps

    def step(self, arrays: Mapping[str, np.ndarray], *, env_steps: int) -> StepResult:
        assert self.prepared == [threading.current_thread().name]
        assert arrays["reward"].shape == (STEPS, LANES)
        assert env_steps == np.count_nonzero(arrays["mask"])
        self.stepping.set()
        assert self.may_step.wait(DEADLINE_SECONDS)
        if self.failure is not None:
            raise self.failure
        self.steps += 1
        return StepResult(
            step=self.steps,
            optimizer_steps=self.steps,
            taken=self.taken,
            num_transitions=SLOT,
            num_untrained=self.num_untrained,
            metrics={"loss": 0.5},
        )

    def adopt(self, learning_rate: float, coefficients: Mapping[str, float]) -> None:
        self.adopted.append((self.steps, learning_rate, coefficients))

    def parameters(self, version: Version) -> Parameters:
        return Parameters(version=version, vector=np.array([self.steps], np.float32), layout="fake")

    def state_dict(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        return {"weight": np.array([self.steps])}, {"step": self.steps}


class Bench:
    """A training thread. The test acts as the trainer's main thread and as one actor."""

    def __init__(
        self,
        folder: Path,
        *,
        max_policy_lag: int = 1,
        buffer_lag: int | None = None,
        version: Version = Version(1, 0),
        progress: Progress | None = None,
        taken: Sequence[bool] = (),
        stop: Mapping[str, Any] | None = None,
        push_steps: int | None = None,
        tag_steps: int | None = None,
        gang: Gang | None = None,
    ) -> None:
        layout = rollout_layout(ENV, num_steps=STEPS, num_lanes=LANES, episode_info=("won", "never"))
        self._resources = ExitStack()
        self._folder = folder
        self.clock = ManualClock()
        self.join_session = RecordingSession()
        self.learner = FakeLearner(version.step)
        self.episode_return: float | None = None
        """The return of the episodes that end with each slot; None: no episode ends."""
        self.published: list[Parameters] = []
        self.stored: list[Checkpoint] = []
        self.ended = threading.Event()
        self.is_paused = False
        self.context = make_context("trainer", folder, join_session=self.join_session, clock=self.clock)
        trainer_page = self._resources.enter_context(self.context.open_ledger_page())
        actor_page = self._resources.enter_context(make_context("actor", folder).open_ledger_page())
        self.ledger = TrainerLedger(trainer_page)
        self.ledger.resume(None)
        self.actor_ledger = ActorLedger(actor_page)
        self.actor_ledger.begin(0)
        channel = InlineChannel()
        self.consumer = InlineConsumer(
            channel,
            ConsumerOptions(token=TOKEN, layout_digest=layout.step_digest, ledger=self.ledger, slots_per_producer=8),
        )
        self.producer = InlineProducer(
            channel,
            ProducerOptions(token=TOKEN, layout=layout, producer_id=ProducerId(0, 0), ledger=self.actor_ledger),
        )
        self.experience = OnPolicyExperience(
            buffer=FifoBuffer(layout=layout, batch_lanes=LANES, max_policy_lag=buffer_lag or max_policy_lag),
            limiter=RateLimiter(batch_lanes=LANES, max_policy_lag=max_policy_lag),
            grant=self.consumer.grant,
            ledger=self.ledger,
            batch_lanes=LANES,
            batch_transitions=SLOT,
            max_policy_lag=max_policy_lag,
        )
        never = dict.fromkeys(("return_mean", "env_steps", "train_steps", "wall_seconds"))

        def settings(given: Mapping[str, Any]) -> TrainingSettings:
            stop = {name: value for name, value in given.items() if name != "store_request"}
            return TrainingSettings(
                store_request=given.get("store_request"),
                stop_conditions=StopConditions(episodes=2, **{**never, **stop}),
                cadence=Cadence(
                    report=FrequencyControl(seconds=1.0, clock=self.clock),
                    push=FrequencyControl(steps=push_steps, clock=self.clock),
                    tag=FrequencyControl(steps=tag_steps, clock=self.clock),
                ),
                learning_rate=0.5,
                coefficients={"clip_range": 0.25},
            )

        self.thread = TrainingThread(
            learning=Learning(
                learner=self.learner,  # type: ignore[arg-type]  # as much of one as the thread uses
                compiler=StepCompiler(
                    mode="off",
                    learner=self.learner,  # type: ignore[arg-type]
                    example_batch=dict,
                    request="",
                    context=self.context,
                ),
                settings=settings(stop or {}),
                read_settings=settings,
            ),
            experience=self.experience,
            start=StartingPoint(
                version=version,
                progress=progress or Progress(episodes=2),
                skip_window=SkipWindow(taken),
                absent_ledgers=[ABSENT],
            ),
            outputs=Outputs(
                publish=self.published.append,
                store=self.stored.append,
                metadata={"program": None},
                on_end=self.ended.set,
            ),
            context=self.context,
            gang=gang or SoloGang(),
        )

    def receive(self) -> None:
        """Run one poll of the trainer's main thread."""
        slots = self.consumer.receive(100, timeout=0)
        self.experience.receive(slots, oldest_outstanding=min(self.consumer.outstanding, default=None))
        for slot in slots:
            self.consumer.release(slot)

    def acquire(self) -> Slot:
        """Return a slot once the thread has granted a credit; serve the consumer meanwhile."""
        while True:
            self.consumer.receive(0, timeout=0)
            try:
                return self.producer.acquire(timeout=0.01)
            except StreamTimeout:
                assert not self.ended.is_set(), "the thread ended without another credit"

    def post(self, slot: Slot, version: Version | None = None, *, num_transitions: int = SLOT) -> None:
        """Fill a slot as acted with ``version`` (default: the requested one), post and receive it."""
        acted = slot.min_version if version is None else version
        for array in slot.arrays.values():
            array[...] = 0
        slot.arrays["mask"].flat[:num_transitions] = True
        slot.arrays["version_attempt"][:], slot.arrays["version_step"][:] = acted
        if self.episode_return is not None:
            slot.arrays["episode_length"][-1], slot.arrays["episode_return"][-1] = STEPS, self.episode_return
            slot.arrays["episode_info/won"][-1], slot.arrays["episode_info/never"][-1] = 1.0, math.nan
        slot.num_transitions = num_transitions
        self.producer.post(slot)
        self.receive()

    def train(self, num_steps: int) -> None:
        """Post ``num_steps`` batches, one after another."""
        for _ in range(num_steps):
            self.post(self.acquire())

    def has_credit(self) -> bool:
        """Return whether the actor gets a credit of those granted so far."""
        for _ in range(2):  # the first time the producer may only connect
            with suppress(StreamTimeout):
                self.producer.acquire(timeout=0)
                return True
            self.consumer.receive(0, timeout=0)
        return False

    def needed_no_samples(self) -> list[float]:
        """Return what the thread has reported of the end of gathering, in order."""
        return [stats[NO_MORE_SAMPLES] for stats in self.join_session.reported("stats") if NO_MORE_SAMPLES in stats]

    def counted(self, *names: str) -> list[float | None]:
        """Return the values of these counters."""
        registry = self.context.metrics.registry
        return [registry.get_sample_value(f"rlsrl_{name}_total") for name in names]

    def end(self) -> None:
        """Stop the thread and close everything as the trainer does; the ledger must balance."""
        self.thread.stop()
        self.thread.join(DEADLINE_SECONDS)
        self.receive()
        self.experience.close()
        self.ledger.end()
        self.actor_ledger.end()
        balance(read_pages(self._folder), ended=True).check()

    def close(self) -> None:
        self.learner.may_step.set()
        self.thread.stop()
        self.thread.join(DEADLINE_SECONDS)
        self._resources.close()


@pytest.fixture
def make_bench(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    benches: list[Bench] = []

    def make(**arguments: Any) -> Bench:
        bench = Bench(tmp_path, **arguments)
        benches.append(bench)
        bench.thread.start(is_paused=lambda: bench.is_paused)
        return bench

    yield make
    for bench in benches:
        bench.close()


def steps_of(published: list[Parameters]) -> list[tuple[str, float]]:
    return [(str(each.version), float(each.vector[0])) for each in published]


def test_every_version_is_published_the_first_one_included(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(stop={"train_steps": 3})
    bench.train(3)
    assert bench.ended.wait(DEADLINE_SECONDS)
    bench.thread.check()
    assert (bench.thread.ending.stop_reason, bench.thread.checkpoint().parameters.version) == (
        "trainSteps",
        Version(1, 3),
    )
    assert steps_of(bench.published) == [("1.0", 0), ("1.1", 1), ("1.2", 2), ("1.3", 3)]
    assert bench.ledger.snapshot()["counters"]["trained"] == 3 * SLOT
    bench.end()


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_credits_run_ahead_of_training_by_the_lag_and_no_further(make_bench: Callable[..., Bench], lag: int) -> None:
    bench = make_bench(max_policy_lag=lag)
    bench.learner.may_step.clear()
    first = [bench.acquire() for _ in range(1 + lag)]
    assert {slot.min_version for slot in first} == {Version(1, 0)}
    bench.post(first[0])
    with pytest.raises(StreamTimeout):
        bench.producer.acquire(timeout=0.05)
    bench.learner.may_step.set()
    assert bench.acquire().min_version == Version(1, 1), (
        "each trained batch grants a batch of credits for the new weights"
    )
    bench.end()


def test_trained_steps_are_counted(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(max_policy_lag=0, stop={"train_steps": 2})
    bench.train(2)
    assert bench.ended.wait(DEADLINE_SECONDS)
    assert bench.counted("train_steps", "transitions_trained", "episodes") == [2, 2 * SLOT, 0]
    assert bench.counted("policy_lag_exceeded") == [0]
    bench.end()


def test_transitions_without_an_effect_are_dropped_not_trained(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(stop={"train_steps": 2})
    bench.learner.taken, bench.learner.num_untrained = (True, False, True), 3
    bench.train(2)
    assert bench.ended.wait(DEADLINE_SECONDS)
    bench.thread.check()
    counters = bench.ledger.snapshot()["counters"]
    assert (counters["trained"], counters["dropped.update_skipped"]) == (2 * (SLOT - 3), 6)
    assert bench.counted("transitions_trained") == [2 * (SLOT - 3)]
    value = bench.context.metrics.registry.get_sample_value
    assert [value("rlsrl_minibatches_total", {"outcome": outcome}) for outcome in ("taken", "skipped")] == [4, 2]
    metadata = bench.thread.checkpoint().metadata
    assert (metadata["minibatches"], metadata["minibatches_skipped"]) == (6, 2)
    assert metadata["env_steps"] == 2 * SLOT, "steps of the environment, trained or not"
    assert bench.join_session.rows[-1][1]["minibatches_skipped"] == 2
    assert (bench.thread.ending.stop_reason, bench.thread.ending.run_failure) == ("trainSteps", None)
    bench.end()


def test_a_run_that_skips_most_minibatches_ends_with_the_reason(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()
    bench.learner.taken = (False,) * 51 + (True,) * 49
    bench.train(2)
    bench.thread.join(DEADLINE_SECONDS)
    assert (bench.thread.ending.stop_reason, bench.learner.steps) == (UPDATES_SKIPPED, 2)
    assert (bench.thread.ending.run_failure or "").startswith("102 of the last 200 minibatches were skipped")
    bench.end()


def test_a_run_that_ends_before_the_window_is_full_is_judged_at_its_end(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(stop={"train_steps": 3})
    bench.learner.taken = (False, False, True)
    bench.train(3)
    bench.thread.join(DEADLINE_SECONDS)
    assert (bench.thread.ending.stop_reason, bench.learner.steps) == (UPDATES_SKIPPED, 3)
    assert (bench.thread.ending.run_failure or "").startswith("6 of the last 9 minibatches were skipped")
    bench.end()


def test_what_is_gathered_while_nothing_is_trained_shows_and_may_end_the_run(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    episodes = EndedEpisodes(returns=[3.0], lengths=[4])
    batches = [
        TrainingBatch(
            arrays={}, num_transitions=0, oldest_version=Version(1, 0), env_steps=env_steps, episodes=episodes
        )
        for env_steps in (7, 4)
    ]
    clocks: list[ManualClock] = []
    monkeypatch.setattr(OnPolicyExperience, "next_batch", lambda self, timeout: batches.pop(0) if batches else None)
    monkeypatch.setattr(OnPolicyExperience, "passed", lambda self, batch: clocks[0].advance(2.0))
    with monkeypatch.context() as patched:
        patched.setattr(TrainingThread, "start", lambda self, **_: None)
        bench = make_bench(stop={"env_steps": 10})
    clocks.append(bench.clock)
    bench.thread.start()
    bench.thread.join(DEADLINE_SECONDS)
    bench.thread.check()
    assert bench.thread.ending.stop_reason == "envSteps"
    assert (bench.learner.steps, bench.learner.env_steps_without_a_step) == (0, 11)
    shown = [stats["env_steps"] for stats in bench.join_session.reported("stats") if "env_steps" in stats]
    assert shown == [7.0, 11.0]
    assert bench.counted("episodes") == [2.0]


def test_a_batch_without_a_transition_is_no_step(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(max_policy_lag=0, stop={"train_steps": 1})
    for _ in range(3):
        bench.post(bench.acquire(), num_transitions=0)
    bench.post(bench.acquire())
    assert bench.ended.wait(DEADLINE_SECONDS)
    bench.thread.check()
    assert steps_of(bench.published) == [("1.0", 0), ("1.1", 1)]
    assert bench.ledger.snapshot()["counters"]["trained"] == SLOT
    bench.end()


def test_the_length_of_episodes_and_values_of_info_are_reported_with_the_return(
    make_bench: Callable[..., Bench],
) -> None:
    bench = make_bench(push_steps=1, stop={"train_steps": 2})
    bench.episode_return = 5.0
    bench.train(2)
    assert bench.ended.wait(DEADLINE_SECONDS)
    bench.thread.check()
    bench.end()
    info = {"won": {"mean": 1.0, "count": 2 * LANES}, "never": {"mean": None, "count": 0}}
    final = bench.thread.checkpoint()
    assert (final.metadata["length_mean"], final.metadata["episode_info"]) == (STEPS, info)
    row = bench.join_session.rows[-1][1]
    assert (row["length_mean"], row["episode_info/won/mean"], row["episode_info/won/count"]) == (STEPS, 1, 2 * LANES)
    assert row["episode_info/never/count"] == 0
    assert "episode_info/never/mean" not in row
    registry = bench.context.metrics.registry
    assert registry.get_sample_value("rlsrl_episode_length_mean") == STEPS
    assert registry.get_sample_value("rlsrl_episode_info_mean", {"key": "won"}) == 1
    assert registry.get_sample_value("rlsrl_episode_info_total", {"key": "won"}) == 2 * LANES
    assert registry.get_sample_value("rlsrl_episode_info_total", {"key": "never"}) == 0


def test_returns_that_are_not_finite_are_counted_and_never_stored(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(push_steps=1, stop={"train_steps": 2})
    bench.episode_return = math.nan
    bench.train(2)
    assert bench.ended.wait(DEADLINE_SECONDS)
    bench.thread.check()
    bench.end()
    final = bench.thread.checkpoint()
    json.dumps({**final.metadata, **final.state.values["progress"]}, allow_nan=False)
    assert (final.metadata["return_mean"], final.metadata["non_finite_returns"]) == (None, 2 * LANES)
    assert "return_mean" not in bench.join_session.rows[-1][1]
    assert bench.join_session.rows[-1][1]["non_finite_returns"] == 2 * LANES


def test_a_lag_beyond_the_bound_is_counted(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(max_policy_lag=0, buffer_lag=5, stop={"train_steps": 3})
    for _ in range(3):
        bench.post(bench.acquire(), Version(1, 0))
    assert bench.ended.wait(DEADLINE_SECONDS)
    assert bench.counted("policy_lag_exceeded") == [2]
    bench.end()


def test_versions_are_stored_when_due_with_what_resuming_needs(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(push_steps=2, tag_steps=3, stop={"train_steps": 7})
    bench.train(7)
    assert bench.ended.wait(DEADLINE_SECONDS)
    bench.thread.check()
    assert [(each.parameters.version.step, each.is_permanent) for each in bench.stored] == [
        (2, False),
        (3, True),
        (4, False),
        (6, True),
    ]
    stored = bench.stored[2]
    assert float(stored.parameters.vector[0]) == stored.state.values["learner"]["step"] == 4
    assert stored.state.version == stored.parameters.version
    assert stored.state.values["limiters"] == [{"sampled": 4 * LANES}]
    assert [each["counters"]["trained"] for each in stored.state.values["ledgers"]] == [4 * SLOT, 80]
    assert stored.state.values["progress"]["env_steps"] == stored.metadata["env_steps"] == 4 * SLOT
    assert (stored.metadata["train_steps"], stored.metadata["program"]) == (4, None)
    assert bench.join_session.turns.count("store") == len(bench.stored), "a slow disk shows as a wait"
    bench.end()
    assert (bench.thread.checkpoint().parameters.version, bench.thread.ending.is_last_permanent) == (
        Version(1, 7),
        False,
    )


def test_a_permanent_version_that_is_due_at_the_last_step_is_the_last_version(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(push_steps=3, tag_steps=3, stop={"train_steps": 3})
    bench.train(3)
    assert bench.ended.wait(DEADLINE_SECONDS)
    bench.thread.check()
    assert bench.stored == []
    bench.end()
    assert bench.thread.ending.is_last_permanent
    assert bench.thread.checkpoint(is_permanent=True).is_permanent


def test_experience_of_a_former_attempt_is_dropped_and_its_lanes_granted_again(
    make_bench: Callable[..., Bench],
) -> None:
    bench = make_bench(version=Version(2, 5), max_policy_lag=1, stop={"train_steps": 2})
    slots = [bench.acquire(), bench.acquire()]
    bench.post(slots[0], Version(1, 9))
    bench.post(slots[1])
    bench.train(1)
    assert bench.ended.wait(DEADLINE_SECONDS)
    bench.thread.check()
    counters = bench.ledger.snapshot()["counters"]
    assert (counters["dropped.old_attempt"], counters["trained"]) == (SLOT, 2 * SLOT)
    assert bench.thread.checkpoint().parameters.version == Version(2, 7)
    bench.end()


def test_a_run_that_resumes_at_its_stop_condition_trains_nothing(make_bench: Callable[..., Bench]) -> None:
    """The former process was killed between its last checkpoint and its terminal record."""
    done = Progress(episodes=2)
    done.load_state_dict({"env_steps": 40, "train_steps": 5, "num_episodes": 0, "train_seconds": 1.0, "returns": []})
    bench = make_bench(version=Version(2, 5), progress=done, stop={"train_steps": 5})
    assert bench.ended.wait(DEADLINE_SECONDS)
    assert (bench.thread.ending.stop_reason, bench.thread.checkpoint().parameters.version) == (
        "trainSteps",
        Version(2, 5),
    )
    assert bench.learner.steps == 5
    assert not bench.has_credit()
    bench.end()


def test_no_credit_is_granted_that_training_cannot_use(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(max_policy_lag=3, stop={"train_steps": 2})
    slots = [bench.acquire(), bench.acquire()]
    assert not bench.has_credit()
    for slot in slots:
        bench.post(slot)
    assert bench.ended.wait(DEADLINE_SECONDS)
    assert not bench.has_credit()
    assert bench.learner.steps == 2
    assert bench.needed_no_samples() == [1.0]
    bench.end()
    assert bench.ledger.snapshot()["counters"]["trained"] == 2 * SLOT


def test_a_batch_with_fewer_transitions_is_followed_by_another_credit(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(max_policy_lag=3, stop={"env_steps": 2 * SLOT})
    slots = [bench.acquire(), bench.acquire()]
    assert not bench.has_credit()
    bench.post(slots[0], num_transitions=SLOT - 1)
    last = bench.acquire()
    assert last.min_version == Version(1, 1)
    assert not bench.has_credit()
    bench.post(slots[1])
    bench.post(last)
    assert bench.ended.wait(DEADLINE_SECONDS)
    assert (bench.thread.ending.stop_reason, bench.learner.steps) == ("envSteps", 3)
    bench.end()


def test_a_stop_that_moves_away_grants_credits_again(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(max_policy_lag=1, stop={"train_steps": 1})
    slot = bench.acquire()
    assert not bench.has_credit()
    bench.thread.adopt({"train_steps": 3})
    second = bench.acquire()
    assert not bench.has_credit(), "the lag is kept"
    bench.post(slot)
    bench.post(second)
    bench.train(1)
    assert bench.ended.wait(DEADLINE_SECONDS)
    assert bench.learner.steps == 3
    assert bench.needed_no_samples() == [1.0, 0.0, 1.0]
    bench.end()


def test_a_run_that_resumes_at_its_end_is_judged_by_the_minibatches_of_its_former_life(
    make_bench: Callable[..., Bench],
) -> None:
    """The former process was killed before it recorded that most updates had been skipped."""
    done = Progress(episodes=2)
    done.load_state_dict({"env_steps": 40, "train_steps": 5, "num_episodes": 0, "train_seconds": 1.0, "returns": []})
    bench = make_bench(version=Version(2, 5), progress=done, taken=[True, False, False], stop={"train_steps": 5})
    assert bench.ended.wait(DEADLINE_SECONDS)
    assert bench.thread.ending.stop_reason == UPDATES_SKIPPED
    assert (bench.thread.ending.run_failure or "").startswith("2 of the last 3 minibatches were skipped")
    assert bench.thread.checkpoint().state.values["minibatches_taken"] == [True, False, False]
    bench.end()


def test_stop_ends_the_thread_without_a_batch(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()
    bench.acquire()
    bench.thread.stop()
    bench.thread.join(DEADLINE_SECONDS)
    assert bench.ended.is_set()
    assert bench.thread.ending.stop_reason is None
    bench.end()


def test_settings_are_applied_between_two_steps(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(stop={"train_steps": 100})
    bench.train(2)
    slot = bench.acquire()
    until(lambda: bench.learner.steps == 2, "the thread waits for a batch")
    bench.thread.adopt({"train_steps": 50})
    bench.thread.adopt({"train_steps": 3})
    until(lambda: bench.learner.adopted, "the newest settings are applied without a batch")
    assert bench.learner.adopted[-1] == (2, 0.5, {"clip_range": 0.25})
    assert len(bench.learner.adopted) <= 2
    bench.post(slot)
    bench.thread.join(DEADLINE_SECONDS)
    assert bench.thread.ending.stop_reason == "trainSteps"
    assert bench.learner.steps == 3


def test_settings_may_end_the_run(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()
    bench.train(2)
    until(lambda: bench.learner.steps == 2, "the thread waits for a batch")
    bench.thread.adopt({"train_steps": 1})
    bench.thread.join(DEADLINE_SECONDS)
    assert (bench.thread.ending.stop_reason, bench.learner.steps) == ("trainSteps", 2)


@pytest.mark.parametrize(("given", "reason"), [({"now": True}, "now"), ({"train_steps": 3}, "trainSteps")])
def test_a_run_with_all_its_env_steps_trains_what_is_due_unless_another_condition_ends_it(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], reason: str
) -> None:
    monkeypatch.setattr(OnPolicyExperience, "is_behind", True)
    monkeypatch.setattr(OnPolicyExperience, "expect", lambda *_: None)
    bench = make_bench(stop={"env_steps": SLOT})
    bench.train(3)
    until(lambda: bench.learner.steps == 3, "training goes on")
    assert not bench.ended.is_set()
    bench.thread.adopt({"env_steps": SLOT, **given})
    bench.thread.join(DEADLINE_SECONDS)
    assert (bench.thread.ending.stop_reason, bench.learner.steps) == (reason, 3)


def paused(bench: Bench) -> Bench:
    """Pause the thread, and return once it is paused."""
    bench.is_paused = True
    until(lambda: bench.thread.is_paused, "a paused thread")
    return bench


def test_a_paused_thread_takes_no_step_and_grants_no_credit(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(max_policy_lag=0, stop={"train_steps": 2})
    slot = bench.acquire()
    paused(bench)
    bench.post(slot)
    for _ in range(3):  # each answered request shows that the thread has come by
        bench.thread.adopt({"train_steps": 2})
        until(lambda: not bench.thread._new_settings, "the thread has come by")
    assert (bench.learner.steps, bench.has_credit()) == (0, False)
    bench.is_paused = False
    bench.thread.wake()
    bench.train(1)
    assert bench.ended.wait(DEADLINE_SECONDS)
    assert bench.learner.steps == 2
    bench.end()


def test_a_pause_is_no_training_time(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(stop={"train_steps": 1})
    slot = bench.acquire()
    bench.clock.advance(2.0)
    paused(bench)
    bench.clock.advance(1000.0)
    bench.is_paused = False
    until(lambda: not bench.thread.is_paused, "training goes on")
    bench.clock.advance(3.0)
    bench.post(slot)
    assert bench.ended.wait(DEADLINE_SECONDS)
    assert bench.thread.checkpoint().metadata["train_seconds"] == 3.0
    bench.end()


def test_a_paused_thread_stores_versions_on_request_and_ends_when_it_is_told_to(
    make_bench: Callable[..., Bench],
) -> None:
    bench = paused(make_bench())
    bench.thread.adopt({"store_request": "first"})
    until(lambda: bench.stored, "a stored version")
    assert bench.stored[0].metadata["store_request"] == "first"
    assert bench.stored[0].state.values["progress"]["store_request"] == "first"
    bench.thread.adopt({"store_request": "first", "now": True})
    assert bench.ended.wait(DEADLINE_SECONDS)
    bench.thread.check()
    assert (bench.thread.ending.stop_reason, len(bench.stored)) == ("now", 1)
    bench.end()


def test_a_request_is_fulfilled_once_over_all_lives(make_bench: Callable[..., Bench]) -> None:
    progress = Progress(episodes=2)
    progress.store_request = "done"
    bench = make_bench(progress=progress, stop={"store_request": "done", "train_steps": 1})
    bench.train(1)
    assert bench.ended.wait(DEADLINE_SECONDS)
    assert bench.stored == []
    bench.end()


def test_a_request_from_before_the_start_is_fulfilled(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(stop={"store_request": "asked"})
    until(lambda: bench.stored, "a stored version")
    assert bench.stored[0].metadata["store_request"] == "asked"
    bench.end()


def test_a_failed_step_is_raised_with_its_cause(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()
    bench.thread.check()
    bench.learner.failure = FloatingPointError("no gradient")
    bench.post(bench.acquire())
    assert bench.ended.wait(DEADLINE_SECONDS), "on_end is called"
    with pytest.raises(RuntimeError, match="training thread failed") as raised:
        bench.thread.check()
    assert raised.value.__cause__ is bench.learner.failure
    assert bench.ledger.snapshot()["counters"]["trained"] == 0


def test_join_raises_if_a_step_takes_too_long(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()
    bench.learner.may_step.clear()
    bench.post(bench.acquire())
    assert bench.learner.stepping.wait(DEADLINE_SECONDS)
    bench.thread.stop()
    with pytest.raises(TimeoutError, match="still in a step"):
        bench.thread.join(0.05)


def test_rows_are_reported_when_due_and_for_the_last_step(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(max_policy_lag=0, stop={"train_steps": 4})
    bench.train(1)
    slot = bench.acquire()  # granted before the step's row is due
    until(lambda: bench.join_session.turns[-1] == "batch", "the step is recorded")
    bench.clock.advance(1.5)
    bench.post(slot)
    bench.train(2)
    assert bench.ended.wait(DEADLINE_SECONDS)
    bench.thread.check()
    assert [step for step, _ in bench.join_session.rows] == [2, 4]
    _, scalars = bench.join_session.rows[0]
    assert (scalars["env_steps"], scalars["train_steps"], scalars["policy_lag"]) == (2 * SLOT, 2, 0)
    assert (scalars["train_seconds"], scalars["env_steps_per_second"]) == (1.5, 2 * SLOT / 1.5)
    assert scalars["train/loss"] == 0.5
    assert bench.join_session.reported("version") == [Version(1, 2), Version(1, 4)]
    bench.end()


class SlowerRank(SoloGang):
    """A gang of two ranks. The other one has no batch until ``has_batch`` is set, and then the same as this one."""

    size = 2

    def __init__(self) -> None:
        self.bench: Bench | None = None
        self.has_batch = threading.Event()
        self.activities: list[str] = []
        """What this rank did, as reported, while it waited for the other one's answer."""

    @override
    def agree(self, mine: Mapping[str, Any]) -> list[dict[str, Any]]:
        assert self.bench is not None
        self.activities.append(self.bench.join_session.turns[-1])
        other = dict(mine)
        if not self.has_batch.is_set() and "batch" in mine:
            other["batch"] = None
        return [dict(mine), other]


def test_a_rank_that_waits_for_another_one_does_not_work(tmp_path: Path) -> None:
    """Else a run whose only batch is at one rank would count as working, and not as stalled, for ten minutes."""
    gang = SlowerRank()
    with closing(Bench(tmp_path, gang=gang)) as bench:
        gang.bench = bench
        bench.thread.start()
        bench.post(bench.acquire())
        asked = len(gang.activities)
        until(lambda: len(gang.activities) > asked + 3, "the thread asks again and again")
        assert bench.learner.steps == 0

        gang.has_batch.set()
        until(lambda: bench.learner.steps == 1, "both ranks train")

    assert set(gang.activities) == {OTHER_RANKS}


def test_a_batch_in_hand_waits_for_the_end_of_a_pause(tmp_path: Path) -> None:
    gang = SlowerRank()
    with closing(Bench(tmp_path, gang=gang)) as bench:
        gang.bench = bench
        bench.thread.start(is_paused=lambda: bench.is_paused)
        bench.post(bench.acquire())
        asked = len(gang.activities)
        until(lambda: len(gang.activities) > asked + 3, "the thread has the batch, and the other rank has none")
        paused(bench)
        gang.has_batch.set()
        asked = len(gang.activities)
        until(lambda: len(gang.activities) > asked + 3, "both ranks have one")
        assert bench.learner.steps == 0

        bench.is_paused = False
        bench.thread.wake()
        until(lambda: bench.learner.steps == 1, "both ranks train")


class SecondRank(SoloGang):
    """A gang of two ranks. This one is rank 1, and rank 0 has the same batches. The test answers for rank 0's pause."""

    rank, size = 1, 2

    def __init__(self) -> None:
        self.pauses_rank_0 = False
        self.num_boundaries = 0
        """How often the ranks have agreed what comes next."""

    @override
    def agree(self, mine: Mapping[str, Any]) -> list[dict[str, Any]]:
        first = dict(mine)
        if "pause" in mine:
            first["pause"] = self.pauses_rank_0
            self.num_boundaries += 1
        return [first, dict(mine)]

    def pass_boundaries(self) -> None:
        """Return once the thread has passed a whole boundary since this call."""
        before = self.num_boundaries
        until(lambda: self.num_boundaries > before + 2, "the ranks agree again")


def test_a_rank_pauses_with_rank_0_before_it_is_asked(tmp_path: Path) -> None:
    gang = SecondRank()
    with closing(Bench(tmp_path, gang=gang)) as bench:
        bench.thread.start(is_paused=lambda: bench.is_paused)
        slot = bench.acquire()
        gang.pauses_rank_0 = True
        gang.pass_boundaries()
        bench.post(slot)
        gang.pass_boundaries()
        assert (bench.thread.is_paused, bench.learner.steps) == (True, 0)

        gang.pauses_rank_0 = False
        until(lambda: bench.learner.steps == 1, "it goes on with rank 0")


def test_a_rank_that_is_asked_to_pause_goes_on_until_rank_0_pauses(tmp_path: Path) -> None:
    gang = SecondRank()
    with closing(Bench(tmp_path, gang=gang)) as bench:
        bench.is_paused = True
        bench.thread.start(is_paused=lambda: bench.is_paused)
        gang.pass_boundaries()
        assert not bench.thread.is_paused
        bench.train(2)
        until(lambda: bench.learner.steps == 2, "it trains with rank 0")

        gang.pauses_rank_0 = True
        until(lambda: bench.thread.is_paused, "it pauses with rank 0")


def test_a_single_rank_waits_for_no_other(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()
    bench.train(2)

    bench.end()

    assert OTHER_RANKS not in bench.join_session.turns
