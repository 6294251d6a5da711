"""Q-learning from a replay store finds the values that follow from the environment's rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.wrappers import TimeLimit
from prometheus_client import CollectorRegistry

from rlsrl.algorithms.adam import Adam
from rlsrl.algorithms.custom import Setup
from rlsrl.algorithms.learner import Learner
from rlsrl.api.spec import AlgorithmNeeds, CustomAlgorithmSpec, ReplaySpec
from rlsrl.buffers.replay.draws import UniformDraws
from rlsrl.buffers.replay.layout import ReplayLayout
from rlsrl.buffers.replay.ratio import Pace, RatioLimiter
from rlsrl.buffers.replay.rows import RowForm
from rlsrl.data.version import Version
from rlsrl.policies.build import build_network
from rlsrl.policies.networks import MlpActionValues
from rlsrl.policies.torch_policy import TorchPolicy
from rlsrl.runtime.metrics import Metrics
from rlsrl.testing.q_learning import QLearning
from rlsrl.testing.replay import SlotSource, empty_replay_store
from rlsrl.workers.replay_experience import ReplayExperience
from rlsrl.workers.replay_store import Drawing, LocalStore

NUM_STATES, DISCOUNT = 5, 0.9
STEPS, LANES = 8, 4
UPDATES, ROWS = 8, 64


class Corridor(gymnasium.Env[Any, Any]):
    """Action 2 goes on, action 0 goes back, action 1 stays and earns a little; the end earns 1 and terminates."""

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Box(0, 1, (NUM_STATES,), np.float32)
        self.action_space: gymnasium.Space[Any] = gymnasium.spaces.Discrete(3)
        self._place = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._place = int(self.np_random.integers(NUM_STATES))
        return one_hot(self._place), {}

    def step(self, action: Any) -> Any:
        self._place, reward, terminated = after(self._place, int(action))
        return one_hot(min(self._place, NUM_STATES - 1)), reward, terminated, False, {}


def after(place: int, action: int) -> tuple[int, float, bool]:
    """Return (place, reward, whether the episode terminated)."""
    place = max(0, place + action - 1)
    terminated = place == NUM_STATES
    return place, 1.0 if terminated else 0.02 * (action == 1), terminated


def one_hot(place: int) -> np.ndarray:
    return np.eye(NUM_STATES, dtype=np.float32)[place]


def exact_values() -> np.ndarray:
    """Return the value of each action in each place, by value iteration."""
    values = np.zeros((NUM_STATES, 3))
    for _ in range(200):
        for place in range(NUM_STATES):
            for action in range(3):
                following, reward, terminated = after(place, action)
                values[place, action] = reward + (0.0 if terminated else DISCOUNT * values[following].max())
    return values


def test_it_finds_the_exact_values_where_most_episodes_are_cut(tmp_path: Path) -> None:
    """Episodes have at most three steps, so most are truncated: values beyond that are bootstrapped."""
    source = SlotSource(num_steps=STEPS, num_lanes=LANES, make=lambda: TimeLimit(Corridor(), 3))
    network = build_network(
        MlpActionValues, source.env_spec, {"hidden_sizes": (32,), "activation": "relu"}, seed=0, outputs="actionValues"
    )
    policy = TorchPolicy(network, source.env_spec, outputs="actionValues")
    layout = ReplayLayout.of(source.layout, capacity=2000)
    store = empty_replay_store(tmp_path, layout)
    segments = store.segments

    class Ledger:
        def trained(self, num_transitions: int, *, num_untrained: int = 0) -> None: ...
        def dropped(self, reason: str, num_transitions: int) -> None: ...
        def snapshot(self) -> dict[str, Any]:
            return {}

    granted: list[int] = []
    drawing = Drawing(updates=UPDATES, minibatch_rows=ROWS)
    form = RowForm(num_steps=1, discount=DISCOUNT)
    metrics = Metrics(CollectorRegistry())
    experience = ReplayExperience(
        store=LocalStore(
            store, draws=UniformDraws(segments), form=form, drawing=drawing, ledger=Ledger(), metrics=metrics
        ),
        limiter=RatioLimiter(
            Pace(updates_per_env_step=0.5, bound=100.0, most_lanes=LANES), start=100, updates_per_step=UPDATES,
            steps_per_lane=STEPS,
        ),
        drawing=drawing,
        grant=lambda lanes, version, room: granted.append(lanes),
        ledger=Ledger(),
        metrics=metrics,
    )  # fmt: skip
    needs = AlgorithmNeeds(minibatch_size=ROWS, replay=ReplaySpec(), outputs="actionValues")
    settings = CustomAlgorithmSpec(factory="rlsrl.testing.q_learning:QLearning", needs=needs)
    algorithm = QLearning(Setup(policy=policy, settings=settings, num_ranks=1))
    initial = policy.parameters(Version(1, 0))
    learner = Learner(algorithm, initial, learning_rate=3e-3, optimizer=Adam(epsilon=1e-8), seed=0)
    gathered = 0
    for step in range(500):
        experience.grant(Version(1, step))
        while sum(granted) - gathered >= LANES and not experience._limiter.may_train:
            experience.receive([source.slot()], oldest_outstanding=None)
            gathered += LANES
        batch = experience.next_batch(timeout=0)
        assert batch is not None
        batch = experience.completed(batch, [experience.shared(batch)])
        assert batch is not None
        experience.trained(batch, learner.step(batch.arrays, env_steps=batch.env_steps))
    cut = np.count_nonzero(segments.arrays["truncated"])
    assert cut > 2 * np.count_nonzero(segments.arrays["terminated"])
    found = policy.pure(learner._params["policy"], {"observation": torch.eye(NUM_STATES)})["q"].detach().numpy()
    np.testing.assert_allclose(found, exact_values(), atol=0.03)
