from __future__ import annotations

import json
from pathlib import Path

from rlsrl.local.metrics_log import MetricsRow, evaluation_rows, read_rows, training_rows


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
