"""Actions of several parts and observations of categories in real runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import rlsrl
from rlsrl.envs.wrappers import ActionMask
from rlsrl.testing.environments import EchoEnv
from rlsrl.testing.live_runs import Desk

EXPERIMENT = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {{name: live}}
spec:
  seed: 1
  environment:
    factory: rlsrl.testing.environments:EchoEnv
    kwargs: {{kind: {kind}, masked: {masked}}}
    {mask}
  algorithm: {{ppo: {{learningRate: 3e-3, minibatchSize: 128, epochs: 4, discount: 0.5}}}}
  actors: {{environments: 8, rolloutLength: 64}}
  {more}
  stop: {{returnMean: {goal}, envSteps: 150000}}
"""
CASES = [
    pytest.param("choices", False, "", 7.5, id="choices"),
    pytest.param("choices", True, "policyWorkers: {replicas: 1}", 7.5, id="masked choices, policy worker"),
    pytest.param("flags", False, "", 7.5, id="flags"),
    pytest.param("box", False, "", 7.0, id="box without zero, bounds or float32"),
    pytest.param("parts", False, "", 7.0, id="parts"),
    pytest.param("parts", False, "policyWorkers: {replicas: 1}", 7.0, id="parts, policy worker"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "masked", "more", "goal"), CASES)
def test_a_run_learns_to_repeat_each_part_of_its_observation(
    tmp_path: Path, kind: str, masked: bool, more: str, goal: float
) -> None:
    mask = "actionMask: action_mask" if masked else ""
    desk = Desk(tmp_path, EXPERIMENT.format(kind=kind, masked=str(masked).lower(), mask=mask, more=more, goal=goal))
    with desk.begin() as run:
        assert run.wait() == 0, run.output
    summary = desk.facts().json("summary.json")
    assert (summary["reason"], summary["restarts"]) == ("returnMean", {}), "the environment refuses illegal actions"
    assert summary["ledger"]["balanced"]
    played = desk.call("eval", "runs/live", "--episodes", "16", "--environments", "4", "--json")
    assert played.returncode == 0, played.stderr
    assert json.loads(played.stdout)["return_mean"] >= goal
    env: gymnasium.Env[Any, Any] = EchoEnv(kind=kind, masked=masked)
    env = ActionMask(env, "action_mask") if masked else env
    policy = rlsrl.load(desk.run_folder)
    assert np.mean([return_of_an_episode(policy, env, seed) for seed in range(8)]) >= goal


def return_of_an_episode(policy: rlsrl.TrainedPolicy, env: gymnasium.Env[Any, Any], seed: int) -> float:
    observation, _ = env.reset(seed=seed)
    total, has_ended = 0.0, False
    while not has_ended:
        observation, reward, terminated, truncated, _ = env.step(policy.act(observation))
        total += float(reward)
        has_ended = terminated or truncated
    return total
