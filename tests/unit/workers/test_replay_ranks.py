"""Two trainer ranks that replay: their training threads meet in one process; only the learners are fakes."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from typing_extensions import override

from rlsrl.algorithms.base import Reduce
from rlsrl.algorithms.learner import StepResult
from rlsrl.algorithms.normalizer import ReplayNormalizer, SampleMoments, normalizable
from rlsrl.api.load import load_text
from rlsrl.api.placement import local_placement
from rlsrl.api.resolve import resolve
from rlsrl.api.resolved import TrainerConfig
from rlsrl.buffers.replay.draws import UniformDraws
from rlsrl.buffers.replay.layout import ENV_STEPS, MARK, ReplayLayout
from rlsrl.buffers.replay.ratio import Pace, RatioLimiter
from rlsrl.buffers.replay.rows import IMPORTANCE, RowForm
from rlsrl.data.slots import DISCOUNTED_RETURN
from rlsrl.data.version import Version
from rlsrl.parameters.protocols import Parameters, TrainerState
from rlsrl.runtime.errors import ConfigurationError
from rlsrl.runtime.frequency import FrequencyControl
from rlsrl.runtime.ledger import TrainerLedger, read_pages
from rlsrl.testing.contexts import make_context
from rlsrl.testing.replay import SlotSource, empty_replay_store
from rlsrl.testing.waiting import until
from rlsrl.workers.build.replay import drawing_of, open_store, replay_experience
from rlsrl.workers.compiling import StepCompiler
from rlsrl.workers.gang import Gang
from rlsrl.workers.progress import Progress, StopConditions
from rlsrl.workers.replay_experience import ReplayExperience
from rlsrl.workers.replay_store import Drawing, LocalStore
from rlsrl.workers.training import (
    Cadence,
    Learning,
    Outputs,
    StartingPoint,
    TrainingSettings,
    TrainingThread,
)

STEPS, LANES, RANKS = 5, 2, 2
UPDATES, ROWS = 3, 4
RATIO, START = 0.2, 20
"""Of the whole run; each rank has twice the ratio and half the start."""
DEADLINE_SECONDS = 30.0
NEVER = dict.fromkeys(("return_mean", "env_steps", "train_steps", "wall_seconds"))


class MeetingPoint:
    """Where the ranks of a gang exchange values."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(RANKS)
        self.messages: list[str] = [""] * RANKS


class ThreadGang(Gang):
    """The gang of training threads in one process."""

    size = RANKS

    def __init__(self, rank: int, point: MeetingPoint) -> None:
        self.rank = rank
        self._point = point

    @override
    def agree(self, mine: Mapping[str, Any]) -> list[dict[str, Any]]:
        self._point.messages[self.rank] = json.dumps(mine)
        self._point.barrier.wait(DEADLINE_SECONDS)
        answers = [json.loads(message) for message in self._point.messages]
        self._point.barrier.wait(DEADLINE_SECONDS)
        return answers

    @override
    def reduce(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.sum([answer["values"] for answer in self.agree({"values": values.tolist()})], axis=0)

    @override
    def close(self) -> None:
        pass


class FakeLearner:
    """Counts its steps, keeps what it was given, and has its normaliser learn."""

    def __init__(self, normalizer: ReplayNormalizer, reduce: Reduce) -> None:
        self.normalizer = normalizer
        self._reduce = reduce
        self.batches: list[Mapping[str, np.ndarray]] = []
        self.env_steps = 0

    def use_threads(self) -> None:
        pass

    def learn_statistics(self, moments: SampleMoments | None) -> None:
        if moments is not None:
            self.normalizer.learn(moments, self._reduce)

    def count_env_steps(self, env_steps: int) -> None:
        self.env_steps += env_steps

    def step(self, arrays: Mapping[str, np.ndarray], *, env_steps: int) -> StepResult:
        self.batches.append(arrays)
        return StepResult(
            step=len(self.batches),
            optimizer_steps=0,
            taken=(True,) * UPDATES,
            num_transitions=UPDATES * ROWS,
            num_untrained=0,
            metrics={},
        )

    def parameters(self, version: Version) -> Parameters:
        return Parameters(version=version, vector=np.zeros(1, np.float32), layout="fake")

    def state_dict(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        return {}, {"step": len(self.batches)}


class Rank:
    """One rank. The test acts as its main thread and as its actors."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        point: MeetingPoint,
        resources: ExitStack,
        *,
        stop: Mapping[str, Any],
        turns: bool,
        normalizes: bool,
    ) -> None:
        folder.mkdir()
        self.source = SlotSource(
            num_steps=STEPS, num_lanes=LANES, seed=rank, index=rank, return_discount=0.9 if normalizes else None
        )
        normalizer = ReplayNormalizer(normalizable(self.source.env_spec) if normalizes else {}, rewards=normalizes)
        store = empty_replay_store(folder, ReplayLayout.of(self.source.layout, capacity=400))
        self.segments = store.segments
        self._lanes = 0
        self._room = 0
        self._credits = threading.Lock()
        pace = Pace(
            updates_per_env_step=RANKS * RATIO,
            bound=UPDATES + 3 * STEPS * LANES * RANKS * RATIO,
            most_lanes=LANES,
            lanes_in_turn=2 * LANES if turns else None,
        )
        context = make_context("trainer", folder)
        ledger = TrainerLedger(resources.enter_context(context.open_ledger_page()))
        ledger.resume(None)
        self.ledger = ledger
        drawing = Drawing(updates=UPDATES, minibatch_rows=ROWS, seed=rank)
        form = RowForm(num_steps=2, discount=0.9, rewards=normalizer.rewards)
        self.experience = ReplayExperience(
            store=LocalStore(
                store,
                draws=UniformDraws(self.segments),
                form=form,
                drawing=drawing,
                ledger=ledger,
                metrics=context.metrics,
            ),
            limiter=RatioLimiter(pace, start=START // RANKS, updates_per_step=UPDATES, steps_per_lane=STEPS),
            drawing=drawing,
            grant=self._grant,
            ledger=ledger,
            metrics=context.metrics,
            num_ranks=RANKS,
            normalizer=normalizer,
        )
        gang = ThreadGang(rank, point)
        self.learner = FakeLearner(normalizer, gang.reduce)
        self.progress = Progress(episodes=3)
        settings = TrainingSettings(
            stop_conditions=StopConditions(episodes=3, **{**NEVER, **stop}),
            cadence=Cadence(report=FrequencyControl(), push=FrequencyControl(), tag=FrequencyControl()),
            learning_rate=0.5,
            coefficients={},
            pace=pace,
        )
        self.thread = TrainingThread(
            learning=Learning(
                learner=self.learner,  # type: ignore[arg-type]  # as much of one as the thread uses
                compiler=StepCompiler(
                    mode="off",
                    learner=self.learner,  # type: ignore[arg-type]
                    example_batch=dict,
                    request="",
                    context=context,
                ),
                settings=settings,
                read_settings=lambda _: settings,
            ),
            experience=self.experience,
            start=StartingPoint(version=Version(1, 0), progress=self.progress),
            outputs=Outputs(publish=lambda _: None, store=lambda _: None, metadata={}, on_end=lambda: None),
            context=context,
            gang=gang,
        )

    @property
    def may_gather(self) -> bool:
        with self._credits:
            return self._lanes > 0 and self._lanes + self._room >= LANES

    @property
    def stored(self) -> int:
        return self.segments.env_steps

    def gather(self) -> None:
        """Receive a slot, as the ledger counts it."""
        slot = self.source.slot()
        slot.arrays["version_attempt"][:], slot.arrays["version_step"][:] = (1, 0)
        slot.credit = slot.sequence
        assert slot.producer is not None
        self.ledger.take(slot.producer, slot.sequence, slot.num_transitions, self.stored + slot.num_transitions)
        with self._credits:
            self._lanes -= LANES
        self.experience.receive([slot], oldest_outstanding=None)

    def _grant(self, lanes: int, version: Version, room: int) -> None:
        with self._credits:
            self._lanes, self._room = self._lanes + lanes, room


@pytest.fixture
def make_ranks(tmp_path: Path) -> Any:
    resources = ExitStack()
    made: list[Rank] = []
    point = MeetingPoint()

    def make(*, turns: bool = False, normalizes: bool = False, **stop: Any) -> list[Rank]:
        made.extend(
            Rank(tmp_path / str(rank), rank, point, resources, stop=stop, turns=turns, normalizes=normalizes)
            for rank in range(RANKS)
        )
        for rank in made:
            rank.thread.start()
        return made

    yield make
    for rank in made:
        rank.thread.stop()
    for rank in made:
        rank.thread.join(DEADLINE_SECONDS)
    resources.close()


def test_ranks_train_together_or_count_what_has_arrived(make_ranks: Callable[..., list[Rank]]) -> None:
    first, second = make_ranks()
    until(lambda: first.may_gather and second.may_gather, "credits")
    while not first.experience.is_behind:
        first.gather()
    assert not first.learner.batches
    second.gather()
    assert not second.experience.is_behind, "its start is not stored yet"
    until(lambda: first.progress.env_steps == second.progress.env_steps > second.stored, "both count what has arrived")
    assert first.learner.env_steps == second.learner.env_steps == first.progress.env_steps
    assert first.progress.train_steps == second.progress.train_steps == 0
    while not second.experience.is_behind:
        second.gather()
    until(lambda: len(first.learner.batches) == len(second.learner.batches) >= 1, "both train")
    sizes = [rank.segments.num_transitions for rank in (first, second)]
    for rank, size in zip((first, second), sizes, strict=True):
        np.testing.assert_allclose(rank.learner.batches[0][IMPORTANCE], size / max(sizes), rtol=1e-6)
    rows = [rank.learner.batches[0]["observation"] for rank in (first, second)]
    assert not np.array_equal(*rows), "each rank draws from its own store"


def gather_to_the_end(ranks: list[Rank], rng: random.Random) -> None:
    def has_work_or_end() -> bool:
        return has_ended() or any(rank.may_gather for rank in ranks)

    def has_ended() -> bool:
        return all(rank.thread.ending.stop_reason is not None for rank in ranks)

    while not has_ended():
        until(has_work_or_end, "credits, or the end of the run", timeout=DEADLINE_SECONDS)
        if able := [rank for rank in ranks if rank.may_gather]:
            rng.choice(able).gather()
    for rank in ranks:
        rank.thread.join(DEADLINE_SECONDS)
        rank.thread.check()


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_a_run_ends_on_all_ranks_for_the_same_reason_with_all_its_updates(
    seed: int, turns: bool, make_ranks: Callable[..., list[Rank]]
) -> None:
    end, rng = 300, random.Random(seed)
    ranks = make_ranks(turns=turns, env_steps=end)
    gather_to_the_end(ranks, rng)
    first, second = ranks
    assert first.thread.ending.stop_reason == second.thread.ending.stop_reason == "envSteps"
    assert first.progress.state_dict() == second.progress.state_dict()
    assert end <= first.progress.env_steps < end + 2 * RANKS * STEPS * LANES
    updates = first.progress.minibatches
    assert updates == UPDATES * len(first.learner.batches) == UPDATES * len(second.learner.batches)
    dues = [(rank.experience.state_dict()["stored"] - START / RANKS) * RANKS * RATIO for rank in ranks]
    assert -1e-6 <= min(dues) - updates < UPDATES, "the rank that has gathered less has nothing more to train"
    assert sum(rank.experience.state_dict()["stored"] for rank in ranks) == first.progress.env_steps


@pytest.mark.parametrize("turns", [False, True])
def test_ranks_learn_once_from_what_any_of_them_counts(turns: bool, make_ranks: Callable[..., list[Rank]]) -> None:
    ranks = make_ranks(turns=turns, normalizes=True, env_steps=300)
    gather_to_the_end(ranks, random.Random(0))
    state, other = (rank.learner.normalizer.state_dict() for rank in ranks)
    assert {name: array.tobytes() for name, array in state.items()} == {
        name: array.tobytes() for name, array in other.items()
    }
    for name, field in (("observation", "observation"), ("return", DISCOUNTED_RETURN)):
        samples = np.concatenate([counted(rank, field) for rank in ranks]).astype(np.float64)
        assert state[f"{name}/count"] == len(samples) == ranks[0].progress.env_steps
        np.testing.assert_allclose(state[f"{name}/mean"], samples.mean(0), rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(state[f"{name}/squares"], samples.var(0) * len(samples), rtol=1e-8)


def counted(rank: Rank, field: str) -> NDArray[Any]:
    """Return the field of all transitions that the run's progress contains; none was evicted."""
    arrays = rank.segments.arrays
    is_counted = (arrays[MARK] > 0) & (arrays[ENV_STEPS] <= rank.experience.state_dict()["stored"])
    found: NDArray[Any] = arrays[field][:, :STEPS][arrays["mask"] & is_counted[:, np.newaxis]]
    return found


EXPERIMENT = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {name: ranks}
spec:
  environment: {id: CartPole-v1}
  algorithm:
    custom:
      factory: rlsrl.testing.q_learning:QLearning
      needs: {minibatchSize: 12, outputs: actionValues, replay: {capacity: 121, start: 25, nStep: 2}}
  actors: {environments: 12, replicas: 6, rolloutLength: 4}
  pacing: {trainStepsPerEnvStep: 0.5}
  stop: {envSteps: 1000000}
"""


def config_of(folder: Path, num_ranks: int) -> TrainerConfig:
    experiment = load_text(EXPERIMENT, overrides=[f"trainers.replicas={num_ranks}"])
    return resolve(experiment, local_placement("uid", folder)).trainer


def resumed(folder: Path, num_ranks: int, rank: int, state: TrainerState | None, *, former: int | None) -> Any:
    config = config_of(folder, num_ranks)
    source = SlotSource(num_steps=4, num_lanes=2)
    context = make_context("trainer", folder, index=rank)
    store = open_store(config, context, state, source.layout, former=former)
    assert store is not None
    assert config.replay is not None
    consumer: Any = SimpleNamespace(grant=lambda *_: None)
    ledger: Any = SimpleNamespace(trained=lambda *_: None, dropped=lambda *_: None)
    return replay_experience(config, config.replay, context, state, store, consumer, ledger, rank=rank)


def state_of(counts: Sequence[tuple[int, float]], updates: int) -> TrainerState:
    """Return the state of ranks that have (env steps, updates due)."""
    limiters = [{"stored": stored, "due": due, "updates": updates, "draws": {}} for stored, due in counts]
    values: dict[str, Any] = {"limiters": limiters, "progress": {"env_steps": sum(stored for stored, _ in counts)}}
    return TrainerState(version=Version(1, 7), arrays={}, values=values)


def test_each_rank_has_a_part_of_the_store_and_draws_of_its_own(tmp_path: Path) -> None:
    config = config_of(tmp_path, 2)
    assert config.replay is not None
    drawings = [drawing_of(config, config.replay, rank=rank) for rank in range(2)]
    assert [drawing.minibatch_rows for drawing in drawings] == [6, 6]
    assert drawings[0].seed != drawings[1].seed
    assert drawings[0].seed == drawing_of(config_of(tmp_path, 1), config.replay).seed
    for rank in range(2):
        experience = resumed(tmp_path, 2, rank, None, former=None)
        assert experience._store.segments.layout.num_places == 64, "61 of 121, in segments of 4"
        assert experience._limiter._start == 13
        assert (tmp_path / "replay" / f"trainer-{rank}.store").exists()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG])
def test_a_store_that_the_disk_does_not_take_ends_the_trainer_with_the_arithmetic(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=5000))
    with pytest.raises(ConfigurationError) as raised:
        resumed(tmp_path, 2, 0, None, former=None)
    text = str(raised.value)
    assert text.startswith("spec.algorithm.custom.needs.replay.capacity, one of 2 parts: 61 transitions x ")
    if number == errno.ENOSPC:
        assert f"there is room for 0.0 MiB on the disk at {tmp_path / 'replay' / 'trainer-0.store'}: at most" in text
    else:
        assert text.endswith(f"the file cannot be made at {tmp_path / 'replay' / 'trainer-0.store'}: File too large")


def test_each_rank_resumes_from_its_own_counts(tmp_path: Path) -> None:
    state = state_of([(100, 87.0), (60, 47.0)], updates=40)
    for rank, debt in enumerate((47.0, 7.0)):
        experience = resumed(tmp_path, 2, rank, state, former=None)
        assert experience.figures()["train_steps_behind"] == debt
        assert experience.state_dict() == state.values["limiters"][rank]


@pytest.mark.parametrize(("before", "is_old"), [(1, True), (1, False), (2, False)])
def test_a_rank_that_the_checkpoint_does_not_know_starts_without_debt(
    before: int, is_old: bool, tmp_path: Path
) -> None:
    state = state_of([(100, 87.0), (60, 47.0)][:before], updates=40)
    if is_old:
        state.values["limiter"] = state.values.pop("limiters")[0]
    known = resumed(tmp_path, 3, 0, state, former=None)
    assert known.figures()["train_steps_behind"] == 47.0
    (tmp_path / "replay" / "trainer-2.store").write_bytes(b"rlsrlrp1 of another time")
    new = resumed(tmp_path, 3, 2, state, former=0)
    assert new.figures()["train_steps_behind"] == 0.0
    assert new.figures()["replay_transitions"] == 0
    assert new.state_dict() == {"stored": (160 if before == 2 else 100) // 3, "due": 40, "updates": 40, "draws": {}}


def test_stores_of_ranks_that_are_gone_are_removed_and_counted(tmp_path: Path) -> None:
    (tmp_path / "replay").mkdir()
    for rank in range(4):
        (tmp_path / "replay" / f"trainer-{rank}.store").touch()
    gone = make_context("trainer", tmp_path, index=3)
    source = SlotSource(num_steps=4, num_lanes=2)
    slot = source.slot()
    assert slot.producer is not None
    with closing(gone.open_ledger_page()) as page:
        ledger = TrainerLedger(page)
        ledger.resume(None, keeps=True)
        ledger.take(slot.producer, slot.sequence, slot.num_transitions, slot.num_transitions)
        ledger.trained(2)
        ledger.end()
    resumed(tmp_path, 2, 1, None, former=None)
    assert len(list((tmp_path / "replay").iterdir())) == 4
    for _ in range(2):
        resumed(tmp_path, 2, 0, None, former=None)
        assert sorted(path.name for path in (tmp_path / "replay").iterdir()) == ["trainer-0.store", "trainer-1.store"]
        (record,) = read_pages(gone.ledger_folder)
        assert (record.counters["in_buffer"], record.counters["dropped.evicted"]) == (0, slot.num_transitions - 2)
