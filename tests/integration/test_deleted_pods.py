"""A pod that is deleted takes its ledger page along, whosever it is: the run goes on, and the ledger adds up."""

from __future__ import annotations

import signal
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from rlsrl.api.resolved import CoordinatorConfig, RoleConfig
from rlsrl.testing.pods import Pods
from rlsrl.testing.s3_server import CREDENTIALS, REGION, S3Server
from rlsrl.testing.waiting import DEADLINE_SECONDS, until

EXPERIMENT = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {name: deleted}
spec:
  environment: {id: CartPole-v1}
  policy: {network: {mlp: {hiddenSizes: [8]}}}
  algorithm: {ppo: {epochs: 1, minibatchSize: 64}}
  actors: {replicas: 2, environments: 4, rolloutLength: 16}
  parameters: {everySteps: 20}
  stop: {trainSteps: 1000000}
"""
HEARTBEAT_SECONDS = 0.25
LEASE_SECONDS = 4.0


class Cluster:
    """Pods by role and number, and whoever takes the place of one that was deleted."""

    def __init__(self, pods: Pods) -> None:
        self.pods = pods
        self.attempt = 0
        self.running: dict[tuple[str, int], tuple[subprocess.Popen[bytes], str]] = {}
        told = pods.told.coordinator.model_dump() | {
            "heartbeat_seconds": HEARTBEAT_SECONDS,
            "lease_seconds": LEASE_SECONDS,
        }
        self.coordinator = CoordinatorConfig.model_validate(told)
        numbers = {"coordinator": 1, "buffer": self.coordinator.num_buffer_workers, "trainer": 1, "actor": 2}
        for role, number in numbers.items():
            for index in range(number):
                self.start(role, index)

    def start(self, role: str, number: int, *, host: str = "") -> None:
        config: RoleConfig | None = self.coordinator if role == "coordinator" else getattr(self.pods.told, role)
        self.attempt += role == "trainer"
        arguments = ["--attempt", str(self.attempt)] if role == "trainer" else []
        self.running[role, number] = self.pods.start(role, config, *arguments, host=host)

    def replace(self, role: str, number: int) -> None:
        """Delete the pod; another comes up, elsewhere but for the coordinator, which its Service leads to."""
        process, host = self.running[role, number]
        self.pods.delete(process, host)
        self.start(role, number, host=host if role == "coordinator" else "")

    def trains_on(self) -> None:
        """Wait for training, with every worker there."""
        until(lambda: {role for role, workers in self.workers().items() if workers} >= {"actor", "trainer"}, "workers")
        hosts = {host for (role, _), (_, host) in self.running.items() if role != "coordinator"}
        until(lambda: self.hosts() == hosts, "everybody is there")
        steps = self.pods.train_steps()
        until(lambda: self.pods.train_steps() > steps + 5, "training goes on")

    def workers(self) -> dict[str, list[dict[str, object]]]:
        found: dict[str, list[dict[str, object]]] = self.pods.status()["roles"]
        return found

    def hosts(self) -> set[str]:
        """Where the workers are that are there and do their work."""
        return {
            str(worker["endpoints"]["metrics"]).rpartition(":")[0]  # type: ignore[index]
            for workers in self.workers().values()
            for worker in workers
            if worker["state"] == "running"
        }

    def end(self) -> None:
        """End everybody but the coordinator, as pods are ended."""
        for role in ("trainer", "buffer", "actor"):
            for (each, _), (process, _) in self.running.items():
                if each == role:
                    process.send_signal(signal.SIGTERM)
                    assert process.wait(DEADLINE_SECONDS) == 0


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def bucket(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """The override that keeps the run in a bucket of its own."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    name = f"deleted-{uuid.uuid4().hex}"
    s3_server.create_bucket(name)
    store = f"{{url: 's3://{name}/runs', endpoint: '{s3_server.endpoint}', region: {REGION}}}"
    return f"parameters.store={{objectStore: {store}}}"


def check(cluster: Cluster) -> dict[str, int]:
    """See to it that the ledger of the ended run adds up; returns what was lost, by cause."""
    ledger = cluster.pods.status()["ledger"]
    assert ledger["balanced"], ledger
    assert (ledger["unsettled"], ledger["in_buffer"]) == (0, 0), ledger
    assert ledger["trained"] > 0, ledger
    assert min(ledger["lost"].values()) >= 0, ledger
    lost: dict[str, int] = ledger["lost"]
    return lost


@pytest.mark.parametrize("buffers", [0, 1])
def test_whoever_is_deleted_the_ledger_adds_up(tmp_path: Path, stack: ExitStack, buffers: int) -> None:
    overrides = ["bufferWorkers.replicas=1"] if buffers else []
    cluster = Cluster(Pods(EXPERIMENT, tmp_path, stack, overrides=overrides))
    cluster.trains_on()
    for role in ("actor", "trainer", *["buffer"] * buffers, "coordinator"):
        cluster.replace(role, 0)
        cluster.trains_on()
    cluster.end()
    lost = check(cluster)
    assert lost["rolled_back"] + lost["receiver_died"] > 0, "what the trainer had made since its last version"


@pytest.mark.slow
def test_with_nothing_but_a_bucket_too(tmp_path: Path, stack: ExitStack, bucket: str) -> None:
    overrides = [bucket, "bufferWorkers.replicas=1"]
    cluster = Cluster(Pods(EXPERIMENT, tmp_path, stack, overrides=overrides))
    cluster.trains_on()
    for role in ("coordinator", "trainer", "buffer", "actor", "coordinator"):
        cluster.replace(role, 0)
        cluster.trains_on()
    cluster.end()
    check(cluster)


def test_all_that_hold_pages_are_deleted_at_once_and_never_come_back(tmp_path: Path, stack: ExitStack) -> None:
    """The copies alone say where everything went."""
    cluster = Cluster(Pods(EXPERIMENT, tmp_path, stack, overrides=["bufferWorkers.replicas=1"]))
    cluster.trains_on()
    for (role, _), (process, host) in cluster.running.items():
        if role != "coordinator":
            cluster.pods.delete(process, host)
    until(lambda: not any(cluster.workers().values()), "their leases run out")
    check(cluster)
