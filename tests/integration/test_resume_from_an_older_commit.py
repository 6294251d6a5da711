"""This commit resumes runs that an older commit of this repository wrote: a run folder, a volume and a bucket.

The older commit's code runs in this environment, from its own files. It trains, and ends cleanly or by SIGKILL.
"""

from __future__ import annotations

import io
import json
import os
import secrets
import signal
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from checkouts import CheckoutFailed, commit_of, import_path

from rlsrl.api.resolved import CoordinatorConfig
from rlsrl.api.role_configs import POLICY_NAME
from rlsrl.data.version import Version
from rlsrl.local.metrics_log import read_rows, training_rows
from rlsrl.parameters.protocols import VersionInfo
from rlsrl.testing.live_runs import Desk, RunFolderFacts, await_death
from rlsrl.testing.pod_fleet import PodFleet
from rlsrl.testing.pods import Pods
from rlsrl.testing.s3_server import CREDENTIALS, REGION, S3Server
from rlsrl.testing.waiting import until
from rlsrl.workers.build.parameters import open_parameter_store

REPOSITORY = Path(__file__).parents[2]
OLDER_COMMIT = "dabdd24"
"""The last commit before the classes and modules that write stored formats were renamed and moved. Move it on to the
commit before each later change of a stored format."""
VARIABLE = "RLSRL_OLDER_COMMIT"
"""Environment variable that names another commit to resume from."""

EXPERIMENT = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {{name: live}}
spec:
  environment: {{id: CartPole-v1}}
  policy: {{network: {{mlp: {{hiddenSizes: [8]}}}}}}
  algorithm: {{ppo: {{epochs: 1, minibatchSize: 64}}}}
  actors: {{replicas: 2, environments: 4, rolloutLength: 16}}
  parameters: {{everySteps: 20, keepLast: 10000, store: {store}}}
  stop: {{trainSteps: 1000000}}
"""
RESOLVE = """
import json, sys
from rlsrl.api import placement
from rlsrl.api.load import load_text
from rlsrl.api.resolve import resolve
place = getattr(placement, "cluster_placement", None) or placement.ClusterPlacement  # the name in older commits
print(resolve(load_text(sys.stdin.read()), place(**json.loads(sys.argv[1]))).to_json())
"""
"""Prints the roles' configs for pods, as the imported code resolves them."""
COMMAND_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True)
class OlderCode:
    """The files of an older commit."""

    folder: Path

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables with which Python imports the older code."""
        return import_path(self.folder)

    def configs(self, experiment: str, coordinator: CoordinatorConfig) -> dict[str, Any]:
        """Return the roles' configs of the older commit, for pods of the run of that coordinator."""
        placement = {
            "run_uid": coordinator.run_uid,
            "coordinator_host": coordinator.coordinator_address.rpartition(":")[0],
            "record_folder": coordinator.record_folder,
        }
        found: dict[str, Any] = json.loads(self._print(RESOLVE, json.dumps(placement), text=experiment))
        return found

    def check(self) -> None:
        """Check that Python imports the older code and not the present one."""
        found = Path(self._print("import rlsrl; print(rlsrl.__file__)").strip())
        assert found.is_relative_to(self.folder), found

    def _print(self, program: str, *arguments: str, text: str = "") -> str:
        return subprocess.run(
            [sys.executable, "-c", program, *arguments],
            cwd=self.folder,
            env={**os.environ, **self.environment},
            input=text,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=COMMAND_SECONDS,
        ).stdout


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> OlderCode:
    """The older commit, from the clone's history."""
    commit = _commit()
    folder = tmp_path_factory.mktemp("older")
    archive = ["git", "archive", commit, "worker"]
    packed = subprocess.run(archive, cwd=REPOSITORY, stdout=subprocess.PIPE, check=True, timeout=COMMAND_SECONDS).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as files:
        files.extractall(folder, filter="data")
    older = OlderCode(folder=folder)
    older.check()
    return older


def _commit() -> str:
    if VARIABLE in os.environ:
        return commit_of(os.environ[VARIABLE])
    try:
        return commit_of(OLDER_COMMIT)
    except CheckoutFailed:
        shallow = subprocess.run(
            ["git", "rev-parse", "--is-shallow-repository"],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        if shallow.stdout.strip() != "true":
            raise
        pytest.skip(f"this shallow clone has no commit {OLDER_COMMIT}: `git fetch --unshallow` gets it")


@pytest.fixture(params=["filesystem", "bucket"])
def experiment(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The experiment, with its weights on the disk or in an empty bucket."""
    if request.param == "filesystem":
        return EXPERIMENT.format(store="{filesystem: {}}")
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    server: S3Server = request.getfixturevalue("s3_server")
    bucket = f"older-{secrets.token_hex(8)}"
    server.create_bucket(bucket)
    place = f"{{url: 's3://{bucket}/runs', endpoint: '{server.endpoint}', region: {REGION}}}"
    return EXPERIMENT.format(store=f"{{objectStore: {place}}}")


def env_steps(info: VersionInfo) -> int:
    return int(info.metadata["env_steps"])


def listed(desk: Desk, environment: Mapping[str, str] | None = None) -> list[str]:
    """The versions that ``rlsrl params list`` shows."""
    shown = desk.call("params", "list", "runs/live", "--json", environment=environment)
    assert shown.returncode == 0, shown.stderr
    return [each["version"] for each in json.loads(shown.stdout)]


def curve(facts: RunFolderFacts) -> list[int]:
    """The training steps of the learning curve's rows."""
    return [row.step for row in training_rows(read_rows(facts.folder / "metrics.jsonl"))]


def has_progress(facts: RunFolderFacts) -> bool:
    steps = curve(facts)
    versions = facts.versions() if steps else []
    return len(versions) > 3 and versions[-1].version.step >= steps[0]


def check_history(older: list[str], versions: list[VersionInfo]) -> None:
    """Check that all older versions are there and that the later ones, of attempt 2, continue from the last."""
    assert [str(info.version) for info in versions[: len(older)]] == older
    last, later = versions[len(older) - 1], versions[len(older) :]
    assert later
    assert {info.version.attempt for info in later} == {2}
    assert [info.version.step for info in later] == sorted({info.version.step for info in later})
    assert later[0].version.step > last.version.step
    steps = [env_steps(info) for info in (last, *later)]
    assert steps == sorted(set(steps)), "env steps continue"


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_a_run_of_an_older_commit_is_resumed(
    older: OlderCode, experiment: str, tmp_path: Path, signum: signal.Signals
) -> None:
    desk = Desk(tmp_path, experiment)
    facts = desk.facts()
    with desk.begin(environment=older.environment) as run:
        run.until(lambda: has_progress(facts), "four versions of the older commit, and a row of the learning curve")
        workers = run.workers()
        run.send(signum)
        assert run.wait() == {signal.SIGINT: 128 + signal.SIGINT, signal.SIGKILL: -signal.SIGKILL}[signum], run.output
        for worker in workers:
            await_death(worker.pid)  # The controller's death kills them.
    assert facts.leftovers() == []
    before = listed(desk, older.environment)
    assert listed(desk) == before, "this commit reads the versions before it writes any"
    last = Version.parse(before[-1])

    with desk.begin() as run:
        assert run.until(lambda: facts.logged("trainer-0", "resumed"), "a resumed trainer")[0]["version"] == str(last)
        run.until(lambda: facts.versions()[len(before) + 2 :], "three versions of this commit")
        run.send(signal.SIGINT)
        assert run.wait() == 128 + signal.SIGINT, run.output
    assert "resuming runs/live, attempt 2" in run.output
    assert facts.leftovers() == []

    versions = facts.versions()
    check_history(before, versions)
    assert listed(desk) == [str(info.version) for info in versions]
    summary = facts.json("summary.json")
    assert (summary["attempts"], summary["lives"], summary["restarts"]) == (2, 2, {})
    assert (summary["train_steps"], summary["env_steps"]) == (versions[-1].version.step, env_steps(versions[-1]))
    ledger = summary["ledger"]
    assert ledger["balanced"], ledger
    # What is trained and not rolled back is in the last version, to the last transition.
    assert ledger["trained"] == summary["env_steps"], ledger
    if signum == signal.SIGINT:
        assert set(ledger["lost"].values()) == {0}, ledger
    steps = curve(facts)
    assert steps[0] <= last.step < steps[-1], "the learning curve has rows of both commits"


@pytest.mark.slow
def test_killed_pods_of_an_older_commit_are_resumed(older: OlderCode, experiment: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        earlier = Pods(experiment, tmp_path, stack)
        configs = older.configs(experiment, earlier.resolved.coordinator)
        started = [
            earlier.start_from(role, configs[role], *arguments, variables=older.environment)
            for role, *arguments in (("coordinator",), ("trainer", "--attempt", "1"), ("actor",), ("actor",))
        ]
        db = open_parameter_store(earlier.resolved.coordinator.parameter_store)
        until(
            lambda: POLICY_NAME in db.policies() and db.versions(POLICY_NAME)[3:], "four versions of the older commit"
        )
        for process, host in reversed(started):
            earlier.delete(process, host)
        before = db.versions(POLICY_NAME)

        fleet = PodFleet(Pods(experiment, tmp_path, stack, resumes=earlier), last_attempt=1)
        fleet.await_training()
        until(lambda: db.versions(POLICY_NAME)[len(before) + 2 :], "three versions of this commit")
        fleet.end()
        fleet.check_ledger()
        versions = db.versions(POLICY_NAME)
        check_history([str(info.version) for info in before], versions)
        ledger = fleet.pods.status()["ledger"]
        assert ledger["trained"] == env_steps(versions[-1]), ledger
