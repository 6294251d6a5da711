"""A deleted pod takes its ledger page along; the run continues, and the ledger adds up."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from rlsrl.testing.pod_fleet import PodFleet
from rlsrl.testing.pods import Pods
from rlsrl.testing.s3_server import CREDENTIALS, REGION, S3Server

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
BUFFERED = "bufferWorkers.replicas=1"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def bucket(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the override that stores the run in its own bucket."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    name = f"deleted-{uuid.uuid4().hex}"
    s3_server.create_bucket(name)
    store = f"{{url: 's3://{name}/runs', endpoint: '{s3_server.endpoint}', region: {REGION}}}"
    return f"parameters.store={{objectStore: {store}}}"


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [[BUFFERED], []], ids=["by way of a buffer worker", "actors to trainers"])
def test_the_ledger_adds_up_after_the_deletion_of_any_pod(
    tmp_path: Path, stack: ExitStack, overrides: list[str]
) -> None:
    fleet = PodFleet(Pods(EXPERIMENT, tmp_path, stack, overrides=overrides))
    fleet.await_training()
    for role in ("actor", "trainer", *["buffer"] * len(overrides), "coordinator"):
        fleet.delete((role, 0))
        fleet.await_training()
    fleet.end()
    lost = fleet.check_ledger()
    assert lost["rolled_back"] + lost["receiver_died"] > 0, "the trainer's transitions since its last version"


@pytest.mark.slow
def test_the_ledger_adds_up_with_only_a_bucket(tmp_path: Path, stack: ExitStack, bucket: str) -> None:
    fleet = PodFleet(Pods(EXPERIMENT, tmp_path, stack, overrides=[bucket, BUFFERED]))
    fleet.await_training()
    for role in ("coordinator", "trainer", "buffer", "actor", "coordinator"):
        fleet.delete((role, 0))
        fleet.await_training()
    fleet.end()
    fleet.check_ledger()


@pytest.mark.slow
def test_the_ledger_adds_up_after_deletions_at_the_same_time(tmp_path: Path, stack: ExitStack) -> None:
    """As with a lost node: both ends of a stream may be deleted."""
    fleet = PodFleet(Pods(EXPERIMENT, tmp_path, stack, overrides=[BUFFERED]))
    fleet.await_training()
    for gone in ([("actor", 0), ("buffer", 0)], [("buffer", 0), ("trainer", 0)], [("coordinator", 0), ("actor", 1)]):
        fleet.delete(*gone)
        fleet.await_training()
    fleet.end()
    fleet.check_ledger()


@pytest.mark.slow
def test_the_ledger_adds_up_if_all_pods_with_pages_are_deleted_for_good(tmp_path: Path, stack: ExitStack) -> None:
    """Only the copies of the pages remain."""
    fleet = PodFleet(Pods(EXPERIMENT, tmp_path, stack, overrides=[BUFFERED]))
    fleet.await_training()
    for (role, _), pod in fleet.running.items():
        if role != "coordinator":
            fleet.pods.delete(*pod)
    fleet.await_empty_roster()
    fleet.check_ledger()
