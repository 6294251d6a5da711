"""A trainer that replays is killed anywhere, again and again: its store, its ledger and its counts agree afterwards."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rlsrl.algorithms.base import one_rank
from rlsrl.algorithms.learner import StepResult
from rlsrl.algorithms.normalizer import ReplayNormalizer, normalizable
from rlsrl.api.load import load_text
from rlsrl.api.placement import Placement, cluster_placement, local_placement
from rlsrl.api.resolve import resolve
from rlsrl.buffers.replay import store_file
from rlsrl.buffers.replay.draws import PrioritizedDraws
from rlsrl.buffers.replay.layout import MARK, PRIORITY
from rlsrl.buffers.replay.ratio import Pace
from rlsrl.buffers.replay.segments import Segments
from rlsrl.data.slots import DISCOUNTED_RETURN, Slot
from rlsrl.data.version import Version
from rlsrl.parameters.protocols import TrainerState
from rlsrl.runtime.errors import ConfigurationError
from rlsrl.runtime.ledger import LedgerPage
from rlsrl.testing.contexts import make_context
from rlsrl.testing.replay import SlotSource
from rlsrl.workers.build import trainer as build
from rlsrl.workers.build.replay import pace_of, replay_experience
from rlsrl.workers.replay_experience import ReplayBatch
from rlsrl.workers.stored_transitions import StoredTransitions

STEPS, LANES = 4, 3
IN_A_SLOT = STEPS * LANES
START = 24
EXPERIMENT = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {name: survival}
spec:
  environment: {id: CartPole-v1}
  algorithm:
    custom:
      factory: rlsrl.testing.q_learning:QLearning
      needs: {minibatchSize: 4, outputs: actionValues, replay: {capacity: 120, start: 24, nStep: 2, priorities: {}}}
  actors: {environments: 6, replicas: 2, rolloutLength: 4}
  pacing: {trainStepsPerEnvStep: 0.5}
  stop: {envSteps: 1000000}
"""
WRITES: tuple[tuple[type, str], ...] = (
    (LedgerPage, "apply"),
    (Segments, "_free"),
    (Segments, "_write"),
    (PrioritizedDraws, "_refresh"),
    (Segments, "forget_training_after"),
    (StoredTransitions, "_note_trained"),
)
"""Each changes what outlives the trainer."""


class Killed(BaseException):
    """A SIGKILL."""


class Kills:
    """Kills the trainer before or after one of its writes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._left: int | None = None
        for owner, name in WRITES:
            monkeypatch.setattr(owner, name, self._killing(getattr(owner, name)))
        self._pages: list[LedgerPage] = []
        open_page = LedgerPage.open
        monkeypatch.setattr(LedgerPage, "open", lambda *arguments: self._opened(open_page(*arguments)))

    @contextmanager
    def after(self, writes: int) -> Iterator[None]:
        self._left = 2 * writes
        try:
            yield
        except Killed:
            pass
        finally:
            self._left = None
            for page in self._pages:  # as the kernel does
                page.close()

    def _opened(self, page: LedgerPage) -> LedgerPage:
        self._pages.append(page)
        return page

    def _killing(self, write: Callable[..., Any]) -> Callable[..., Any]:
        def killing(*arguments: Any, **keywords: Any) -> Any:
            self._pass()
            result = write(*arguments, **keywords)
            self._pass()
            return result

        return killing

    def _pass(self) -> None:
        if self._left is not None:
            self._left -= 1
            if self._left <= 0:
                raise Killed


class Run:
    """What outlives a trainer: files, checkpoints, and the actor with its slots."""

    def __init__(
        self,
        folder: Path,
        *,
        placement: Placement | None = None,
        max_policy_lag: int = 1,
        capacity: int = 120,
        normalizes: bool = False,
    ) -> None:
        self.folder = folder
        overrides = (f"pacing.maxPolicyLag={max_policy_lag}", f"algorithm.custom.needs.replay.capacity={capacity}")
        experiment = load_text(EXPERIMENT, overrides=overrides)
        self.config = resolve(experiment, placement or local_placement("uid", folder)).trainer
        self.source = SlotSource(num_steps=STEPS, num_lanes=LANES, return_discount=0.9 if normalizes else None)
        self.normalizes = normalizes
        self.state: TrainerState | None = None
        self.lives = 0
        self.slot: Slot | None = None
        """Posted, and not acknowledged."""
        self.taken = 0
        """Transitions that a ledger has counted."""
        self.replay = self.config.replay
        """With the present pace."""
        self.dues = [0.0]
        """The updates due after each env step that was stored."""

    def count_stored(self, env_steps: int) -> None:
        """Each env step since the last call has the present ratio."""
        assert self.replay is not None
        while len(self.dues) <= env_steps:
            self.dues.append(self.dues[-1] + self.replay.updates_per_env_step * (len(self.dues) > START))

    def live_edit(self, ratio: float) -> Pace:
        assert self.replay is not None
        self.replay = self.replay.model_copy(update={"updates_per_env_step": ratio, "most_updates_behind": 1000})
        return pace_of(self.replay)

    @contextmanager
    def live(self) -> Iterator[Life]:
        with ExitStack() as resources:
            self.lives += 1
            yield Life(self, resources)


class Life:
    """One life of the trainer, from the newest checkpoint on."""

    def __init__(self, run: Run, resources: ExitStack) -> None:
        config, state = run.config, run.state
        assert run.replay is not None
        self._run = run
        context = make_context("trainer", run.folder / "ledger", incarnation=run.lives)
        self.ledger, store = build._resumed_ledger(config, context, state, run.source.layout, resources)
        assert store is not None
        self.store = store
        self.lanes = 0
        consumer: Any = SimpleNamespace(grant=self._grant)
        observation = normalizable(run.source.env_spec) if run.normalizes else {}
        self.normalizer = ReplayNormalizer(observation, rewards=run.normalizes)
        if state is not None:
            self.normalizer.load_state_dict(state.arrays)
        self.experience = replay_experience(
            config, run.replay, context, state, store, consumer, self.ledger, normalizer=self.normalizer
        )
        self.env_steps = 0 if state is None else int(state.values["progress"])
        self.step = 0 if state is None else state.version.step
        if state is None:
            self.save()
        assert run.state is not None
        run.dues = list(run.state.values["dues"])
        run.count_stored(store.segments.env_steps)

    @property
    def counters(self) -> dict[str, int]:
        return {term: count for term, count in self.ledger.snapshot()["counters"].items() if count}

    def check(self) -> None:
        """Compare the ledger with the store and with what was ever taken, between two writes."""
        counters = self.counters
        assert sum(counters.values()) == self._run.taken, counters
        segments = self.store.segments
        assert counters.get("in_buffer", 0) == segments.count_untrained()
        is_held = segments.arrays["mask"] & (segments.arrays[MARK] > 0)[:, np.newaxis]
        assert (segments.arrays[PRIORITY][is_held] > 0).all()

    def work(self) -> bool:
        """Train if training is due, else gather a slot; return whether a step was trained."""
        self.experience.grant(Version(self._run.lives, self.step))
        batch = self.experience.next_batch(timeout=0)
        if batch is None:
            assert self.lanes >= LANES, "both sides wait"
            self._gather()
            return False
        self.env_steps += batch.env_steps
        if batch.moments is not None:
            self.normalizer.learn(batch.moments, one_rank)
        if not batch.num_transitions:
            self.experience.passed(batch)
            return False
        assert isinstance(batch, ReplayBatch)
        self.step += 1
        taken = (True,) * self.experience._drawing.updates
        errors = np.random.default_rng(self.step).standard_normal(batch.num_transitions).astype(np.float32)
        self.experience.trained(batch, result_of(self.step, taken, errors))
        return True

    def save(self) -> None:
        values = {
            "ledgers": [self.ledger.snapshot()],
            "limiters": [self.experience.state_dict()],
            "progress": self.env_steps,
            "dues": self._run.dues[: self.env_steps + 1],
        }
        self._run.state = TrainerState(
            version=Version(self._run.lives, self.step), arrays=self.normalizer.state_dict(), values=values
        )

    def end(self, *, run_ended: bool) -> None:
        self.experience.close()
        self.save()
        self.experience.give_up(run_ended=run_ended)
        self.ledger.end()
        self.experience.sync()

    def _gather(self) -> None:
        run, ledger = self._run, self.ledger
        if run.slot is not None and ledger.marked_sequence(run.slot.producer) >= run.slot.sequence:
            run.slot = None  # taken by a former life, which was killed before the actor knew
        slot = run.slot = run.slot or run.source.slot()
        assert slot.producer is not None
        try:
            ledger.take(slot.producer, slot.sequence, slot.num_transitions, run.taken + slot.num_transitions)
        finally:  # a kill after the update was counted, too
            if ledger.marked_sequence(slot.producer) == slot.sequence:
                run.taken += slot.num_transitions
        self.experience.receive([slot], oldest_outstanding=None)
        run.count_stored(self.store.segments.env_steps)
        self.lanes -= LANES
        run.slot = None

    def _grant(self, lanes: int, version: Version, room: int) -> None:
        self.lanes += lanes


def result_of(step: int, taken: tuple[bool, ...], errors: NDArray[np.float32]) -> StepResult:
    return StepResult(
        step=step, optimizer_steps=0, taken=taken, num_transitions=0, num_untrained=0, errors=errors, metrics={}
    )


@pytest.mark.parametrize("max_policy_lag", [1, 0], ids=["at_once", "in_turn"])
@pytest.mark.parametrize("seed", range(20))
def test_nothing_that_was_stored_is_lost_by_kills(
    seed: int, max_policy_lag: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, kills, rng = Run(tmp_path, max_policy_lag=max_policy_lag), Kills(monkeypatch), random.Random(seed)
    num_kills, stored = 30, 0
    on_its_way = IN_A_SLOT if max_policy_lag else 2 * IN_A_SLOT  # a turn is stored at once
    for _ in range(num_kills):
        with kills.after(rng.randint(1, 80)), run.live() as life:
            while rng.random() > 0.02:
                stored = life.store.segments.env_steps
                if life.work() and rng.random() < 0.2:
                    life.save()
                if rng.random() < 0.1:
                    life.experience.tune(run.live_edit(rng.choice([0.2, 0.5, 1.3])))
            life.end(run_ended=False)
        with run.live() as life:
            life.check()
            assert life.store.file.why_empty is None
            assert life.counters.get("trained", 0) == saved(run)["trained"]
            assert stored <= life.store.segments.env_steps <= stored + on_its_way
    with run.live() as life:
        lost = life.counters.get("lost.receiver_died", 0)
        assert lost <= num_kills * (on_its_way + STEPS), "what was on its way, and a segment in whose place it came"
        while life.env_steps < stored + 100:
            life.work()
        while life.experience.is_behind:
            life.work()
        assert life.env_steps == life.store.segments.env_steps
        life.check()
        updates = life.experience._limiter._updates
        assert -1e-6 <= run.dues[life.env_steps] - updates < life.experience._drawing.updates
        life.end(run_ended=True)
        assert "in_buffer" not in life.counters
        assert not (tmp_path / "replay" / "trainer-0.store").exists()


@pytest.mark.parametrize("max_policy_lag", [1, 0], ids=["at_once", "in_turn"])
@pytest.mark.parametrize("seed", range(8))
def test_statistics_learn_once_from_each_transition_through_kills(
    seed: int, max_policy_lag: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store has room for all. Checkpoints are rare, so that lives begin with transitions that they lack."""
    run = Run(tmp_path, max_policy_lag=max_policy_lag, capacity=8000, normalizes=True)
    kills, rng = Kills(monkeypatch), random.Random(seed)
    uncounted = []
    for _ in range(8):
        with kills.after(rng.randint(20, 160)), run.live() as life:
            uncounted.append(life.store.uncounted)
            while True:
                if life.work() and rng.random() < 0.05:
                    life.save()
    assert sum(each > 0 for each in uncounted) > 2
    with run.live() as life:
        while life.env_steps < life.store.segments.env_steps or not life.env_steps:
            life.work()
        arrays = life.store.segments.arrays
        is_held = arrays["mask"] & (arrays[MARK] > 0)[:, np.newaxis]
        assert np.count_nonzero(is_held) == life.store.segments.env_steps, "none was evicted"
        state = life.normalizer.state_dict()
        for name, values in {"observation": arrays["observation"][:, :-1], "return": arrays[DISCOUNTED_RETURN]}.items():
            samples = values[is_held].astype(np.float64)
            assert state[f"{name}/count"] == len(samples)
            np.testing.assert_allclose(state[f"{name}/mean"], samples.mean(0), rtol=1e-10, atol=1e-12)
            np.testing.assert_allclose(state[f"{name}/squares"], samples.var(0) * len(samples), rtol=1e-8)


@pytest.mark.parametrize("seed", range(4))
def test_a_machine_that_stops_again_and_again_costs_what_its_disk_lacks(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk has each part of the store as it was when it was last written back, or later."""
    run, rng = Run(tmp_path), random.Random(seed)
    boot, path = tmp_path / "boot_id", tmp_path / "replay" / "trainer-0.store"
    monkeypatch.setattr(store_file, "_BOOT", boot)
    held, found = [0], []
    for number in range(8):
        boot.write_text(str(number) * 36)
        with run.live() as life:
            life.check()
            found.append(life.store.segments.num_transitions)
            assert life.counters.get("in_buffer", 0) == 0, "all that it held counts as lost"
            assert life.env_steps == life.store.segments.env_steps, "nothing is gathered twice"
            disk = path.read_bytes()
            for _ in range(rng.randint(40, 80)):
                if life.work() and rng.random() < 0.3:
                    life.save()
                if rng.random() < 0.2:
                    life.store.write_back()
                    disk = path.read_bytes()
            life.check()
            held.append(life.store.segments.num_transitions)
        newest = path.read_bytes()
        parts = [rng.choice((disk, newest))[start : start + 256] for start in range(0, len(disk), 256)]
        path.with_suffix(".disk").write_bytes(b"".join(parts))
        path.with_suffix(".disk").replace(path)
    assert all(now <= before for now, before in zip(found, held, strict=False))
    assert 0 < sum(found) < sum(held[:-1])


def saved(run: Run) -> dict[str, int]:
    assert run.state is not None
    counters: dict[str, int] = run.state.values["ledgers"][0]["counters"]
    return counters


def after_training(run: Run) -> dict[str, int]:
    with run.live() as life:
        while life.env_steps < 200:
            life.work()
        life.end(run_ended=False)
        return life.counters


def test_an_interrupted_run_goes_on_with_all_that_it_held(tmp_path: Path) -> None:
    run = Run(tmp_path)
    before = after_training(run)
    assert before["in_buffer"] > 0
    with run.live() as life:
        assert life.counters == before
        life.check()


def test_a_pod_that_ends_drops_what_it_held(tmp_path: Path) -> None:
    run = Run(tmp_path, placement=cluster_placement("uid", "host", state_folder=str(tmp_path)))
    before = after_training(run)
    assert "in_buffer" not in before
    assert before["dropped.end_of_run"] > 0
    with run.live() as life:
        life.check()
        assert life.store.file.why_empty == "no store was left"
        assert life.counters == before


@pytest.mark.parametrize("name", ["ledger/trainer-0.page", "replay/trainer-0.store"])
def test_a_store_without_its_ledger_page_is_not_used_nor_the_reverse(name: str, tmp_path: Path) -> None:
    run = Run(tmp_path)
    before = after_training(run)
    (tmp_path / name).unlink()
    with run.live() as life:
        assert life.store.file.why_empty is not None
        assert life.store.segments.num_transitions == 0
        in_buffer = before.pop("in_buffer")
        assert life.counters == {**before, "lost.receiver_died": in_buffer}
        assert life.store.segments.env_steps == life.env_steps
        life.work()


def test_a_store_that_holds_more_than_the_ledger_counts_is_given_up(tmp_path: Path) -> None:
    run = Run(tmp_path)
    before = after_training(run)
    with LedgerPage.open(tmp_path / "ledger" / "trainer-0.page", "trainer", 0) as page:
        page.update(in_buffer=-10, **{"dropped.stale": 10})
    for _ in range(2):
        with run.live() as life:
            assert life.counters["trained"] == before["trained"]
            assert life.counters["lost.receiver_died"] == before["in_buffer"] - 10
            life.check()
            assert life.store.segments.num_transitions == 0


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("name", ["posix_fallocate", "mmap"])
def test_a_store_that_cannot_be_opened_is_left_as_it_was(
    name: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    failing = (
        ("os.posix_fallocate", fail)
        if name == "posix_fallocate"
        else ("rlsrl.buffers.replay.store_file.mmap", SimpleNamespace(mmap=fail))
    )
    run, path = Run(tmp_path), tmp_path / "replay" / "trainer-0.store"
    expected = (
        rf"capacity: 120 transitions x \d+ bytes = .*, and the file cannot be made at {path}: {os.strerror(number)}"
    )
    monkeypatch.setattr(*failing)
    with pytest.raises(ConfigurationError, match=expected), run.live():
        pass
    assert not path.exists(), "there was none"
    monkeypatch.undo()
    before = after_training(run)
    monkeypatch.setattr(*failing)
    with pytest.raises(ConfigurationError, match=expected), run.live():
        pass
    monkeypatch.undo()
    with run.live() as life:
        assert life.counters == before
        life.check()
