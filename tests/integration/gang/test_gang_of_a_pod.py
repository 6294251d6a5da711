"""The launcher of a gang as a pod's container: it starts its ranks once, however often it is started itself."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil

from rlsrl.testing.waiting import DEADLINE_SECONDS, until

CONFIGURATION_ERROR = 2


def test_a_gang_is_started_once_and_then_waits_to_be_ended(tmp_path: Path) -> None:
    once = tmp_path / "once"
    launcher = [sys.executable, "-m", "rlsrl.workers.gang_launcher", "--ranks", "1", "--once", str(once)]
    told_nothing = [*launcher, "--role", "trainer", "--config", str(tmp_path / "absent.json")]
    first = subprocess.run(told_nothing, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False)
    assert first.returncode == CONFIGURATION_ERROR, first.stderr
    assert once.exists()

    log = tmp_path / "log"
    with log.open("wb") as output, subprocess.Popen(told_nothing, stderr=output) as second:
        try:
            until(lambda: "its next attempt begins in a new pod" in log.read_text(), "the launcher waits")
            assert not psutil.Process(second.pid).children(), "no rank was started"
            second.terminate()
            assert second.wait(DEADLINE_SECONDS) == -signal.SIGTERM
        finally:
            second.kill()
