"""What happens to benchmarked runs: a worker of each role is killed, each once all train again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml
from contestants import RUN, ContestantFailed
from hindrances import KILLED_ROLES, STEPS_BETWEEN_KILLS, killed

from rlsrl.testing.live_runs import GATED_EXPERIMENT, LiveRun


def test_one_worker_of_each_role_is_killed_while_the_run_trains(tmp_path: Path) -> None:
    experiment = yaml.safe_load(GATED_EXPERIMENT.format(gate=tmp_path / "gate"))
    experiment["spec"]["actors"]["replicas"] = 1
    (tmp_path / "live.yaml").write_text(yaml.safe_dump(experiment))
    command = ["run", "live.yaml", "--run-dir", RUN]
    with LiveRun(command, cwd=tmp_path, run_folder=tmp_path / RUN, env=os.environ) as run:
        run.until(run.is_complete, "all workers")
        first = {worker.role: worker.pid for worker in run.workers()}
        assert first.keys() == {*KILLED_ROLES}
        with killed(tmp_path):
            for number, role in enumerate(KILLED_ROLES, start=1):
                run.until(lambda role=role: first[role] not in pids(run), f"{role} is killed")
                assert {*first.values()} & pids(run) == {first[each] for each in KILLED_ROLES[number:]}
                run.until(lambda role=role: run.facts.workers(role), f"{role} is started again")
        trained = len(KILLED_ROLES) * STEPS_BETWEEN_KILLS
        run.until(lambda: run.facts.train_steps() > trained, "training with all of them")
        (tmp_path / "gate").touch()
        assert run.wait() == 0, run.output
    assert run.facts.json("summary.json")["ledger"]["balanced"]


def test_a_run_that_ends_before_is_no_run_with_kills(tmp_path: Path) -> None:
    with pytest.raises(ContestantFailed, match="these roles was killed: coordinator, actor, trainer"), killed(tmp_path):
        pass


def pids(run: LiveRun) -> set[int]:
    return {worker.pid for worker in run.workers()}
