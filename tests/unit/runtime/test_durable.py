from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlsrl.runtime.durable import make_folder, remove_temporaries, write_durably


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
    with pytest.raises(OSError, match="Input/output error"):
        write_durably(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


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
