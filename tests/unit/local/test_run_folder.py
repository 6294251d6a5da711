from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rlsrl.api.placement import PARAMETERS
from rlsrl.api.role_configs import POLICY_NAME
from rlsrl.data.version import Version
from rlsrl.local.run_folder import RunFolder, RunFolderBusy, RunFolderError
from rlsrl.local.run_names import RECORD
from rlsrl.parameters.protocols import Parameters, TrainerState
from rlsrl.runtime.errors import ConfigurationError
from rlsrl.testing.clock import ManualClock
from rlsrl.workers.build.run_database import RESOLVED


def create(path: Path, clock: ManualClock | None = None) -> RunFolder:
    folder = RunFolder.open(path, clock=clock)
    folder.create(as_given=b"given", resolved=b"resolved", package_version="0.1")
    return folder


def test_a_new_folder_becomes_a_run_that_is_found_again(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "run"
    with RunFolder.open(path) as folder:
        assert not folder.holds_run
        folder.create(as_given=b"given", resolved=b"resolved", package_version="0.1")
        uid = folder.record.run_uid
    assert (path / "experiment.yaml").read_bytes() == b"given"
    assert (path / "experiment.resolved.yaml").read_bytes() == b"resolved"
    with RunFolder.open(path) as again:
        assert again.holds_run
        assert again.record.run_uid == uid
        assert not again.is_finished()


def test_two_runs_have_different_uids(tmp_path: Path) -> None:
    with create(tmp_path / "a") as first, create(tmp_path / "b") as second:
        assert first.record.run_uid != second.record.run_uid


def test_an_attempt_is_on_the_disk_before_it_is_used(tmp_path: Path) -> None:
    with create(tmp_path / "run") as folder:
        for expected in (1, 2, 3):
            assert folder.begin_attempt() == expected
            assert json.loads((tmp_path / "run" / RECORD).read_text())["attempt"] == expected


def test_time_of_a_killed_life_ends_with_its_last_metrics(tmp_path: Path) -> None:
    clock = ManualClock(time=1000.0)
    path = tmp_path / "run"
    with create(path, clock) as folder:
        folder.begin_life(modules=tmp_path)
        folder.begin_attempt()
    folder.metrics.write_text("")
    os.utime(folder.metrics, (1030.0, 1030.0))
    clock.advance(5000.0)
    with RunFolder.open(path, clock=clock) as again:
        again.begin_life(modules=tmp_path)
        clock.advance(3.0)
        again.end_life()
        assert again.record.wall_seconds == 33.0
        assert again.record.training_seconds == 30.0


def store(folder: RunFolder, step: int, **metadata: int) -> None:
    version = Version(1, step)
    parameters = Parameters(version=version, vector=np.zeros(1, np.float32), layout="x")
    state = TrainerState(version=version, arrays={}, values={})
    folder.database.push(POLICY_NAME, parameters, metadata=metadata, state=state)


@pytest.mark.parametrize(
    ("status", "lost"),
    [
        (None, ""),
        ("damaged", ""),
        ('{"totals": {"train_steps": null}}', ""),
        ('{"totals": {"train_steps": 300, "env_steps": 300000}}', ""),
        (
            '{"totals": {"train_steps": 441, "env_steps": 464119}}',
            "; training steps lost after it: at least 62 (to 464,119 env steps)",
        ),
        ('{"totals": {"train_steps": 1441}}', "; training steps lost after it: at least 1,062"),
    ],
)
def test_a_resumption_names_its_version_and_what_the_last_status_shows_as_lost(
    tmp_path: Path, status: str | None, lost: str
) -> None:
    with create(tmp_path / "run") as folder:
        if status is not None:
            folder.status.write_text(status)
        assert folder.resumption() is None, "no version is stored"
        store(folder, 100)
        store(folder, 379, env_steps=337953)
        assert folder.resumption() == f"from version 1.379 (337,953 env steps){lost}"


def test_a_resumption_from_an_older_version_than_the_newest(tmp_path: Path) -> None:
    with create(tmp_path / "run") as folder:
        store(folder, 100)
        store(folder, 379, env_steps=337953)
        assert folder.resumption(Version(1, 100)) == "from version 1.100"


def test_a_resumption_asks_no_bucket_and_does_not_end_the_run(tmp_path: Path) -> None:
    with create(tmp_path / "run") as folder:
        (folder.path / RESOLVED).write_text("{}")
        with pytest.raises(ConfigurationError):
            _ = folder.database  # as for a bucket that cannot be used from here
        assert folder.resumption() is None
        (folder.path / PARAMETERS).mkdir()
        assert folder.resumption() is None


def test_a_held_folder_is_refused_with_its_holder(tmp_path: Path) -> None:
    with create(tmp_path / "run"), pytest.raises(RunFolderBusy, match=rf"process {os.getpid()} is running .*run"):
        RunFolder.open(tmp_path / "run")
    RunFolder.open(tmp_path / "run").close()


@pytest.mark.parametrize("ends", [True, False])
def test_opening_waits_for_workers_of_a_dead_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    """A child of the dead controller keeps the lock until this test closes the child's input."""
    if not ends:
        monkeypatch.setattr("rlsrl.local.run_folder.PREDECESSOR_GRACE_SECONDS", 0.05)
    code = f"""
import subprocess, sys
from pathlib import Path
from rlsrl.local.run_folder import RunFolder
folder = RunFolder.open(Path({str(tmp_path / "run")!r}))
subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], pass_fds=(folder.lock_fd,))
"""
    reader, writer = os.pipe()
    subprocess.run([sys.executable, "-c", code], stdin=reader, check=True, timeout=60)
    os.close(reader)
    if ends:
        os.close(writer)
        RunFolder.open(tmp_path / "run").close()
    else:
        with pytest.raises(RunFolderBusy, match="has ended, but its workers still run"):
            RunFolder.open(tmp_path / "run")
        os.close(writer)


def test_fresh_moves_aside_to_the_first_free_name(tmp_path: Path) -> None:
    path = tmp_path / "run"
    (tmp_path / "run.1").mkdir()
    with create(path) as old:
        uid = old.record.run_uid
    with RunFolder.open(path, fresh=True) as new:
        assert not new.holds_run
        assert json.loads((tmp_path / "run.2" / RECORD).read_text())["run_uid"] == uid
        with pytest.raises(RunFolderBusy):
            RunFolder.open(path)


def test_fresh_does_not_move_a_run_that_is_running(tmp_path: Path) -> None:
    with create(tmp_path / "run"), pytest.raises(RunFolderBusy):
        RunFolder.open(tmp_path / "run", fresh=True)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_fresh_on_an_empty_folder_is_just_new(tmp_path: Path) -> None:
    RunFolder.open(tmp_path / "run", fresh=True).close()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("fresh", [False, True])
def test_a_folder_with_other_files_is_left_unchanged(tmp_path: Path, fresh: bool) -> None:
    (tmp_path / "thesis.tex").write_text("dear to somebody")
    with pytest.raises(RunFolderError, match=r"thesis\.tex"):
        RunFolder.open(tmp_path, fresh=fresh)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_the_rest_of_a_killed_create_is_reused(tmp_path: Path) -> None:
    create(tmp_path).close()
    (tmp_path / RECORD).rename(tmp_path / f".{RECORD}.1-abc.tmp")
    with RunFolder.open(tmp_path) as folder:
        assert not folder.holds_run
        folder.create(as_given=b"", resolved=b"", package_version="0.1")
        assert folder.holds_run


def test_a_damaged_record_is_named_and_can_be_moved_aside(tmp_path: Path) -> None:
    path = tmp_path / "run"
    create(path).close()
    (path / RECORD).write_text('{"run_uid": ')
    with pytest.raises(RunFolderError, match=r"controller\.json is damaged"):
        RunFolder.open(path)
    RunFolder.open(path, fresh=True).close()
    assert (tmp_path / "run.1" / RECORD).exists()
