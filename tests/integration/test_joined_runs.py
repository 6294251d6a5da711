"""Real runs of networks with encoders for parts of the observation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlsrl
from rlsrl.testing.environments import PictureAndWord
from rlsrl.testing.live_runs import Desk

TRAINING_SECONDS = 900.0
"""Deadline of a run to its goal, on a machine with other load."""
CAMERA = "{key: picture, cnn: {hiddenSize: 32}}"
EXPERIMENT = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {{name: live}}
spec:
  seed: 1
  environment: {{factory: 'rlsrl.testing.environments:PictureAndWord'}}
  algorithm: {{{algorithm}}}
  policy:
    normalizeObservations: true
    network:
      mlp: {{hiddenSizes: [32]}}
      encoders: [{encoders}]
{network}
  actors: {{environments: 8, rolloutLength: 16}}
{more}
  stop: {{returnMean: 7.6, envSteps: 60000}}
"""
PPO = "ppo: {learningRate: 1e-3, minibatchSize: 64, epochs: 4, discount: 0.5}"
DQN = (
    "dqn: {learningRate: 1e-3, minibatchSize: 64, targetPeriod: 100, discount: 0.5, epsilon: 0.02, "
    "replay: {capacity: 20000, start: 500}}"
)
RATIO = "  pacing: {trainStepsPerEnvStep: 0.1}"
CASES = {
    "inline": (PPO, CAMERA, "", ""),
    "with layers for the word, policy worker": (
        PPO, f"{CAMERA}, {{key: word, mlp: {{hiddenSizes: [4]}}}}", "", "  policyWorkers: {replicas: 1}"
    ),
    "residual, two ranks": (
        PPO, "{key: picture, impalaCnn: {channels: [8, 8], hiddenSize: 32, layerNorm: true}}", "",
        "  trainers: {replicas: 2}",
    ),
    "replay, recurrent": (
        DQN.replace("64", "128"), CAMERA, "      recurrent: {kind: gru, size: 32}", RATIO
    ),
    "replay": (DQN, CAMERA, "", RATIO),
    "without torch, evaluator": (
        PPO, "{key: picture, mlp: {hiddenSizes: [64]}}, {key: word, mlp: {hiddenSizes: [4]}}", "",
        "  evaluators: {environments: 2, everyVersions: 1}",
    ),
}  # fmt: skip


def train(folder: Path, case: str) -> Desk:
    algorithm, encoders, network, more = CASES[case]
    actors = "{environments: 8, replicas: 2" if "ranks" in case else "{environments: 8"
    text = EXPERIMENT.format(algorithm=algorithm, encoders=encoders, network=network, more=more)
    desk = Desk(folder, text.replace("{environments: 8", actors))
    done = desk.call("run", "live.yaml", timeout=TRAINING_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    summary: dict[str, Any] = desk.facts().json("summary.json")
    assert summary["reason"] == "returnMean", summary
    assert summary["ledger"]["balanced"]
    return desk


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case == "inline" else [pytest.mark.slow]) for case in CASES]
)
def test_a_run_learns_from_a_picture_beside_a_word(tmp_path: Path, case: str) -> None:
    policy, env = rlsrl.load(train(tmp_path, case).run_folder), PictureAndWord()
    returns = []
    for seed in range(20):
        observation, _ = env.reset(seed=seed)
        policy.restart()
        rewards = []
        for _ in range(env.LENGTH):
            observation, reward, _, _, _ = env.step(np.int64(policy.act(observation)))
            rewards.append(reward)
        returns.append(sum(rewards))
    assert np.mean(returns) > 7.5
