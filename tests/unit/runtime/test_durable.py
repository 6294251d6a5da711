from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from rlsrl.runtime.durable import NoRoom, make_folder, remove_temporaries, write_durably


def test_a_file_is_replaced_atomically(tmp_path: Path) -> None:
    path = tmp_path / "roster.json"
    write_durably(path, b"old and long")
    with path.open("rb") as reader:
        write_durably(path, memoryview(b"new"))
        assert reader.read() == b"old and long"
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["roster.json"]


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:3]))
    write_durably(tmp_path / "file", b"0123456789")
    assert (tmp_path / "file").read_bytes() == b"0123456789"


@pytest.mark.parametrize("failing", ["write", "fsync", "replace"])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    path = tmp_path / "file"
    write_durably(path, b"old")

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(OSError, match=f"Input/output error: '{path}'"):
        write_durably(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (
            errno.ENOSPC,
            "No space left on device: '{path}' needs 2,000,000 bytes, 1,638,400 are free: free 361,600 more",
        ),
        (errno.EDQUOT, "Disk quota exceeded: '{path}' needs 2,000,000 bytes"),
        (errno.EFBIG, "File too large: '{path}' needs 2,000,000 bytes"),
    ],
    ids=["full", "quota", "limit"],
)
def test_a_disk_without_room_is_reported_with_path_and_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, text: str
) -> None:
    path = tmp_path / "file"

    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    free = os.statvfs_result((4096, 4096, 1000, 500, 400, 0, 0, 0, 0, 255))
    with monkeypatch.context() as full:
        full.setattr(os, "write", fail)
        full.setattr(os, "statvfs", lambda _: free)
        with pytest.raises(NoRoom) as raised:
            write_durably(path, bytes(2_000_000))
        whole = raised.value.of(tmp_path, 3_000_000)
    assert str(raised.value) == f"[Errno {code}] {text.format(path=path)}"
    assert (raised.value.errno, raised.value.filename) == (code, str(path))
    assert f"'{tmp_path}' needs 3,000,000 bytes" in str(whole)
    assert os.listdir(tmp_path) == []


def test_the_order_is_write_fsync_rename_fsync_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("write", "fsync", "replace"):
        real = getattr(os, name)

        def record(*args: object, name: str = name, real: object = real) -> object:
            kind = "folder" if name == "fsync" and os.path.isdir(f"/proc/self/fd/{args[0]}") else "file"
            calls.append(f"{name} {kind}")
            return real(*args)  # type: ignore[operator]

        monkeypatch.setattr(os, name, record)
    write_durably(tmp_path / "file", b"new")
    assert calls == ["write file", "fsync file", "replace file", "fsync folder"]


def test_a_folder_is_created_with_its_parents(tmp_path: Path) -> None:
    for _ in range(2):
        make_folder(tmp_path / "a" / "b" / "c")
    assert (tmp_path / "a" / "b" / "c").is_dir()


def test_only_files_of_killed_writers_are_removed(tmp_path: Path) -> None:
    for name in (".file.12-ab.tmp", ".hidden", "file", "file.tmp"):
        (tmp_path / name).touch()
    remove_temporaries(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".hidden", "file", "file.tmp"]
