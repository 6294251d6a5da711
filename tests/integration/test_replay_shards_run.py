"""Real runs whose replay store is in buffer workers: to the end, and over kills of each role."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlsrl.testing.chaos import KillCampaign
from rlsrl.testing.live_runs import GATED_EXPERIMENT, Desk

EXAMPLE = (Path(__file__).parents[2] / "examples" / "cartpole-dqn.yaml").read_text()
SHARDS = ("bufferWorkers.replicas=2", "actors.replicas=2")
ROLES = ("coordinator", "actor", "buffer", "trainer")
BLOCK = "dqn: {{replay: {{capacity: 5000, start: 500, nStep: 3, priorities: {{}}}}}}"
GATED_SHARDS = (
    GATED_EXPERIMENT.replace("ppo: {{epochs: 2, minibatchSize: 256}}", BLOCK)
    + "  pacing: {{trainStepsPerEnvStep: 0.1}}\n  bufferWorkers: {{replicas: 2}}\n"
)
assert BLOCK in GATED_SHARDS
TRAINERS = "  trainers: {{{{replicas: {num_trainers}}}}}\n"


def settings(*changes: str) -> list[str]:
    return [part for change in changes for part in ("--set", f"spec.{change}")]


def run(folder: Path, *changes: str) -> dict[str, Any]:
    desk = Desk(folder, EXAMPLE.replace("name: cartpole-dqn", "name: live"))
    done = desk.call("run", "live.yaml", *settings(*SHARDS, *changes))
    assert done.returncode == 0, done.stdout + done.stderr
    assert desk.facts().leftovers() == []
    assert not [*(desk.run_folder / "replay").iterdir()], "stores end with their run"
    summary: dict[str, Any] = desk.facts().json("summary.json")
    assert summary["ledger"]["balanced"], summary["ledger"]
    assert not any(summary["ledger"]["lost"].values()), summary["ledger"]
    return summary


@pytest.mark.parametrize("num_trainers", [1, 2])
def test_shards_train_as_often_as_the_ratio_says_to_the_end(num_trainers: int, tmp_path: Path) -> None:
    ratio, start = 0.3, 1000
    changes = (f"algorithm.dqn.replay.start={start}", "algorithm.dqn.replay.priorities={}")
    trainers = f"trainers.replicas={num_trainers}"
    summary = run(tmp_path, *changes, trainers, "stop={envSteps: 4000}", f"pacing.trainStepsPerEnvStep={ratio}")
    assert summary["env_steps"] >= 4000
    due, ledger = (summary["env_steps"] - start) * ratio, summary["ledger"]
    of_a_rollout = ratio * 16 * 8
    assert 0 <= due - summary["minibatches"] < 2 * num_trainers * of_a_rollout
    assert ledger["produced"] == ledger["trained"] + sum(ledger["dropped"].values())
    assert ledger["trained"] > 1000


def test_an_edit_that_removes_the_shards_of_a_live_run_leaves_nothing_behind(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    desk = Desk(tmp_path, GATED_SHARDS.format(gate=gate))
    facts = desk.facts()
    with desk.begin() as run:
        run.until(lambda: run.is_complete() and facts.train_steps() > 0, "training from shards")
        edited = desk.call("edit", "live", "--set", "bufferWorkers=null")
        assert edited.returncode == 0, edited.stderr
        run.until(lambda: run.is_complete() and not run.workers("buffer"), "the role is gone")
        steps = facts.train_steps()
        run.until(lambda: facts.train_steps() > steps, "training from the trainer's own store")
        gate.touch()
        assert run.wait() == 0, run.output
    summary = facts.json("summary.json")
    assert summary["ledger"]["balanced"], summary["ledger"]
    assert summary["ledger"]["in_buffer"] == 0, summary["ledger"]
    assert not [*(desk.run_folder / "replay").iterdir()], "stores end with their run"
    assert facts.leftovers() == []


def test_trainers_restart_when_slots_get_another_width(tmp_path: Path) -> None:
    """Credits of the old width would wait at a shard that cannot fill a slot by them, and no other would get them."""
    desk = Desk(tmp_path, GATED_SHARDS.format(gate=tmp_path / "never"))
    facts = desk.facts()
    with desk.begin("--set", "actors.environments=16") as run:
        run.until(lambda: run.is_complete() and facts.train_steps() > 0, "training from shards")
        before = run.workers("trainer")
        edited = desk.call("edit", "live", *settings("actors.environments=8"))
        assert edited.returncode == 0, edited.stderr
        run.until(lambda: run.is_complete() and run.workers("trainer") != before, "another trainer")
        steps = facts.train_steps()
        run.until(lambda: facts.train_steps() > steps, "it trains")
        edited = desk.call("edit", "live", *settings("stop={trainSteps: 1}"))
        assert edited.returncode == 0, edited.stderr
        assert run.wait() == 0, run.output
    ledger = facts.json("summary.json")["ledger"]
    assert ledger["balanced"], ledger
    assert facts.leftovers() == []


@pytest.mark.slow
def test_shards_reach_the_goal(tmp_path: Path) -> None:
    summary = run(tmp_path, "stop={returnMean: 475, envSteps: 400000}")
    assert summary["return_mean"] >= 475


@pytest.mark.slow
@pytest.mark.parametrize("num_trainers", [1, 2])
def test_shards_survive_a_kill_of_each_role(num_trainers: int, tmp_path: Path) -> None:
    with KillCampaign(tmp_path, GATED_SHARDS + TRAINERS.format(num_trainers=num_trainers), seed=1) as campaign:
        for role in ROLES:
            campaign.kill(role, "training")
        summary = campaign.finish()
    assert summary["restarts"] == dict.fromkeys(ROLES, 1)
