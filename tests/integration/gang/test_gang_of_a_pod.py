"""The launcher of a gang as a pod's first process: it starts its ranks once, and heeds SIGTERM from the beginning."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil

from rlsrl.testing.waiting import DEADLINE_SECONDS, until

CONFIGURATION_ERROR = 2
FIRST_PROCESS = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child")
"""What follows is process 1 of a namespace of its own."""


def test_a_gang_is_started_once_and_then_waits_to_be_ended(tmp_path: Path) -> None:
    once = tmp_path / "once"
    launcher = [sys.executable, "-m", "rlsrl.workers.gang_launcher", "--ranks", "1", "--once", str(once)]
    told_nothing = [*launcher, "--role", "trainer", "--config", str(tmp_path / "absent.json")]
    first = subprocess.run(told_nothing, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False)
    assert first.returncode == CONFIGURATION_ERROR, first.stderr
    assert once.exists()

    log = tmp_path / "log"
    with log.open("wb") as output, subprocess.Popen([*FIRST_PROCESS, *told_nothing], stderr=output) as second:
        try:
            until(lambda: "its next attempt begins in a new pod" in log.read_text(), "the launcher waits")
            (inner,) = psutil.Process(second.pid).children()
            assert not inner.children(), "no rank was started"
            inner.send_signal(signal.SIGTERM)
            assert second.wait(DEADLINE_SECONDS) == 0
        finally:
            second.kill()
