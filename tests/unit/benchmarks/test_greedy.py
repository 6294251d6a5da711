"""Stored versions of a run are played without exploration, whatever their statistics say of it."""

from __future__ import annotations

from typing import Any

import greedy
import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from rlsrl.api.spec import NetworkOutputs, VectorActions
from rlsrl.data.version import Version
from rlsrl.parameters.protocols import Parameters
from rlsrl.policies.build import build_network
from rlsrl.policies.epsilon_greedy import EPSILON
from rlsrl.policies.exploration import DEVIATION
from rlsrl.policies.networks import MlpActionValues, MlpPolicy
from rlsrl.policies.torch_policy import TorchPolicy
from rlsrl.testing.rollouts import bounded_env_spec, discrete_env_spec


class Countdown(gymnasium.Env[Any, Any]):
    """Three steps; the reward is the action."""

    def __init__(self, action_space: spaces.Space[Any]) -> None:
        self.action_space = action_space
        self.observation_space = spaces.Box(-1, 1, (4,), np.float32)
        self.left = 3

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.left = 3
        return self.np_random.uniform(-1, 1, 4).astype(np.float32), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        self.left -= 1
        return np.zeros(4, np.float32), float(np.sum(action)), self.left == 0, False, {}


def constant_policy(
    env_spec: Any, biases: list[float], statistics: dict[str, Any], *, has_values: bool = False
) -> tuple[Any, Parameters]:
    """Return the exported actor and parameters of a policy whose last layer says the biases everywhere."""
    outputs: NetworkOutputs = "actionValues" if has_values else "policy"
    factory = MlpActionValues if has_values else MlpPolicy
    module = build_network(factory, env_spec, {"hidden_sizes": (8,)}, seed=0, outputs=outputs)
    policy = TorchPolicy(module, env_spec, outputs=outputs)
    parameters = policy.parameters(Version(1, 0))
    vector = np.zeros_like(parameters.vector)
    vector[-len(biases) :] = biases
    found = Parameters(version=parameters.version, vector=vector, layout=parameters.layout, statistics=statistics)
    return policy.export(), found


@pytest.mark.parametrize(("vectors", "within"), [("squashed", np.tanh(0.7)), ("clipped", np.tanh(0.7))])
def test_vectors_are_those_of_the_mean_scaled_to_the_bounds(
    vectors: VectorActions, within: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = spaces.Box(np.array([0.0, -4.0], np.float32), np.array([10.0, 4.0], np.float32))
    monkeypatch.setattr("environments.make", lambda env_id: Countdown(space))
    biases = [0.7, 0.0, 5.0, 5.0] if vectors == "squashed" else [0.7, 0.0]
    statistics = {DEVIATION: np.array(0.9, np.float32)}
    actor, parameters = constant_policy(bounded_env_spec(vectors), biases, statistics)
    found = greedy.mean_return(actor, parameters, "any", episodes=3)
    assert found == pytest.approx(3 * (within + 1) / 2 * 10, rel=1e-5)


def test_choices_are_the_most_probable_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("environments.make", lambda env_id: Countdown(spaces.Discrete(2)))
    for biases, wanted in (([0.0, 0.1], 3.0), ([0.1, 0.0], 0.0)):
        actor, parameters = constant_policy(discrete_env_spec(), biases, {})
        assert greedy.mean_return(actor, parameters, "any", episodes=2) == wanted


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 1.0])
def test_the_best_action_is_taken_whatever_epsilon(epsilon: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("environments.make", lambda env_id: Countdown(spaces.Discrete(2)))
    statistics = {EPSILON: np.array(epsilon, np.float32)}
    for biases, wanted in (([7.0, 7.5], 3.0), ([7.5, 7.0], 0.0)):
        actor, parameters = constant_policy(discrete_env_spec(), biases, statistics, has_values=True)
        assert greedy.mean_return(actor, parameters, "any", episodes=4) == wanted


def test_runs_with_other_seeds_begin_their_episodes_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int | None] = []

    class Told(Countdown):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            seeds.append(seed)
            return super().reset(seed=seed, options=options)

    monkeypatch.setattr("environments.make", lambda env_id: Told(spaces.Discrete(2)))
    actor, parameters = constant_policy(discrete_env_spec(), [0.0, 1.0], {})
    for seed in (1_000_000, 2_000_000):
        greedy.mean_return(actor, parameters, "any", episodes=2, seed=seed)
    assert seeds == [1_000_000, 1_000_001, 2_000_000, 2_000_001]
