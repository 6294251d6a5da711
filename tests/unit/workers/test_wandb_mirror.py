"""The wandb mirror of the learning curve: real offline files, and every failure of wandb."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import structlog
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from rlsrl.api.resolved import CoordinatorConfig, ParameterStoreConfig
from rlsrl.api.spec import Wandb
from rlsrl.runtime.join_session import JoinRequest, JoinSession
from rlsrl.runtime.metrics import Metrics
from rlsrl.testing.folder_watch import FolderWatch
from rlsrl.workers import wandb_mirror
from rlsrl.workers.coordinator import CoordinatorWorker
from rlsrl.workers.learning_curve import CurveRow, LearningCurve
from rlsrl.workers.video_rows import VideoRow
from rlsrl.workers.wandb_mirror import WandbMirror
from rlsrl.workers.wandb_process import Follower, Options, num_rows_written
from rlsrl.workers.worker_metrics import WorkerMetricsRow

LOG = structlog.stdlib.get_logger()
DEADLINE = 60.0


@pytest.fixture
def curve(tmp_path: Path) -> Iterator[LearningCurve]:
    curve = LearningCurve(tmp_path, now=0.0, log=LOG)
    yield curve
    curve.close()


def rows(*sequences: int, attempt: int = 1) -> list[CurveRow]:
    return [
        CurveRow(
            step=sequence * 10,
            wall=1000.0 + sequence,
            scalars={"loss": sequence + 0.5, "return_mean": -float(sequence)},
            role="trainer",
            index=0,
            attempt=attempt,
            instance=f"life-{attempt}",
            sequence=sequence,
        )
        for sequence in sequences
    ]


def metrics_rows(*steps: int, size: int = 1) -> list[WorkerMetricsRow]:
    scalars = {f"workers/actor/0/{number}": 0.5 for number in range(size)}
    return [WorkerMetricsRow(step=step, wall=1000.0, scalars=scalars) for step in steps]


def videos(*steps: int) -> list[VideoRow]:
    return [VideoRow(step=step, tag="videos/evaluation", file=f"videos/0-1.{step}.mp4") for step in steps]


class Mirrored:
    """A mirror of a folder's learning curve, and its number of failures."""

    def __init__(self, folder: Path, *, close_seconds: float = DEADLINE, **options: Any) -> None:
        self.failures = 0
        self.lost = 0
        self.videos_lost = 0
        defaults = {"project": "toys", "entity": None, "mode": "offline", "experiment": "cartpole", "run_uid": "0f3a"}
        self.mirror = WandbMirror(
            Options(**{**defaults, "folder": str(folder), **options}),
            log=LOG,
            on_failed=self._count,
            on_lost=self._lose,
            on_lost_videos=self._lose_videos,
            close_seconds=close_seconds,
        )

    def _count(self) -> None:
        self.failures += 1

    def _lose(self, number: int) -> None:
        self.lost += number

    def _lose_videos(self, number: int) -> None:
        self.videos_lost += number

    def wait(self) -> None:
        """Wait until the present process has ended."""
        assert self.mirror._process is not None
        self.mirror._process.wait(DEADLINE)


def records(folder: Path) -> Iterator[Any]:
    """Yield the records that wandb would send for the folder's runs, in file order."""
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    for path in files(folder):
        store = DataStore()
        store.open_for_scan(str(path))
        with contextlib.suppress(AssertionError):  # raised at the end of a truncated file
            while (data := store.scan_data()) is not None:
                yield Record.FromString(data)


def files(folder: Path) -> list[Path]:
    return sorted((folder / "wandb").glob("offline-run-*/*.wandb"))


def history(folder: Path) -> list[dict[str, Any]]:
    """Return the rows, without the fields that wandb adds."""
    found = []
    for record in records(folder):
        if record.HasField("history"):
            items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            found.append({name: value for name, value in items.items() if not name.startswith("_")})
    return found


def expected(*sequences: int, attempt: int = 1) -> list[dict[str, Any]]:
    return [{"train_step": row.step, "attempt": attempt, **row.scalars} for row in rows(*sequences, attempt=attempt)]


@pytest.mark.slow
def test_rows_of_several_processes_are_at_wandb_once_under_one_run_id(curve: LearningCurve, tmp_path: Path) -> None:
    curve.append(rows(0, 1))
    first = Mirrored(tmp_path)
    curve.append(rows(2))
    first.mirror.poll(new_rows=True)
    first.mirror.close()
    curve.append(rows(3))
    curve.append(rows(2, 4, attempt=2))
    second = Mirrored(tmp_path)
    second.mirror.close()
    second.mirror.close()

    assert history(tmp_path) == expected(0, 1, 2, 3) + expected(2, 4, attempt=2)
    runs = [record.run for record in records(tmp_path) if record.HasField("run")]
    assert {(run.run_id, run.project, run.display_name) for run in runs} == {("0f3a", "toys", "cartpole")}
    drawn_over = {record.metric.glob_name: record.metric.step_metric for record in records(tmp_path)}
    assert drawn_over["*"] == "train_step"
    assert first.failures == second.failures == 0


FAKE = """
import json, os, pathlib, signal, threading, time
here = pathlib.Path(os.environ["FAKE_WANDB"])
class Settings:
    def __init__(self, **settings): pass
class Run:
    def define_metric(self, *_, **__): pass
    def log(self, row):
        with (here / "logged").open("a") as file:
            file.write(json.dumps(row["train_step"]) + "\\n")
        if row["train_step"] == 20 and not (here / "died").exists():
            (here / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
    def finish(self): FINISH
def init(**_):
    with (here / "begun").open("a") as file:
        file.write("x")
    INIT
    return Run()
"""


@pytest.fixture
def fake(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that replaces wandb by a fake with the given behaviour."""
    folder = tmp_path_factory.mktemp("fake")

    def install(init: str = "", finish: str = "pass", source: str = FAKE) -> Path:
        (folder / "wandb.py").write_text(source.replace("INIT", init).replace("FINISH", finish))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
        monkeypatch.setenv("FAKE_WANDB", str(folder))
        return folder

    return install


def logged(folder: Path) -> list[int]:
    return [int(line) for line in (folder / "logged").read_text().split()]


def test_a_process_that_dies_is_restarted_and_no_row_is_lost(curve: LearningCurve, tmp_path: Path, fake: Any) -> None:
    folder = fake()
    curve.append(rows(0, 1, 2, 3))
    mirrored = Mirrored(tmp_path)
    mirrored.wait()
    mirrored.mirror.poll(new_rows=False)
    assert mirrored.failures == 1
    mirrored.mirror.close()
    assert logged(folder) == [0, 10, 20, 0, 10, 20, 30], "rows that reached no file are sent again"
    assert mirrored.failures == 1


def test_the_mirror_gives_up_a_wandb_that_never_works(curve: LearningCurve, tmp_path: Path, fake: Any) -> None:
    folder = fake(init="raise ConnectionError('no such server')")
    curve.append(rows(0))
    with capture_logs() as logs:
        mirrored = Mirrored(tmp_path)
        for _ in range(3):
            mirrored.wait()
            mirrored.mirror.poll(new_rows=True)
        mirrored.mirror.poll(new_rows=True)
        mirrored.mirror.close()
    assert (folder / "begun").read_text() == "xxx"
    assert mirrored.failures == 3
    assert [log["given_up"] for log in logs] == [False, False, True]


def test_the_mirror_gives_up_at_once_if_wandb_is_not_installed(
    curve: LearningCurve, tmp_path: Path, fake: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    fake(source="raise ImportError('no wandb here')")
    mirrored = Mirrored(tmp_path)
    mirrored.wait()
    mirrored.mirror.poll(new_rows=True)
    assert mirrored.failures == 1
    assert mirrored.mirror._process is None
    assert "pip install 'rlsrl[wandb]' (no wandb here)" in capfd.readouterr().err


def test_a_wandb_process_that_does_not_finish_is_killed(
    curve: LearningCurve, tmp_path: Path, fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fake(finish="os.write(int(os.environ['FINISHING']), b'x'); threading.Event().wait()")
    read, write = os.pipe()
    os.set_inheritable(write, True)
    monkeypatch.setenv("FINISHING", str(write))
    monkeypatch.setattr(wandb_mirror.subprocess, "Popen", popen_with_descriptor(write))
    curve.append(rows(0))
    mirrored = Mirrored(tmp_path, close_seconds=0.01)
    process = mirrored.mirror._process
    assert process is not None
    process.stdin.close()
    assert select.select([read], [], [], DEADLINE)[0], "the process is finishing"
    mirrored.mirror.close()
    assert process.returncode == -9
    assert mirrored.failures == 1
    assert logged(folder) == [0]


def popen_with_descriptor(descriptor: int) -> Any:
    popen = subprocess.Popen
    return lambda *arguments, **options: popen(*arguments, **options, pass_fds=(descriptor,))


PARENT = """
import sys, signal
import structlog
from rlsrl.workers.wandb_mirror import WandbMirror
from rlsrl.workers.wandb_process import Options

options, log = Options.from_json(sys.argv[1]), structlog.stdlib.get_logger()
mirror = WandbMirror(options, log=log, on_failed=lambda: None, on_lost=print)
print(mirror._process.pid, flush=True)
signal.pause()
"""


def test_no_process_outlives_the_coordinator(curve: LearningCurve, tmp_path: Path) -> None:
    curve.append(rows(0))
    options = Options(project="toys", entity=None, mode="offline", experiment="a", run_uid="0f3a", folder=str(tmp_path))
    with FolderWatch(tmp_path) as watch:
        parent = subprocess.Popen([sys.executable, "-c", PARENT, options.to_json()], stdout=subprocess.PIPE)
        try:
            assert parent.stdout is not None
            child = psutil.Process(int(parent.stdout.readline()))
            assert watch.wait_for_name(".wandb", timeout=DEADLINE), "the run has started"
            (server,) = child.children()
            descriptors = [os.pidfd_open(process.pid) for process in (child, server)]
        finally:
            parent.kill()
            parent.wait()
    for descriptor in descriptors:
        assert select.select([descriptor], [], [], DEADLINE)[0], "the process ends with its parent"
        os.close(descriptor)


def test_a_coordinator_forwards_every_row_and_counts_failures(tmp_path: Path, fake: Any) -> None:
    folder = fake()
    config = CoordinatorConfig(
        experiment="cartpole",
        run_uid="0f3a",
        seed=1,
        coordinator_address=f"unix-abstract:rlsrl-test-{uuid.uuid4()}",
        heartbeat_seconds=0.05,
        metrics_address="127.0.0.1:0",
        log_folder=str(tmp_path),
        ledger_folder=str(tmp_path),
        http_address="127.0.0.1:0",
        lease_seconds=60.0,
        roster_path=str(tmp_path / "roster.json"),
        record_folder=str(tmp_path),
        parameter_store=ParameterStoreConfig(folder=str(tmp_path / "parameters")),
        wandb=Wandb(project="toys"),
        num_actors=1,
        num_trainers=1,
    )
    metrics = Metrics(CollectorRegistry())
    worker = CoordinatorWorker(token="token", metrics=metrics, log=LOG)
    worker.configure(config)
    worker.start()
    running = threading.Thread(target=worker.run)
    running.start()
    with FolderWatch(folder) as watch:
        request = JoinRequest(address=config.coordinator_address, token="token", role="trainer", index=0, attempt=1)
        member = JoinSession.join(request, timeout=DEADLINE)
        for step in (0, 10, 20):
            member.record(step, {"loss": 0.5})
        while not (folder / "died").exists():
            watch.wait(timeout=DEADLINE)
        member.record(30, {"loss": 0.5})
        member.leave("over")
        worker.exit()
        running.join(DEADLINE)
    assert logged(folder)[:3] == [0, 10, 20], "the fake died after this row"
    assert metrics.registry.get_sample_value("rlsrl_tracking_failures_total", {"tracker": "wandb"}) == 1.0


@pytest.mark.slow
def test_the_workers_metrics_are_at_wandb_and_hide_no_missing_row(curve: LearningCurve, tmp_path: Path) -> None:
    curve.append(rows(0))
    first = Mirrored(tmp_path)
    first.mirror.poll(new_rows=False, metrics_rows=metrics_rows(5, 6))
    first.mirror.close()
    curve.append(rows(1, 2))
    second = Mirrored(tmp_path)
    second.mirror.close()
    shown = history(tmp_path)
    metrics = [{"train_step": step, "workers/actor/0/0": 0.5} for step in (5, 6)]
    assert [row for row in shown if "attempt" not in row] == metrics
    assert [row for row in shown if "attempt" in row] == expected(0, 1, 2)
    assert first.lost == second.lost == 0


def test_a_wandb_that_stands_still_loses_metrics_and_no_row(curve: LearningCurve, tmp_path: Path, fake: Any) -> None:
    folder = fake(init="while not (here / 'go').exists(): time.sleep(0.01)")
    mirrored = Mirrored(tmp_path)
    taken = []
    for step in range(100, 200):
        mirrored.mirror.poll(new_rows=False, metrics_rows=metrics_rows(step, size=1000))
        if mirrored.lost:
            break
        taken.append(step)
    assert mirrored.lost == 1, "the pipe is full, in the middle of a row"
    curve.append(rows(0, 1))
    mirrored.mirror.poll(new_rows=True, metrics_rows=metrics_rows(98, 99))
    assert mirrored.lost == 3
    with FolderWatch(folder) as watch:
        (folder / "go").touch()
        while not ((folder / "logged").exists() and {0, 10, 100} <= set(logged(folder))):
            watch.wait(timeout=DEADLINE)
    mirrored.mirror.poll(new_rows=False)
    mirrored.mirror.close()
    assert sorted(logged(folder)) == [0, 10, *taken]
    assert mirrored.failures == 0


def test_metrics_for_a_wandb_that_has_ended_are_lost_and_counted(
    curve: LearningCurve, tmp_path: Path, fake: Any
) -> None:
    fake(source="raise ImportError('no wandb here')")
    mirrored = Mirrored(tmp_path)
    mirrored.wait()
    mirrored.mirror.poll(new_rows=False, metrics_rows=metrics_rows(1))
    assert mirrored.lost == 1, "the process has just ended"
    mirrored.mirror.poll(new_rows=False, metrics_rows=metrics_rows(2, 3))
    assert mirrored.lost == 3, "it is given up"


def test_videos_for_a_wandb_that_has_ended_are_counted(curve: LearningCurve, tmp_path: Path, fake: Any) -> None:
    fake(source="raise ImportError('no wandb here')")
    mirrored = Mirrored(tmp_path)
    mirrored.wait()
    mirrored.mirror.poll(new_rows=False, videos=videos(1))
    mirrored.mirror.poll(new_rows=False, videos=videos(2, 3))
    assert (mirrored.videos_lost, mirrored.lost) == (3, 0)


@pytest.mark.slow
def test_videos_are_at_wandb_and_hide_no_missing_row(curve: LearningCurve, tmp_path: Path) -> None:
    (tmp_path / "videos").mkdir()
    (tmp_path / "videos" / "0-1.5.mp4").write_bytes(b"film")
    curve.append(rows(0))
    first = Mirrored(tmp_path)
    first.mirror.poll(new_rows=True, metrics_rows=metrics_rows(4), videos=videos(5, 6))  # 6 has no file.
    first.mirror.close()
    curve.append(rows(1))
    second = Mirrored(tmp_path)
    second.mirror.close()
    shown = history(tmp_path)
    assert [row for row in shown if "attempt" in row] == expected(0, 1)
    (row,) = [row for row in shown if "videos/evaluation" in row]
    assert row["train_step"] == 5
    about = {
        item.nested_key[1]: json.loads(item.value_json)
        for record in records(tmp_path)
        for item in record.history.item
        if len(item.nested_key) == 2
    }
    assert about["_type"] == "video-file"
    (copy,) = (tmp_path / "wandb").glob(f"offline-run-*/files/{about['path']}")
    assert copy.read_bytes() == b"film"
    assert (first.failures, second.failures, first.videos_lost) == (0, 0, 0)


@pytest.mark.slow
def test_rows_that_a_kill_removed_from_wandbs_files_are_written_again(curve: LearningCurve, tmp_path: Path) -> None:
    curve.append(rows(*range(40)))
    whole = Mirrored(tmp_path)
    whole.mirror.close()
    assert num_rows_written(tmp_path, "0f3a") == 40
    (path,) = files(tmp_path)
    data = path.read_bytes()
    for size in (len(data) * 2 // 3, 7, 3, 0):
        path.write_bytes(data[:size])
        num_left = num_rows_written(tmp_path, "0f3a")
        assert num_left < 40
        assert num_left > 0 or size <= 7
    assert num_rows_written(tmp_path, "other") == 0
    path.write_bytes(data[: len(data) * 2 // 3])
    rest = Mirrored(tmp_path)
    rest.mirror.close()
    assert history(tmp_path) == expected(*range(40)), "each row once"


def test_an_incomplete_line_waits_and_an_invalid_line_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    curve = Follower(path)
    assert list(curve.new_rows()) == []
    first, second = (row.to_line() for row in rows(0, 1))
    path.write_bytes(first + b"no row\n" + second[:-1])
    assert [row.step for row in curve.new_rows()] == [0]
    assert list(curve.new_rows()) == []
    path.write_bytes(first + b"no row\n" + second)
    assert [row.step for row in curve.new_rows()] == [10]
