"""A run in which only the coordinator accesses the stored weights, and actors get theirs over gRPC."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from rlsrl.api.load import load_text
from rlsrl.api.placement import local_placement
from rlsrl.api.resolve import resolve
from rlsrl.api.resolved import ParameterStoreConfig, RoleConfig
from rlsrl.api.role_configs import POLICY_NAME
from rlsrl.data.version import Version
from rlsrl.local.session import read_ledger
from rlsrl.parameters.filesystem import FilesystemParameterDB
from rlsrl.parameters.terminal import terminal_record
from rlsrl.testing.waiting import until
from rlsrl.workers.build.parameters import open_parameter_source

EXPERIMENT = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {name: wired}
spec:
  environment: {id: CartPole-v1}
  policy: {network: {mlp: {hiddenSizes: [8]}}}
  algorithm: {ppo: {epochs: 1, minibatchSize: 64}}
  actors: {replicas: 1, environments: 4, rolloutLength: 16}
  parameters: {everySteps: 20}
  stop: {trainSteps: 160}
"""
TOKEN = "the-token"
DEADLINE_SECONDS = 120.0
"""Never reached: the conditions take seconds on an idle machine."""


class Run:
    """The workers of one run as processes."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        placement = local_placement(run_uid=uuid.uuid4().hex[:12], run_folder=folder)
        resolved = resolve(load_text(EXPERIMENT.encode()), placement)
        self.folder = folder
        self.stack = stack
        self.coordinator = resolved.coordinator
        self.trainer = resolved.trainer.model_copy(
            update={
                "parameters_endpoint": None,
                "publishes_live": True,
                "parameter_store": ParameterStoreConfig(service=self.coordinator.coordinator_address),
            }
        )
        self.actor = resolved.actor.model_copy(update={"parameters_endpoint": None})

    def start(self, role: str, config: RoleConfig, *arguments: str) -> subprocess.Popen[bytes]:
        path = self.folder / f"{role}.json"
        path.write_text(config.to_json())
        command = [sys.executable, "-m", "rlsrl.workers", "--role", role, "--config", str(path), *arguments]
        process = subprocess.Popen(
            command, env={**os.environ, "RLSRL_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE
        )
        self.stack.callback(process.communicate)
        self.stack.callback(process.kill)
        return process


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with ExitStack() as stack:
        yield Run(tmp_path, stack)


def test_training_survives_a_kill_of_the_coordinator_and_all_versions_are_stored(run: Run) -> None:
    coordinator = run.start("coordinator", run.coordinator)
    trainer = run.start("trainer", run.trainer, "--attempt", "1")
    actor = run.start("actor", run.actor)
    store = FilesystemParameterDB(run.folder / "parameters")

    def stored_after(step: int) -> Version:
        """Wait for a stored version with a higher step; return it."""

        def versions() -> list[Version]:
            return [info.version for info in store.versions(POLICY_NAME) if info.version.step > step]

        return max(until(versions, f"a version after step {step}"))

    before = stored_after(0)
    coordinator.kill()
    coordinator.wait(DEADLINE_SECONDS)
    coordinator = run.start("coordinator", run.coordinator)
    after = stored_after(before.step + 20)
    source = open_parameter_source(run.actor, TOKEN, None)
    run.stack.callback(source.close)
    assert source.wait(after, DEADLINE_SECONDS).version >= after
    assert trainer.wait(DEADLINE_SECONDS) == 0
    actor.send_signal(signal.SIGTERM)
    assert actor.wait(DEADLINE_SECONDS) == 0
    coordinator.send_signal(signal.SIGTERM)
    assert coordinator.wait(DEADLINE_SECONDS) == 0
    record = terminal_record(store, POLICY_NAME)
    assert record is not None
    assert record["reason"] == "trainSteps"
    assert store.versions(POLICY_NAME)[-1].version == Version(1, 160)
    assert store.load_state(POLICY_NAME) is not None
    ledger = read_ledger(run.folder / "ledger")
    assert ledger["balanced"], ledger
    assert ledger["trained"] == ledger["produced"] - sum(ledger["dropped"].values())
