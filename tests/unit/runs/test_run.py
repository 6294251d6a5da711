"""The figures of a run as a table, its stored versions and its curve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlsrl
from rlsrl.data.version import Version
from rlsrl.local.run_folder import RunFolderError
from rlsrl.parameters.evaluations import EVALUATION_KEY
from rlsrl.parameters.filesystem import FilesystemParameterDB
from rlsrl.parameters.protocols import ParameterError
from rlsrl.testing.clock import ManualClock
from rlsrl.testing.parameter_dbs import POLICY, make_parameters, make_state
from rlsrl.testing.stored_runs import CARTPOLE, make_run


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


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A run of three versions: the first one has an evaluation, the second one a tag and the trainer's state."""
    folder = make_run(tmp_path / "stored", CARTPOLE)
    db = FilesystemParameterDB(folder / "parameters", clock=ManualClock(time=1_800_000_000.0))
    for step in (10, 20, 30):
        metadata = {"env_steps": 100 * step, "return_mean": None if step == 10 else step / 2}
        db.push(POLICY, make_parameters(Version(1, step), size=8), metadata=metadata)
    db.save_state(POLICY, make_state(Version(1, 20)))
    db.annotate(POLICY, Version(1, 10), {EVALUATION_KEY: {"episodes": 5, "return_mean": 7.5}})
    db.annotate(POLICY, Version(1, 20), {EVALUATION_KEY: {"return_mean": 1.5, "unfinished": "two episodes"}})
    db.tag(POLICY, Version(1, 20), "best")
    return folder


def test_stored_versions_are_rows_with_tags_and_evaluations(stored: Path) -> None:
    first, second, third = rlsrl.Run(stored).versions()
    assert first == rlsrl.VersionRow(
        version="1.10",
        env_steps=1000.0,
        evaluation=7.5,
        created_at=1_800_000_000.0,
        num_parameters=8,
        nbytes=first.nbytes,
        metadata={"env_steps": 1000, "return_mean": None, EVALUATION_KEY: {"episodes": 5, "return_mean": 7.5}},
    )
    assert first.nbytes is not None
    assert first.nbytes > 8 * 4
    assert (second.tags, second.has_state, second.return_mean) == (("best",), True, 10.0)
    assert second.evaluation is None, "of some episodes alone"
    assert (third.tags, third.has_state, third.evaluation) == ((), False, None)


def test_damaged_versions_have_their_reason(stored: Path) -> None:
    _, second, third = sorted((stored / "parameters" / POLICY / "versions").glob("*.safetensors"))
    second.write_bytes(second.read_bytes()[:-1] + b"!")
    third.write_bytes(b"")
    whole, arrays, header = rlsrl.Run(stored).versions()
    assert whole.damage is None
    assert arrays.damage is not None
    assert "checksum" in arrays.damage
    assert arrays.tags == ("best",)
    assert header == rlsrl.VersionRow(version="1.30", damage=header.damage)
    assert header.damage
    with pytest.raises(ParameterError, match=r"1\.30 is tagged, but its header is damaged"):
        rlsrl.Run(stored).tag("1.30", "published")


def test_a_tag_moves_to_a_version_by_its_name_its_tag_or_as_the_newest(stored: Path) -> None:
    run = rlsrl.Run(stored)
    for version, tagged in (("1.10", "1.10"), ("best", "1.20"), ("latest", "1.30")):
        assert run.tag(version, "published") == tagged
        assert [row.version for row in run.versions() if "published" in row.tags] == [tagged]
    with pytest.raises(ParameterError, match="did you mean 'best'"):
        run.tag("bset", "published")
    with pytest.raises(ValueError, match="tag 'a/b': allowed are"):
        run.tag("best", "a/b")
    with pytest.raises(ValueError, match=r"texts like '2\.1500' already name versions"):
        run.tag("best", "1.10")


def test_a_run_without_versions_says_so(tmp_path: Path) -> None:
    run = rlsrl.Run(make_run(tmp_path / "new", CARTPOLE))
    with pytest.raises(ParameterError, match="no versions of policy 'default'; stored policies: none"):
        run.versions()
    with pytest.raises(ParameterError, match="no versions of policy 'default'; stored policies: none"):
        run.tag("latest", "published")


def test_a_run_draws_its_curve_into_its_folder_or_another_file(run: Path) -> None:
    opened = rlsrl.Run(run)
    assert opened.plot() == run / "curve.png"
    assert (run / "curve.png").read_bytes().startswith(b"\x89PNG")
    picture = opened.plot(run / "other.svg", axis="train-steps", smooth=2)
    assert "training steps" in picture.read_text()
