"""A real run of the project of ``rlsrl init``: environment and network come from outside the package."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from rlsrl.testing.live_runs import Desk
from rlsrl.testing.run_snapshot import take_snapshot


@pytest.mark.slow
def test_the_projects_own_environment_and_network_are_trained_and_played(tmp_path: Path) -> None:
    nobody = Desk(tmp_path, "")
    assert nobody.call("init", "project").returncode == 0
    project = tmp_path / "project"
    text = (project / "experiment.yaml").read_text().replace("name: project", "name: live")
    desk = Desk(project, text)
    # It goes on until it was looked at: the return that would end it is above what can be had.
    changes = ("spec.stop.returnMean=1", "spec.stop.envSteps=1000000000", "spec.parameters.everySteps=2")
    with desk.begin(*(argument for change in changes for argument in ("--set", change))) as run:
        run.until(run.is_complete, "all processes at work")
        snapshot = take_snapshot(run)
        run.until(lambda: (newest := run.facts.newest()) and newest.version.step >= 2, "a version that was trained")
        run.send(signal.SIGINT)
        assert run.wait() == 128 + signal.SIGINT, run.output
    # Nobody can export a network that only its author knows: the actor evaluates it by torch.
    assert any("libtorch" in file for file in snapshot.mapped_files["actor"])
    summary = desk.facts().json("summary.json")
    assert summary["train_steps"] >= 2
    assert summary["ledger"]["balanced"]
    assert summary["return_mean"] is not None, "episodes of the own environment ended"
    first, *_, last = desk.facts().versions()
    assert first.num_parameters == last.num_parameters > 0
    assert last.metadata["program"] is None
    played = desk.call("eval", "runs/live", "--episodes", "10")
    assert played.returncode == 0, played.stderr
    assert "return: mean" in played.stdout
