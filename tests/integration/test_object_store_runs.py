"""Runs whose weights are in a bucket of a real S3 server."""

from __future__ import annotations

import json
import os
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlsrl.testing.live_runs import GATED_EXPERIMENT, Desk
from rlsrl.testing.s3_server import ACCESS_KEY, CREDENTIALS, REGION, SECRET_KEY, S3Server

EXAMPLE = Path(__file__).parents[2] / "examples" / "cartpole-object-store.yaml"
STORE = "parameters.store.objectStore"


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (CREDENTIALS | {"AWS_REGION": REGION}).items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def bucket(s3_server: S3Server) -> str:
    """An empty bucket."""
    name = f"bucket-{secrets.token_hex(8)}"
    s3_server.create_bucket(name)
    return name


@pytest.fixture
def own_server(s3_server_binary: Path, tmp_path: Path) -> Iterator[S3Server]:
    """A server that a test may freeze."""
    with S3Server(s3_server_binary, tmp_path / "buckets") as server:
        yield server


def in_bucket(server: S3Server, bucket: str) -> list[str]:
    place = (f"{STORE}.url=s3://{bucket}/team", f"{STORE}.endpoint={server.endpoint}")
    return [argument for override in place for argument in ("--set", override)]


def secrets_in(folder: Path) -> list[str]:
    """Files that hold a credential."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path.name for path in files if any(key.encode() in path.read_bytes() for key in (ACCESS_KEY, SECRET_KEY))]


@pytest.mark.slow
def test_the_example_keeps_its_weights_in_the_bucket_and_every_command_finds_them(
    s3_server: S3Server, bucket: str, tmp_path: Path
) -> None:
    desk = Desk(tmp_path, EXAMPLE.read_text().replace("name: cartpole-object-store", "name: live"))
    short = ["--set", "stop={trainSteps: 12}", "--set", "parameters.everySteps=3", *in_bucket(s3_server, bucket)]
    with desk.begin(*short) as run:
        assert run.wait() == 0, run.output
        assert "live finished (trainSteps)" in run.output

    facts = desk.facts()
    folder = s3_server.folder(bucket) / "team" / f"live-{facts.run_uid}" / "default"
    assert (folder / "index.json").is_file()
    assert not (desk.run_folder / "parameters").exists()
    summary = facts.json("summary.json")
    assert (summary["finished"], summary["versions"]["last"]) == (True, "1.12")
    listed = json.loads(desk.call("params", "list", "runs/live", "--json").stdout)
    assert [each["version"] for each in listed] == [str(info.version) for info in facts.versions()]
    assert len(listed) == len(list((folder / "versions").iterdir())) == summary["versions"]["count"]
    played = desk.call("eval", "runs/live", "--episodes", "4", "--max-steps", "2000", "--json")
    assert json.loads(played.stdout)["version"] == "1.12", played.stderr
    assert desk.call("params", "tag", "runs/live", "1.12", "keep").stdout == "1.12: keep\n"
    again = desk.call("run", "live.yaml", *short)
    assert again.returncode == 0
    assert "has finished; --fresh renames its folder" in again.stdout
    assert secrets_in(tmp_path) == []
    assert facts.leftovers() == []


@pytest.mark.slow
def test_the_example_trains_to_475(s3_server: S3Server, bucket: str, tmp_path: Path) -> None:
    desk = Desk(tmp_path, EXAMPLE.read_text().replace("name: cartpole-object-store", "name: live"))
    with desk.begin(*in_bucket(s3_server, bucket)) as run:
        assert run.wait(timeout=250.0) == 0, run.output
    summary = desk.facts().json("summary.json")
    assert summary["reason"] == "returnMean"
    played = json.loads(desk.call("eval", "runs/live", "--json").stdout)
    assert played["return_mean"] >= 475
    assert summary["ledger"]["balanced"]


@pytest.mark.slow
def test_a_killed_trainer_goes_on_from_the_bucket_and_a_new_run_does_not_meet_the_old_one(
    s3_server: S3Server, bucket: str, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    desk = Desk(tmp_path, GATED_EXPERIMENT.format(gate=gate))
    arguments = in_bucket(s3_server, bucket)
    with desk.begin(*arguments) as run:
        stored = run.until(lambda: [info for info in run.facts.versions() if info.has_state][1:], "two versions")
        (victim,) = run.workers("trainer")
        os.kill(victim.pid, signal.SIGKILL)
        run.until(lambda: [info for info in run.facts.versions() if info.version.attempt == 2], "a version of the next")
        gate.touch()
        assert run.wait() == 0, run.output
    resumed = run.facts.logged("trainer-0", "resumed")
    assert len(resumed) == 1
    assert stored[-1].version.step <= int(resumed[0]["version"].partition(".")[2])
    summary = desk.facts().json("summary.json")
    assert (summary["attempts"], summary["finished"], summary["ledger"]["balanced"]) == (2, True, True)
    last = summary["versions"]["last"]

    with desk.begin("--fresh", *arguments) as run:
        assert run.wait() == 0, run.output
    summary = desk.facts().json("summary.json")
    assert (summary["attempts"], summary["finished"]) == (1, True)
    assert desk.call("params", "show", "runs/live.1", last).returncode == 0
    assert len(list((s3_server.folder(bucket) / "team").iterdir())) == 2


@pytest.mark.parametrize(
    ("arguments", "environment", "says"),
    [
        ([], {"AWS_SECRET_ACCESS_KEY": "wrong"}, "SignatureDoesNotMatch; check the credentials in the environment"),
        ([], {"AWS_SECRET_ACCESS_KEY": ""}, "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment"),
        (["--set", f"{STORE}.url=s3://no-such-bucket/team"], {}, "NoSuchBucket; the bucket does not exist"),
    ],
    ids=["secret", "none", "bucket"],
)
def test_a_store_that_refuses_ends_a_run_before_it_starts_with_one_clear_error(
    s3_server: S3Server, bucket: str, tmp_path: Path, arguments: list[str], environment: dict[str, str], says: str
) -> None:
    desk = Desk(tmp_path, GATED_EXPERIMENT.format(gate=tmp_path / "gate"))
    with desk.begin(*in_bucket(s3_server, bucket), *arguments, environment=environment) as run:
        assert run.wait() == 2, run.output
    assert says in run.output
    assert len(run.output.splitlines()) == 1
    assert secrets_in(tmp_path) == []
    assert not list((desk.run_folder / "logs").iterdir()), "nothing was started"


@pytest.mark.slow
def test_a_store_that_is_away_for_a_while_costs_checkpoints_and_not_the_run(
    own_server: S3Server, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    own_server.create_bucket("bucket")
    desk = Desk(tmp_path, GATED_EXPERIMENT.format(gate=gate))
    arguments = [*in_bucket(own_server, "bucket"), "--set", f"{STORE}.answerSeconds=0.5"]
    with desk.begin(*arguments) as run:
        run.until(lambda: run.facts.versions()[1:], "two versions")
        own_server.kill()
        run.until(lambda: run.facts.logged("trainer-0", "checkpoint_failed"), "a checkpoint that failed")
        own_server.restart()
        newest = run.facts.versions()[-1].version
        run.until(lambda: run.facts.versions()[-1].version > newest, "a version after the outage")
        gate.touch()
        assert run.wait() == 0, run.output
    summary = desk.facts().json("summary.json")
    assert (summary["attempts"], summary["finished"], summary["restarts"]) == (1, True, {})
    assert secrets_in(tmp_path / "runs") == []
