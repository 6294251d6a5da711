"""Real runs in which policy workers evaluate the policy: to the goal, and over kills."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsrl.testing.chaos import MOMENTS, KillCampaign
from rlsrl.testing.live_runs import GATED_EXPERIMENT, Desk, WorkerProcess

EXAMPLE = Path(__file__).parents[2] / "examples" / "cartpole-policy-worker.yaml"
EXPERIMENT = (
    GATED_EXPERIMENT.replace("rolloutLength: 64}}", "rolloutLength: 64, ringSize: 2}}")
    + "  policyWorkers: {{replicas: 2, maxBatchSize: 8}}\n"
)


def test_a_killed_policy_worker_is_the_only_one_that_is_missed(tmp_path: Path) -> None:
    with KillCampaign(tmp_path, EXPERIMENT, seed=3) as campaign:
        campaign.kill("policy", "training")
        campaign.kill("actor", "training")
        summary = campaign.finish()
    assert summary["restarts"] == {"policy": 1, "actor": 1}
    assert summary["policy_lag"] <= 1


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("role", ["policy", "actor"])
def test_killed_again_and_again(tmp_path: Path, role: str) -> None:
    with KillCampaign(tmp_path, EXPERIMENT, seed=4) as campaign:
        for _ in range(3):
            for moment in MOMENTS:
                campaign.kill(role, moment)
        campaign.finish()


@pytest.mark.slow
def test_the_example_trains_to_its_goal_with_torch_in_the_trainer_alone(tmp_path: Path) -> None:
    desk = Desk(tmp_path, EXAMPLE.read_text().replace("name: cartpole-policy-worker", "name: live"))
    with desk.begin() as run:
        run.until(run.is_complete, "all processes at work")
        mapped = {worker.role: maps_of(worker) for worker in run.workers()}
        code = run.wait(timeout=250.0)
    assert code == 0, run.output
    assert [role for role, files in mapped.items() if "libtorch" in files] == ["trainer"]
    facts = desk.facts()
    assert facts.leftovers() == []
    summary = facts.json("summary.json")
    assert (summary["reason"], summary["finished"]) == ("returnMean", True)
    assert summary["return_mean"] >= 475
    assert summary["ledger"]["balanced"], summary
    assert not any(summary["ledger"]["lost"].values())
    assert summary["policy_lag"] <= 1
    assert sum(each["environments"] for each in facts.logged("policy-0", "statistics")) >= summary["env_steps"]


def maps_of(worker: WorkerProcess) -> str:
    """What files the process has mapped."""
    return Path(f"/proc/{worker.pid}/maps").read_text()
