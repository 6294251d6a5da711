from __future__ import annotations

import json
from pathlib import Path

from rlsrl.local.metrics_log import MetricsRow, evaluation_rows, fixed_evaluations, read_rows, training_rows


def row(step: int, *, role: str = "trainer", **scalars: float) -> MetricsRow:
    return MetricsRow(step=step, wall=float(step), role=role, scalars=scalars)


def test_reads_whole_rows_and_leaves_out_the_rest(tmp_path: Path) -> None:
    good = json.dumps({"step": 1, "wall": 2.0, "scalars": {"env_steps": 8, "loss": "nan"}, "role": "trainer"})
    lines = [good, "[]", "7", '{"step": 2}', '{"step": 3, "wall": 1, "scalars": []}', good[:20]]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    (read,) = read_rows(tmp_path / "metrics.jsonl")
    assert (read.step, read.wall, read.scalars["env_steps"]) == (1, 2.0, 8.0)
    assert read.scalars["loss"] != read.scalars["loss"]


def test_no_file_has_no_rows(tmp_path: Path) -> None:
    assert read_rows(tmp_path / "metrics.jsonl") == []


def test_a_resumed_run_replaces_rolled_back_rows() -> None:
    rows = [row(1, life=1), row(5, life=1), row(9, life=1), row(5, life=2), row(8, life=2), row(7, life=3)]
    kept = training_rows(rows)
    assert [(each.step, each.scalars["life"]) for each in kept] == [(1, 1), (5, 2), (7, 3)]


def test_a_late_evaluation_removes_no_training_rows() -> None:
    rows = [row(1), row(5), row(1, role="evaluator"), row(9), row(5, role="evaluator")]
    assert [each.step for each in training_rows(rows)] == [1, 5, 9]


def test_each_step_has_one_evaluation() -> None:
    rows = [
        row(5, role="evaluator", by=1),
        row(1, role="evaluator", by=2),
        row(7),
        row(5, role="evaluator", by=3),
    ]
    assert [(each.step, each.scalars["by"]) for each in evaluation_rows(rows)] == [(1, 2), (5, 3)]


def fixed(step: int, *, attempt: float, prefix: str = "fixed_evaluation", **scalars: float) -> MetricsRow:
    named = {f"{prefix}/{name}": value for name, value in {**scalars, "attempt": attempt}.items()}
    return row(step, role="evaluator", **named)


def test_a_fixed_version_is_no_evaluation_of_the_run() -> None:
    rows = [
        row(5, role="evaluator", by=1),
        fixed(5, attempt=3, return_mean=9.0),
        fixed(7, attempt=3, return_mean=9.0, prefix="unfinished_fixed_evaluation"),
    ]
    assert [(each.step, each.scalars["by"]) for each in evaluation_rows(rows)] == [(5, 1)]


def test_the_last_result_of_each_fixed_version_counts() -> None:
    rows = [
        fixed(500, attempt=1, return_mean=3.0),
        row(5, role="evaluator", by=1),
        fixed(500, attempt=2, return_mean=4.0, prefix="unfinished_fixed_evaluation"),
        fixed(900, attempt=2, return_mean=8.0, return_std=float("inf"), episodes=20),
        fixed(500, attempt=1, return_mean=5.0, **{"episode_info/won/mean": 0.5}),
    ]
    first, second = fixed_evaluations(rows)
    assert (first["version"], first["return_mean"]) == ("1.500", 5.0)
    assert first["episode_info"] == {"won": {"mean": 0.5, "count": None}}
    assert (second["version"], second["return_mean"], second["return_std"]) == ("2.900", 8.0, None)
    assert second["episodes"] == 20
