"""Workers with the configs of pods, each with its own host: they connect over TCP, also after a restart elsewhere."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from rlsrl.api.placement import HTTP_PORT, STREAMS_PORT
from rlsrl.api.role_configs import POLICY_NAME
from rlsrl.parameters.filesystem import FilesystemParameterDB
from rlsrl.parameters.terminal import terminal_record
from rlsrl.testing.live_runs import fetch
from rlsrl.testing.pods import Pods
from rlsrl.testing.waiting import DEADLINE_SECONDS, until

EXPERIMENT = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {name: pods}
spec:
  environment: {id: CartPole-v1}
  policy: {network: {mlp: {hiddenSizes: [8]}}}
  algorithm: {ppo: {epochs: 1, minibatchSize: 64}}
  actors: {replicas: 2, environments: 4, rolloutLength: 16}
  policyWorkers: {replicas: 2}
  bufferWorkers: {replicas: 1}
  parameters: {everySteps: 20}
  stop: {trainSteps: 1000000}
"""


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    with ExitStack() as stack:
        yield Pods(EXPERIMENT, tmp_path, stack)


@pytest.mark.slow
def test_restarted_workers_at_new_hosts_are_found_and_the_run_continues(pods: Pods, tmp_path: Path) -> None:
    told = pods.resolved
    coordinator, _ = pods.start("coordinator", told.coordinator)
    policies = [pods.start("policy", told.configs["policy"]) for _ in range(2)]
    buffer, buffer_host = pods.start("buffer", told.configs["buffer"])
    trainer, trainer_host = pods.start("trainer", told.trainer, "--attempt", "1")
    actors = [pods.start("actor", told.actor) for _ in range(2)]
    until(lambda: pods.train_steps() > 3, "training steps over TCP")
    assert pods.place("buffer", 0) == f"{buffer_host}:{STREAMS_PORT}"
    assert "rlsrl_ledger" in fetch(f"http://{trainer_host}:{HTTP_PORT}/metrics")

    buffer.kill()
    buffer.wait(DEADLINE_SECONDS)
    buffer, successor_host = pods.start("buffer", told.configs["buffer"])
    until(lambda: pods.place("buffer", 0) == f"{successor_host}:{STREAMS_PORT}", "a buffer worker elsewhere")
    steps = pods.train_steps()
    until(lambda: pods.train_steps() > steps + 3, "training steps through it")

    for policy, _ in policies:
        policy.kill()
        policy.wait(DEADLINE_SECONDS)
    policies = [pods.start("policy", told.configs["policy"]) for _ in range(2)]
    hosts = {f"{host}:{STREAMS_PORT}" for _, host in policies}
    until(lambda: {pods.place("policy", index) for index in range(2)} == hosts, "policy workers elsewhere")
    steps = pods.train_steps()
    until(lambda: pods.train_steps() > steps + 3, "training steps with their actions")

    everybody = [(coordinator, 0), (trainer, 0), (buffer, 0), *policies, *actors]
    for process, _ in (*actors, *policies, (buffer, 0), (trainer, 0)):
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_SECONDS) == 0
    ledger = pods.status()["ledger"]
    assert ledger["balanced"], ledger
    assert ledger["unsettled"] == 0, ledger
    coordinator.send_signal(signal.SIGTERM)
    assert [process.wait(DEADLINE_SECONDS) for process, _ in everybody] == [0] * len(everybody)
    db = FilesystemParameterDB(tmp_path / "data" / "parameters")
    assert db.versions(POLICY_NAME)[-1].version.step > steps
    assert terminal_record(db, POLICY_NAME) is None, "ended, not finished"
    events = [json.loads(line)["event"] for line in pods.log("trainer", trainer_host).splitlines()]
    assert "configuring" in events
