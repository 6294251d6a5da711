"""Real runs of recurrent policies: a cue that is shown once and asked for some steps later."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlsrl
from rlsrl.envs.memory_tasks import DelayedCue
from rlsrl.testing.chaos import KillCampaign
from rlsrl.testing.live_runs import GATED_EXPERIMENT, Desk

DELAY = 4
TRAINING_SECONDS = 900.0
"""Deadline of a run to its goal, on a machine with other load. It takes 20 s on two idle cores."""
CUE = f"""
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {{name: live}}
spec:
  seed: 1
  environment:
    factory: rlsrl.envs.memory_tasks:DelayedCue
    kwargs: {{delay: {DELAY}}}
  algorithm:
    ppo: {{learningRate: 0.003, entropyCoefficient: 0.01, minibatchSize: 128, sequenceLength: 16}}
  policy:
    network: {{mlp: {{hiddenSizes: [32]}}, recurrent: {{kind: gru, size: 32}}}}
  actors: {{environments: 16, rolloutLength: 16}}
  stop: {{returnMean: 0.97, envSteps: 300000}}
"""
PPO = "ppo: {learningRate: 0.003, entropyCoefficient: 0.01, minibatchSize: 128, sequenceLength: 16}"
NETWORK = "{mlp: {hiddenSizes: [32]}, recurrent: {kind: gru, size: 32}}"
OWN_NETWORK = """
import torch


class Remembering(torch.nn.Module):
    state_sizes = {"memory": 32}

    def __init__(self, env_spec):
        super().__init__()
        self.cell = torch.nn.GRUCell(3, 32)
        self.policy = torch.nn.Linear(32, env_spec.action.num_actions)
        self.value = torch.nn.Linear(32, 1)

    def forward(self, observation, state):
        memory = self.cell(observation["observation"], state["memory"])
        return {"policy": self.policy(memory), "value": self.value(memory).squeeze(-1)}, {"memory": memory}
"""
DQN = (
    "dqn: {learningRate: 0.001, minibatchSize: 256, targetPeriod: 100, epsilon: 0.02, "
    "replay: {capacity: 50000, start: 2000, nStep: 3, priorities: {}}}"
)
ACTORS = "  actors:"
CHANGES = {
    "PPO, LSTM, burn-in": {
        NETWORK: NETWORK.replace("gru", "lstm"),
        PPO: PPO.replace("sequenceLength: 16", "sequenceLength: 8, burnIn: 4"),
    },
    "V-trace, GRU": {
        PPO: "vtrace: {learningRate: 0.003, entropyCoefficient: 0.01, minibatchSize: 256, sequenceLength: 16}"
    },
    "R2D2, GRU": {PPO: DQN, ACTORS: f"  pacing: {{trainStepsPerEnvStep: 0.05}}\n{ACTORS}"},
    "R2D2, LSTM, dueling": {
        PPO: DQN.replace("minibatchSize", "burnIn: false, valueRescaling: true, minibatchSize"),
        ACTORS: f"  pacing: {{trainStepsPerEnvStep: 0.05}}\n{ACTORS}",
        NETWORK: NETWORK.replace("gru", "lstm").replace("[32]", "[32], activation: relu, dueling: true"),
    },
    "R2D2, normalised": {
        PPO: DQN.replace("minibatchSize", "normalizeRewards: true, minibatchSize"),
        ACTORS: f"  pacing: {{trainStepsPerEnvStep: 0.05}}\n{ACTORS}",
        "  policy:\n": "  policy:\n    normalizeObservations: true\n",
    },
    "own network": {NETWORK: "{custom: {factory: 'my_network:Remembering', state: {memory: 32}}}"},
}
WAYS = {
    "policy worker": ("policyWorkers.replicas=1", "actors.ringSize=2"),
    "two ranks": ("trainers.replicas=2", "actors.replicas=2"),
    "buffer worker": ("bufferWorkers.replicas=1",),
    "compiled": ("trainers.compile=upfront",),
    "threads": ("actors.vectorization=threads",),
    "threads, policy worker": ("actors.vectorization=threads", "policyWorkers.replicas=1"),
}
WITH_REPLAY = {
    **WAYS,
    "policy worker": ("policyWorkers.replicas=1",),
    "buffer worker": ("bufferWorkers.replicas=2", "actors.replicas=2"),
}


def experiment_of(name: str) -> str:
    text = CUE
    for part, other in CHANGES.get(name, {}).items():
        assert part in text
        text = text.replace(part, other)
    return text


def train(folder: Path, name: str, *changes: str) -> Desk:
    (folder / "my_network.py").write_text(OWN_NETWORK)
    desk = Desk(folder, experiment_of(name))
    given = [part for change in changes for part in ("--set", f"spec.{change}")]
    done = desk.call("run", "live.yaml", *given, timeout=TRAINING_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    summary: dict[str, Any] = desk.facts().json("summary.json")
    assert summary["return_mean"] >= 0.97, summary
    assert summary["ledger"]["balanced"]
    return desk


def share_of_right_answers(policy: Any, *, forgets: bool = False) -> float:
    env, right = DelayedCue(delay=DELAY), 0.0
    for seed in range(40):
        observation, _ = env.reset(seed=seed)
        policy.restart()
        has_ended = False
        while not has_ended:
            if forgets:
                policy.restart()
            observation, reward, has_ended, _, _ = env.step(policy.act(observation))
            right += reward
    return right / 40


@pytest.mark.timeout(TRAINING_SECONDS + 60)
def test_a_recurrent_policy_learns_the_cue_and_is_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = train(tmp_path, "PPO, GRU")
    played = desk.call("eval", "runs/live", "--episodes", "40", "--json")
    assert played.returncode == 0, played.stdout + played.stderr
    assert json.loads(played.stdout)["return_mean"] >= 0.95
    monkeypatch.chdir(tmp_path)
    policy = rlsrl.load("runs/live")
    assert share_of_right_answers(policy) >= 0.95
    assert share_of_right_answers(policy, forgets=True) <= 0.8
    for suffix in (".pt2", ".onnx"):
        policy.export(tmp_path / f"policy{suffix}")


def test_an_onnx_graph_takes_and_returns_the_state(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    desk = Desk(tmp_path, CUE)
    done = desk.call("run", "live.yaml", "--set", "spec.stop={trainSteps: 2}")
    assert done.returncode == 0, done.stdout + done.stderr
    policy = rlsrl.load(tmp_path / "runs" / "live")
    policy.export(tmp_path / "policy.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "policy.onnx")
    state = {"state/hidden": np.zeros((1, 32), np.float32)}
    env = DelayedCue(delay=DELAY)
    for seed in range(3):
        observation, _ = env.reset(seed=seed)
        policy.restart()
        state["state/hidden"][...] = 0.0
        for _ in range(DELAY):
            names = ("action", "next_state/hidden")
            action, following = session.run(names, {"observation": observation[np.newaxis], **state})
            assert int(action[0]) == int(policy.act(observation))
            assert np.abs(following - state["state/hidden"]).max() > 0.0
            state["state/hidden"] = following
            observation, *_ = env.step(action[0])


@pytest.mark.slow
@pytest.mark.timeout(TRAINING_SECONDS + 60)
@pytest.mark.parametrize("name", CHANGES)
def test_it_reaches_the_goal(name: str, tmp_path: Path) -> None:
    desk = train(tmp_path, name)
    played = desk.call("eval", "runs/live", "--episodes", "5")
    assert played.returncode == 0, played.stderr


@pytest.mark.slow
@pytest.mark.timeout(TRAINING_SECONDS + 60)
@pytest.mark.parametrize(
    ("name", "way"),
    [*(("PPO, GRU", way) for way in WAYS), ("own network", "policy worker"), ("own network", "threads")],
)
def test_it_reaches_the_goal_with(name: str, way: str, tmp_path: Path) -> None:
    train(tmp_path, name, *WAYS[way])


@pytest.mark.slow
@pytest.mark.timeout(TRAINING_SECONDS + 60)
@pytest.mark.parametrize("way", WITH_REPLAY)
def test_it_reaches_the_goal_with_replay_and(way: str, tmp_path: Path) -> None:
    train(tmp_path, "R2D2, GRU", *WITH_REPLAY[way])


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "others"), [("ppo", "buffer"), ("dqn", ""), ("dqn", "buffer")])
def test_it_survives_a_kill_of_each_role(algorithm: str, others: str, tmp_path: Path) -> None:
    mlp, ppo = "{{mlp: {{hiddenSizes: [16]}}", "ppo: {{epochs: 2, minibatchSize: 256}}"
    assert mlp in GATED_EXPERIMENT
    assert ppo in GATED_EXPERIMENT
    experiment = GATED_EXPERIMENT.replace(mlp, f"{mlp}, recurrent: {{{{kind: lstm}}}}")
    if algorithm == "dqn":
        replay = "dqn: {{minibatchSize: 256, replay: {{capacity: 5000, start: 500, priorities: {{}}}}}}"
        experiment = experiment.replace(ppo, replay) + "  pacing: {{trainStepsPerEnvStep: 0.1}}\n"
    experiment += "  policyWorkers: {{replicas: 1}}\n"
    if others:
        experiment += "  bufferWorkers: {{replicas: 1}}\n"
    roles = ("coordinator", "actor", "trainer", "policy", *filter(None, [others]))
    with KillCampaign(tmp_path, experiment, seed=1) as campaign:
        for role in roles:
            campaign.kill(role, "training")
        summary = campaign.finish()
    assert summary["restarts"] == dict.fromkeys(roles, 1)
