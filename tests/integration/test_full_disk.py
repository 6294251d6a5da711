"""A full disk costs durability, never the run, and is reported."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rlsrl.testing.live_runs import GATED_EXPERIMENT, Desk
from rlsrl.testing.run_snapshot import take_snapshot

LARGE = "[256, 256]"
ROOM_BYTES = 200_000
"""Smaller than a version of this network, and far larger than the trainer's log."""


@pytest.mark.slow
def test_training_continues_and_versions_are_stored_again_once_the_disk_has_space(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    desk = Desk(tmp_path, GATED_EXPERIMENT.format(gate=gate).replace("[16]", LARGE))
    with desk.begin() as run:
        run.until(run.is_complete, "all processes at work")
        run.until(lambda: (run.facts.newest() or 0) and len(run.facts.versions()) > 1, "a version beyond the first")
        (trainer,) = run.workers("trainer")
        # The kernel refuses what lies beyond the limit, in the middle of a write, as it does on a full disk.
        _, hard = resource.prlimit(trainer.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(trainer.pid, resource.RLIMIT_FSIZE, (ROOM_BYTES, hard))

        def failures() -> list[dict]:
            return run.facts.logged("trainer-0", "checkpoint_failed")

        run.until(lambda: len(failures()) >= 2, "two versions that the disk did not take")
        run.until(lambda: "NOT STORED: the newest" in run.output, "a line about versions that are not stored")
        durable = run.facts.newest()
        assert durable is not None
        families = text_string_to_metric_families(take_snapshot(run).expositions["trainer-0"])
        shown = {sample.name: sample.value for family in families for sample in family.samples}
        assert shown["rlsrl_checkpoints_failed_total"] >= 2
        assert {failure["level"] for failure in failures()} == {"error"}
        assert "File too large" in failures()[0]["exception"]
        # Each failed version was a training step further.
        steps = [int(failure["version"].partition(".")[2]) for failure in failures()]
        assert durable.version.step < steps[0] < steps[1]

        resource.prlimit(trainer.pid, resource.RLIMIT_FSIZE, (hard, hard))
        newer = run.until(
            lambda: next((info for info in run.facts.versions() if info.version.step > steps[-1]), None),
            "a version after there is room again",
        )
        assert newer.version.attempt == 1
        assert run.workers("trainer") == [trainer]
        gate.touch()
        assert run.wait() == 0, run.output
    summary = desk.facts().json("summary.json")
    assert summary["restarts"] == {}
    assert summary["ledger"]["balanced"]
    assert not list((desk.run_folder / "parameters").rglob("*.tmp")), "nothing half-written is left"
