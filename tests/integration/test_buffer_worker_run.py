"""Real runs with a buffer worker between actors and trainer: to the goal, and over kills on the samples' way."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from rlsrl.testing.chaos import MOMENTS, KillCampaign
from rlsrl.testing.live_runs import GATED_EXPERIMENT, Desk

EXPERIMENT = GATED_EXPERIMENT + "  bufferWorkers: {{replicas: 1}}\n"
EXAMPLE = Path(__file__).parents[2] / "examples" / "cartpole-buffer-worker.yaml"


def test_kills_of_the_buffer_worker_and_its_neighbours(tmp_path: Path) -> None:
    with KillCampaign(tmp_path, EXPERIMENT, seed=1) as campaign:
        campaign.kill("buffer", "training")
        campaign.kill("trainer", "training")
        campaign.kill("actor", "training")
        summary = campaign.finish()
    assert summary["restarts"] == {"buffer": 1, "trainer": 1, "actor": 1}
    assert summary["max_policy_lag"] <= 1


def test_edits_that_remove_and_add_the_buffer_worker_keep_the_ledger(tmp_path: Path) -> None:
    """The buffer worker has started more often than the actors that take its place."""
    gate = tmp_path / "gate"
    desk = Desk(tmp_path, EXPERIMENT.format(gate=gate))
    facts = desk.facts()
    with desk.begin() as run:
        run.until(lambda: run.is_complete() and facts.train_steps() > 0, "training with the buffer worker")
        for _ in range(2):
            (killed,) = run.workers("buffer")
            os.kill(killed.pid, signal.SIGKILL)
            run.until(lambda: run.is_complete() and run.workers("buffer") != [killed], "another buffer worker")
        for section, number in (("null", 0), ("{replicas: 1}", 1)):
            edited = desk.call("edit", "live", "--set", f"bufferWorkers={section}")
            assert edited.returncode == 0, edited.stderr
            run.until(lambda: run.is_complete() and len(run.workers("buffer")) == number, "all are at work")
            steps = facts.train_steps()
            run.until(lambda: facts.train_steps() > steps, f"training with {number} buffer workers")
        gate.touch()
        assert run.wait() == 0, run.output
    summary = facts.json("summary.json")
    assert summary["ledger"]["balanced"], summary["ledger"]
    assert summary["restarts"] == {"buffer": 2}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_repeated_kills_of_the_buffer_worker(tmp_path: Path) -> None:
    with KillCampaign(tmp_path, EXPERIMENT + "  transport: grpc\n", seed=2) as campaign:
        for _ in range(3):
            for moment in MOMENTS:
                campaign.kill("buffer", moment)
        campaign.finish()
    assert len(campaign.kills) >= 10


@pytest.mark.slow
def test_the_example_trains_to_its_goal_without_torch_in_the_buffer_worker(tmp_path: Path) -> None:
    desk = Desk(tmp_path, EXAMPLE.read_text().replace("name: cartpole-buffer-worker", "name: live"))
    with desk.begin() as run:
        run.until(run.is_complete, "all processes at work")
        (buffer,) = run.workers("buffer")
        maps = Path(f"/proc/{buffer.pid}/maps").read_text()
        code = run.wait(timeout=250.0)
    assert code == 0, run.output
    assert "libtorch" not in maps
    assert desk.facts().leftovers() == []
    summary = desk.facts().json("summary.json")
    assert (summary["reason"], summary["restarts"]) == ("returnMean", {})
    assert summary["return_mean"] >= 475
    assert summary["max_policy_lag"] <= 1
    assert summary["ledger"]["balanced"], summary["ledger"]
    assert not any(summary["ledger"]["lost"].values()), summary["ledger"]
