"""The figures of a run as a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlsrl
from rlsrl.local.run_folder import RunFolderError


def row(step: int, role: str = "trainer", **scalars: float) -> dict[str, Any]:
    return {"step": step, "wall": 100.0 + step, "role": role, "scalars": scalars}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "resolved.json").write_text("{}")
    rows = [
        row(1, env_steps=10),
        row(2, env_steps=20, return_mean=1.5),
        row(3, env_steps=30, return_mean=9.0),
        row(2, env_steps=21, return_mean=1.75),  # a resumed trainer repeats step 2
        row(2, role="evaluator", **{"evaluation/return_mean": 2.5}),
        row(3, role="program", **{"own/score": 9.0}),  # of a step that was rolled back
        row(2, role="program", **{"own/score": 7.0}),
        row(2, role="program", **{"own/score": 8.0}),
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows) + '{"step": 4, "wa')
    return tmp_path


def test_metrics_are_columns_of_the_history_that_counts(run: Path) -> None:
    table = rlsrl.Run(run).metrics()
    assert {name: column.dtype.name for name, column in table.items()} == dict.fromkeys(
        ("step", "wall", "env_steps", "return_mean"), "float64"
    )
    np.testing.assert_array_equal(table["step"], [1, 2])
    np.testing.assert_array_equal(table["wall"], [101, 102])
    np.testing.assert_array_equal(table["env_steps"], [10, 21])
    np.testing.assert_array_equal(table["return_mean"], [np.nan, 1.75])
    evaluations = rlsrl.Run(run).metrics("evaluations")
    np.testing.assert_array_equal(evaluations["evaluation/return_mean"], [2.5])
    np.testing.assert_array_equal(rlsrl.Run(run).metrics("own")["own/score"], [7.0, 8.0])
    with pytest.raises(ValueError, match="kind is 'trainig'; allowed: training, evaluations, own"):
        rlsrl.Run(run).metrics("trainig")  # type: ignore[arg-type]


def test_a_run_without_rows_and_without_an_end(run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    opened = rlsrl.Run(run)
    assert [len(column) for column in opened.metrics().values()] == [0, 0]
    assert opened.summary is None
    (run / "summary.json").write_text('{"finished": true}')
    assert opened.summary == {"finished": True}
    with pytest.raises(RunFolderError, match="holds a run without"):
        _ = opened.experiment


def test_a_missing_run_is_named(run: Path) -> None:
    with pytest.raises(RunFolderError, match="is not a run folder"):
        rlsrl.Run(run.parent)
