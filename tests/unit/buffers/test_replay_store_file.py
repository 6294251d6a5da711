"""The file of a replay store: when a later process finds what an earlier one left, and when it must not."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from rlsrl.buffers.replay import store_file
from rlsrl.buffers.replay.layout import ReplayLayout
from rlsrl.buffers.replay.store_file import StoreFile
from rlsrl.testing.replay import SlotSource

SOURCE = SlotSource(num_steps=4, num_lanes=1)
LAYOUT = ReplayLayout.of(SOURCE.layout, capacity=40)
OTHER_LAYOUT = ReplayLayout.of(SOURCE.layout, capacity=44)
SAME_SIZE = ReplayLayout.of(SlotSource(num_steps=4, num_lanes=2).layout, capacity=40)
OWNER = 3


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "replay" / "trainer-0.store"


def fill(path: Path, *, close: bool = False) -> None:
    file = StoreFile.open(path, LAYOUT, former=None, owner=OWNER)
    file.content[:4] = b"kept"
    if close:
        file.close()


def start_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the machine have another boot."""
    boot = folder / "boot_id"
    boot.write_text("0" * 36)
    monkeypatch.setattr(store_file, "_BOOT", boot)


def test_a_new_file_has_zeros(path: Path) -> None:
    file = StoreFile.open(path, LAYOUT, former=OWNER, owner=OWNER + 1)
    assert file.why_empty == "no store was left"
    assert len(file.content) == LAYOUT.nbytes
    assert not any(file.content)
    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("layout", "former", "why_empty"),
    [
        pytest.param(LAYOUT, OWNER, None, id="the same"),
        pytest.param(SAME_SIZE, OWNER, None, id="slots of another width"),
        pytest.param(LAYOUT, OWNER + 1, "the ledger does not know what it held", id="of an older incarnation"),
        pytest.param(LAYOUT, None, "the ledger does not know what it held", id="without a ledger page"),
        pytest.param(OTHER_LAYOUT, OWNER, "the spec asks for another one", id="another capacity"),
    ],
)
def test_what_is_found_by_a_later_process(
    path: Path, layout: ReplayLayout, former: int | None, why_empty: str | None
) -> None:
    fill(path)
    file = StoreFile.open(path, layout, former=former, owner=9)
    assert file.why_empty == why_empty
    assert bytes(file.content[:4]) == (b"kept" if why_empty is None else bytes(4))
    assert len(file.content) == layout.nbytes


def test_a_store_is_its_former_owners_until_the_ledger_is_the_new_ones(path: Path) -> None:
    fill(path)
    for number in range(1, 4):  # each is killed before the ledger knows of it
        assert StoreFile.open(path, LAYOUT, former=OWNER, owner=OWNER + number).why_empty is None
    assert StoreFile.open(path, LAYOUT, former=OWNER + 3, owner=OWNER + 4).why_empty is None
    assert StoreFile.open(path, LAYOUT, former=OWNER, owner=OWNER + 5).why_empty is not None


def test_after_the_machine_stopped_a_store_is_in_doubt_unless_it_was_closed(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(path, close=True)
    with monkeypatch.context() as patch:
        start_anew(tmp_path, patch)
        found = StoreFile.open(path, LAYOUT, former=OWNER, owner=OWNER + 1)
        assert (found.why_empty, found.is_in_doubt, bytes(found.content[:4])) == (None, False, b"kept")
    for former in (OWNER + 1, None):  # the ledger's page may be lost, too
        found = StoreFile.open(path, LAYOUT, former=former, owner=OWNER + 2)
        assert (found.why_empty, found.is_in_doubt, bytes(found.content[:4])) == (None, True, b"kept")


def test_a_store_stays_in_doubt_until_it_was_checked(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(path)
    start_anew(tmp_path, monkeypatch)
    for number in range(1, 3):  # each is killed while it checks
        assert StoreFile.open(path, LAYOUT, former=OWNER, owner=OWNER + number).is_in_doubt
    StoreFile.open(path, LAYOUT, former=OWNER, owner=OWNER + 3).believe()
    found = StoreFile.open(path, LAYOUT, former=OWNER + 3, owner=OWNER + 4)
    assert (found.why_empty, found.is_in_doubt) == (None, False)


def test_a_store_of_another_layout_is_not_in_doubt_but_empty(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(path)
    start_anew(tmp_path, monkeypatch)
    found = StoreFile.open(path, OTHER_LAYOUT, former=OWNER, owner=OWNER + 1)
    assert (found.why_empty, found.is_in_doubt) == ("the spec asks for another one", False)


def test_a_store_is_written_back_while_it_is_used_and_when_it_is_closed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    file = StoreFile.open(path, LAYOUT, former=None, owner=OWNER)
    file.write_back()
    file.close()
    assert synced == [path.stat().st_ino] * 2
    file.remove()
    file.write_back()
    assert len(synced) == 2, "a removed file needs no disk"


def test_a_disk_without_room_is_an_error_and_leaves_no_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(OSError, match="No space left"):
        StoreFile.open(path, LAYOUT, former=None, owner=OWNER)
    assert list(path.parent.iterdir()) == []


def test_a_removed_file_can_still_be_used_by_its_process(path: Path) -> None:
    file = StoreFile.open(path, LAYOUT, former=None, owner=OWNER)
    file.remove()
    file.remove()
    file.content[:4] = b"kept"
    assert StoreFile.open(path, LAYOUT, former=OWNER, owner=OWNER + 1).why_empty == "no store was left"
