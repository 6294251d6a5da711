"""``kubectl rlsrl top`` on real workers, with a fake kubectl that forwards to the coordinator."""

from __future__ import annotations

import base64
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rlsrl.api.placement import COORDINATOR_PORT
from rlsrl.cli import main
from rlsrl.rpc.tls import FILES
from rlsrl.testing.certificates import Authority, MountedSecret
from rlsrl.testing.cluster_objects import NAME, Object, experiment, token_secret
from rlsrl.testing.kubectl_standin import KubectlStandIn
from rlsrl.testing.pods import TOKEN, Pods
from rlsrl.testing.waiting import DEADLINE_SECONDS, until

NAMESPACE = "research"
EXPERIMENT = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {name: cartpole}
spec:
  environment: {id: CartPole-v1}
  policy: {network: {mlp: {hiddenSizes: [8]}}}
  algorithm: {ppo: {epochs: 1, minibatchSize: 64}}
  actors: {environments: 4, rolloutLength: 16}
  bufferWorkers: {replicas: 1}
  policyWorkers: {replicas: 1}
  stop: {trainSteps: 1000000}
"""
SECRET = token_secret(TOKEN)


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    with ExitStack() as stack:
        yield Pods(EXPERIMENT, tmp_path, stack)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KubectlStandIn:
    """Yield the fake cluster; its kubectl is the only one on the PATH."""
    folder = tmp_path / "kubectl"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return KubectlStandIn(folder)


def start_coordinator(pods: Pods, cluster: KubectlStandIn) -> subprocess.Popen[bytes]:
    """Start the run's coordinator and wait until it answers; kubectl forwards to it."""
    process, host = pods.start("coordinator", pods.resolved.coordinator)
    cluster.reach(f"{host}:{COORDINATOR_PORT}")
    until(lambda: pods.status()["phase"] == "starting", "a coordinator that answers")
    return process


@pytest.fixture
def coordinator(pods: Pods, cluster: KubectlStandIn) -> subprocess.Popen[bytes]:
    """One that is there, of an experiment that kubectl shows."""
    cluster.show(experiment("Running"), SECRET)
    return start_coordinator(pods, cluster)


@pytest.mark.slow
def test_top_shows_the_work_and_waits_of_each_role(pods: Pods, coordinator: subprocess.Popen[bytes]) -> None:
    assert coordinator.poll() is None
    for role in ("policy", "buffer", "trainer", "actor"):
        pods.start(role, pods.resolved.configs[role], *(["--attempt", "1"] if role == "trainer" else []))

    def known(role: str) -> bool:
        workers = pods.status()["roles"].get(role, [])
        return bool(workers and workers[0]["activity"] and "samples_per_second" in workers[0]["stats"])

    until(lambda: all(map(known, ("policy", "buffer", "trainer", "actor"))), "the first statistics of all")
    result = CliRunner().invoke(main, ["top", NAME, "-n", NAMESPACE])
    assert result.exit_code == 0, result.output
    rows = {line.split()[0]: line for line in result.output.splitlines() if line[:1].islower()}
    waits = {"actor": "inference", "buffer": "samples|credit", "policy": "requests", "trainer": "batch"}
    for role, word in waits.items():
        assert re.search(rf"1 running +\d+% .*({word}) \d+%", rows[role]), rows[role]
    for role, word in {"actor": "environment", "trainer": "update"}.items():
        assert re.search(rf"1 running +\d+% +.*{word} \d+%", rows[role]), rows[role]
    assert re.search(r"\d requests ", rows["policy"]), "its unit"
    for role in waits:
        (worker,) = pods.status()["roles"][role]
        assert sum(worker["activity"].values()) == pytest.approx(1.0, abs=0.01)


@pytest.mark.slow
def test_top_on_a_terminal_is_live_reports_a_lost_coordinator_and_ends_quietly(
    pods: Pods, coordinator: subprocess.Popen[bytes]
) -> None:
    near, far = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", "from rlsrl.cli import main; main()", "top", NAME, "-n", NAMESPACE],
        stdin=far, stdout=far, stderr=far, start_new_session=True, env={**os.environ, "COLUMNS": "200", "LINES": "50"},
    )  # fmt: skip
    os.close(far)
    seen = ""

    def shows(words: str, times: int = 1) -> bool:
        nonlocal seen
        seen += os.read(near, 65536).decode()
        return seen.count(words) >= times

    try:
        until(lambda: shows("cartpole: starting", times=3), "the table, three times", timeout=DEADLINE_SECONDS)
        assert "\x1b[H\x1b[J" in seen, "drawn over itself"
        coordinator.kill()
        coordinator.wait(DEADLINE_SECONDS)
        until(lambda: shows("old: the coordinator"), "the age of the last answer", timeout=DEADLINE_SECONDS)
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE_SECONDS) == 130
        assert "Traceback" not in seen
    finally:
        process.kill()
        process.wait(DEADLINE_SECONDS)
        os.close(near)


def encrypted(spec: dict[str, Any]) -> Object:
    """Return the experiment in the namespace of the tests' certificates."""
    document = experiment("Running", name="tests")
    document["metadata"]["namespace"] = "tests"
    document["spec"] |= spec
    return document


@pytest.mark.slow
def test_certificates_of_the_experiment_are_used(tmp_path: Path, cluster: KubectlStandIn) -> None:
    authority = Authority.new(tmp_path)
    mount = MountedSecret(tmp_path / "tls", authority.issue(), authority)
    data = {file: base64.b64encode((mount.folder / file).read_bytes()).decode() for file in FILES}
    secret = {"kind": "Secret", "metadata": {"name": "of-the-workers"}, "data": data}
    with ExitStack() as stack:
        start_coordinator(Pods(EXPERIMENT, tmp_path, stack, secret=mount), cluster)

        cluster.show(encrypted({"security": {"tlsSecret": "of-the-workers"}}), SECRET, secret)
        result = CliRunner().invoke(main, ["top", "tests", "-n", "tests"])
        assert (result.exit_code, result.output[:19]) == (0, "cartpole: starting,"), result.output

        cluster.show(encrypted({}), SECRET, secret)
        result = CliRunner().invoke(main, ["top", "tests", "-n", "tests"])
        assert result.exit_code == 2
        assert result.output.startswith("Error: the coordinator of tests does not answer"), result.output

        cluster.show(encrypted({"security": {"tlsSecret": "of-the-workers"}}), SECRET, {**secret, "data": {}})
        result = CliRunner().invoke(main, ["top", "tests", "-n", "tests"])
        assert result.exit_code == 2
        assert result.output.startswith("Error: the certificates in the Secret of-the-workers cannot be used: ")
        assert len(result.output.splitlines()) == 1, result.output
