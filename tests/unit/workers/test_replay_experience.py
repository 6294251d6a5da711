"""What the experience of a replay store counts, when it grants credits and returns batches, which threads it wakes."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from rlsrl.algorithms.learner import StepResult
from rlsrl.buffers.replay.draws import PrioritizedDraws, UniformDraws
from rlsrl.buffers.replay.layout import MARK, ReplayLayout
from rlsrl.buffers.replay.ratio import Pace, RatioLimiter
from rlsrl.buffers.replay.rows import IMPORTANCE, RowForm, rows_of
from rlsrl.data.episodes import EndedEpisodes
from rlsrl.data.version import Version
from rlsrl.runtime.errors import ConfigurationError
from rlsrl.runtime.metrics import Metrics
from rlsrl.testing.replay import LedgerTerms, SlotSource, empty_replay_store
from rlsrl.testing.waiting import DEADLINE_SECONDS
from rlsrl.workers.experience import TrainingBatch
from rlsrl.workers.progress import Progress, StopConditions
from rlsrl.workers.replay_experience import ReplayBatch, ReplayExperience
from rlsrl.workers.replay_store import Drawing, LocalStore

STEPS, LANES = 5, 2
UPDATES, ROWS = 3, 4
FORM = RowForm(num_steps=2, discount=0.9)


ENDLESS = StopConditions(episodes=3, return_mean=None, env_steps=None, train_steps=None, wall_seconds=None)


class Bench:
    """The test acts as the main thread, the training thread and the actors."""

    def __init__(
        self,
        folder: Path,
        *,
        ratio: float = 0.5,
        start: int = 20,
        capacity: int = 60,
        lanes_in_turn: int | None = None,
        by_priority: bool = False,
        num_ranks: int = 1,
    ) -> None:
        self.source = SlotSource(num_steps=STEPS, num_lanes=LANES)
        store = empty_replay_store(
            folder, ReplayLayout.of(self.source.layout, capacity=capacity, has_priorities=by_priority)
        )
        self.segments = store.segments
        self.ledger = LedgerTerms()
        drawing = Drawing(updates=UPDATES, minibatch_rows=ROWS, by_priority=by_priority)
        draws = (
            PrioritizedDraws(self.segments, exponent=1.0, offset=1e-9) if by_priority else UniformDraws(self.segments)
        )
        self.folder = folder
        self.metrics = Metrics(CollectorRegistry())
        self.store = LocalStore(
            store, draws=draws, form=FORM, drawing=drawing, ledger=self.ledger, metrics=self.metrics
        )
        self.granted: list[tuple[int, Version, int]] = []
        self.inserted = 0
        self.episodes: list[EndedEpisodes] = []
        self.experience = ReplayExperience(
            store=self.store,
            limiter=RatioLimiter(
                Pace(
                    updates_per_env_step=ratio,
                    bound=UPDATES + 2 * STEPS * LANES * ratio,
                    most_lanes=LANES,
                    lanes_in_turn=lanes_in_turn,
                ),
                start=start,
                updates_per_step=UPDATES,
                steps_per_lane=STEPS,
            ),
            drawing=drawing,
            grant=lambda *arguments: self.granted.append(arguments),
            ledger=self.ledger,
            metrics=self.metrics,
            num_ranks=num_ranks,
        )
        self.step = 0
        self.without_rows: list[TrainingBatch] = []
        self.experience.grant(Version(1, 0))

    @property
    def lanes_left(self) -> int:
        return sum(lanes for lanes, _, _ in self.granted) - LANES * len(self.episodes)

    def held(self) -> list[int]:
        """The keys of all transitions that are held."""
        place, step = np.nonzero(self.segments.arrays["mask"] & (self.segments.arrays[MARK] > 0)[:, None])
        keys: list[int] = ((self.segments.arrays[MARK][place] - 1) * STEPS + step).tolist()
        return keys

    def gather(self, version: Version | None = None) -> None:
        slot = self.source.slot()
        slot.arrays["version_attempt"][:], slot.arrays["version_step"][:] = version or (1, self.step)
        self.inserted += int(slot.arrays["mask"].sum())
        self.episodes.append(EndedEpisodes.of(slot.arrays))
        self.experience.receive([slot], oldest_outstanding=None)

    def train(self, taken: tuple[bool, ...] = (True,) * UPDATES) -> ReplayBatch | None:
        batch = self.experience.next_batch(timeout=0)
        if batch is None:
            return None
        if not batch.num_transitions:
            self.experience.passed(batch)
            self.without_rows.append(batch)
            return None
        batch = completed(self.experience, batch)
        self.step += 1
        self.experience.trained(batch, result_of(self.step, taken))
        self.experience.grant(Version(1, self.step))
        return batch


def sample(metrics: Metrics, name: str, **labels: str) -> float | None:
    """Return the value of a metric; None: it was never set."""
    return metrics.registry.get_sample_value(f"rlsrl_{name}", labels)


@pytest.fixture
def make_bench(tmp_path: Path) -> Callable[..., Bench]:
    return partial(Bench, tmp_path)


def completed(experience: ReplayExperience, *batches: TrainingBatch | None) -> ReplayBatch:
    """Return the first batch as it is trained beside those of further ranks."""
    of_ranks = [experience.shared(batch) for batch in batches if batch is not None]
    assert batches[0] is not None
    whole = experience.completed(batches[0], json.loads(json.dumps(of_ranks)))
    assert isinstance(whole, ReplayBatch)
    return whole


def result_of(step: int, taken: tuple[bool, ...]) -> StepResult:
    """Return the result of a step whose schedule is the reverse of the draws' order."""
    minibatches = np.arange(UPDATES * ROWS)[::-1].reshape(UPDATES, ROWS)
    return StepResult(
        step=step,
        optimizer_steps=0,
        taken=taken,
        num_transitions=UPDATES * ROWS,
        num_untrained=0,
        trained_rows=None if all(taken) else np.sort(minibatches[np.array(taken)].reshape(-1)),
        metrics={},
    )


def test_another_number_of_minibatches_is_refused(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()
    for _ in range(4):
        bench.gather()
    with pytest.raises(ConfigurationError, match="has 2 minibatches for 12 rows; with replay it needs 3 of 4"):
        bench.train((True, True))


def test_every_transition_is_counted_once_whatever_becomes_of_it(make_bench: Callable[..., Bench]) -> None:
    bench, rng = make_bench(), np.random.default_rng(3)
    env_steps, returns, updates = 0, 0, 0
    for _ in range(300):
        if bench.lanes_left >= LANES and rng.random() < 0.7:
            bench.gather()
        elif (batch := bench.train((True, rng.random() < 0.8, True))) is not None:
            env_steps += batch.env_steps
            returns += len(batch.episodes.returns)
            updates += UPDATES
        held = bench.inserted - sum(bench.ledger.terms.values())
        assert bench.segments.count_untrained() == held
    assert min(bench.ledger.terms[term] for term in ("trained", "evicted")) > 100
    while (batch := bench.train()) is not None:
        env_steps += batch.env_steps
        returns += len(batch.episodes.returns)
        updates += UPDATES
    assert 0 <= (bench.inserted - 20) * 0.5 - updates < UPDATES
    env_steps += sum(each.env_steps for each in bench.without_rows)
    returns += sum(len(each.episodes.returns) for each in bench.without_rows)
    assert env_steps == bench.inserted
    assert returns == sum(len(each.returns) for each in bench.episodes)
    bench.experience.close()
    bench.experience.give_up(run_ended=True)
    assert sum(bench.ledger.terms.values()) == bench.inserted
    assert bench.train() is None


def test_a_batch_has_the_rows_of_its_keys(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()
    for _ in range(4):
        bench.gather()
    batch = bench.train()
    assert batch is not None
    assert batch.num_transitions == len(batch.rows.keys) == UPDATES * ROWS
    expected = rows_of(bench.segments, batch.rows.keys, FORM)
    assert batch.arrays.keys() == {*expected, IMPORTANCE}
    np.testing.assert_array_equal(batch.arrays[IMPORTANCE], 1.0)
    for name, array in expected.items():
        np.testing.assert_array_equal(batch.arrays[name], array)


def test_draws_by_priority_follow_the_errors_of_rows_and_say_how_to_correct_them(tmp_path: Path) -> None:
    bench = Bench(tmp_path, by_priority=True)
    for _ in range(4):
        bench.gather()
    first = completed(bench.experience, bench.experience.next_batch(timeout=0))
    np.testing.assert_array_equal(first.arrays[IMPORTANCE], 1.0)
    errors = np.full(UPDATES * ROWS, np.nan, np.float32)
    errors[:-1] = 0.25
    errors[0] = 3.0
    bench.experience.trained(first, replace(result_of(1, (True,) * UPDATES), errors=errors))
    bench.experience.grant(Version(1, 1))
    known = {int(key): float(error) for key, error in zip(first.rows.keys[:-1], errors[:-1], strict=True)}
    place = {int(key): known.get(int(key), 1.0) for key in bench.held()}
    total = sum(place.values())
    second = completed(bench.experience, bench.experience.next_batch(timeout=0))
    expected = np.array([total / place[int(key)] for key in second.rows.keys]).reshape(UPDATES, ROWS)
    expected /= expected.max(axis=1, keepdims=True)
    np.testing.assert_allclose(second.arrays[IMPORTANCE], expected.reshape(-1), rtol=1e-4)
    with pytest.raises(ConfigurationError, match="is to draw by priority, and no loss has 'errors'"):
        bench.experience.trained(second, result_of(2, (True,) * UPDATES))


def test_transitions_of_skipped_minibatches_stay_untrained(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()
    for _ in range(4):
        bench.gather()
    batch = bench.train((False, False, True))
    assert batch is not None
    assert bench.ledger.terms["trained"] == len(set(batch.rows.keys[:ROWS].tolist()))
    assert bench.segments.count_untrained() == bench.inserted - bench.ledger.terms["trained"]


def test_gathering_begins_alone_then_both_go_on_at_the_ratio(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(ratio=0.5, start=20)
    assert bench.train() is None
    while bench.lanes_left >= LANES:
        bench.gather()
    assert bench.inserted >= 20
    assert all(version == Version(1, 0) for _, version, _ in bench.granted)
    before = bench.lanes_left
    assert bench.train() is not None
    assert bench.lanes_left > before
    assert bench.granted[-1][1] == Version(1, 1)
    assert bench.experience.state_dict()["updates"] == UPDATES


def test_the_policy_lag_is_that_of_the_slots_that_have_arrived(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(ratio=0.3, start=10)
    bench.step = 3
    bench.experience.grant(Version(1, 3))
    for version in (Version(1, 3), Version(1, 2), Version(0, 400), Version(1, 3)):
        bench.gather(version)
    first, second = bench.train(), bench.train()
    assert first is not None
    assert first.oldest_version == Version(1, 2)
    assert second is not None
    assert (second.oldest_version, second.env_steps, second.episodes.returns) == (Version(1, 4), 0, []), "none arrived"


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_in_turn_slots_are_stored_together_in_the_order_of_their_credits(
    order: tuple[int, ...], make_bench: Callable[..., Bench]
) -> None:
    bench = make_bench(ratio=0.5, start=6, lanes_in_turn=3 * LANES)
    assert bench.lanes_left == 3 * LANES
    slots = [bench.source.slot() for _ in order]
    for credit, slot in enumerate(slots):
        slot.credit = credit
        slot.arrays["version_attempt"][:], slot.arrays["version_step"][:] = (1, 0)
    expected = [slot.arrays["observation"].copy() for slot in slots]
    for place, number in enumerate(order):
        assert bench.experience.next_batch(timeout=0) is None
        bench.experience.receive([slots[number]], oldest_outstanding=None)
        slots[number].arrays["observation"][...] = 0  # the slot is released
        bench.experience.grant(Version(1, 0))
        assert (len(bench.granted), bench.segments.next_number) == ((1, 0) if place < 2 else (1, 3 * LANES))
    for credit, observation in enumerate(expected):
        stored = bench.segments.arrays["observation"][credit * LANES : (credit + 1) * LANES]
        np.testing.assert_array_equal(stored, observation.swapaxes(0, 1))
    steps = 0
    while (batch := bench.train()) is not None:
        steps += 1
        assert batch.env_steps == (bench.segments.env_steps if steps == 1 else 0)
        assert (len(bench.granted) == 2) == (not bench.experience.is_behind), "granted again once all is trained"
    assert steps >= 2


def test_a_turn_that_is_not_complete_is_kept_with_the_store(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(lanes_in_turn=2 * LANES)
    bench.gather()
    assert bench.segments.num_transitions == 0
    bench.experience.close()
    bench.experience.give_up(run_ended=False)
    assert bench.segments.count_untrained() == bench.inserted
    assert bench.ledger.terms.total() == 0


def test_draws_depend_on_seed_and_step_alone(make_bench: Callable[..., Bench]) -> None:
    drawn = []
    for _ in range(2):
        bench = make_bench(ratio=0.5, start=20)
        while not bench.experience.is_behind:
            bench.gather()
        batch = bench.experience.next_batch(timeout=0)
        assert isinstance(batch, ReplayBatch)
        drawn.append(batch.rows.keys)
        bench.step = 1
        bench.experience.grant(Version(1, 1))
        again = bench.experience.next_batch(timeout=0)
        assert isinstance(again, ReplayBatch)
        assert not np.array_equal(again.rows.keys, batch.rows.keys)
    np.testing.assert_array_equal(*drawn)


def test_another_pace_counts_from_now_on(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(ratio=0.5, start=20)
    while bench.inserted < 50:
        bench.gather()
    stored, due = bench.inserted, (bench.inserted - 20) * 0.5
    assert "replay_age" not in bench.experience.figures()
    bench.train()
    figures = bench.experience.figures()
    assert figures["train_steps_behind"] == due - UPDATES
    assert figures["replay_transitions"] == bench.segments.num_transitions
    assert 0 < figures["replay_age"] < stored
    bench.experience.tune(Pace(updates_per_env_step=2.0, bound=1.0, most_lanes=LANES))
    assert bench.experience.figures()["train_steps_behind"] == due - UPDATES
    assert bench.experience.figures()["train_steps_behind_limit"] == UPDATES + 2.0 * STEPS * LANES, (
        "else both could wait"
    )
    bench.gather()
    behind = due - UPDATES + 2.0 * (bench.inserted - stored)
    assert bench.experience.figures()["train_steps_behind"] == behind
    bench.experience.tune(Pace(updates_per_env_step=0.1, bound=1000.0, most_lanes=LANES))
    assert bench.experience.figures() == {**bench.experience.figures(), "train_steps_behind_limit": 1000.0}


def test_a_store_shows_what_it_holds_draws_and_evicts(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(ratio=0.5, start=20, capacity=60)
    shown = partial(sample, bench.metrics)
    empty = {"replay_transitions": 0, "replay_capacity_transitions": 60, "replay_drawn_total": None}
    assert {name: shown(name) for name in empty} == empty
    assert shown("replay_bytes") == sum(each.stat().st_size for each in bench.folder.glob("*.store"))
    num_drawn = 0
    while bench.inserted < 200:
        bench.gather()
        if (batch := bench.train()) is not None:
            num_drawn += len(batch.rows.keys)
            assert shown("replay_age_steps") == batch.rows.mean_age
    assert shown("replay_drawn_total") == num_drawn
    assert shown("replay_transitions") == bench.segments.num_transitions == len(bench.held())
    assert shown("replay_evicted_total", outcome="untrained") == bench.ledger.terms["evicted"]
    trained = bench.inserted - bench.segments.num_transitions - bench.ledger.terms["evicted"]
    assert shown("replay_evicted_total", outcome="trained") == trained > 0


def test_a_rank_shows_its_pace_and_what_is_missing_until_training_begins(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(ratio=0.5, start=20, num_ranks=2)
    shown = partial(sample, bench.metrics)
    assert (shown("replay_start_missing_transitions"), shown("replay_ratio_wanted")) == (20, 0.25)
    bench.gather()
    assert shown("replay_start_missing_transitions") == 20 - bench.inserted > 0
    while bench.inserted < 40:
        bench.gather()
    assert shown("replay_start_missing_transitions") == 0
    assert shown("train_steps_behind") == (bench.inserted - 20) * 0.5
    assert bench.train() is not None
    assert shown("train_steps_behind") == (bench.inserted - 20) * 0.5 - UPDATES
    bench.experience.tune(Pace(updates_per_env_step=1.0, bound=70.0, most_lanes=LANES))
    assert (shown("replay_ratio_wanted"), shown("train_steps_behind_limit")) == (0.5, 70)


def test_what_arrives_while_training_must_wait_comes_without_rows(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(ratio=0.3, start=100)
    assert bench.experience.next_batch(timeout=0) is None
    bench.gather()
    bench.gather()
    batch = bench.experience.next_batch(timeout=0)
    assert batch is not None
    assert (batch.num_transitions, batch.env_steps) == (0, bench.inserted)
    assert len(batch.episodes.returns) == sum(len(each.returns) for each in bench.episodes)
    bench.experience.passed(batch)
    assert bench.experience.next_batch(timeout=0) is None
    assert not bench.ledger.terms["trained"]


@pytest.mark.parametrize(("stop", "end"), [({"env_steps": 60}, 60), ({"train_steps": 5}, 20 + 5 * UPDATES * 2)])
def test_a_run_gathers_no_more_than_it_needs_and_trains_all_that_is_due(
    stop: dict[str, int], end: int, make_bench: Callable[..., Bench]
) -> None:
    bench, progress = make_bench(ratio=0.5, start=20), Progress(episodes=3)
    never = dict.fromkeys(("return_mean", "env_steps", "train_steps", "wall_seconds"))
    conditions = StopConditions(episodes=3, **{**never, **stop})
    while True:
        bench.experience.expect(progress, conditions)
        is_complete = bench.experience.grant(Version(1, bench.step))
        _, _, room = bench.granted[-1]
        if bench.lanes_left + room >= LANES:
            bench.gather()
        elif (batch := bench.train()) is not None:
            progress.gathered(batch.episodes, env_steps=batch.env_steps)
            progress.trained(seconds=0.0, minibatches=UPDATES, skipped=0)
        else:
            break
    assert is_complete
    assert not bench.experience.is_behind
    assert end <= bench.inserted < end + STEPS * LANES
    assert 0 <= (bench.inserted - 20) * 0.5 - progress.minibatches < UPDATES


@pytest.mark.parametrize("by_priority", [False, True])
def test_importance_counts_the_rows_of_all_ranks_whatever_each_has_stored(by_priority: bool, tmp_path: Path) -> None:
    ranks = []
    for rank, slots in enumerate((4, 6)):
        (tmp_path / str(rank)).mkdir()
        ranks.append(bench := Bench(tmp_path / str(rank), by_priority=by_priority, num_ranks=2))
        for _ in range(slots):
            bench.gather()
        if by_priority:
            errors = np.random.default_rng(rank).uniform(0.1, 9.0, len(bench.held())).astype(np.float32)
            bench.store.draws.settle(np.array(bench.held()), errors)
    batches = [bench.experience.next_batch(timeout=0) for bench in ranks]
    found = [completed(ranks[own].experience, batches[own], batches[1 - own]) for own in range(2)]
    held = [len(bench.held()) for bench in ranks]
    assert held[0] < held[1]
    for update in range(UPDATES):
        part = slice(update * ROWS, (update + 1) * ROWS)
        ratios = []
        for number, bench, batch in zip(held, ranks, found, strict=True):
            draws: Any = bench.store.draws
            for key in batch.rows.keys[part].tolist():
                share = 1 / number
                if by_priority:
                    place = key % bench.segments.layout.num_places
                    share = draws._tree[np.array([place])][0] / draws._tree.total
                # A row of all would be drawn with 1 / sum(held); half of a minibatch is drawn from this rank's.
                ratios.append(2 * number / sum(held) * (1 / (number * share)))
        expected = [ratio / max(ratios) for ratio in ratios]
        of_both = np.concatenate([batch.arrays[IMPORTANCE][part] for batch in found])
        np.testing.assert_allclose(of_both, expected, rtol=1e-6)
        assert of_both.max() == 1.0


def test_a_batch_that_no_rank_trained_on_comes_again_with_the_same_rows(make_bench: Callable[..., Bench]) -> None:
    """As on a rank whose training is due while that of another one is not."""
    bench = make_bench(num_ranks=2)
    for _ in range(4):
        bench.gather()
    first = bench.experience.next_batch(timeout=0)
    assert isinstance(first, ReplayBatch)
    without_rows = TrainingBatch(
        arrays={}, num_transitions=0, oldest_version=first.oldest_version, env_steps=0, episodes=first.episodes
    )
    of_ranks = [bench.experience.shared(batch) for batch in (first, without_rows)]
    assert bench.experience.completed(first, of_ranks) is None
    bench.experience.passed(first)
    again = bench.experience.next_batch(timeout=0)
    assert isinstance(again, ReplayBatch)
    np.testing.assert_array_equal(again.rows.keys, first.rows.keys)
    assert (first.env_steps, again.env_steps, again.episodes.returns) == (bench.inserted, 0, [])
    assert bench.experience.state_dict()["stored"] == bench.inserted
    assert bench.experience.state_dict()["updates"] == 0
    assert bench.ledger.terms.total() == 0


def test_a_rank_counts_its_own_env_steps_and_gathers_its_part_of_what_is_left(make_bench: Callable[..., Bench]) -> None:
    bench, progress = make_bench(ratio=0.1, start=0, num_ranks=2), Progress(episodes=3)
    never = dict.fromkeys(("return_mean", "train_steps", "wall_seconds"))
    stop = StopConditions(episodes=3, env_steps=100, **never)
    counted, others = 0, 7  # the other rank is ahead by so many
    while progress.env_steps < 100:
        bench.experience.expect(progress, stop)
        bench.experience.grant(Version(1, bench.step))
        assert bench.lanes_left > 0, "the run is not at its end"
        bench.gather()
        assert bench.experience.state_dict()["stored"] == counted, "what has arrived is not in the progress yet"
        batch = bench.experience.next_batch(timeout=0)
        assert batch is not None
        bench.experience.passed(batch)
        counted += batch.env_steps
        progress.gathered(batch.episodes, env_steps=2 * batch.env_steps + others)
        others = 0
    assert bench.experience.state_dict()["stored"] == bench.inserted == bench.segments.env_steps
    assert (100 - 7) / 2 <= bench.inserted < (100 - 7) / 2 + 2 * STEPS * LANES


def test_in_turn_a_rank_of_several_gathers_again_only_after_all_is_counted(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(start=1000, capacity=2000, lanes_in_turn=2 * LANES, num_ranks=2)
    bench.gather()
    bench.gather()
    assert bench.lanes_left == 0
    bench.experience.grant(Version(1, 0))
    assert bench.lanes_left == 0, "the end of the run depends on what the other rank has gathered"
    batch = bench.experience.next_batch(timeout=0)
    assert batch is not None
    bench.experience.passed(batch)
    bench.experience.grant(Version(1, 0))
    assert bench.lanes_left == 0, "the end is not set yet"
    bench.experience.expect(Progress(episodes=3), ENDLESS)
    bench.experience.grant(Version(1, 0))
    assert bench.lanes_left == 2 * LANES


def test_in_turn_a_rank_of_several_gathers_after_a_step_only_once_the_end_is_set(
    make_bench: Callable[..., Bench],
) -> None:
    bench = make_bench(ratio=0.2, start=0, lanes_in_turn=2 * LANES, num_ranks=2, capacity=400)
    bench.gather()
    bench.gather()
    batch = bench.train()
    assert batch is not None
    assert bench.lanes_left == 0, "what the other rank has counted may move the end"
    progress = Progress(episodes=3)
    progress.gathered(batch.episodes, env_steps=batch.env_steps + 6)
    bench.experience.expect(progress, replace(ENDLESS, env_steps=progress.env_steps + 2 * STEPS))
    bench.experience.grant(Version(1, bench.step))
    assert bench.lanes_left == 1, "a half of what is left"


@pytest.mark.parametrize("what", ["slots", "close"])
def test_a_waiting_thread_is_woken(what: str, make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(ratio=1.0, start=1)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(bench.experience.next_batch(timeout=DEADLINE_SECONDS)))
    thread.start()
    if what == "slots":
        bench.gather()
    else:
        bench.experience.close()
    thread.join(DEADLINE_SECONDS / 2)
    assert not thread.is_alive()
    assert (found[0] is not None) == (what == "slots")
