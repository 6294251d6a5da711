"""Several trainer ranks in a real run: they train, end and restart together."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from rlsrl.testing.chaos import MOMENTS, KillCampaign
from rlsrl.testing.live_runs import GATED_EXPERIMENT, LiveRun

EXPERIMENT = GATED_EXPERIMENT + "  trainers: {{replicas: 2}}\n"


def test_a_kill_of_a_rank_restarts_its_gang_and_nothing_else(tmp_path: Path) -> None:
    with KillCampaign(tmp_path, EXPERIMENT, seed=1) as campaign:
        campaign.kill("trainer", "training")
        run = campaign.life()
        run.until(run.is_complete, "all processes at work")
        addresses = listening_addresses(run)
        summary = campaign.finish()
    assert summary["restarts"] == {"trainer": 1}
    assert summary["attempts"] == 2
    assert addresses == {"127.0.0.1"}, "the run's ports are on loopback only"


def listening_addresses(run: LiveRun) -> set[str]:
    """Return the addresses on which the run's processes listen for TCP, from the kernel."""
    processes = [process for worker in run.workers() for process in family(worker.pid)]
    connections = [connection for process in processes for connection in process.net_connections("inet")]
    return {connection.laddr.ip for connection in connections if connection.status == psutil.CONN_LISTEN}


def family(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_repeated_kills_of_ranks(tmp_path: Path) -> None:
    with KillCampaign(tmp_path, EXPERIMENT, seed=2) as campaign:
        for _ in range(3):
            for moment in MOMENTS:
                campaign.kill("trainer", moment)
        campaign.finish()
    assert len(campaign.kills) >= 10
