"""The workers' own metrics of real runs in TensorBoard's files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlsrl.testing.live_runs import GATED_EXPERIMENT, Desk
from rlsrl.testing.tensorboard import WORK_METRICS, roles_at_work, shown_scalars, worker_series

EVERY_ROLE = """
  policyWorkers: {replicas: 1}
  bufferWorkers: {replicas: 1}
  evaluators: {replicas: 1, environments: 2}
"""


def rows(run_folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]


def test_each_worker_of_a_run_shows_its_metrics_at_the_step_of_training(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    desk = Desk(tmp_path, GATED_EXPERIMENT.format(gate=gate) + EVERY_ROLE + "  tracking: {workerSeconds: 0.5}\n")
    wanted = {
        *(f"workers/{role}/0/process_resident_memory_bytes" for role in WORK_METRICS),
        f"workers/actor/1/{WORK_METRICS['actor']}",
        "workers/trainer/0/policy_lag_steps",
        "workers/trainer/0/ledger_transitions/trained",
    }

    with desk.begin() as run:
        run.until(lambda: roles_at_work(desk.run_folder) == set(WORK_METRICS), "every role's work is at TensorBoard")
        run.until(lambda: wanted <= set(worker_series(desk.run_folder)), "the other metrics are there")
        gate.touch()
        assert run.wait() == 0, run.output
    steps = {row["step"] for row in rows(desk.run_folder)}
    assert {step for values in worker_series(desk.run_folder).values() for step, _ in values} <= {0, *steps}
    assert not any(name.startswith("workers/") for row in rows(desk.run_folder) for name in row["scalars"])


def test_with_zero_seconds_a_run_shows_no_metrics_of_workers(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    desk = Desk(tmp_path, GATED_EXPERIMENT.format(gate=gate) + "  tracking: {workerSeconds: 0}\n")
    gate.touch()
    with desk.begin() as run:
        assert run.wait() == 0, run.output
    assert shown_scalars(desk.run_folder)
    assert worker_series(desk.run_folder) == {}
