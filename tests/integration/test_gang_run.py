"""Several trainer ranks in a real run: they train as one, fall as one and come back as one."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsrl.testing.kills import MOMENTS, KillCampaign
from rlsrl.testing.live_runs import GATED_EXPERIMENT

EXPERIMENT = GATED_EXPERIMENT + "  trainers: {{replicas: 2}}\n"


def test_a_kill_of_a_rank_restarts_its_gang_and_nothing_else(tmp_path: Path) -> None:
    with KillCampaign(tmp_path, EXPERIMENT, seed=1) as campaign:
        campaign.kill("trainer", "training")
        summary = campaign.finish()
    assert summary["restarts"] == {"trainer": 1}
    assert summary["attempts"] == 2


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ranks_are_killed_again_and_again(tmp_path: Path) -> None:
    with KillCampaign(tmp_path, EXPERIMENT, seed=2) as campaign:
        for _ in range(3):
            for moment in MOMENTS:
                campaign.kill("trainer", moment)
        campaign.finish()
    assert len(campaign.kills) >= 10
