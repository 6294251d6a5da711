"""Evaluators of one fixed version in real runs: a tag of a resumed run, a file of another run, and as pods."""

from __future__ import annotations

import json
import secrets
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlsrl.api.role_configs import POLICY_NAME
from rlsrl.parameters.evaluations import evaluation_of
from rlsrl.parameters.filesystem import FilesystemParameterDB
from rlsrl.testing.live_runs import GATED_EXPERIMENT, Desk, RunFolderFacts
from rlsrl.testing.pods import Pods
from rlsrl.testing.s3_server import CREDENTIALS, REGION, S3Server
from rlsrl.testing.waiting import DEADLINE_SECONDS, until

FIELD = "evaluators.parameters"
PODS = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {name: pods}
spec:
  environment: {id: CartPole-v1}
  policy: {network: {mlp: {hiddenSizes: [8]}}}
  algorithm: {ppo: {epochs: 1, minibatchSize: 64}}
  actors: {replicas: 1, environments: 4, rolloutLength: 16}
  evaluators: {environments: 2, episodesPerEnvironment: 1, parameters: {tag: reference}}
  parameters: {everySteps: 20}
  stop: {trainSteps: 1000000}
"""


def rows_of(facts: RunFolderFacts) -> list[dict[str, Any]]:
    """Return the evaluators' rows of the learning curve."""
    rows = [json.loads(line) for line in (facts.folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["role"] == "evaluator"]


@pytest.fixture(params=["folder", "bucket"])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the arguments that place the run's versions."""
    if request.param == "folder":
        return []
    server: S3Server = request.getfixturevalue("s3_server")
    for name, value in (CREDENTIALS | {"AWS_REGION": REGION}).items():
        monkeypatch.setenv(name, value)
    bucket = f"bucket-{secrets.token_hex(8)}"
    server.create_bucket(bucket)
    place = f"{{url: 's3://{bucket}/team', endpoint: '{server.endpoint}'}}"
    return ["--set", f"parameters.store.objectStore={place}"]


@pytest.mark.slow
def test_a_resumed_run_plays_a_tag_and_another_run_plays_its_file(tmp_path: Path, store: list[str]) -> None:
    gate, file = tmp_path / "gate", tmp_path / "reference.safetensors"
    desk = Desk(tmp_path, GATED_EXPERIMENT.format(gate=gate))
    evaluators = ["--set", "evaluators={environments: 2, episodesPerEnvironment: 3}"]
    facts = desk.facts()
    fresh = desk.call("run", "live.yaml", *store, "--set", f"{FIELD}.tag=reference")
    assert fresh.returncode == 2
    assert f"{FIELD}.tag 'reference': this run has not stored a version yet" in fresh.stderr
    with desk.begin(*store) as run:
        run.until(lambda: [info for info in run.facts.versions() if info.version.step], "a version")
        run.send(signal.SIGINT)
        assert run.wait() == 128 + signal.SIGINT, run.output
    stored = facts.versions()[-1].version
    assert desk.call("params", "tag", "live", str(stored), "reference").returncode == 0
    assert desk.call("params", "export", "live", "reference", "-o", str(file)).returncode == 0

    wrong = desk.call("run", "live.yaml", *store, *evaluators, "--set", f"{FIELD}.tag=referense")
    assert wrong.returncode == 2
    assert f"{FIELD}.tag 'referense': policy 'default' has no version or tag 'referense'" in wrong.stderr
    assert "(did you mean 'reference'?)" in wrong.stderr
    assert facts.json("controller.json")["attempt"] == 1, "no process started"

    with desk.begin(*store, *evaluators, "--set", f"{FIELD}.tag=reference") as run:
        run.until(lambda: rows_of(run.facts), "the result of the tagged version")
        run.until(run.is_complete, "all processes at work: the evaluator waits")
        gate.touch()
        assert run.wait() == 0, run.output
        assert f"evaluation of the fixed version {stored}: mean return 0.00 over 6 episodes" in run.output
    (row,) = rows_of(facts)
    assert row["step"] == stored.step
    assert row["scalars"]["fixed_evaluation/return_mean"] == 0.0
    summary = facts.json("summary.json")
    (result,) = summary["fixed_evaluations"]
    assert (result["version"], result["return_mean"], result["episodes"]) == (str(stored), 0.0, 6)
    assert (summary["evaluation"], summary["best"], summary["attempts"]) == (None, None, 2)
    assert [evaluation_of(info) for info in facts.versions()] == [None] * len(facts.versions())
    recorded = yaml.safe_load((facts.folder / "experiment.resolved.yaml").read_text())
    assert recorded["spec"]["evaluators"]["parameters"] == {"tag": "reference"}
    assert facts.leftovers() == []

    second = ("run", "live.yaml", "--run-dir", "runs/second", *store, *evaluators, "--set", f"{FIELD}.file={file}")
    other = desk.call(*second, "--set", "policy.network.mlp.hiddenSizes=[8]")
    assert other.returncode == 2
    assert "actor.0.weight is [16, 2] there and [8, 2] here" in other.stderr, "the evaluator's last words"
    played = desk.call(*second, "--fresh")
    assert played.returncode == 0, played.stdout + played.stderr
    summary = json.loads((tmp_path / "runs" / "second" / "summary.json").read_text())
    (result,) = summary["fixed_evaluations"]
    assert (result["version"], result["return_mean"]) == (str(stored), 8.0), "the gate is open now"
    assert summary["evaluation"] is None


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    with ExitStack() as stack:
        yield Pods(PODS, tmp_path, stack)


@pytest.mark.slow
def test_an_evaluator_pod_ends_with_what_is_missing_and_plays_the_tag_once_it_exists(
    pods: Pods, tmp_path: Path
) -> None:
    db = FilesystemParameterDB(tmp_path / "data" / "parameters")
    resolved = pods.resolved
    pods.start("coordinator", resolved.coordinator)
    pods.start("trainer", resolved.trainer, "--attempt", "1")
    pods.start("actor", resolved.actor)
    until(lambda: pods.train_steps() > 20, "a stored version")

    early, host = pods.start("evaluator", resolved.configs["evaluator"])
    assert early.wait(DEADLINE_SECONDS) == 2
    lines = pods.log("evaluator", host).splitlines()
    assert lines[-1].startswith("rlsrl: evaluators.parameters.tag 'reference': policy 'default' has no version or tag")

    db.tag(POLICY_NAME, "latest", "reference")
    (stored,) = [info.version for info in db.versions(POLICY_NAME) if "reference" in info.tags]
    evaluator, _ = pods.start("evaluator", resolved.configs["evaluator"], host=host)

    def result() -> dict[str, Any] | None:
        reports = pods.status()["roles"].get("evaluator", [])
        return next((report["stats"] for report in reports if "fixed_return_mean" in report["stats"]), None)

    stats = until(result, "the result of the tagged version")
    assert (stats["version_attempt"], stats["version_step"]) == stored
    assert "return_mean" not in stats
    evaluator.send_signal(signal.SIGTERM)
    assert evaluator.wait(DEADLINE_SECONDS) == 0
