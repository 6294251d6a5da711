"""The workers' own metrics of real runs in TensorBoard's files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlsrl.testing.live_runs import GATED_EXPERIMENT, Desk
from rlsrl.testing.tensorboard import shown_scalars

RATE = "env_steps_per_second"


def of_workers(run_folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return steps and values of each of the workers' series."""
    series: dict[str, list[tuple[int, float]]] = {}
    for tag, step, value in shown_scalars(run_folder):
        if tag.startswith("workers/"):
            series.setdefault(tag, []).append((step, value))
    return series


def rows(run_folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]


def test_each_worker_of_a_run_shows_its_metrics_at_the_step_of_training(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    desk = Desk(tmp_path, GATED_EXPERIMENT.format(gate=gate) + "  tracking: {workerSeconds: 0.5}\n")
    wanted = {
        *(f"workers/actor/{index}/{RATE}" for index in (0, 1)),
        "workers/actor/0/process_resident_memory_bytes",
        "workers/trainer/0/policy_lag_steps",
        "workers/trainer/0/train_steps_per_second",
        "workers/trainer/0/ledger_transitions/trained",
    }

    def trains_and_shows() -> bool:
        series = of_workers(desk.run_folder)
        return wanted <= set(series) and any(step > 0 and rate > 0 for step, rate in series[f"workers/actor/0/{RATE}"])

    with desk.begin() as run:
        run.until(trains_and_shows, "the workers' metrics are at TensorBoard")
        gate.touch()
        assert run.wait() == 0, run.output
    steps = {row["step"] for row in rows(desk.run_folder)}
    assert {step for values in of_workers(desk.run_folder).values() for step, _ in values} <= {0, *steps}
    assert not any(name.startswith("workers/") for row in rows(desk.run_folder) for name in row["scalars"])


def test_with_zero_seconds_a_run_shows_no_metrics_of_workers(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    desk = Desk(tmp_path, GATED_EXPERIMENT.format(gate=gate) + "  tracking: {workerSeconds: 0}\n")
    gate.touch()
    with desk.begin() as run:
        assert run.wait() == 0, run.output
    assert shown_scalars(desk.run_folder)
    assert of_workers(desk.run_folder) == {}
