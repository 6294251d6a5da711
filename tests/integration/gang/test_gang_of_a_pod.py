"""The launcher of a gang as a pod's container: it starts its ranks once, however often it is started itself."""

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


def test_a_gang_is_started_once_and_then_waits_to_be_ended(tmp_path: Path) -> None:
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
            assert fetch(f"http://{host}:{HEALTH_PORT}/healthz") == "ok\n", "it is not to be restarted"
            second.terminate()
            assert second.wait(DEADLINE_SECONDS) == -signal.SIGTERM
        finally:
            second.kill()


def on_machines(what: str, folder: Path) -> Any:
    """What comes of it, as machines.py prints it."""
    driver = Path(__file__).with_name("machines.py")
    command = [*OWN_NETWORK, f"ip link set lo up && exec {sys.executable} {driver} {what} {folder}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=2 * DEADLINE_SECONDS)
    logs = "".join(path.read_text() for path in folder.glob("trainer-*.log"))
    assert done.returncode == 0, done.stderr + logs
    return json.loads(done.stdout)


@pytest.mark.slow
def test_when_one_machine_is_ended_the_others_launcher_does_not_wait_for_it(tmp_path: Path) -> None:
    """torchrun's would, five minutes, deaf to SIGTERM: the pod is killed, and its successors meet a dead gang."""
    assert on_machines("end-one", tmp_path) == [0, 0]


@pytest.mark.slow
def test_a_gang_that_shrinks_and_grows_again_loses_nothing(tmp_path: Path) -> None:
    ended = on_machines("change-size", tmp_path)
    ledger = ended["ledger"]
    assert ledger["balanced"], ledger
    assert ledger["trained"] == ended["env_steps"] > 0, ledger
    assert sum(ledger["lost"].values()) == 0, ledger
