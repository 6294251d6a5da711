"""The thread that writes a store back to its disk."""

from __future__ import annotations

import errno
import threading

from structlog.testing import capture_logs

from rlsrl.buffers.replay.write_back import WriteBack
from rlsrl.testing.waiting import until


def test_it_writes_again_and_again_until_it_is_left() -> None:
    writes: list[str] = []
    with WriteBack(lambda: writes.append(threading.current_thread().name), seconds=0.001):
        until(lambda: len(writes) >= 3, "three writes")
    assert set(writes) == {"write-back"}
    assert "write-back" not in {thread.name for thread in threading.enumerate()}, "joined"


def test_it_writes_nothing_before_its_time() -> None:
    writes: list[int] = []
    with WriteBack(lambda: writes.append(1), seconds=3600):
        pass
    assert not writes


def test_a_disk_that_fails_is_logged_once_and_tried_again() -> None:
    writes: list[int] = []

    def write() -> None:
        writes.append(1)
        raise OSError(errno.EIO, "Input/output error")

    with capture_logs() as logs, WriteBack(write, seconds=0.001):
        until(lambda: len(writes) >= 3, "three writes")
    (logged,) = logs
    assert (logged["event"], logged["log_level"]) == ("replay_store_not_written_back", "warning")
    assert "Input/output error" in logged["why"]
