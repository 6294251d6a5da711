"""Rewards that are NaN, infinite or too large end the run once, with their environment; nothing is repeated."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsrl.testing.live_runs import Desk

EXPERIMENT = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {{name: live}}
spec:
  environment: {{factory: "extreme:make", kwargs: {{reward: "{reward}"}}, maxNonFinite: 100}}
  actors: {{environments: 2, rolloutLength: 8}}
  algorithm: {{ppo: {{minibatchSize: 16}}}}
  stop: {{trainSteps: 100000}}
"""
ENVIRONMENT = """
import gymnasium

class Extreme(gymnasium.Wrapper):
    "From its 50th step on, each reward is the given one."

    def __init__(self, env, reward):
        super().__init__(env)
        self.reward, self.taken = float(reward), 0

    def step(self, action):
        self.taken += 1
        observation, reward, *rest = self.env.step(action)
        return observation, self.reward if self.taken >= 50 else reward, *rest

def make(reward):
    return Extreme(gymnasium.make("CartPole-v1"), reward)
"""


@pytest.mark.parametrize("reward", ["nan", "inf", "1e300"])
def test_a_run_with_such_rewards_ends_once(tmp_path: Path, reward: str) -> None:
    (tmp_path / "extreme.py").write_text(ENVIRONMENT)
    desk = Desk(tmp_path, EXPERIMENT.format(reward=reward))
    with desk.begin() as run:
        assert run.wait() == 1, run.output
    shown = "nan" if reward == "nan" else "inf"  # a reward is a 32-bit float
    assert f": reward is {shown} at step " in run.output
    assert "environment rank " in run.output
    summary = desk.facts().json("summary.json")
    assert summary["restarts"] == {}
    assert summary["attempts"] == 1
    ledger = summary["ledger"]
    assert ledger["balanced"]
    assert ledger["dropped"]["non_finite"] >= 1
    assert ledger["lost"]["rolled_back"] == 0
