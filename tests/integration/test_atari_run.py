"""A short run of the Pong example, and an evaluation of its last version."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlsrl.testing.live_runs import Desk

EXAMPLE = Path(__file__).parents[2] / "examples" / "pong.yaml"
FEW_STEPS = {
    "stop.envSteps": 300,
    "actors.replicas": 1,
    "actors.rolloutLength": 16,
    "algorithm.ppo.minibatchSize": 64,
    "algorithm.ppo.epochs": 1,
    "environment.maxEpisodeSteps": 25,
}


@pytest.fixture(scope="module")
def pong(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    desk = Desk(tmp_path_factory.mktemp("pong"), EXAMPLE.read_text().replace("name: pong", "name: live"))
    overrides = [part for name, value in FEW_STEPS.items() for part in ("--set", f"{name}={value}")]
    with desk.begin(*overrides) as run:
        assert run.wait() == 0, run.output
    return desk


@pytest.mark.slow
def test_the_pong_example_trains(pong: Desk) -> None:
    summary = pong.facts().json("summary.json")
    assert summary["reason"] == "envSteps"
    assert summary["env_steps"] >= 300
    assert summary["ledger"]["balanced"]
    assert summary["restarts"] == {}
    newest = pong.facts().newest()
    assert newest is not None
    assert newest.metadata["program"] is None, "actors evaluate the network with torch"
    last = json.loads((pong.run_folder / "metrics.jsonl").read_text().splitlines()[-1])["scalars"]
    assert 0.0 < last["train/entropy"] < 1.8
    assert 0.0 < last["train/learning_rate"] < 2.5e-4


@pytest.mark.slow
def test_its_last_version_can_be_played(pong: Desk) -> None:
    played = pong.call("eval", "runs/live", "--episodes", "1", "--environments", "1", "--json")
    assert played.returncode == 0, played.stderr
    result = json.loads(played.stdout)
    assert (result["episodes"], result["length_mean"]) == (1, 25.0)
