"""What happens to benchmarked runs: a worker of each role is killed, each once all train again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from contestants import RUN, ContestantFailed
from hindrances import KILLED_ROLES, STEPS_BETWEEN_KILLS, killed

from rlsrl.testing.waiting import until


def test_one_worker_of_each_role_is_killed_while_the_run_trains(tmp_path: Path) -> None:
    (tmp_path / RUN).mkdir()
    command = [sys.executable, "-c", "input()"]
    workers = {role: subprocess.Popen(command, stdin=subprocess.PIPE) for role in KILLED_ROLES}

    def tell(train_steps: float) -> None:
        roles = {role: [{"pid": process.pid}] for role, process in workers.items()}
        new = tmp_path / "new"
        new.write_text(json.dumps({"roles": roles, "totals": {"train_steps": train_steps}}))
        new.replace(tmp_path / RUN / "status.json")

    try:
        with killed(tmp_path):
            for number, role in enumerate(KILLED_ROLES, start=1):
                assert workers[role].poll() is None, "only while training goes on"
                tell(number * (STEPS_BETWEEN_KILLS + 1.0))
                until(lambda role=role: workers[role].poll() is not None, f"{role} is killed")
    finally:
        for process in workers.values():
            process.kill()
            process.wait()


def test_a_run_that_ends_before_is_no_run_with_kills(tmp_path: Path) -> None:
    with pytest.raises(ContestantFailed, match="these roles was killed: coordinator, actor, trainer"), killed(tmp_path):
        pass
