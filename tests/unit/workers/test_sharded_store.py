"""A rank's store in shards: what is drawn, counted and repeated while shards and ranks come and go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from rlsrl.algorithms.learner import StepResult
from rlsrl.buffers.replay.draws import PrioritizedDraws
from rlsrl.buffers.replay.layout import ReplayLayout
from rlsrl.buffers.replay.ratio import Pace, RatioLimiter
from rlsrl.buffers.replay.rows import RowForm, rows_of
from rlsrl.buffers.replay.segments import Segments
from rlsrl.buffers.replay.store_file import StoreFile
from rlsrl.data.slots import Slot
from rlsrl.data.specs import ArraySpec
from rlsrl.data.version import Version
from rlsrl.rpc.codec import Malformed
from rlsrl.runtime.ledger import Held, TrainerLedger, balance
from rlsrl.runtime.metrics import Metrics
from rlsrl.streams.grpc_replay.messages import DrawRequest, Grant, ReplayCodec, Settle, Stored
from rlsrl.testing.contexts import make_context
from rlsrl.testing.replay import LinkedShards, SlotSource
from rlsrl.testing.replay_draws import LEAST_PROBABILITY, held_keys, p_value_of_ratios
from rlsrl.workers.replay_experience import ReplayBatch, ReplayExperience
from rlsrl.workers.replay_shard import LIFE_ENV_STEPS, ReplayShard
from rlsrl.workers.replay_store import Drawing
from rlsrl.workers.sharded_store import ShardedStore, known_shards
from rlsrl.workers.stored_transitions import OpenedStore, Settlement, StoredTransitions

STEPS, LANES = 5, 2
UPDATES, ROWS, RATIO = 3, 4, 0.5
FORM = RowForm(num_steps=2, discount=0.9)


def drawing_of(num_rows: int = ROWS, updates: int = UPDATES) -> Drawing:
    return Drawing(updates=updates, minibatch_rows=num_rows, by_priority=True, seed=7)


def codec_of(layout: ReplayLayout) -> ReplayCodec:
    segments = Segments(layout, bytearray(layout.nbytes))
    rows = rows_of(segments, np.zeros(0, np.int64), FORM)
    return ReplayCodec({name: ArraySpec(shape=each.shape[1:], dtype=each.dtype.name) for name, each in rows.items()}, 7)


class Node:
    """What outlives a shard's process: its file, its page and its actor."""

    def __init__(self, folder: Path, index: int, *, capacity: int = 60) -> None:
        self.index = index
        self.source = SlotSource(num_steps=STEPS, num_lanes=LANES, seed=index, index=index)
        self.layout = ReplayLayout.of(self.source.layout, capacity=capacity, has_priorities=True)
        self.codec = codec_of(self.layout)
        self.grants: list[int] = []
        self.produced = 0
        self._folder = folder
        self._lives = 0

    def begin(self, resources: ExitStack) -> None:
        """Begin a life of the shard. ``resources`` ends it, as a kill does."""
        self._lives += 1
        context = make_context("buffer", self._folder, index=self.index, incarnation=self._lives)
        self.ledger = TrainerLedger(resources.enter_context(context.open_ledger_page()))
        file = StoreFile.open(
            self._folder / f"{self.index}.store",
            self.layout,
            former=self.ledger.former_life(None),
            owner=self._lives,
        )
        self.segments = Segments(self.layout, file.content, env_steps=self._lives * LIFE_ENV_STEPS)
        held = Held(untrained=self.segments.count_untrained(), trained_since=0)
        self.ledger.resume(self.ledger.snapshot(), incarnation=self._lives, held=held, keeps=True)
        opened = OpenedStore(segments=self.segments, file=file, outlives=True, step=0, env_steps=0)
        draws = PrioritizedDraws(self.segments, exponent=1.0, offset=1e-3)
        self.metrics = context.metrics
        self.store = StoredTransitions(opened, draws=draws, form=FORM, ledger=self.ledger, metrics=self.metrics)
        self.shard = ReplayShard(
            self.store,
            index=self.index,
            codec=self.codec,
            ledger=self.ledger,
            grant=lambda lanes, version, room: self.grants.append(lanes),
        )

    def slot(self) -> Slot:
        slot = self.source.slot()
        slot.arrays["version_attempt"][:], slot.arrays["version_step"][:] = (1, 0)
        assert slot.producer is not None
        self.produced += slot.num_transitions
        self.ledger.take(slot.producer, slot.sequence, slot.num_transitions, self.produced)
        return slot

    @property
    def counters(self) -> dict[str, int]:
        return {term: count for term, count in self.ledger.snapshot()["counters"].items() if count}

    def check(self) -> None:
        """Compare the ledger with the store and with what was taken."""
        assert sum(self.counters.values()) == self.produced, self.counters
        assert self.counters.get("in_buffer", 0) == self.segments.count_untrained()


class Rank:
    """A life of a rank, whose shards are in this process."""

    def __init__(
        self,
        *nodes: Node,
        state: dict[str, Any] | None = None,
        step: int = 0,
        drawing: Drawing,
        late: Sequence[Node] = (),
    ) -> None:
        """Connect all of its shards but those that are ``late``."""
        self.link = LinkedShards(nodes[0].codec)
        self.metrics = Metrics(CollectorRegistry())
        self.store = ShardedStore(
            self.link,
            codec=nodes[0].codec,
            drawing=drawing,
            indices=[node.index for node in nodes],
            lanes_per_slot=LANES,
            step=step,
            state=state,
            metrics=self.metrics,
        )
        self.arrived: Counter[str] = Counter()
        for node in nodes:
            if node not in late:
                self.link.connect(node.index, node.shard)
        self.insert()

    def insert(self) -> None:
        for arrival in self.store.insert([]):
            self.arrived.update(env_steps=arrival.env_steps, lanes=arrival.lanes, fresh=arrival.fresh)
            self.arrived.update(episodes=len(arrival.episodes.returns))

    def post(self, node: Node) -> None:
        self.link.post(node.index, node.slot())
        self.insert()

    def train(self, step: int) -> None:
        assert self.has_rows(step - 1)
        rows = self.store.draw(step - 1)
        errors = np.random.default_rng(step).standard_normal(len(rows.keys)).astype(np.float32)
        self.store.settle(Settlement(step=step, keys=rows.keys, trained_rows=None, errors=errors))
        self.insert()

    def has_rows(self, step: int) -> bool:
        """Request rows, unless they were, and return whether they have come."""
        for _ in range(2):  # after a death they are requested once more
            self.store.is_ready(step)
            self.insert()
        return self.store.is_ready(step)


@pytest.fixture
def lives() -> Iterator[ExitStack]:
    with ExitStack() as resources:
        yield resources


@pytest.fixture
def make_nodes(tmp_path: Path, lives: ExitStack) -> Callable[..., list[Node]]:
    def make(number: int = 2, **settings: Any) -> list[Node]:
        nodes = [Node(tmp_path, index, **settings) for index in range(number)]
        for node in nodes:
            node.begin(lives)
        return nodes

    return make


def items_and_shares(store: ShardedStore, nodes: list[Node], step: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the items drawn for a step, numbered over all nodes, their shares, and the number of items."""
    rows = store.draw(step)
    shards = store._draws[step].allotment.shards
    items, first = np.zeros(len(rows.keys), np.int64), 0
    for node in nodes:
        keys = held_keys(node.segments)
        items[shards == node.index] = first + np.searchsorted(keys, rows.keys[shards == node.index])
        expected = rows_of(node.segments, rows.keys[shards == node.index], FORM)
        for name, array in expected.items():
            np.testing.assert_array_equal(rows.arrays[name][shards == node.index], array)
        first += len(keys)
    return items, rows.share, first


@pytest.mark.parametrize("dies", ["never", "before", "between"])
def test_rows_of_shards_are_drawn_as_their_shares_say(dies: str, make_nodes: Callable[..., list[Node]]) -> None:
    nodes = make_nodes(3)
    rank = Rank(*nodes, drawing=drawing_of(6000, 10))
    for node, slots in zip(nodes, (1, 5, 3), strict=True):
        for _ in range(slots):
            rank.post(node)
        errors = np.random.default_rng(node.index).uniform(0.2, 1.0, node.store.num_transitions) * 3.0**node.index
        node.store.draws.settle(held_keys(node.segments), errors.astype(np.float32))
    rank.link.is_held = dies == "between"
    if dies == "before":
        rank.link.cut(1)
        rank.insert()
    assert rank.has_rows(0) is (dies != "between")
    if dies == "between":
        rank.link.cut(1)
        rank.link.is_held = False
        rank.link.deliver()
    assert rank.has_rows(0)
    if dies != "never":
        nodes.pop(1)
    items, share, number = items_and_shares(rank.store, nodes, 0)
    assert p_value_of_ratios(items, 1.0 / (number * share), number) > LEAST_PROBABILITY
    assert p_value_of_ratios(items, np.ones(len(items)), number) < LEAST_PROBABILITY


def test_rows_of_the_next_step_are_on_their_way_while_one_trains(make_nodes: Callable[..., list[Node]]) -> None:
    nodes = make_nodes()
    rank = Rank(*nodes, drawing=drawing_of())
    for node in nodes:
        rank.post(node)
    assert rank.has_rows(0)
    rows = rank.store.draw(0)
    assert {each.step for each in rank.link.requests if isinstance(each, DrawRequest)} == {0, 1}
    assert rank.has_rows(1)
    again = rank.store.draw(0)
    np.testing.assert_array_equal(rows.keys, again.keys)


def test_a_shard_that_connects_again_at_once_gives_its_rows(make_nodes: Callable[..., list[Node]]) -> None:
    nodes = make_nodes()
    rank = Rank(*nodes, drawing=drawing_of())
    for node in nodes:
        rank.post(node)
    rank.link.is_held = True
    assert not rank.has_rows(0)
    rank.link.cut(0)
    rank.link.connect(0, nodes[0].shard)
    rank.link.is_held = False
    rank.link.deliver()
    assert rank.has_rows(0)


def test_what_a_broken_connection_lost_is_counted_once(make_nodes: Callable[..., list[Node]]) -> None:
    nodes = make_nodes()
    rank = Rank(*nodes, drawing=drawing_of())
    rank.store.grant(6 * LANES, Version(1, 0), 0)
    assert [sum(node.grants) for node in nodes] == [3 * LANES, 3 * LANES]
    rank.post(nodes[0])
    rank.link.post(0, nodes[0].slot())  # and the rank does not hear of it
    rank.link.cut(0)
    rank.insert()
    assert rank.arrived["lanes"] == 3 * LANES, "those of the lost connection come back, too"
    rank.link.connect(0, nodes[0].shard)
    rank.insert()
    assert rank.arrived["lanes"] == 2 * LANES, "but the actor has one slot still"
    assert rank.arrived["env_steps"] == rank.arrived["fresh"] == nodes[0].produced == rank.store.env_steps
    assert rank.arrived["lanes"] == 2 * LANES
    for _ in range(2):
        rank.link.cut(0)
        rank.link.connect(0, nodes[0].shard)
        rank.insert()
    assert rank.arrived["env_steps"] == rank.arrived["fresh"] == nodes[0].produced


def test_a_settlement_that_was_lost_is_sent_again_and_counts_once(make_nodes: Callable[..., list[Node]]) -> None:
    nodes = make_nodes()
    rank = Rank(*nodes, drawing=drawing_of())
    for node in nodes:
        rank.post(node)
    rank.train(1)
    trained = [node.counters["trained"] for node in nodes]
    assert rank.has_rows(1)
    rank.link.is_held = True
    rows = rank.store.draw(1)
    rank.store.settle(Settlement(step=2, keys=rows.keys, trained_rows=None, errors=None))
    rank.link.cut(0)
    rank.link.is_held = False
    rank.link.connect(0, nodes[0].shard)
    rank.link.deliver()
    rank.insert()
    settled = [each for each in rank.link.requests if isinstance(each, Settle) and each.step == 2]
    assert len(settled) == 3, "one for each shard, and one again"
    after = [node.counters["trained"] for node in nodes]
    assert all(more >= before for before, more in zip(trained, after, strict=True))
    assert after[0] > trained[0]
    again = [answer.num_trained for each in settled[::2] for answer in nodes[0].shard.answers(each)]
    assert again == [0, 0]
    assert [node.counters["trained"] for node in nodes] == after
    for node in nodes:
        node.check()


def test_draws_depend_on_seed_step_trial_and_shard(make_nodes: Callable[..., list[Node]]) -> None:
    nodes = make_nodes()
    slot = nodes[0].slot()
    for node in nodes:
        node.shard.insert([slot])

    def keys(node: Node, **changed: int) -> list[int]:
        request = DrawRequest(**{"step": 1, "trial": 0, "num_rows": 40, "seed": 5, **changed})
        return [int(key) for rows in node.shard.answers(request) for key in rows.arrays["key"]]  # type: ignore[attr-defined]

    assert keys(nodes[0]) == keys(nodes[0])
    others = [keys(nodes[1]), *(keys(nodes[0], **{name: 9}) for name in ("step", "trial", "seed"))]
    assert all(other != keys(nodes[0]) for other in others)


def test_rows_whose_update_was_skipped_stay_untrained_and_learn_no_error(
    make_nodes: Callable[..., list[Node]],
) -> None:
    nodes = make_nodes()
    rank = Rank(*nodes, drawing=drawing_of())
    for node in nodes:
        rank.post(node)
    assert rank.has_rows(0)
    rows, shards = rank.store.draw(0), rank.store._draws[0].allotment.shards
    masses = [node.store.draws.mass for node in nodes]
    trained_rows = np.array([0, 5, 6])
    rank.store.settle(Settlement(step=1, keys=rows.keys, trained_rows=trained_rows, errors=None))
    for node, mass in zip(nodes, masses, strict=True):
        keys = rows.keys[trained_rows][shards[trained_rows] == node.index]
        assert node.counters.get("trained", 0) == len(set(keys.tolist()))
        assert node.store.draws.mass == mass
        node.check()


def test_a_rank_that_goes_back_untrains_what_is_held_and_counts_the_rest_as_lost(
    make_nodes: Callable[..., list[Node]],
) -> None:
    nodes = make_nodes()
    rank = Rank(*nodes, drawing=drawing_of())
    for _ in range(2):
        for node in nodes:
            rank.post(node)
    rank.train(1)
    rank.train(2)
    state, at_checkpoint = rank.store.state_dict(), [node.counters["trained"] for node in nodes]
    for step in range(3, 30):
        rank.train(step)
        rank.post(nodes[step % 2])
    assert all(node.counters["dropped.evicted"] for node in nodes)
    resumed = Rank(*nodes, state=state, step=2, drawing=drawing_of())
    for node, trained in zip(nodes, at_checkpoint, strict=True):
        node.check()
        assert node.counters["trained"] == trained
        assert node.counters["lost.rolled_back"] > 0
        assert node.segments.count_trained_after(2) == 0
    assert resumed.store.env_steps == sum(node.produced for node in nodes)
    assert resumed.arrived["env_steps"] == resumed.store.env_steps - state["arrived"]
    assert resumed.arrived["fresh"] == resumed.store.num_transitions


def test_a_shard_that_returns_has_what_its_file_has(
    make_nodes: Callable[..., list[Node]], lives: ExitStack, tmp_path: Path
) -> None:
    nodes = make_nodes()
    rank = Rank(*nodes, drawing=drawing_of())
    for node in nodes:
        rank.post(node)
    rank.train(1)
    lives.close()
    before = nodes[0].counters
    (tmp_path / "1.store").unlink()
    for node in nodes:
        rank.link.cut(node.index)
        node.begin(lives)
        rank.link.connect(node.index, node.shard)
    rank.insert()
    assert nodes[0].counters == before
    assert nodes[1].counters["lost.receiver_died"] > 0
    assert rank.arrived["env_steps"] == sum(node.produced for node in nodes)
    assert rank.store.num_transitions == nodes[0].store.num_transitions
    rank.post(nodes[1])
    assert rank.arrived["env_steps"] == sum(node.produced for node in nodes)
    for node in nodes:
        node.check()


def test_each_shard_shows_its_own_store_and_the_rank_how_many_are_away(
    make_nodes: Callable[..., list[Node]], lives: ExitStack, tmp_path: Path
) -> None:
    nodes = make_nodes(3)
    late = nodes[2]
    rank = Rank(*nodes, drawing=drawing_of(), late=[late])

    def shown(metrics: Metrics, name: str) -> float | None:
        return metrics.registry.get_sample_value(f"rlsrl_replay_{name}")

    assert shown(rank.metrics, "shards_away") == 1
    rank.link.connect(late.index, late.shard)
    for node in nodes:
        rank.post(node)
    assert shown(rank.metrics, "shards_away") == 0
    rank.train(1)
    assert rank.has_rows(1)
    for node in nodes:
        assert shown(node.metrics, "transitions") == node.segments.num_transitions > 0
    drawn = [shown(node.metrics, "drawn_total") or 0 for node in nodes]
    requested = [each.num_rows for each in rank.link.requests if isinstance(each, DrawRequest)]
    assert sum(drawn) == sum(requested) == 2 * UPDATES * ROWS
    assert shown(rank.metrics, "transitions") is None, "a sum over all processes counts each store once"
    held = [node.segments.num_transitions for node in nodes]
    lives.close()
    (tmp_path / "1.store").unlink()
    for node in nodes:
        rank.link.cut(node.index)
    rank.insert()
    assert shown(rank.metrics, "shards_away") == 3
    for node in nodes:
        node.begin(lives)
    assert [shown(node.metrics, "transitions") for node in nodes] == [held[0], 0, held[2]]


def test_lanes_are_given_by_whole_slots_to_the_shard_with_the_fewest(make_nodes: Callable[..., list[Node]]) -> None:
    nodes = make_nodes()
    rank = Rank(*nodes, drawing=drawing_of())
    for lanes in (1, 1, 1):
        rank.store.grant(lanes, Version(1, 0), 0)
    assert [node.grants for node in nodes] == [[LANES], []]
    rank.store.grant(0, Version(1, 0), LANES - 1)
    assert [node.grants for node in nodes] == [[LANES], [LANES]], "the last slot of a run may be wider"
    rank.store.grant(2, Version(1, 3), 0)
    assert [sum(node.grants) for node in nodes] == [LANES, LANES], "one of these was given already"
    rank.post(nodes[1])
    rank.store.grant(1, Version(1, 3), 0)
    assert [sum(node.grants) for node in nodes] == [LANES, 2 * LANES]
    (last,) = [each for each in rank.link.requests if isinstance(each, Grant)][-1:]
    assert (last.attempt, last.step) == (1, 3)


def test_the_end_of_the_run_drops_what_was_never_trained(make_nodes: Callable[..., list[Node]], tmp_path: Path) -> None:
    nodes = make_nodes()
    rank = Rank(*nodes, drawing=drawing_of())
    for node in nodes:
        rank.post(node)
    rank.store.give_up(run_ended=False)
    assert all(node.counters["in_buffer"] for node in nodes)
    rank.store.give_up(run_ended=True)
    rank.post(nodes[0])
    for node in nodes:
        assert node.counters == {"dropped.end_of_run": node.produced}
        node.ledger.end()
    assert not [*tmp_path.glob("*.store")]


@pytest.mark.parametrize("seed", range(4))
def test_training_and_gathering_keep_pace_while_connections_break(
    seed: int, make_nodes: Callable[..., list[Node]]
) -> None:
    nodes, rng = make_nodes(3), np.random.default_rng(seed)
    drawing = drawing_of()
    rank = Rank(*nodes, drawing=drawing)
    experience = experience_of(rank)
    step = env_steps = idle = 0
    while step < 60:
        experience.grant(Version(1, step))
        experience.receive([], oldest_outstanding=None)
        batch = experience.next_batch(timeout=0)
        env_steps += 0 if batch is None else batch.env_steps
        if isinstance(batch, ReplayBatch):
            step += 1
            errors = rng.standard_normal(UPDATES * ROWS).astype(np.float32)
            experience.trained(batch, result_of(step, errors))
        elif batch is not None:
            experience.passed(batch)
        able = [node for node in nodes if node.shard._lanes >= LANES]
        idle = 0 if able or batch is not None else idle + 1
        assert idle < 5, "both sides wait"
        if able and rng.random() < 0.6:
            rank.link.post((node := able[rng.integers(len(able))]).index, node.slot())
        if rng.random() < 0.1:
            index = int(rng.integers(len(nodes)))
            rank.link.cut(index)
            rank.link.connect(index, nodes[index].shard)
    experience.receive([], oldest_outstanding=None)
    assert env_steps <= rank.store.env_steps == sum(node.produced for node in nodes)
    assert -1e-6 <= experience.figures()["train_steps_behind"] <= experience.figures()["train_steps_behind_limit"]
    for node in nodes:
        node.check()
    pages = [node.ledger._page.record for node in nodes]
    assert balance(pages, ended=False).trained == sum(node.counters["trained"] for node in nodes) > 0


def test_shards_of_two_ranks_count_once_however_often_the_ranks_resume(make_nodes: Callable[..., list[Node]]) -> None:
    nodes = make_nodes(2)
    ranks = [Rank(node, drawing=drawing_of()) for node in nodes]
    for _ in range(3):
        states = [rank.store.state_dict() for rank in ranks]
        shards = known_shards(states)
        ranks = [
            Rank(node, state={"arrived": state["arrived"], "shards": shards}, drawing=drawing_of())
            for node, state in zip(nodes, states, strict=True)
        ]
        assert [rank.store.env_steps for rank in ranks] == [node.produced for node in nodes]
        for rank, node in zip(ranks, nodes, strict=True):
            rank.post(node)


@pytest.mark.parametrize("num_trained", [0, 5])
def test_after_its_only_shard_has_lost_all_a_rank_gathers_the_start_anew(
    num_trained: int, make_nodes: Callable[..., list[Node]], lives: ExitStack, tmp_path: Path
) -> None:
    (node,) = make_nodes(1, capacity=600)
    rank = Rank(node, drawing=drawing_of())
    experience = experience_of(rank, bound=UPDATES + 2 * STEPS * LANES * RATIO)
    step = 0

    def turn(*, trains: bool) -> None:
        nonlocal step
        experience.grant(Version(1, step))
        experience.receive([], oldest_outstanding=None)
        while node.shard._lanes >= LANES:
            rank.link.post(node.index, node.slot())
        experience.receive([], oldest_outstanding=None)
        batch = experience.next_batch(timeout=0) if trains else None
        if isinstance(batch, ReplayBatch):
            step += 1
            experience.trained(batch, result_of(step, np.ones(UPDATES * ROWS, np.float32)))
        elif batch is not None:
            experience.passed(batch)

    for number in range(20):
        turn(trains=number < num_trained)
    lives.close()
    (tmp_path / "0.store").unlink()
    rank.link.cut(0)
    node.begin(lives)
    rank.link.connect(0, node.shard)
    experience.receive([], oldest_outstanding=None)
    assert experience.next_batch(timeout=0) is None or rank.store.num_transitions == 0
    before = step
    for _ in range(60):
        turn(trains=True)
        assert step == before or rank.store.num_transitions >= 20
    assert step > before + 10, "both sides wait for ever"


def state_after_slots(nodes: list[Node], slots: int) -> tuple[dict[str, Any], int]:
    """Have each node store so many slots; return the state and the env steps of their rank."""
    rank = Rank(*nodes, drawing=drawing_of())
    for _ in range(slots):
        for node in nodes:
            rank.post(node)
    return rank.store.state_dict(), rank.store.env_steps


def test_a_rank_that_resumes_grants_nothing_until_it_has_heard_all_its_shards(
    make_nodes: Callable[..., list[Node]],
) -> None:
    nodes = make_nodes(2, capacity=2000)
    state, stored = state_after_slots(nodes, 60)
    resumed = Rank(*nodes, state=state, drawing=drawing_of(), late=nodes)
    experience = experience_of(resumed, start=800, counts={"stored": stored, "due": 100.0, "updates": 100})
    for node in nodes:
        node.shard._lanes = 0  # their actors posted without credits
        experience.grant(Version(1, 0))
        assert not node.grants
        resumed.link.connect(node.index, node.shard)
        experience.receive([], oldest_outstanding=None)
    experience.grant(Version(1, 0))
    granted = sum(sum(node.grants) for node in nodes) * STEPS * RATIO
    assert 0 < granted <= experience.figures()["train_steps_behind_limit"]


def test_a_rank_that_resumes_goes_on_without_a_shard_that_counts_as_dead(
    make_nodes: Callable[..., list[Node]],
) -> None:
    nodes = make_nodes(2, capacity=2000)
    state, stored = state_after_slots(nodes, 60)
    for _ in range(20):
        nodes[1].shard.insert([nodes[1].slot()])  # and its rank is away
    resumed = Rank(*nodes, state=state, drawing=drawing_of(), late=nodes[1:])
    experience = experience_of(resumed, counts={"stored": stored, "due": 100.0, "updates": 100})
    for node in nodes:
        node.shard._lanes, node.grants[:] = 0, []
    experience.grant(Version(1, 0))
    assert experience.waits_for == "buffer workers"
    assert not nodes[0].grants
    resumed.link.give_up(1)
    experience.receive([], oldest_outstanding=None)
    experience.grant(Version(1, 0))
    assert experience.waits_for == "batch"
    granted = sum(nodes[0].grants)
    assert granted >= LANES
    resumed.link.connect(1, nodes[1].shard)
    experience.receive([], oldest_outstanding=None)
    experience.grant(Version(1, 0))
    assert resumed.store.env_steps == sum(node.produced for node in nodes)
    figures = experience.figures()
    assert figures["train_steps_behind"] > figures["train_steps_behind_limit"], "it brings more than the bound allows"
    assert (sum(nodes[0].grants), nodes[1].grants) == (granted, []), "actors wait until training has caught up"


@pytest.mark.parametrize("comes_back", ["before the step", "after the step"])
def test_what_was_drawn_before_a_shard_lost_all_is_not_settled_after_it(
    comes_back: str, make_nodes: Callable[..., list[Node]], lives: ExitStack, tmp_path: Path
) -> None:
    (node,) = make_nodes(1)
    rank = Rank(node, drawing=drawing_of())
    rank.post(node)
    assert rank.has_rows(0)
    rows = rank.store.draw(0)
    lives.close()
    (tmp_path / "0.store").unlink()
    rank.link.cut(0)
    node.begin(lives)
    settlement = Settlement(step=1, keys=rows.keys, trained_rows=None, errors=np.full(len(rows.keys), 9.0, np.float32))
    node.shard.insert([node.slot()])
    mass = node.store.draws.mass
    if comes_back == "after the step":
        rank.store.settle(settlement)
    rank.link.connect(0, node.shard)
    rank.insert()
    if comes_back == "before the step":
        rank.store.settle(settlement)
    rank.insert()
    assert set(rows.keys.tolist()) & set(held_keys(node.segments).tolist()), "its new transitions have the same keys"
    assert not node.counters.get("trained")
    assert node.store.draws.mass == mass
    node.check()


def test_a_shard_that_edits_took_away_and_brought_back_is_counted_once(make_nodes: Callable[..., list[Node]]) -> None:
    nodes = make_nodes()
    rank = Rank(*nodes, drawing=drawing_of())
    for node in nodes:
        rank.post(node)
    alone = Rank(nodes[0], state=rank.store.state_dict(), drawing=drawing_of())
    alone.post(nodes[0])
    back = Rank(*nodes, state=alone.store.state_dict(), drawing=drawing_of())
    assert back.store.num_transitions == sum(node.produced for node in nodes)
    assert back.store.env_steps == sum(node.produced for node in nodes)
    assert back.arrived["env_steps"] == 0, "all had arrived before"


def test_a_shard_that_connects_late_goes_back_to_the_step_from_which_its_rank_resumes(
    make_nodes: Callable[..., list[Node]],
) -> None:
    nodes = make_nodes()
    rank = Rank(*nodes, drawing=drawing_of())
    for _ in range(2):
        for node in nodes:
            rank.post(node)
    rank.train(1)
    state, at_checkpoint = rank.store.state_dict(), nodes[1].counters["trained"]
    for step in range(2, 5):
        rank.train(step)
    assert nodes[1].counters["trained"] > at_checkpoint
    resumed = Rank(*nodes, state=state, step=1, drawing=drawing_of(), late=nodes[1:])
    for step in range(2, 5):
        resumed.train(step)
    resumed.link.connect(1, nodes[1].shard)
    resumed.insert()
    assert nodes[1].counters["trained"] == at_checkpoint
    resumed.train(5)
    after, other = nodes[1].counters["trained"], nodes[0].counters["trained"]
    for index in range(2):
        resumed.link.cut(index)
        resumed.link.connect(index, nodes[index].shard)
    resumed.insert()
    assert [node.counters["trained"] for node in nodes] == [other, after], "what this life trained stays"


def test_more_rows_than_were_requested_are_no_rows(make_nodes: Callable[..., list[Node]]) -> None:
    (node,) = make_nodes(1)
    rank = Rank(node, drawing=drawing_of())
    rank.post(node)
    assert rank.has_rows(0)
    (part,) = rank.store._draws[0].parts[0]
    rank.link._report(0, part)
    rank.insert()
    rank.train(1)


@pytest.mark.parametrize(
    "text", ["{", "[]", "[1, 2]", '{"returns": [1.0], "lengths": []}', '{"returns": ["x"], "lengths": [1]}', '{"x": 1}']
)
def test_what_says_of_no_episodes_is_malformed(text: str) -> None:
    array = np.frombuffer(text.encode(), np.uint8)
    stored = Stored(
        env_steps=1,
        lanes=1,
        attempt=1,
        step=0,
        num_rows=len(array),
        arrays={"episodes": array},
        mass=1,
        num_transitions=1,
    )
    with pytest.raises(Malformed, match=r"Stored\.episodes"):
        _ = stored.episodes


def test_a_shard_that_ends_counts_no_further_training(make_nodes: Callable[..., list[Node]]) -> None:
    (node,) = make_nodes(1)
    node.store._opened = replace(node.store._opened, outlives=False)
    rank = Rank(node, drawing=drawing_of())
    rank.post(node)
    assert rank.has_rows(0)
    rows = rank.store.draw(0)
    node.shard.give_up(run_ended=False)
    rank.store.settle(Settlement(step=1, keys=rows.keys, trained_rows=None, errors=None))
    node.ledger.end()
    assert node.counters == {"dropped.end_of_run": node.produced}


def experience_of(
    rank: Rank,
    *,
    bound: float = UPDATES + 4 * STEPS * LANES * RATIO,
    start: int = 20,
    counts: dict[str, Any] | None = None,
) -> ReplayExperience:
    """Return the rank's experience, from the beginning or from these counts."""
    pace = Pace(updates_per_env_step=RATIO, bound=bound, most_lanes=LANES)
    limiter = RatioLimiter(pace, start=start, updates_per_step=UPDATES, steps_per_lane=STEPS)
    if counts is not None:
        limiter.load_state_dict(counts, stored=rank.store.env_steps, held=0)
    unused: Any = None
    return ReplayExperience(
        store=rank.store,
        limiter=limiter,
        drawing=drawing_of(),
        grant=rank.store.grant,
        ledger=unused,
        metrics=rank.metrics,
        counted=rank.store.env_steps,
    )


def result_of(step: int, errors: np.ndarray) -> StepResult:
    return StepResult(
        step=step,
        optimizer_steps=0,
        taken=(True,) * UPDATES,
        num_transitions=len(errors),
        num_untrained=0,
        errors=errors,
        metrics={},
    )
