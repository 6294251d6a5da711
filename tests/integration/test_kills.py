"""Every role of a real run is killed; the run still reaches its goal, and every transition is accounted for."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsrl.testing.chaos import KILLED_ROLES, MOMENTS, KillCampaign
from rlsrl.testing.live_runs import GATED_EXPERIMENT

ELSEWHERE = {"policy", "buffer"}
"""Roles without a process here; see ``test_policy_worker_run`` and ``test_buffer_worker_run``."""
ROLES = [role for role in KILLED_ROLES if role not in ELSEWHERE]
EXPERIMENT = GATED_EXPERIMENT + "  evaluators: {{environments: 2, episodesPerEnvironment: 1}}\n"


def test_a_kill_of_each_role(tmp_path: Path) -> None:
    with KillCampaign(tmp_path, EXPERIMENT, seed=1) as campaign:
        campaign.kill("coordinator", "start-up")
        campaign.kill("actor", "training")
        campaign.kill("evaluator", "training")
        campaign.kill("trainer", "checkpoint")
        campaign.kill("controller", "shutdown")
        summary = campaign.finish()
    assert {kill.role for kill in campaign.kills} == set(ROLES), "each role of the table is killed"
    assert summary["restarts"] == {"coordinator": 1, "actor": 1, "evaluator": 1, "trainer": 1}
    assert summary["evaluation"]["version"] == summary["versions"]["last"]
    assert (summary["attempts"], summary["lives"]) == (3, 2)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("role", ROLES)
def test_repeated_kills_of_a_role(tmp_path: Path, role: str) -> None:
    with KillCampaign(tmp_path, EXPERIMENT, seed=2) as campaign:
        for _ in range(3):
            for moment in MOMENTS:
                campaign.kill(role, moment)
        campaign.finish()
    assert len(campaign.kills) >= 10
