"""Stored files of a run of pods, damaged in each way: the worker that needs the file ends for good and names it, or the
run resumes and says what it lost. The table of one machine is in ``test_damaged_run_folders.py``.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from click.testing import CliRunner

from rlsrl.api.failures import RUN_DAMAGED
from rlsrl.api.placement import COORDINATOR_PORT
from rlsrl.cli import main
from rlsrl.parameters.resumption import Rollback
from rlsrl.testing.cluster_objects import experiment, token_secret
from rlsrl.testing.kubectl_standin import KubectlStandIn
from rlsrl.testing.pods import TOKEN, Pods
from rlsrl.testing.s3_server import CREDENTIALS, REGION, S3Server
from rlsrl.testing.waiting import DEADLINE_SECONDS, until

EXPERIMENT = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {name: cartpole}
spec:
  environment: {id: CartPole-v1}
  policy: {network: {mlp: {hiddenSizes: [8]}}}
  algorithm: {ppo: {epochs: 1, minibatchSize: 64}}
  actors: {environments: 4, rolloutLength: 16}
  parameters: {everySteps: 5}
  stop: {trainSteps: 1000000}
"""
SECRET = token_secret(TOKEN)
LAUNCHER = ("--ranks", "1")
"""Trainer pods start their ranks by the gang launcher."""


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:10])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def zeroed(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def flipped(path: Path) -> None:
    path.write_bytes(bytes(byte ^ 0xFF for byte in path.read_bytes()))


def deleted(path: Path) -> None:
    path.unlink()


Damage = Callable[[Path], None]
DAMAGES: tuple[Damage, ...] = (truncated, emptied, zeroed, flipped, deleted)
CURES = {"roster.json": "kubectl rlsrl retry --fresh", "ledger.json": "remove it", "coordinators.json": "remove it"}
"""The documents of the coordinator, and a part of the cure of each."""
CASES = [
    pytest.param(name, damage, id=f"{name}-{damage.__name__}", marks=() if damage is truncated else pytest.mark.slow)
    for name in CURES
    for damage in DAMAGES
    # The coordinator begins the other documents anew.
    if damage is not deleted or name == "roster.json"
]


def train_and_end(pods: Pods) -> None:
    """Run all pods until some versions are stored."""
    roles = [("coordinator", ()), ("trainer", ("--attempt", "1")), ("actor", ())]
    processes = [pods.start(role, pods.resolved.configs[role], *words)[0] for role, words in roles]
    until(lambda: pods.train_steps() > 20, "some versions")
    for process in reversed(processes):
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_SECONDS) == 0


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Pods, Path]]:
    """Yield a run whose pods have ended after some versions, with the folder of its volume."""
    folder = tmp_path_factory.mktemp("damaged-pods")
    with ExitStack() as stack:
        pods = Pods(EXPERIMENT, folder, stack)
        train_and_end(pods)
        shutil.copytree(folder / "data", folder / "whole")
        yield pods, folder / "data"


@pytest.fixture
def volume(ended: tuple[Pods, Path]) -> Path:
    """Return the folder of the volume, as the pods left it."""
    _, volume = ended
    shutil.rmtree(volume)
    shutil.copytree(volume.with_name("whole"), volume)
    return volume


@pytest.fixture
def pods(ended: tuple[Pods, Path], volume: Path, tmp_path: Path) -> Iterator[Pods]:
    """Yield new pods for the run."""
    assert volume.is_dir()
    with ExitStack() as stack:
        yield Pods(EXPERIMENT, tmp_path, stack, resumes=ended[0])


def error_of(pods: Pods, role: str, process: subprocess.Popen[bytes], host: str) -> str:
    """Return the line with which a worker ends that no restart helps."""
    assert process.wait(DEADLINE_SECONDS) == RUN_DAMAGED, pods.log(role, host)
    log = pods.log(role, host)
    assert "Traceback" not in log
    (line,) = (line for line in log.splitlines() if line.startswith("rlsrl: "))
    return line


def versions(volume: Path) -> list[Path]:
    """Return the files of weights and states, oldest first."""
    return sorted((volume / "parameters").glob("*/*/*.safetensors"), key=lambda path: path.name)


@pytest.mark.parametrize(("name", "damage"), CASES)
def test_a_coordinator_with_a_damaged_document_ends_for_good(
    pods: Pods, volume: Path, name: str, damage: Damage
) -> None:
    damage(volume / name)
    line = error_of(pods, "coordinator", *pods.start("coordinator", pods.resolved.coordinator))
    assert str(volume / name) in line
    assert CURES[name] in line


@pytest.mark.parametrize(
    "damage", [zeroed, *(pytest.param(each, marks=pytest.mark.slow) for each in DAMAGES[:2]), deleted]
)
def test_trainers_without_an_intact_version_end_for_good(pods: Pods, volume: Path, damage: Damage) -> None:
    newest = versions(volume)[-1].name
    for path in versions(volume):
        damage(path)
    pods.start("coordinator", pods.resolved.coordinator)
    line = error_of(pods, "trainer", *pods.start("trainer", pods.resolved.trainer, "--attempt", "2", launcher=LAUNCHER))
    assert "no stored version is intact with its state" in line
    assert newest in line or damage is deleted
    assert "kubectl rlsrl retry --fresh" in line
    assert not [path for path in versions(volume) if path.stat().st_size and damage is deleted], "nothing began again"


def test_trainers_that_resume_from_an_older_version_say_which_and_why(pods: Pods, volume: Path) -> None:
    newest = max((volume / "parameters").glob("*/versions/*.safetensors"))
    flipped(newest)
    pods.start("coordinator", pods.resolved.coordinator)
    _, host = pods.start("trainer", pods.resolved.trainer, "--attempt", "2", launcher=LAUNCHER)
    until(lambda: "rolled_back" in pods.log("trainer", host), "the trainer has resumed")
    lines = [json.loads(line) for line in pods.log("trainer", host).splitlines() if "rolled_back" in line]
    (event,) = lines
    assert newest.name in event["reason"]
    assert event["lost_steps"] > 0
    said = str(Rollback(**{name: event[name] for name in ("attempt", "version", "newest", "reason", "lost_steps")}))
    until(lambda: pods.status()["totals"]["rollback"] == said, "the coordinator's status says so")


@pytest.mark.slow
def test_damage_in_a_bucket_is_named_too(tmp_path: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    bucket = f"damaged-{uuid.uuid4().hex}"
    objects = s3_server.create_bucket(bucket)
    store = f"{{objectStore: {{url: 's3://{bucket}/runs', endpoint: '{s3_server.endpoint}', region: {REGION}}}}}"
    with ExitStack() as stack:
        pods = Pods(EXPERIMENT, tmp_path, stack, overrides=[f"parameters.store={store}"])
        train_and_end(pods)
        host = pods.resolved.coordinator.coordinator_address.rpartition(":")[0]
        (roster,) = objects.rglob("roster.json")
        whole = roster.read_bytes()
        truncated(roster)
        line = error_of(pods, "coordinator", *pods.start("coordinator", pods.resolved.coordinator, host=host))
        assert "roster.json is not a roster" in line
        assert bucket in line
        roster.write_bytes(whole)
        for path in objects.rglob("*.safetensors"):
            zeroed(path)
        pods.start("coordinator", pods.resolved.coordinator, host=host)
        line = error_of(pods, "trainer", *pods.start("trainer", pods.resolved.trainer, "--attempt", "2"))
        assert "no stored version is intact with its state: default/" in line


def test_params_marks_damaged_versions_of_a_cluster(
    pods: Pods, volume: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = max((volume / "parameters").glob("*/states/*.safetensors"))
    flipped(newest)
    folder = tmp_path / "kubectl"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    cluster = KubectlStandIn(folder)
    cluster.show(experiment("Running"), SECRET)
    _, host = pods.start("coordinator", pods.resolved.coordinator)
    cluster.reach(f"{host}:{COORDINATOR_PORT}")
    until(lambda: pods.status()["phase"] == "starting", "a coordinator that answers")
    result = CliRunner().invoke(main, ["params", "list", "cartpole", "-n", "research"])
    assert result.exit_code == 0, result.output
    *rows, said = result.stdout.splitlines()
    assert rows[-1].endswith("damaged")
    assert newest.name in said
