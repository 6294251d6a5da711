"""Each row is kept once despite repeated sends and kills; TensorBoard gets the same rows."""

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog

from rlsrl.local.metrics_log import read_rows
from rlsrl.workers.learning_curve import METRICS_FILE, TENSORBOARD_FOLDER, CurveRow, LearningCurve
from rlsrl.workers.worker_metrics import WorkerMetricsRow

LOG = structlog.stdlib.get_logger()


def rows(
    *sequences: int, instance: str = "a", attempt: int = 1, step: int | None = None, role: str = "trainer"
) -> list[CurveRow]:
    return [
        CurveRow(
            step=sequence * 10 if step is None else step,
            wall=1000.0 + sequence,
            scalars={"loss": sequence + 0.5},
            role=role,
            index=0,
            attempt=attempt,
            instance=instance,
            sequence=sequence,
        )
        for sequence in sequences
    ]


@pytest.fixture
def curve(tmp_path: Path) -> Iterator[LearningCurve]:
    curve = open_curve(tmp_path)
    yield curve
    curve.close()


def open_curve(folder: Path) -> LearningCurve:
    return LearningCurve(folder, now=5000.0, log=LOG)


def kept(folder: Path) -> list[tuple[str, int]]:
    lines = (folder / METRICS_FILE).read_text().splitlines()
    return [(row["instance"], row["sequence"]) for row in map(json.loads, lines)]


def events(folder: Path) -> list[tuple[str, int, dict[str, float]]]:
    """Return (kind, step, scalars) of each TensorBoard event, in order of file names; verify the checksums."""
    from tensorboardX.proto.event_pb2 import Event

    found: list[tuple[str, int, dict[str, float]]] = []
    for path in sorted((folder / TENSORBOARD_FOLDER).iterdir()):
        for payload in records(path.read_bytes()):
            event: Any = Event.FromString(payload)
            scalars = {value.tag: value.simple_value for value in event.summary.value}
            found.append((event.WhichOneof("what"), event.step, scalars))
    return found


def records(data: bytes) -> Iterator[bytes]:
    from tensorboardX.crc32c import crc32c

    def masked(content: bytes) -> int:
        crc = crc32c(content)
        return ((crc >> 15) | (crc << 17)) + 0xA282EAD8 & 0xFFFFFFFF

    position = 0
    while position + 12 <= len(data):
        length, check = struct.unpack_from("<QI", data, position)
        assert check == masked(data[position : position + 8])
        payload = data[position + 12 : position + 12 + length]
        if len(payload) < length or position + 16 + length > len(data):
            return
        (check,) = struct.unpack_from("<I", data, position + 12 + length)
        assert check == masked(payload)
        yield payload
        position += 16 + length


def summaries(folder: Path) -> list[int]:
    return [step for kind, step, _ in events(folder) if kind == "summary"]


def test_a_row_that_is_sent_twice_is_kept_once(curve: LearningCurve, tmp_path: Path) -> None:
    assert curve.append(rows(0, 1)) == 2
    assert curve.append(rows(0, 1, 2)) == 1
    assert curve.append(rows(0, instance="b")) == 1
    assert kept(tmp_path) == [("a", 0), ("a", 1), ("a", 2), ("b", 0)]
    assert summaries(tmp_path) == [0, 10, 20, 0]


def test_a_new_coordinator_knows_the_stored_rows(curve: LearningCurve, tmp_path: Path) -> None:
    curve.append(rows(0, 1))
    after = open_curve(tmp_path)
    assert after.append(rows(0, 1, 2)) == 1
    after.close()
    assert kept(tmp_path) == [("a", 0), ("a", 1), ("a", 2)]
    assert summaries(tmp_path) == [0, 10, 20]


@pytest.mark.parametrize("size", [1, 70_000])
def test_a_truncated_line_is_removed_and_its_row_is_kept_when_sent_again(
    curve: LearningCurve, tmp_path: Path, size: int
) -> None:
    curve.append(rows(0))
    with (tmp_path / METRICS_FILE).open("ab") as file:
        file.write(b'{"step":1' + b" " * size)
    after = open_curve(tmp_path)
    after.append(rows(0, 1))
    after.close()
    assert kept(tmp_path) == [("a", 0), ("a", 1)]


def test_a_file_of_one_torn_line_becomes_empty(tmp_path: Path) -> None:
    (tmp_path / METRICS_FILE).write_bytes(b"x" * 200_000)
    open_curve(tmp_path).close()
    assert (tmp_path / METRICS_FILE).read_bytes() == b""


def test_events_lost_by_a_kill_are_written_after_the_restart(curve: LearningCurve, tmp_path: Path) -> None:
    curve.append(rows(0, 1, 2))
    (event_file,) = (tmp_path / TENSORBOARD_FOLDER).iterdir()
    data = event_file.read_bytes()
    for cut in (len(data) - 3, len(data) - 60, 40, 5, 0):
        event_file.write_bytes(data[:cut])
        open_curve(tmp_path).close()
        assert summaries(tmp_path) == [0, 10, 20], f"cut at {cut}"
        for later in sorted((tmp_path / TENSORBOARD_FOLDER).iterdir())[1:]:
            later.unlink()


def test_a_restart_with_complete_files_duplicates_nothing(curve: LearningCurve, tmp_path: Path) -> None:
    curve.append(rows(0, 1))
    for _ in range(3):
        open_curve(tmp_path).close()
    assert summaries(tmp_path) == [0, 10]


def test_an_evaluation_between_a_trainers_rows_undoes_nothing(curve: LearningCurve, tmp_path: Path) -> None:
    curve.append(rows(0, instance="e", role="evaluator", attempt=0))
    curve.append(rows(1))
    curve.append(rows(1, instance="e", role="evaluator", attempt=0))
    curve.append(rows(2))
    assert "session_log" not in [kind for kind, _, _ in events(tmp_path)]

    after = open_curve(tmp_path)
    after.append(rows(3, instance="b", attempt=2))
    after.close()
    assert [kind for kind, _, _ in events(tmp_path)].count("session_log") == 1


def test_a_new_attempt_makes_tensorboard_drop_undone_steps(curve: LearningCurve, tmp_path: Path) -> None:
    curve.append(rows(0, 1, 2))
    curve.append(rows(0, instance="b", attempt=2, step=10))
    assert [(kind, step) for kind, step, _ in events(tmp_path)] == [
        ("file_version", 0),
        ("summary", 0),
        ("summary", 10),
        ("summary", 20),
        ("session_log", 10),
        ("summary", 10),
    ]


def test_scalars_of_any_value_arrive(curve: LearningCurve, tmp_path: Path) -> None:
    scalars = {"plain": 0.25, "not a number": math.nan, "infinite": -math.inf, "huge": 1e300, "é": 1.0}
    (row,) = rows(300)
    curve.append([CurveRow(**{**{name: getattr(row, name) for name in row.__annotations__}, "scalars": scalars})])
    (read,) = read_rows(tmp_path / METRICS_FILE)
    assert read.step == 3000
    assert read.scalars["plain"] == 0.25
    assert math.isnan(read.scalars["not a number"])
    assert read.scalars["infinite"] == -math.inf
    _, (_, step, seen) = events(tmp_path)
    assert step == 3000
    assert seen["plain"] == 0.25
    assert math.isnan(seen["not a number"])
    assert seen["huge"] == math.inf
    assert set(seen) == set(scalars)
    after = open_curve(tmp_path)
    assert after.append([row]) == 0
    after.close()


def test_a_full_disk_keeps_no_row_and_a_retry_keeps_all(
    curve: LearningCurve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    curve.append(rows(0))
    with monkeypatch.context() as patched:
        patched.setattr(curve, "_file", FileOnFullDisk(curve._file))
        with pytest.raises(OSError, match="only 10 of"):
            curve.append(rows(1, 2))
    assert kept(tmp_path) == [("a", 0)]
    assert curve.append(rows(1, 2)) == 2
    assert kept(tmp_path) == [("a", 0), ("a", 1), ("a", 2)]


def worker_metrics(step: int) -> WorkerMetricsRow:
    return WorkerMetricsRow(step=step, wall=2000.0, scalars={"workers/actor/0/a": 0.5, "workers/trainer/0/b": 2.0})


def test_the_newest_step_is_that_of_the_trainers_newest_row(curve: LearningCurve, tmp_path: Path) -> None:
    assert curve.newest_step == 0
    curve.append(rows(0, 1, 2))
    curve.append(rows(0, instance="e", role="evaluator", attempt=0))
    assert curve.newest_step == 20
    curve.append(rows(0, instance="b", attempt=2, step=10))
    assert curve.newest_step == 10
    after = open_curve(tmp_path)
    assert after.newest_step == 10
    after.close()


def test_the_workers_metrics_are_events_and_no_rows(curve: LearningCurve, tmp_path: Path) -> None:
    curve.append(rows(1))
    assert curve.show(worker_metrics(10))
    assert events(tmp_path)[-1] == ("summary", 10, worker_metrics(10).scalars)
    assert kept(tmp_path) == [("a", 1)]


def test_the_workers_metrics_do_not_hide_that_a_rows_event_is_missing(curve: LearningCurve, tmp_path: Path) -> None:
    for step in range(150, 153):
        assert curve.show(worker_metrics(step))
    curve.append(rows(15))
    (event_file,) = (tmp_path / TENSORBOARD_FOLDER).iterdir()
    event_file.write_bytes(event_file.read_bytes()[:-3])
    open_curve(tmp_path).close()
    assert summaries(tmp_path) == [150, 151, 152, 150]
    open_curve(tmp_path).close()
    assert summaries(tmp_path) == [150, 151, 152, 150], "and duplicate nothing"


def test_a_row_without_scalars_has_one_event(curve: LearningCurve, tmp_path: Path) -> None:
    (row,) = rows(300)
    curve.append([replace(row, scalars={})])
    open_curve(tmp_path).close()
    assert summaries(tmp_path) == [3000]


class FileOnFullDisk:
    """A file on a disk with ten bytes left."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: bytes) -> int:
        return int(self._file.write(data[:10]))

    def fileno(self) -> int:
        return int(self._file.fileno())
