"""The coordinator keeps what workers print, also of workers that were killed, for `kubectl rlsrl logs`."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import structlog
from click.testing import CliRunner, Result

from rlsrl.api.resolved import ObjectStoreConfig
from rlsrl.cli import main
from rlsrl.rpc.v1 import coordinator_pb2 as pb
from rlsrl.runtime.printed_text import HALF_CHARACTERS
from rlsrl.testing.cluster_objects import NAME, UID, bucket_secret, experiment, pod, suspended_with_bucket, token_secret
from rlsrl.testing.kubectl_standin import KubectlStandIn
from rlsrl.testing.pods import TOKEN, Pods
from rlsrl.testing.s3_server import CREDENTIALS, REGION, S3Server
from rlsrl.testing.waiting import DEADLINE_SECONDS, until
from rlsrl.workers.build.parameters import open_objects
from rlsrl.workers.kept_logs import KEPT_BYTES, KeptLogs, LogCopies, LogName

EXPERIMENT = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {{name: kept}}
spec:
  environment: {{factory: "rlsrl.testing.environments:PrintingEnv", kwargs: {{gate: "{folder}/gate", lines: {lines}}}}}
  policy: {{network: {{mlp: {{hiddenSizes: [8]}}}}}}
  algorithm: {{ppo: {{epochs: 1, minibatchSize: 16}}}}
  actors: {{environments: 1, rolloutLength: 16}}
  policyWorkers: {{replicas: 1}}
  stop: {{trainSteps: 1000000}}
"""
COORDINATOR_POD = pod("cartpole-coordinator-0", "coordinator")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KubectlStandIn:
    (tmp_path / "kubectl").mkdir()
    cluster = KubectlStandIn(tmp_path / "kubectl")
    monkeypatch.setenv("PATH", f"{cluster.folder}{os.pathsep}{os.environ['PATH']}")
    return cluster


def begun(folder: Path, stack: ExitStack, *, lines: int | str) -> tuple[Pods, subprocess.Popen[bytes]]:
    """Start a run's coordinator; return the run's pods and the coordinator. Environments print ``lines`` lines."""
    pods = Pods(EXPERIMENT.format(folder=folder, lines=lines), folder, stack)
    coordinator, _ = pods.start("coordinator", pods.resolved.coordinator)
    return pods, coordinator


def kept(pods: Pods, role: str = "actor") -> str:
    """Return the kept log of a role's first worker."""
    logs = pods.client.logs(role, 0, tail=None, timeout=DEADLINE_SECONDS)
    return "".join(f"{log.text.decode()}\n" for log in logs)


def called(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["logs", NAME, "-n", "research", *arguments])


@pytest.mark.slow
def test_a_killed_workers_lines_outlive_it_and_the_coordinator(
    tmp_path: Path, stack: ExitStack, cluster: KubectlStandIn
) -> None:
    pods, coordinator = begun(tmp_path, stack, lines=3)
    actor, host = pods.start("actor", pods.resolved.actor)
    until(lambda: "printed line 3 of 3\n" in kept(pods), "the actor's lines arrive")
    actor.kill()
    actor.wait(DEADLINE_SECONDS)
    first = kept(pods)
    assert '"configuring"' in first, "logs are kept"
    assert "printed line 1 of 3\nprinted line 2 of 3\n" in first, "what an environment prints is kept, too"

    pods.start("actor", pods.resolved.actor, host=host)
    until(lambda: "printed line 3 of 3\n" in kept(pods).removeprefix(first), "the lines of its successor follow")
    assert "\n\n" in kept(pods), "after an empty line"

    until(lambda: '"serving"' in kept(pods, "coordinator"), "the coordinator keeps its own lines")
    before = kept(pods).rstrip("\n")
    coordinator.kill()
    coordinator.wait(DEADLINE_SECONDS)
    address = pods.resolved.coordinator.coordinator_address
    pods.start("coordinator", pods.resolved.coordinator, host=address.rpartition(":")[0])
    assert kept(pods).startswith(before), "the files of the volume are still there"

    cluster.reach(address)
    cluster.show(experiment("Succeeded"), token_secret(TOKEN), COORDINATOR_POD)
    result = called("--role", "actor", "--tail", "-1")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines.count("[actor-0] printed line 2 of 3") >= 2, "of both"
    assert all(line.startswith("[actor-0] ") for line in lines)
    assert called("--role", "actor", "--tail", "1").output.count("\n") == 1
    assert "[coordinator-0] " in called().output, "of all roles"
    assert called("--role", "actor", "--index", "7").output == "Error: cartpole keeps no log of actor 7\n"


@pytest.mark.slow
def test_a_flood_costs_bounded_bytes_and_the_worker_goes_on(tmp_path: Path, stack: ExitStack) -> None:
    num_lines = 200_000
    pods, _ = begun(tmp_path, stack, lines=num_lines)
    actor, host = pods.start("actor", pods.resolved.actor)
    last = f"printed line {num_lines} of {num_lines}\n"
    until(lambda: last in kept(pods), "the end of the flood arrives")
    assert actor.poll() is None
    assert '"configuring"' in kept(pods), "what was before it"
    assert "[rlsrl: missing here: " in kept(pods)
    assert pods.log("actor", host).count("printed line ") >= num_lines, "the pod's own log has all of it"
    files = list((tmp_path / "data" / "logs").glob("actor-0.out*"))
    assert sum(file.stat().st_size for file in files) < 2 * KEPT_BYTES + 4 * HALF_CHARACTERS


@pytest.mark.slow
def test_the_traceback_of_a_worker_that_ends_is_kept(tmp_path: Path, stack: ExitStack) -> None:
    pods, _ = begun(tmp_path, stack, lines="none")
    actor, _ = pods.start("actor", pods.resolved.actor)
    assert actor.wait(DEADLINE_SECONDS) != 0
    text = kept(pods)
    assert "Traceback (most recent call last):" in text
    assert "environments.py" in text
    assert 'can only concatenate str (not "int") to str' in text


@pytest.mark.slow
def test_only_processes_with_the_token_read_logs(tmp_path: Path, stack: ExitStack, cluster: KubectlStandIn) -> None:
    pods, _ = begun(tmp_path, stack, lines=1)
    until(lambda: '"serving"' in kept(pods, "coordinator"), "a log")
    cluster.reach(pods.resolved.coordinator.coordinator_address)
    cluster.show(experiment("Failed"), token_secret("another"), COORDINATOR_POD)
    result = called()
    assert result.exit_code == 2
    assert "UNAUTHENTICATED" in result.output
    assert pods.client.logs("../coordinator", 0, tail=None, timeout=DEADLINE_SECONDS) == [], "a name is no path"


@pytest.mark.slow
def test_without_a_volume_the_next_coordinator_has_the_logs_from_the_bucket(
    tmp_path: Path, stack: ExitStack, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    bucket = f"logs-{uuid.uuid4().hex}"
    s3_server.create_bucket(bucket)
    store = f"{{url: 's3://{bucket}/runs', endpoint: '{s3_server.endpoint}', region: {REGION}}}"
    overrides = [f"parameters.store={{objectStore: {store}}}"]
    pods = Pods(EXPERIMENT.format(folder=tmp_path, lines=3), tmp_path, stack, overrides=overrides)
    coordinator, host = pods.start("coordinator", pods.resolved.coordinator)
    actor, _ = pods.start("actor", pods.resolved.actor)
    until(lambda: "printed line 3 of 3\n" in kept(pods), "the actor's lines arrive")
    actor.kill()
    actor.wait(DEADLINE_SECONDS)
    before = kept(pods)
    coordinator.send_signal(signal.SIGTERM)
    assert coordinator.wait(DEADLINE_SECONDS) == 0
    shutil.rmtree(tmp_path / "data")  # as with its pod
    pods.start("coordinator", pods.resolved.coordinator, host=host)
    until(lambda: kept(pods) == before, "the bucket is read")
    assert '"serving"' in kept(pods, "coordinator")


@pytest.mark.parametrize("fresh_attempt", [None, 3])
def test_a_suspended_experiments_logs_are_read_in_its_bucket(
    tmp_path: Path,
    s3_server: S3Server,
    monkeypatch: pytest.MonkeyPatch,
    cluster: KubectlStandIn,
    fresh_attempt: int | None,
) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    bucket = f"logs-{uuid.uuid4().hex}"
    s3_server.create_bucket(bucket)
    place = {"url": f"s3://{bucket}/runs", "endpoint": s3_server.endpoint, "region": REGION}
    log = structlog.stdlib.get_logger()
    for run in (f"{NAME}-{UID}", f"{NAME}-{UID}-3"):
        logs = KeptLogs(tmp_path / run, log=log)
        for role in ("actor", "trainer"):
            text = f"a line of {run}\nthe last line of {role}\n".encode()
            logs.append(LogName(role, 0), "process", [pb.LogPart(sequence=0, text=text)])
        stored = ObjectStoreConfig.model_validate({**place, "url": f"{place['url']}/{run}", "answer_seconds": 10.0})
        LogCopies(logs, open_objects(stored), log=log).write()
    for name in CREDENTIALS:  # from now on only the Secret has them
        monkeypatch.setenv(name, "wrong")

    cluster.show(suspended_with_bucket(place, fresh_attempt), bucket_secret(CREDENTIALS))
    run = f"{NAME}-{UID}" if fresh_attempt is None else f"{NAME}-{UID}-3"
    result = called("--role", "actor")
    assert result.exit_code == 0, result.output
    assert result.output == f"[actor-0] a line of {run}\n[actor-0] the last line of actor\n"
    assert called("--tail", "1").output == "[actor-0] the last line of actor\n[trainer-0] the last line of trainer\n"
