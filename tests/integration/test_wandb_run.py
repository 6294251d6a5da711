"""A real run with wandb in offline mode, through a kill of the coordinator."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from wandb.proto.wandb_internal_pb2 import Record
from wandb.sdk.internal.datastore import DataStore

from rlsrl.testing.live_runs import GATED_EXPERIMENT, Desk

EXPERIMENT = GATED_EXPERIMENT + "  tracking: {{wandb: {{project: toys}}, workerSeconds: 0.5}}\n"


@pytest.mark.slow
def test_every_row_of_a_run_is_at_wandb_under_the_runs_identity(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    desk = Desk(tmp_path, EXPERIMENT.format(gate=gate))
    with desk.begin() as run:
        run.until(lambda: len(files_of(desk.run_folder)) == 1, "the run has begun at wandb")
        (coordinator,) = run.workers("coordinator")
        os.kill(coordinator.pid, signal.SIGKILL)
        run.until(lambda: len(files_of(desk.run_folder)) == 2, "the next life goes on with it")
        run.until(lambda: len(rows_of(desk.run_folder)) > 1, "the learning curve has rows")
        gate.touch()
        assert run.wait() == 0, run.output
    facts = desk.facts()
    assert facts.leftovers() == []
    assert facts.json("summary.json")["restarts"] == {"coordinator": 1}
    kept = rows_of(desk.run_folder)
    paths = files_of(desk.run_folder)
    assert {path.name for path in paths} == {f"run-{facts.run_uid}.wandb"}
    shown = [row for path in paths for row in history(path)]
    assert len(shown) > 1
    assert any("workers/actor/0/env_steps_per_second" in row for row in shown), "the workers' own metrics"
    learning_curve = [row for row in shown if "attempt" in row]
    assert learning_curve == [{"train_step": row["step"], "attempt": 1, **row["scalars"]} for row in kept]


def rows_of(run_folder: Path) -> list[dict[str, Any]]:
    """Return the rows of the learning curve."""
    curve = run_folder / "metrics.jsonl"
    return [json.loads(line) for line in curve.read_text().splitlines()] if curve.exists() else []


def files_of(run_folder: Path) -> list[Path]:
    """Return wandb's files in the order of their creation."""
    return sorted(run_folder.glob("wandb/offline-run-*/*.wandb"))


def history(path: Path) -> list[dict[str, Any]]:
    """Return the rows without wandb's additions."""
    store = DataStore()
    store.open_for_scan(str(path))
    found = []
    with contextlib.suppress(AssertionError):  # the end of a file that a kill cut short
        while (data := store.scan_data()) is not None:
            record = Record.FromString(data)
            if record.HasField("history"):
                items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                found.append({name: value for name, value in items.items() if not name.startswith("_")})
    return found
