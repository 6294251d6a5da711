import errno
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from rlsrl.runtime.ledger import LedgerError, LedgerPage, Mark, PageRecord, Posted, read_page, read_pages
from rlsrl.runtime.ledger.page import _ACTIVE, _BANK_BYTES, _BANKS, _FILE_BYTES
from rlsrl.runtime.ledger.records import TERMS


def rich_record() -> PageRecord:
    return PageRecord(
        role="trainer",
        index=1,
        counters={term: 1000 + number for number, term in enumerate(TERMS)},
        lives=3,
        ended=True,
        keeps=True,
        incarnation=7,
        sequence=41,
        marks={0: Mark(2, 17), 5: Mark(1, 2**63 - 1)},
        unacknowledged=(Posted(6, 40, 256, 0), Posted(7, 41, 255, 1, withdrawn=True)),
    )


@pytest.mark.parametrize("record", [rich_record(), PageRecord(role="actor", index=0)], ids=["rich", "empty"])
def test_encode_and_decode(record: PageRecord) -> None:
    assert PageRecord.decode(record.encode(), role=record.role, index=record.index) == record


def test_a_page_of_fewer_terms_reads_as_zero_for_the_new_ones() -> None:
    payload = bytearray(rich_record().encode())
    payload[0:8] = (len(TERMS) - 1).to_bytes(8, "little")
    del payload[8 * len(TERMS) : 8 * (len(TERMS) + 1)]
    older = PageRecord.decode(bytes(payload), role="trainer", index=1)
    assert older.counters == {**rich_record().counters, TERMS[-1]: 0}
    assert older.unacknowledged == rich_record().unacknowledged


@pytest.mark.parametrize(("ended", "keeps"), [(False, False), (True, False), (False, True), (True, True)])
def test_encode_and_decode_an_end(ended: bool, keeps: bool) -> None:
    record = PageRecord(role="trainer", index=0, ended=ended, keeps=keeps)
    assert PageRecord.decode(record.encode(), role="trainer", index=0) == record


def test_unknown_terms_are_refused() -> None:
    with pytest.raises(KeyError, match="misspelt"):
        PageRecord(role="actor", index=0).count(misspelt=1)


def test_a_new_page_is_empty_and_another_process_can_read_it(tmp_path: Path) -> None:
    path = tmp_path / "actor-3.page"
    with LedgerPage.open(path, "actor", 3) as page:
        assert page.record == read_page(path) == PageRecord(role="actor", index=3)


def test_updates_are_read_at_once_and_survive_reopening(tmp_path: Path) -> None:
    path = tmp_path / "trainer-1.page"
    with LedgerPage.open(path, "trainer", 1) as page:
        page.apply(lambda _: rich_record())
        assert read_page(path) == rich_record()
        for _ in range(5):
            page.update(trained=10, in_buffer=-10)
        expected = rich_record().count(trained=50, in_buffer=-50)
        assert page.record == read_page(path) == expected
    with LedgerPage.open(path, "trainer", 1) as page:
        assert page.record == expected


def test_a_change_that_raises_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "actor-0.page"
    with LedgerPage.open(path, "actor", 0) as page:
        page.update(produced=5)
        with pytest.raises(KeyError):
            page.update(produced=1, misspelt=1)
        with pytest.raises(LedgerError, match=r"actor-0.page is full with 0 marks and 9000 unacknowledged"):
            page.apply(lambda record: replace(record, unacknowledged=tuple(Posted(0, n, 1, 0) for n in range(9000))))
        page.update(produced=1)
        assert read_page(path) == PageRecord(role="actor", index=0).count(produced=6)


def test_threads_lose_no_update(tmp_path: Path) -> None:
    with LedgerPage.open(tmp_path / "trainer-0.page", "trainer", 0) as page:
        threads = [
            threading.Thread(target=lambda: [page.update(produced=2, in_buffer=1) for _ in range(200)])
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert page.record.counters["produced"] == 1600
        assert page.record.counters["in_buffer"] == 800


def test_a_page_has_one_writer_process(tmp_path: Path) -> None:
    path = tmp_path / "actor-0.page"
    with LedgerPage.open(path, "actor", 0) as page:
        page.update(produced=1)
        code = (
            "import sys; from pathlib import Path; from rlsrl.runtime.ledger import LedgerPage\n"
            "LedgerPage.open(Path(sys.argv[1]), 'actor', 0)"
        )
        command = [sys.executable, "-c", code, str(path)]
        other = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
        assert "LedgerError: another process writes" in other.stderr
        with pytest.raises(LedgerError, match="another process writes"):
            LedgerPage.open(path, "actor", 0)
    LedgerPage.open(path, "actor", 0).close()


def test_a_closed_page_refuses_writes(tmp_path: Path) -> None:
    path = tmp_path / "actor-0.page"
    page = LedgerPage.open(path, "actor", 0)
    page.close()
    page.close()
    with pytest.raises(ValueError, match="closed"):
        page.update(produced=1)
    assert read_page(path) == page.record == PageRecord(role="actor", index=0)


def test_the_page_of_another_worker_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "actor-0.page"
    LedgerPage.open(path, "actor", 0).close()
    with pytest.raises(LedgerError, match="is the page of actor 0, not of trainer 2"):
        LedgerPage.open(path, "trainer", 2)
    with pytest.raises(LedgerError, match="too long"):
        LedgerPage.open(tmp_path / "long.page", "r" * 49, 0)


def test_absent_and_empty_pages(tmp_path: Path) -> None:
    assert read_page(tmp_path / "actor-0.page") is None
    (tmp_path / "actor-1.page").write_bytes(b"")
    assert read_page(tmp_path / "actor-1.page") is None
    # A writer that was killed while it created the page has not written the magic bytes yet.
    (tmp_path / "actor-2.page").write_bytes(bytes(30_000))
    assert read_page(tmp_path / "actor-2.page") is None
    with LedgerPage.open(tmp_path / "actor-2.page", "actor", 2) as page:
        page.update(produced=4)
    assert [(record.index, record.counters["produced"]) for record in read_pages(tmp_path)] == [(2, 4)]


@pytest.mark.parametrize("space", [0, 3000, _BANKS + 10, _FILE_BYTES - 1, _FILE_BYTES])
def test_a_full_disk_creates_no_page_until_it_has_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, space: int
) -> None:
    """Opening a page allocates the whole file; the disk has only ``space`` bytes left."""
    path, write, left = tmp_path / "actor-0.page", os.pwrite, space

    def until_the_disk_is_full(descriptor: int, data: memoryview, offset: int) -> int:
        nonlocal left
        if not left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = write(descriptor, data[:left], offset)
        left -= written
        return written

    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", until_the_disk_is_full)
        with pytest.raises(OSError, match="No space left"):
            LedgerPage.open(path, "actor", 0)
    assert read_page(path) is None
    with LedgerPage.open(path, "actor", 0) as page:
        assert page.update(produced=1) == read_page(path) == PageRecord(role="actor", index=0).count(produced=1)


def test_all_pages_of_a_folder_by_role_and_index(tmp_path: Path) -> None:
    for role, index in (("trainer", 0), ("actor", 10), ("actor", 2)):
        LedgerPage.open(tmp_path / f"{role}-{index}.page", role, index).close()
    (tmp_path / "notes.txt").write_text("not a page")
    assert [(record.role, record.index) for record in read_pages(tmp_path)] == [
        ("actor", 2),
        ("actor", 10),
        ("trainer", 0),
    ]


def images(path: Path) -> tuple[bytes, bytes, PageRecord, PageRecord]:
    """Return a page's bytes and records before and after one update of counters and marks."""
    with LedgerPage.open(path, "trainer", 0) as page:
        page.update(produced=1)
        page.apply(lambda record: replace(record.count(in_buffer=3), marks={0: Mark(0, 0)}))
        before, old = path.read_bytes(), page.record
        page.apply(lambda record: replace(record.count(in_buffer=5), marks={0: Mark(0, 1), 1: Mark(0, 0)}))
        return before, path.read_bytes(), old, page.record


def test_a_writer_killed_after_any_byte_leaves_the_old_record_or_the_new(tmp_path: Path) -> None:
    path = tmp_path / "trainer-0.page"
    before, after, old, new = images(path)
    changed = [offset for offset in range(len(before)) if before[offset] != after[offset]]
    assert changed[0] == _ACTIVE, "the byte that chooses the bank is written last"
    bank = changed[1:]
    torn = bytearray(before)
    for offset in range(bank[0], bank[-1] + 1):
        path.write_bytes(torn)
        assert read_page(path) == old
        torn[offset] = after[offset]
    path.write_bytes(torn)
    assert read_page(path) == old
    with LedgerPage.open(path, "trainer", 0) as page:
        assert page.record == old
        page.update(produced=1)
        assert read_page(path) == old.count(produced=1)
    torn[_ACTIVE] = after[_ACTIVE]
    path.write_bytes(torn)
    assert read_page(path) == new


def test_damage_by_a_power_loss_is_detected_and_repaired_from_the_other_bank(tmp_path: Path) -> None:
    path = tmp_path / "trainer-0.page"
    _, after, old, _ = images(path)
    active = _BANKS + after[_ACTIVE] * _BANK_BYTES
    damaged = bytearray(after)
    damaged[active + 40] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(LedgerError, match=r"trainer-0.page is damaged"):
        read_page(path)
    with LedgerPage.open(path, "trainer", 0) as page:
        assert page.record == old
        page.update(produced=1)
        assert read_page(path) == old.count(produced=1)
    for bank in range(2):
        damaged[_BANKS + bank * _BANK_BYTES + 40] ^= 2
    path.write_bytes(damaged)
    with pytest.raises(LedgerError, match="remove it"):
        LedgerPage.open(path, "trainer", 0)
