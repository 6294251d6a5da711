"""Statistics learn from transitions when they arrive, and normalise rows when they are drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from typing_extensions import override

from rlsrl.algorithms.adam import Adam
from rlsrl.algorithms.base import Batch
from rlsrl.algorithms.custom import Setup
from rlsrl.algorithms.learner import Learner
from rlsrl.algorithms.normalizer import ReplayNormalizer, normalizable
from rlsrl.api.spec import AlgorithmNeeds, CustomAlgorithmSpec, ReplaySpec
from rlsrl.buffers.replay.draws import UniformDraws
from rlsrl.buffers.replay.layout import ReplayLayout
from rlsrl.buffers.replay.ratio import Pace, RatioLimiter
from rlsrl.buffers.replay.rows import RowForm, rows_of
from rlsrl.data.slots import DISCOUNTED_RETURN
from rlsrl.data.specs import Arrays
from rlsrl.data.version import Version
from rlsrl.policies.build import build_network
from rlsrl.policies.networks import MlpActionValues
from rlsrl.policies.torch_policy import TorchPolicy
from rlsrl.runtime.metrics import Metrics
from rlsrl.testing.q_learning import QLearning
from rlsrl.testing.replay import SlotSource, empty_replay_store
from rlsrl.workers.experience import TrainingBatch
from rlsrl.workers.replay_experience import ReplayBatch, ReplayExperience
from rlsrl.workers.replay_store import Drawing, LocalStore

STEPS, LANES = 5, 2
UPDATES, ROWS, N_STEP, DISCOUNT, CLIP = 3, 4, 3, 0.9, 0.05
START = 20


class Seeing(QLearning):
    """Keeps the rows that it prepared last."""

    seen: Arrays

    @override
    def prepare(self, params: Any, slots: Arrays, reduce: Any, evaluate: Any) -> Batch:
        self.seen = slots
        return super().prepare(params, slots, reduce, evaluate)


class Ledger:
    """Counts nothing."""

    def trained(self, num_transitions: int, *, num_untrained: int = 0) -> None: ...
    def dropped(self, reason: str, num_transitions: int) -> None: ...
    def snapshot(self) -> dict[str, Any]:
        return {}


class Rank:
    """The test acts as the actors and as both threads of a trainer, whose store holds four slots."""

    def __init__(self, folder: Path, *, start: int = START) -> None:
        self.source = SlotSource(num_steps=STEPS, num_lanes=LANES, return_discount=DISCOUNT)
        store = empty_replay_store(folder, ReplayLayout.of(self.source.layout, capacity=4 * STEPS * LANES))
        self.segments = store.segments
        normalizer = ReplayNormalizer(normalizable(self.source.env_spec), rewards=True, reward_clip=CLIP)
        pace = Pace(updates_per_env_step=1.0, bound=1000.0, most_lanes=LANES)
        drawing = Drawing(updates=UPDATES, minibatch_rows=ROWS)
        form = RowForm(num_steps=N_STEP, discount=DISCOUNT, rewards=normalizer.rewards)
        metrics = Metrics(CollectorRegistry())
        self.experience = ReplayExperience(
            store=LocalStore(
                store,
                draws=UniformDraws(self.segments),
                form=form,
                drawing=drawing,
                ledger=Ledger(),
                metrics=metrics,
            ),
            limiter=RatioLimiter(pace, start=start, updates_per_step=UPDATES, steps_per_lane=STEPS),
            drawing=drawing,
            grant=lambda *_: None,
            ledger=Ledger(),
            metrics=metrics,
            normalizer=normalizer,
        )
        network = build_network(MlpActionValues, self.source.env_spec, {}, seed=0, outputs="actionValues")
        policy = TorchPolicy(network, self.source.env_spec, outputs="actionValues")
        needs = AlgorithmNeeds(minibatch_size=ROWS, replay=ReplaySpec(), outputs="actionValues")
        settings = CustomAlgorithmSpec(factory="rlsrl.testing.q_learning:QLearning", needs=needs)
        self.algorithm = Seeing(Setup(policy=policy, settings=settings, num_ranks=1))
        self.learner = Learner(
            self.algorithm,
            policy.parameters(Version(1, 0)),
            learning_rate=1e-3,
            optimizer=Adam(),
            seed=0,
            normalizer=normalizer,
        )
        self.step = 0
        self.gathered: list[dict[str, np.ndarray]] = []
        """The samples of each slot."""
        self.experience.grant(Version(1, 0))

    def gather(self, num_slots: int) -> None:
        for _ in range(num_slots):
            slot = self.source.slot()
            mask = slot.arrays["mask"]
            fields = {"observation": slot.arrays["observation"][:-1], "return": slot.arrays[DISCOUNTED_RETURN]}
            self.gathered.append({name: array[mask].astype(np.float64) for name, array in fields.items()})
            self.experience.receive([slot], oldest_outstanding=None)

    def samples(self, name: str, num_slots: int | None = None) -> np.ndarray:
        return np.concatenate([each[name] for each in self.gathered[:num_slots]])

    def draw(self) -> TrainingBatch:
        batch = self.experience.next_batch(timeout=0)
        assert batch is not None
        return batch

    def train(self, batch: TrainingBatch) -> None:
        """Do as ``TrainingThread`` does with a batch."""
        completed = self.experience.completed(batch, [self.experience.shared(batch)])
        self.learner.learn_statistics(batch.moments)
        if completed is None:
            self.experience.passed(batch)
            return
        self.step += 1
        self.experience.trained(completed, self.learner.step(completed.arrays, env_steps=completed.env_steps))
        self.experience.grant(Version(1, self.step))


def raw_rows(rank: Rank, keys: np.ndarray, rewards: Any) -> Arrays:
    return rows_of(rank.segments, keys, RowForm(num_steps=N_STEP, discount=DISCOUNT, rewards=rewards))


def test_rows_have_the_statistics_of_all_that_arrived_with_what_has_gone(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    rank.gather(1)
    first = rank.draw()
    assert not first.num_transitions
    rank.train(first)
    known = 1
    for num_slots in (6, 1, 3, 6):
        rank.gather(num_slots)  # six do not fit into the store: two of them are gone before anything learns
        batch = rank.draw()
        assert isinstance(batch, ReplayBatch)
        assert batch.num_transitions == UPDATES * ROWS
        deviation = rank.samples("return", known).std()
        plain = raw_rows(rank, batch.rows.keys, lambda raw, scale=deviation: np.clip(raw / scale, -CLIP, CLIP))
        rank.train(batch)
        known += num_slots
        seen, observed = rank.algorithm.seen, rank.samples("observation")
        np.testing.assert_allclose(seen["reward"], plain["reward"], rtol=1e-4, atol=1e-6)
        mean, scale = observed.mean(0), np.sqrt(observed.var(0) + 1e-8)
        for name in ("observation", "next/observation"):
            np.testing.assert_allclose(seen[name], np.clip((plain[name] - mean) / scale, -10, 10), rtol=1e-3, atol=1e-3)
        statistics = rank.learner.parameters(Version(1, rank.step)).statistics
        np.testing.assert_allclose(statistics["observation/mean"], mean, rtol=1e-5)
        np.testing.assert_allclose(statistics["observation/variance"], observed.var(0), rtol=1e-5)
    state = rank.learner.normalizer.state_dict()
    assert state["observation/count"] == state["return/count"] == len(rank.samples("return"))


@pytest.mark.parametrize("num_slots", [1, 4])
def test_no_row_is_drawn_before_something_was_learned(num_slots: int, tmp_path: Path) -> None:
    """Else rewards of the first training step would not be scaled."""
    rank = Rank(tmp_path, start=0)
    rank.gather(num_slots)
    while not rank.experience.is_behind:
        rank.gather(1)
    first = rank.draw()
    assert (first.num_transitions, first.env_steps) == (0, len(rank.samples("return")))
    rank.train(first)
    second = rank.draw()
    assert (second.num_transitions, second.env_steps) == (UPDATES * ROWS, 0)
    rank.train(second)
    assert rank.learner.normalizer.state_dict()["return/count"] == len(rank.samples("return"))


def test_a_batch_that_is_left_is_not_learned(tmp_path: Path) -> None:
    """The next life counts it, and learns from it then."""
    rank = Rank(tmp_path)
    rank.gather(3)
    rank.train(rank.draw())
    learned = rank.experience.state_dict()["stored"]
    rank.gather(2)
    rank.experience.abandon(rank.draw())
    assert rank.experience.state_dict()["stored"] == learned
    assert rank.learner.normalizer.state_dict()["observation/count"] == learned < rank.segments.env_steps


def test_compiling_sees_normalised_rows_and_teaches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(tmp_path)
    rank.gather(4)
    rank.train(rank.draw())
    batch = rank.draw()
    completed = rank.experience.completed(batch, [rank.experience.shared(batch)])
    assert completed is not None
    before = {name: array.tobytes() for name, array in rank.learner.normalizer.state_dict().items()}
    monkeypatch.setattr(rank.learner._steps, "compile", lambda _: None)
    rank.learner.compile(completed.arrays)
    assert np.abs(completed.arrays["observation"]).max() > 10.0 >= np.abs(rank.algorithm.seen["observation"]).max()
    assert {name: array.tobytes() for name, array in rank.learner.normalizer.state_dict().items()} == before
