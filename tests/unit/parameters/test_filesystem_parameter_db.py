from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from rlsrl.data.version import Version
from rlsrl.parameters import filesystem
from rlsrl.parameters.filesystem import FilesystemParameterDB
from rlsrl.parameters.protocols import Corrupt, StaleAttempt
from rlsrl.runtime.durable import NoRoom
from rlsrl.testing.parameter_dbs import POLICY, got, make_parameters, make_state, push_steps, stored


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "parameters"


def version_file(root: Path, step: int) -> Path:
    return root / POLICY / "versions" / f"000001-{step:012d}.safetensors"


def test_file_names_sort_like_versions(root: Path) -> None:
    db = FilesystemParameterDB(root)
    for version in [Version(1, 10), Version(1, 9), Version(10, 1), Version(2, 100)][:3]:
        db.push(POLICY, make_parameters(version))
    names = sorted(path.name for path in (root / POLICY / "versions").iterdir())
    assert [name.partition(".")[0] for name in names] == [
        "000001-000000000009",
        "000001-000000000010",
        "000010-000000000001",
    ]


def test_the_safetensors_library_reads_a_version(root: Path) -> None:
    from safetensors import safe_open

    FilesystemParameterDB(root).push(POLICY, make_parameters(Version(1, 7), mean=np.arange(3.0)))
    with safe_open(version_file(root, 7), framework="numpy") as file:
        np.testing.assert_array_equal(file.get_tensor("vector"), np.full(16, 7, np.float32))
        np.testing.assert_array_equal(file.get_tensor("statistics/mean"), np.arange(3.0))
        assert file.metadata()["version"] == "1.7"


def test_reading_creates_nothing(root: Path) -> None:
    db = FilesystemParameterDB(root)
    assert (db.policies(), db.versions(POLICY), db.load_state(POLICY)) == ([], [], None)
    assert not root.exists()


def test_every_flipped_bit_and_every_truncation_of_a_version_is_detected(root: Path) -> None:
    """A change of the blanks that pad the header has no effect."""
    db = FilesystemParameterDB(root)
    pushed = make_parameters(Version(1, 2), size=3, mean=np.array([0.5]))
    db.push(POLICY, pushed, metadata={"env_steps": 64})
    (info,) = db.versions(POLICY)
    path = version_file(root, 2)
    whole = path.read_bytes()
    damaged = [whole[:length] for length in range(0, len(whole), 7)]
    damaged += [
        whole[:at] + bytes([whole[at] ^ (1 << bit)]) + whole[at + 1 :] for at in range(len(whole)) for bit in (0, 5, 7)
    ]
    num_noticed = 0
    for data in damaged:
        path.write_bytes(data)
        with capture_logs():
            try:
                read = got(FilesystemParameterDB(root), Version(1, 2))
            except Corrupt:
                num_noticed += 1
                continue
            assert FilesystemParameterDB(root).versions(POLICY) in ([info], [])
        np.testing.assert_array_equal(read.vector, pushed.vector)
        np.testing.assert_array_equal(read.statistics["mean"], pushed.statistics["mean"])
        assert (read.version, read.layout) == (pushed.version, pushed.layout)
    assert num_noticed > len(damaged) - 40


def test_a_version_with_a_damaged_header_is_left_out_and_reported_once(root: Path) -> None:
    db = FilesystemParameterDB(root)
    push_steps(db, 1, 2)
    data = version_file(root, 2).read_bytes()
    version_file(root, 2).write_bytes(data.replace(b"layout-1", b"layout-2"))
    with capture_logs() as logs:
        assert stored(db) == stored(db) == ["1.1"]
        assert got(db).version == Version(1, 1)
    assert [(entry["event"], "000002" in entry["error"]) for entry in logs] == [("parameters_corrupt", True)]


def test_a_state_of_another_version_is_refused(root: Path) -> None:
    """A file that was moved by hand names its version."""
    db = FilesystemParameterDB(root)
    push_steps(db, 1, 2)
    version_file(root, 2).write_bytes(version_file(root, 1).read_bytes())
    with pytest.raises(Corrupt, match=r"holds version 1\.1"):
        db.get(POLICY, Version(1, 2))
    with capture_logs():
        assert got(db).version == Version(1, 1)


def test_metadata_may_be_longer_than_the_first_read_of_a_listing(root: Path) -> None:
    db = FilesystemParameterDB(root)
    metadata = {"curve": [0.5] * 100_000}
    db.push(POLICY, make_parameters(Version(1, 1)), metadata=metadata)
    assert db.versions(POLICY)[0].metadata == metadata
    assert got(db).version == Version(1, 1)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"value": {"a": 2}, "crc32": 1}', b"\xff"])
def test_damaged_annotations_are_reported_and_leave_the_metadata_of_the_push(root: Path, content: bytes) -> None:
    db = FilesystemParameterDB(root)
    db.push(POLICY, make_parameters(Version(1, 1)), metadata={"a": 1})
    db.annotate(POLICY, Version(1, 1), {"a": 2})
    version_file(root, 1).with_suffix(".json").write_bytes(content)
    with capture_logs() as logs:
        assert db.versions(POLICY)[0].metadata == {"a": 1}
    assert [entry["event"] for entry in logs] == ["parameters_corrupt"]
    db.annotate(POLICY, Version(1, 1), {"b": 3})
    assert db.versions(POLICY)[0].metadata == {"a": 1, "b": 3}


def test_the_fence_remains_after_the_versions_that_raised_it_are_gone(root: Path) -> None:
    db = FilesystemParameterDB(root)
    push_steps(db, 1, attempt=1)
    push_steps(db, 1, attempt=2)
    (root / POLICY / "versions" / "000002-000000000001.safetensors").unlink()
    with pytest.raises(StaleAttempt, match="attempt 2"):
        push_steps(FilesystemParameterDB(root), 2, attempt=1)


def test_without_a_readable_fence_the_versions_are_the_fence(root: Path) -> None:
    db = FilesystemParameterDB(root)
    push_steps(db, 1, attempt=2)
    (root / POLICY / "fence.json").write_bytes(b"")
    with capture_logs(), pytest.raises(StaleAttempt, match="attempt 2"):
        push_steps(FilesystemParameterDB(root), 2, attempt=1)


def test_files_of_a_killed_writer_are_invisible_and_the_next_write_removes_them(root: Path) -> None:
    db = FilesystemParameterDB(root)
    push_steps(db, 1)
    folders = [root / POLICY, *(root / POLICY / part for part in ("versions", "states", "tags"))]
    leftovers = [folder / ".000001-000000000002.safetensors.123-abcd.tmp" for folder in folders]
    for leftover in leftovers:
        leftover.write_bytes(b"part of a version")
    assert stored(db) == ["1.1"]
    assert db.versions(POLICY)[0].tags == ()
    push_steps(FilesystemParameterDB(root), 2)
    assert not any(leftover.exists() for leftover in leftovers)


def test_a_writer_frozen_during_a_write_does_not_hang_the_next(root: Path) -> None:
    push_steps(FilesystemParameterDB(root), 1)
    held = os.open(root / POLICY / "writer.lock", os.O_RDWR)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        impatient = FilesystemParameterDB(root, lock_seconds=0.0)
        with pytest.raises(TimeoutError, match="another writer"):
            push_steps(impatient, 2)
        assert got(impatient).version == Version(1, 1)
    finally:
        os.close(held)
    push_steps(impatient, 2)


def test_a_waiting_writer_continues_when_the_lock_holder_dies(root: Path) -> None:
    push_steps(FilesystemParameterDB(root), 1)
    hold = (
        "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], os.O_RDWR), fcntl.LOCK_EX); print(flush=True); input()"
    )
    command = [sys.executable, "-c", hold, str(root / POLICY / "writer.lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(TimeoutError):
            push_steps(FilesystemParameterDB(root, lock_seconds=0.0), 2)
        holder.kill()
        push_steps(FilesystemParameterDB(root), 2)
    assert stored(FilesystemParameterDB(root)) == ["1.1", "1.2"]


@pytest.mark.parametrize("num_writes", range(3))
def test_a_version_pushed_with_a_state_is_never_visible_without_it(
    root: Path, monkeypatch: pytest.MonkeyPatch, num_writes: int
) -> None:
    """The writer is killed after that many of the push's three files."""
    write, left = filesystem.write_durably, num_writes

    def until_killed(path: Path, data: bytes) -> None:
        nonlocal left
        if not left:
            raise RuntimeError("killed")
        left -= 1
        write(path, data)

    db = FilesystemParameterDB(root)
    with monkeypatch.context() as killed:
        killed.setattr(filesystem, "write_durably", until_killed)
        with pytest.raises(RuntimeError, match="killed"):
            db.push(POLICY, make_parameters(Version(1, 1)), state=make_state(Version(1, 1)))
    assert [info.has_state for info in db.versions(POLICY)] == []


def test_a_full_disk_is_reported_for_the_whole_version_and_keeps_nothing_of_it(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version's state still fits."""
    write = filesystem.write_durably

    def until_full(path: Path, data: bytes) -> None:
        if path == version_file(root, 2):
            raise NoRoom(errno.ENOSPC, path, len(data))
        write(path, data)

    db = FilesystemParameterDB(root)
    push_steps(db, 1)
    with monkeypatch.context() as full:
        full.setattr(filesystem, "write_durably", until_full)
        with pytest.raises(NoRoom) as raised:
            db.push(POLICY, make_parameters(Version(1, 2)), state=make_state(Version(1, 2)))
    assert raised.value.filename == str(root / POLICY)
    cause = raised.value.__cause__
    assert isinstance(cause, NoRoom)
    assert raised.value.num_bytes > cause.num_bytes, "the state's bytes are needed, too"
    assert list((root / POLICY / "states").iterdir()) == []
    assert stored(db) == ["1.1"]


def test_a_foreign_file_is_ignored(root: Path) -> None:
    db = FilesystemParameterDB(root)
    push_steps(db, 1)
    for name in ("notes.txt", "1-2.safetensors", "000001-000000000009.safetensors.bak", "model.safetensors"):
        (root / POLICY / "versions" / name).write_bytes(b"")
    (root / "README").write_bytes(b"")
    assert (db.policies(), stored(db)) == ([POLICY], ["1.1"])


def test_the_number_of_kept_states_is_configurable(root: Path) -> None:
    db = FilesystemParameterDB(root, keep_states=1)
    for step in (1, 2):
        push_steps(db, step)
        db.save_state(POLICY, make_state(Version(1, step)))
    assert [info.has_state for info in db.versions(POLICY)] == [False, True]
    with pytest.raises(ValueError, match="keep_states is 0"):
        FilesystemParameterDB(root, keep_states=0)


def test_remains_of_a_killed_prune_do_not_attach_to_a_new_version_of_that_name(root: Path) -> None:
    """The kill happens after the version is removed and before its annotations and state are."""
    db = FilesystemParameterDB(root)
    push_steps(db, 1, 2)
    db.save_state(POLICY, make_state(Version(1, 1)))
    db.annotate(POLICY, Version(1, 1), {"return_mean": 475.0})
    version_file(root, 1).unlink()
    assert db.load_state(POLICY) is None
    db.push(POLICY, make_parameters(Version(1, 1), fill=5))
    (info, _) = db.versions(POLICY)
    assert (info.metadata, info.has_state) == ({}, False)
    assert db.load_state(POLICY, Version(1, 1)) is None
