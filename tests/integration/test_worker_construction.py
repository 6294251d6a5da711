"""A real worker that is paused, or asked to exit, while it is built."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from rlsrl.api.live import settings_of
from rlsrl.api.load import load_text
from rlsrl.api.placement import SETTINGS, local_placement
from rlsrl.api.resolve import resolve
from rlsrl.api.resolved import RoleConfig
from rlsrl.runtime.coordination import CoordinatorClient
from rlsrl.runtime.durable import write_durably
from rlsrl.runtime.process import worker_environment
from rlsrl.testing.waiting import DEADLINE_SECONDS, until

TOKEN = "the-token"
EXPERIMENT = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {name: construction}
spec:
  environment: {factory: "slow_to_make:SlowToMakeEnv"}
  actors: {environments: 2}
  bufferWorkers: {replicas: 1}
  stop: {trainSteps: 1}
"""
SLOW_TO_MAKE = """
import gymnasium
from rlsrl.testing.environments import GatedEnv

class SlowToMakeEnv(GatedEnv):
    def __init__(self):
        open("go-on").close()  # a FIFO: until somebody opens its other end
        super().__init__("gate")
"""


class Workers:
    """The worker processes of one run."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self._stack = stack
        placement = local_placement(run_uid=uuid.uuid4().hex[:12], run_folder=folder)
        self.told = resolve(load_text(EXPERIMENT.encode()), placement)
        self.client = CoordinatorClient(self.told.coordinator.coordinator_address, TOKEN)
        stack.callback(self.client.close)

    def start(self, role: str, config: RoleConfig | None) -> subprocess.Popen[bytes]:
        assert config is not None
        path = self.folder / f"{role}.json"
        path.write_text(config.to_json())
        search_path = os.pathsep.join([str(self.folder), *(entry for entry in sys.path if entry)])
        process = subprocess.Popen(
            [sys.executable, "-m", "rlsrl.workers", "--role", role, "--config", str(path)],
            env=worker_environment({**os.environ, "RLSRL_TOKEN": TOKEN, "PYTHONPATH": search_path}, role),
            cwd=self.folder,
        )
        self._stack.callback(process.wait, DEADLINE_SECONDS)
        self._stack.callback(process.kill)
        return process

    def pause(self, *roles: str) -> None:
        """Pause these roles and no other, and wait until the coordinator has told the workers."""
        paused = [{"role": role} for role in roles]
        settings = settings_of(self.told.coordinator) | {"paused": paused}
        write_durably(self.folder / SETTINGS, json.dumps({"coordinator": settings}).encode())
        log = self.folder / "logs" / "coordinator-0.jsonl"
        workers = json.dumps([f"{role}-0" for role in roles])
        until(lambda: f'"paused": {workers}' in log.read_text().splitlines()[-1], "the coordinator has read it")

    def state(self, role: str) -> str | None:
        """Return the coordinator's entry of the role's one worker; None before it has joined."""
        workers = self._known(role)
        return str(workers[0]["state"]) if workers else None

    def await_heartbeat(self, role: str) -> None:
        """Wait for the next heartbeat of the role's one worker."""
        ages = [self._age(role)]

        def heard() -> bool:
            ages.append(self._age(role))
            return ages[-1] < ages[-2]

        until(heard, f"a heartbeat of the {role}")

    def _age(self, role: str) -> float:
        return float(self._known(role)[0]["age_seconds"])

    def _known(self, role: str) -> list[dict[str, Any]]:
        workers: list[dict[str, Any]] = self.client.status(DEADLINE_SECONDS)["roles"].get(role, [])
        return workers


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    (tmp_path / "slow_to_make.py").write_text(SLOW_TO_MAKE)
    os.mkfifo(tmp_path / "go-on")
    with ExitStack() as stack:
        yield Workers(tmp_path, stack)


def test_a_worker_paused_during_its_construction_does_no_work_until_it_is_resumed(workers: Workers) -> None:
    workers.start("coordinator", workers.told.coordinator)
    buffer = workers.start("buffer", workers.told.configs["buffer"])
    until(lambda: workers.state("buffer") == "configuring", "a buffer worker that makes its environment")
    workers.pause("buffer")
    os.close(os.open(workers.folder / "go-on", os.O_WRONLY))  # waits until the environment is being made
    log = workers.folder / "logs" / "buffer-0.jsonl"
    until(lambda: '"configured"' in log.read_text(), "a buffer worker that is built")
    until(lambda: workers.state("buffer") == "paused", "it rests")
    for _ in range(2):  # the first may have been on its way before
        workers.await_heartbeat("buffer")
    assert workers.state("buffer") == "paused"
    workers.pause()
    until(lambda: workers.state("buffer") == "running", "it goes on")
    buffer.send_signal(signal.SIGTERM)
    assert buffer.wait(DEADLINE_SECONDS) == 0


def test_sigterm_ends_a_worker_during_its_construction_at_once(workers: Workers) -> None:
    """Its construction may wait for others that never come, such as the ranks of a deleted gang."""
    workers.start("coordinator", workers.told.coordinator)
    buffer = workers.start("buffer", workers.told.configs["buffer"])
    until(lambda: workers.state("buffer") == "configuring", "a buffer worker that makes its environment")
    buffer.send_signal(signal.SIGTERM)
    assert buffer.wait(DEADLINE_SECONDS) == -signal.SIGTERM
