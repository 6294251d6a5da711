"""The page's tables of versions: what changes in a store is shown, and what did not change is not read again."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typing_extensions import override

from rlsrl.api.role_configs import POLICY_NAME
from rlsrl.data.version import Version
from rlsrl.parameters.evaluations import EVALUATION_KEY
from rlsrl.parameters.filesystem import FilesystemParameterDB, FolderBlobs
from rlsrl.parameters.objects import StoreUnreachable
from rlsrl.parameters.protocols import Parameters, TrainerState, VersionInfo
from rlsrl.testing.clock import ManualClock
from rlsrl.testing.memory_parameter_db import MemoryParameterDB
from rlsrl.testing.stored_runs import BALANCES, CARTPOLE, LINEAR, make_run, push
from rlsrl.ui.versions import VersionTables
from rlsrl.workers.version_table import FOLDERS, SETTLE_SECONDS, STORE_SECONDS, VersionTable


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with version 1.20, which is the best."""
    folder = make_run(tmp_path / "balance", CARTPOLE)
    push(folder, 20, BALANCES, exported=LINEAR, tag="best")
    return folder


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the reads of files in parameter folders, by name."""
    found: Counter[str] = Counter()
    read: Callable[..., bytes] = FolderBlobs.read

    def counted(blobs: FolderBlobs, path: str, limit: int | None = None) -> bytes:
        found[Path(path).name] += 1
        return read(blobs, path, limit)

    monkeypatch.setattr(FolderBlobs, "read", counted)
    return found


def after(run: Path, seconds: float) -> ManualClock:
    """Return a clock that shows the time so many seconds after the last change of the run's versions."""
    folders = [run / "parameters" / POLICY_NAME / name for name in FOLDERS]
    return ManualClock(time=max(folder.stat().st_mtime for folder in folders) + seconds)


def names(answer: dict[str, Any]) -> list[str]:
    assert answer["problem"] is None
    return [row["version"] for row in answer["versions"]]


def test_a_version_has_tags_evaluation_and_state(run: Path) -> None:
    tables, db = VersionTables(), FilesystemParameterDB(run / "parameters")
    (row,) = tables.of(run)["versions"]
    assert (row["version"], row["tags"], row["hasState"], row["evaluation"]) == ("1.20", ["best"], False, None)
    db.annotate(POLICY_NAME, Version(1, 20), {EVALUATION_KEY: {"return_mean": 480.0}})
    push(run, 30, BALANCES, exported=LINEAR)
    db.save_state(POLICY_NAME, TrainerState(version=Version(1, 30), arrays={"m": np.zeros(2)}, values={}))
    db.tag(POLICY_NAME, "1.30", "best")
    newest, older = tables.of(run)["versions"]
    assert (newest["version"], newest["tags"], newest["hasState"]) == ("1.30", ["best"], True)
    assert (older["version"], older["tags"], older["evaluation"]) == ("1.20", [], 480.0)
    db.prune(POLICY_NAME, keep_last=1)
    assert names(tables.of(run)) == ["1.30"]


def test_a_folder_that_did_not_change_is_not_read_again(run: Path, reads: Counter[str]) -> None:
    tables = VersionTables(after(run, 2 * SETTLE_SECONDS))
    assert names(tables.of(run)) == ["1.20"]
    reads.clear()
    assert names(tables.of(run)) == ["1.20"]
    assert not reads


def test_changes_within_the_resolution_of_file_times_are_seen(run: Path) -> None:
    """Two changes of a folder may have the same time: the first read must not hide the second."""
    tables, folder = VersionTables(after(run, 0.0)), run / "parameters" / POLICY_NAME / "versions"
    tables.of(run)
    changed = folder.stat()
    push(run, 30, BALANCES, exported=LINEAR)
    os.utime(folder, ns=(changed.st_atime_ns, changed.st_mtime_ns))
    assert names(tables.of(run)) == ["1.30", "1.20"]


def test_a_fresh_run_in_the_folder_has_its_own_versions(run: Path) -> None:
    tables = VersionTables(after(run, 2 * SETTLE_SECONDS))
    assert tables.of(run)["versions"][0]["returnMean"] is None
    run.rename(run.with_name("balance.1"))
    assert names(tables.of(run)) == []
    make_run(run, CARTPOLE)
    FilesystemParameterDB(run / "parameters").push(
        POLICY_NAME,
        Parameters(version=Version(1, 20), vector=np.zeros(2, np.float32), layout="other"),
        metadata={"return_mean": 7.0},
    )
    assert tables.of(run)["versions"][0]["returnMean"] == 7.0


def test_damage_is_left_out_or_named(run: Path) -> None:
    tables = VersionTables()
    push(run, 30, BALANCES, exported=LINEAR)
    (newest,) = (run / "parameters" / POLICY_NAME / "versions").glob("*30.safetensors")
    newest.write_bytes(b"\xff")
    assert names(tables.of(run)) == ["1.20"]
    (run / "resolved.json").write_bytes(b"\xff{")
    answer = tables.of(run)
    assert answer["versions"] == []
    assert "resolved.json" in answer["problem"]


class AskedStore(MemoryParameterDB):
    """An object store that counts questions, and fails on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.questions: list[str] = []
        self.fails = False

    @override
    def versions(self, policy: str) -> list[VersionInfo]:
        self.questions.append("versions")
        if self.fails:
            raise StoreUnreachable("object store s3://bucket cannot be reached")
        return super().versions(policy)

    @override
    def policies(self) -> list[str]:
        self.questions.append("policies")
        return super().policies()


def test_an_object_store_is_asked_rarely_and_never_for_a_list() -> None:
    db, clock = AskedStore(), ManualClock()
    table = VersionTable(db, folder=Path("absent"), clock=clock)
    assert table.rows() == []
    parameters = Parameters(version=Version(1, 1), vector=np.zeros(2, np.float32), layout="l")
    db.push(POLICY_NAME, parameters)
    db.questions.clear()
    assert table.rows() == []
    clock.advance(STORE_SECONDS - 1)
    assert table.rows() == []
    assert db.questions == []
    clock.advance(1)
    assert [row["version"] for row in table.rows()] == ["1.1"]
    assert db.questions == ["versions"]
    db.fails = True
    clock.advance(STORE_SECONDS)
    for _ in range(3):
        with pytest.raises(StoreUnreachable):
            table.rows()
    assert db.questions == ["versions"] * 2, "a store that fails is not asked more often"


def test_a_run_in_a_bucket_without_credentials_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    store = "parameters: {store: {objectStore: {url: 's3://bucket/team', endpoint: 'http://127.0.0.1:1'}}}"
    run = make_run(tmp_path / "run", CARTPOLE.rstrip() + f"\n  {store}\n")
    assert "no credentials for s3://bucket/team" in VersionTables().of(run)["problem"]
