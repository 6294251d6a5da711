"""The launcher of a gang as a pod's container: a restarted launcher starts no ranks."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlsrl.api.placement import HEALTH_PORT
from rlsrl.runtime.addresses import HOST_VARIABLE
from rlsrl.testing.live_runs import fetch
from rlsrl.testing.waiting import DEADLINE_SECONDS, until

CONFIGURATION_ERROR = 2
OWN_NETWORK = ("unshare", "--user", "--map-root-user", "--net", "--kill-child", "--fork", "bash", "-c")


def test_a_gang_starts_once_and_then_waits_for_its_end(tmp_path: Path) -> None:
    once = tmp_path / "once"
    launcher = [sys.executable, "-m", "rlsrl.workers.gang_launcher", "--ranks", "1", "--once", str(once)]
    told_nothing = [*launcher, "--role", "trainer", "--config", str(tmp_path / "absent.json")]
    first = subprocess.run(told_nothing, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False)
    assert first.returncode == CONFIGURATION_ERROR, first.stderr
    assert once.exists()

    log = tmp_path / "log"
    host = f"127.{secrets.randbelow(250) + 2}.{secrets.randbelow(250) + 1}.1"
    again = [*told_nothing, "--health-at", str(HEALTH_PORT)]
    with (
        log.open("wb") as output,
        subprocess.Popen(again, stderr=output, env={**os.environ, HOST_VARIABLE: host}) as second,
    ):
        try:
            until(lambda: "its next attempt starts in a new pod" in log.read_text(), "the launcher waits")
            assert not psutil.Process(second.pid).children(), "no rank was started"
            assert fetch(f"http://{host}:{HEALTH_PORT}/healthz") == "ok\n", "the kubelet must not restart it"
            second.terminate()
            assert second.wait(DEADLINE_SECONDS) == -signal.SIGTERM
        finally:
            second.kill()


def on_machines(what: str, folder: Path) -> Any:
    """Run machines.py and return what it prints."""
    driver = Path(__file__).with_name("machines.py")
    command = [*OWN_NETWORK, f"ip link set lo up && exec {sys.executable} {driver} {what} {folder}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=2 * DEADLINE_SECONDS)
    logs = "".join(path.read_text() for path in folder.glob("trainer-*.log"))
    assert done.returncode == 0, done.stderr + logs
    return json.loads(done.stdout)


@pytest.mark.slow
def test_a_launcher_does_not_wait_for_another_machines_ended_launcher(tmp_path: Path) -> None:
    """By default it waits five minutes, deaf to SIGTERM: the pod would be killed, and the next gang would meet it."""
    assert on_machines("end-one", tmp_path) == [0, 0]


@pytest.mark.slow
def test_a_gang_that_shrinks_and_grows_again_loses_nothing(tmp_path: Path) -> None:
    ended = on_machines("change-size", tmp_path)
    ledger = ended["ledger"]
    assert ledger["balanced"], ledger
    assert ledger["trained"] == ended["env_steps"] > 0, ledger
    assert sum(ledger["lost"].values()) == 0, ledger
