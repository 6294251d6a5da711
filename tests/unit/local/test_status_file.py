from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from rlsrl.local.status_file import StatusFile, read_status


def test_the_last_written_page_is_read_with_its_age(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    file = StatusFile(path)
    assert read_status(path) is None
    file.write({"phase": "starting"})
    file.write({"phase": "training"})
    an_hour_ago = time.time() - 3600.0
    os.utime(path, (an_hour_ago, an_hour_ago))
    found = read_status(path)
    assert found is not None
    assert found[0] == {"phase": "training"}
    assert found[1] == pytest.approx(3600.0, abs=60.0)
    file.remove()
    file.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_reader_never_sees_a_partial_page(tmp_path: Path) -> None:
    path, done = tmp_path / "status.json", threading.Event()
    file, document = StatusFile(path), {"roles": {"actor": [{"index": index} for index in range(2000)]}}
    file.write(document)

    def write() -> None:
        while not done.is_set():
            file.write(document)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(200):
            found = read_status(path)
            assert found is not None
            assert found[0] == document
    finally:
        done.set()
        writer.join()


def test_a_missing_folder_loses_only_the_copy(tmp_path: Path) -> None:
    path = tmp_path / "gone" / "status.json"
    StatusFile(path).write({"phase": "training"})
    assert not path.exists()


@pytest.mark.parametrize("text", ["", "[1]", "{"])
def test_an_invalid_page_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "status.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"status document|Expecting"):
        read_status(path)
