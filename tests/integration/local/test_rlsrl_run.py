"""``rlsrl run`` with scripted workers: identity of a run, resumption, reports and exit codes."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

import click.testing
import pytest

from rlsrl.cli import main
from rlsrl.local import replay_room
from rlsrl.local.run_folder import RunFolder, read_record
from rlsrl.local.session import run_life

STANDIN = (sys.executable, str(Path(__file__).with_name("standin_worker.py")))
UNTIL_TOLD = [{"until": "SIGTERM"}, {"exit": 0}]
RESULT = {"env_steps": 2048, "train_steps": 7, "return_mean": 481.5}
FINISH = [{"push": RESULT, "terminal": "returnMean"}, {"exit": 0}]
INTERRUPT = [
    {"signal_parent": "SIGINT"},
    {"until": "SIGTERM"},
    {"push": {**RESULT, "train_steps": 3}, "terminal": None},
    {"exit": 0},
]
EXPERIMENT = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {name: toy}
spec:
  environment: {id: CartPole-v1}
  actors: {replicas: 2, environments: 4}
  stop: {returnMean: 475}
"""


class Desk:
    """A working folder with an experiment, in which tests call commands."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = folder / "runs" / "toy"
        (folder / "toy.yaml").write_text(EXPERIMENT)
        self.script("coordinator", UNTIL_TOLD)
        self.script("actor", UNTIL_TOLD)

    def script(self, role: str, *lives: list[dict]) -> None:
        (self.folder / f"{role}.script").write_text(json.dumps(lives))

    def lives(self, role: str) -> list[dict]:
        path = self.folder / f"{role}.lives"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def give(self, *arguments: str) -> click.testing.Result:
        result = click.testing.CliRunner().invoke(main, ["run", "toy.yaml", *arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    def summary(self) -> dict:
        return json.loads((self.run / "summary.json").read_text())


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STANDIN_FOLDER", str(tmp_path))
    monkeypatch.setattr("rlsrl.runs.training.run_life", functools.partial(run_life, command=STANDIN))
    return Desk(tmp_path)


def test_a_run_to_its_goal(desk: Desk) -> None:
    desk.script("trainer", FINISH)

    result = desk.give("--seed", "3", "--set", "spec.algorithm.ppo.epochs=2")

    assert result.exit_code == 0
    assert "toy finished (returnMean): mean return 481.5 after 2,048 env steps" in result.output
    assert "results: runs/toy\n" in result.output
    for command in ("rlsrl eval runs/toy", "rlsrl params list runs/toy", "rlsrl plot runs/toy"):
        assert f"  {command}\n" in result.output
    assert "\x1b" not in result.output, "colours have no place in a pipe"
    summary = desk.summary()
    assert summary["finished"]
    assert (summary["reason"], summary["seed"], summary["attempts"]) == ("returnMean", 3, 1)
    assert {name: summary[name] for name in RESULT} == RESULT
    assert summary["versions"] == {"count": 1, "last": "1.7", "tagged": {}}
    assert summary["ledger"]["balanced"]
    assert 0 < summary["training_seconds"] <= summary["wall_seconds"]
    assert (desk.run / "experiment.yaml").read_text() == EXPERIMENT
    assert "epochs: 2" in (desk.run / "experiment.resolved.yaml").read_text()
    assert json.loads((desk.run / "resolved.json").read_text())["trainer"]["seed"] == 3


def test_workers_get_their_config_a_token_and_the_modules_beside_the_experiment(desk: Desk) -> None:
    desk.script("trainer", FINISH)

    desk.give()

    (trainer,) = desk.lives("trainer")
    assert trainer["config"] == str(desk.run / "config" / "trainer.json")
    assert len(trainer["token"]) >= 32
    assert str(desk.folder) in trainer["path"]
    assert not any(
        trainer["token"] in path.read_text(errors="replace") for path in desk.run.rglob("*") if path.is_file()
    )


def test_the_tls_secret_is_ignored_on_one_machine(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.script("trainer", FINISH)
    (desk.folder / "toy.yaml").write_text(f"{EXPERIMENT}  security: {{tlsSecret: certificates}}\n")
    monkeypatch.setenv("RLSRL_TLS_FOLDER", "/of/the/pod/where/it/is/tried")

    assert desk.give().exit_code == 0

    (trainer,) = desk.lives("trainer")
    assert trainer["tls"] is None


def test_an_interrupted_run_goes_on_with_the_next_attempt(desk: Desk) -> None:
    desk.script("trainer", INTERRUPT, FINISH)

    interrupted = desk.give("--set", "spec.stop.episodes=10")

    assert interrupted.exit_code == 130
    assert "toy has not finished: mean return 481.5" in interrupted.output
    assert "to resume: rlsrl run toy.yaml --set spec.stop.episodes=10\n" in interrupted.output
    first = desk.summary()
    assert (first["finished"], first["versions"]["last"], first["lives"]) == (False, "1.3", 1)

    resumed = desk.give("--set", "spec.stop.episodes=10")

    assert resumed.exit_code == 0
    assert "resuming runs/toy, attempt 2, from version 1.3 (2,048 env steps)\n" in resumed.output
    second = desk.summary()
    assert (second["run_uid"], second["attempts"], second["lives"]) == (first["run_uid"], 2, 2)
    assert second["versions"]["last"] == "2.7"
    assert second["wall_seconds"] > first["wall_seconds"]
    assert [life["attempt"] for life in desk.lives("trainer")] == [1, 2]
    tokens = {life["token"] for life in desk.lives("trainer")}
    assert len(tokens) == 2, "each life of the controller has a token of its own"


@pytest.mark.parametrize("step", [{"remove": "runs/toy"}, {"move": "runs/toy"}])
def test_a_run_whose_folder_is_gone_ends_with_its_name(desk: Desk, step: dict) -> None:
    desk.script("trainer", [step, {"until": "SIGUSR1"}])

    result = desk.give()

    assert result.exit_code == 1
    assert result.output.splitlines()[-1] == (
        f"Error: {desk.run} was removed or moved while the run trained; all its processes were killed"
    )
    assert not (desk.run / "controller.json").exists()


@pytest.mark.parametrize(
    ("path", "program"),
    [
        ("", ".venv/bin/rlsrl"),
        ("other", ".venv/bin/rlsrl"),
        ("other:.venv/bin", ".venv/bin/rlsrl"),
        (".venv/bin:other", "rlsrl"),
    ],
)
def test_commands_are_named_as_the_user_can_call_them(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, path: str, program: str
) -> None:
    for folder in ("other", ".venv/bin"):
        (desk.folder / folder).mkdir(parents=True)
        (desk.folder / folder / "rlsrl").touch(mode=0o755)
    monkeypatch.setattr(sys, "argv", [".venv/bin/rlsrl"])
    monkeypatch.setenv("PATH", ":".join(str(desk.folder / each) for each in path.split(":") if each))
    desk.script("trainer", INTERRUPT)
    output = desk.give().output
    assert f"\n  {program} eval runs/toy\n" in output
    assert f"\nto resume: {program} run toy.yaml\n" in output


def test_a_run_below_its_goal_says_so(desk: Desk) -> None:
    desk.script("trainer", [{"push": {**RESULT, "return_mean": -0.5}, "terminal": "envSteps"}, {"exit": 0}])
    result = desk.give("--set", "spec.stop.envSteps=2048")
    assert result.exit_code == 0
    assert "toy finished (envSteps): mean return -0.500, below the goal 475 (docs/debugging.md), after" in result.output
    assert "\n  rlsrl eval --stochastic runs/toy\n" in result.output


def test_a_second_signal_reports_the_lost_training(desk: Desk) -> None:
    push = {"push": {**RESULT, "train_steps": 3}, "terminal": None}
    interrupt = {"signal_parent": "SIGINT"}
    desk.script("trainer", [push, interrupt, {"until": "SIGTERM"}, {"insist": "SIGINT"}])

    result = desk.give()

    assert result.exit_code == 130
    assert "killed without a last checkpoint: training after version 1.3 is lost" in result.output
    assert "to resume: rlsrl run toy.yaml\n" in result.output


def test_a_resumption_says_from_which_version_and_what_the_last_status_shows_as_lost(desk: Desk) -> None:
    desk.script("trainer", INTERRUPT, FINISH)
    desk.give()
    (desk.run / "status.json").write_text(json.dumps({"totals": {"train_steps": 5.0, "env_steps": 3584.0}}))

    assert (
        "resuming runs/toy, attempt 2, from version 1.3 (2,048 env steps); "
        "training steps lost after it: at least 2 (to 3,584 env steps)\n"
    ) in desk.give().output


def test_a_finished_run_is_reported_and_not_continued(desk: Desk) -> None:
    desk.script("trainer", FINISH)
    desk.give()
    before = desk.summary()
    (desk.run / "summary.json").unlink()

    again = desk.give()

    assert again.exit_code == 0
    assert "runs/toy has finished; --fresh renames its folder" in again.output
    assert "mean return 481.5" in again.output
    assert desk.summary() == before, "the summary follows from the files on disk"
    assert len(desk.lives("trainer")) == 1


@pytest.mark.parametrize("first", [INTERRUPT, FINISH])
def test_another_experiment_is_refused_field_by_field(desk: Desk, first: list[dict]) -> None:
    desk.script("trainer", first)
    desk.give()

    refused = desk.give("--seed", "5", "--set", "spec.policy.normalizeObservations=true")

    assert refused.exit_code == 2
    assert "spec.seed: 0 -> 5" in refused.output
    assert "spec.policy.normalizeObservations: false -> true" in refused.output
    assert "--fresh" in refused.output
    assert len(desk.lives("trainer")) == 1


FIXED = "evaluators.parameters"


def test_a_run_resumes_with_other_destinations_of_its_environments(desk: Desk) -> None:
    """One machine ignores them."""
    desk.script("trainer", INTERRUPT, FINISH)
    assert desk.give().exit_code == 130
    egress = "[{to: {cidr: 203.0.113.0/24}, ports: [{port: 8443}]}]"
    assert desk.give("--set", f"environment.egress={egress}").exit_code == 0
    assert "203.0.113.0/24" in (desk.run / "experiment.resolved.yaml").read_text()
    assert "egress" not in (desk.run / "config" / "actor.json").read_text()


def test_a_run_resumes_with_other_evaluators(desk: Desk) -> None:
    desk.script("trainer", INTERRUPT, INTERRUPT, FINISH)
    desk.script("evaluator", UNTIL_TOLD)
    assert desk.give("--set", "evaluators={replicas: 2, everyVersions: 3}").exit_code == 130
    other = ("--set", f"{FIXED}.version='1.3'")

    refused = desk.give(*other, "--seed", "5")
    assert refused.exit_code == 2
    assert "spec.seed: 0 -> 5" in refused.output
    assert "evaluators.parameters" not in refused.output
    assert "the others may change" in refused.output

    resumed = desk.give(*other)
    assert resumed.exit_code == 130
    config = json.loads((desk.run / "config" / "evaluator.json").read_text())
    assert (config["num_evaluators"], config["parameters"]["version"]) == (1, "1.3")
    assert 'version: "1.3"' in (desk.run / "experiment.resolved.yaml").read_text().replace("'", '"')

    assert desk.give().exit_code == 0, "without evaluators"
    again = desk.give(*other)
    assert again.exit_code == 0
    assert "has finished" in again.output
    assert "evaluators" not in (desk.run / "experiment.resolved.yaml").read_text(), "a finished run had none"


@pytest.mark.parametrize(
    ("named", "problem"),
    [
        ("version: '1.4'", "version '1.4': policy 'default' has no version 1.4; stored: 1.3 (nearest: 1.3)"),
        ("tag: last", "tag 'last': policy 'default' has no version or tag 'last'; tags: none; versions: 1.3"),
        ("file: /none/a.safetensors", "file '/none/a.safetensors': the file does not exist"),
    ],
)
def test_a_fixed_version_that_does_not_exist_is_refused_before_a_process_starts(
    desk: Desk, named: str, problem: str
) -> None:
    desk.script("trainer", INTERRUPT, FINISH)
    desk.give()

    refused = desk.give("--set", f"{FIXED}={{{named}}}")

    assert refused.exit_code == 2
    assert f"{FIXED}.{problem}" in refused.output
    assert len(desk.lives("trainer")) == 1


WIDE = """
import gymnasium
import numpy


class Wide(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 255, (1000, 1000), numpy.uint8)
    action_space = gymnasium.spaces.Discrete(2)
"""
REPLAYING = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {name: toy}
spec:
  environment: {factory: "wide:Wide"}
  algorithm: {dqn: {replay: {capacity: 1000000000, start: 64}}}
  actors: {replicas: 2, environments: 4, rolloutLength: 8}
  pacing: {trainStepsPerEnvStep: 1}
  stop: {returnMean: 475}
"""
CAPACITY = "algorithm.dqn.replay.capacity"


@pytest.fixture
def replaying(desk: Desk) -> Desk:
    (desk.folder / "toy.yaml").write_text(REPLAYING)
    (desk.folder / "wide.py").write_text(WIDE)
    return desk


def test_replay_stores_without_room_are_refused_before_there_is_a_run(replaying: Desk) -> None:
    """So a smaller capacity is no other experiment. A transition has an observation of 1 MB, and a segment one more."""
    replaying.script("trainer", FINISH)

    refused = replaying.give()

    assert refused.exit_code == 2
    assert f"Error: spec.{CAPACITY}: 1,000,000,000 transitions x 1,125,0" in refused.output
    assert f"on the disk at {replaying.run / 'replay'}: at most " in refused.output or "tmpfs" in refused.output
    assert " transitions fit; lower it, or make room\n" in refused.output
    assert not replaying.lives("coordinator")
    assert not (replaying.run / "controller.json").exists()
    assert replaying.give("--set", f"{CAPACITY}=64").exit_code == 0


def test_a_resumed_run_needs_room_only_for_stores_that_are_gone(
    replaying: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    replaying.script("trainer", INTERRUPT, INTERRUPT, FINISH)
    assert replaying.give("--set", f"{CAPACITY}=64").exit_code == 130
    full = functools.partial(replay_room.room_in, free=lambda _: 0)
    monkeypatch.setattr(replay_room, "room_in", full)

    gone = replaying.give("--set", f"{CAPACITY}=64")
    store = replaying.run / "replay" / "trainer-0.store"
    store.parent.mkdir()
    store.write_bytes(bytes(8192))  # as the first attempt left it
    there = replaying.give("--set", f"{CAPACITY}=64")

    assert (gone.exit_code, there.exit_code) == (2, 130)
    assert f"spec.{CAPACITY}: 64 transitions" in gone.output
    assert [life["attempt"] for life in replaying.lives("trainer")] == [1, 2]


def test_changed_stores_without_room_are_refused_before_anything_changes(
    replaying: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    replaying.script("trainer", INTERRUPT, FINISH)
    replaying.give("--set", f"{CAPACITY}=64")
    before = (replaying.run / "experiment.resolved.yaml").read_text()
    edit = functools.partial(click.testing.CliRunner().invoke, main, ["edit", "toy", "--set", "trainers.replicas=2"])
    with monkeypatch.context() as patch:
        patch.setattr(replay_room, "room_in", functools.partial(replay_room.room_in, free=lambda _: 0))
        edited, given = edit(), replaying.give("--set", f"{CAPACITY}=64", "--set", "trainers.replicas=2")

    for refused in (edited, given):
        assert refused.exit_code == 2
        assert f"Error: spec.{CAPACITY}: 64 transitions x " in refused.output
        assert " in 2 files, and there is room for 0.0 MiB " in refused.output
    assert (replaying.run / "experiment.resolved.yaml").read_text() == before
    assert not (replaying.run / "experiment.edit.yaml").exists()
    assert [life["attempt"] for life in replaying.lives("trainer")] == [1]
    assert "spec.trainers.replicas: 1 -> 2" in edit().output, "with room"


def test_an_experiment_of_another_name_is_refused(desk: Desk) -> None:
    desk.script("trainer", FINISH)
    desk.give()

    refused = desk.give("--run-dir", "runs/toy", "--set", "metadata.name=other")

    assert refused.exit_code == 2
    assert 'metadata.name: "toy" -> "other"' in refused.output


def test_fresh_renames_the_old_run(desk: Desk) -> None:
    desk.script("trainer", INTERRUPT, INTERRUPT, FINISH)
    uids = []
    for arguments in ([], ["--fresh", "--seed", "1"], ["--fresh", "--seed", "2"]):
        desk.give(*arguments)
        uids.append(desk.summary()["run_uid"])

    assert len(set(uids)) == 3
    kept = {path.name: json.loads((path / "summary.json").read_text()) for path in desk.run.parent.iterdir()}
    assert {name: summary["run_uid"] for name, summary in kept.items()} == {
        "toy.1": uids[0],
        "toy.2": uids[1],
        "toy": uids[2],
    }
    assert [life["attempt"] for life in desk.lives("trainer")] == [1, 1, 1]
    assert kept["toy"]["finished"]


def test_a_workers_configuration_error_exits_with_2(desk: Desk) -> None:
    desk.script("trainer", [{"print": "rlsrl: spec.environment.id: no environment 'Carpole'"}, {"exit": 2}])

    result = desk.give()

    assert result.exit_code == 2
    assert "no environment 'Carpole'" in result.output
    assert "once it is mended: rlsrl run toy.yaml --fresh\n" in result.output
    assert "to resume" not in result.output
    assert not desk.summary()["finished"]


def test_a_run_that_cannot_be_kept_alive_fails_with_the_log(desk: Desk) -> None:
    desk.script("trainer", [{"print": "Traceback: out of tricks"}, {"exit": 1}])

    result = desk.give("--set", "spec.restarts.budget=1", "--run-dir", "elsewhere")

    assert result.exit_code == 1
    assert "error: trainer-0 exited with code 1: all 1 restarts of this role are spent" in result.output
    assert "out of tricks" in result.output
    assert "elsewhere/logs/trainer-0.out" in result.output
    assert "to resume: rlsrl run toy.yaml --set spec.restarts.budget=1 --run-dir elsewhere" in result.output
    summary = json.loads((desk.folder / "elsewhere" / "summary.json").read_text())
    assert (summary["restarts"], summary["attempts"]) == ({"trainer": 1}, 2)
    record = read_record(desk.folder / "elsewhere")
    assert record is not None
    assert record.failure.startswith("trainer-0 exited with code 1: all 1 restarts of this role are spent"), (
        "for the page"
    )
    assert record.failure.endswith("Traceback: out of tricks")


def test_a_run_whose_worker_is_killed_too_often_fails(desk: Desk) -> None:
    """As by the kernel, for lack of memory."""
    desk.script("trainer", [{"die": "SIGKILL"}])

    result = desk.give("--set", "spec.restarts.budget=1")

    assert result.exit_code == 1
    assert "error: trainer-0 was killed by SIGKILL" in result.output
    assert "all 1 restarts of this role are spent" in result.output


def test_a_folder_in_use_is_refused_with_its_process(desk: Desk) -> None:
    with RunFolder.open(desk.run):
        refused = desk.give()

    assert refused.exit_code == 2
    assert "is running" in refused.output
    assert not desk.lives("trainer")


@pytest.mark.parametrize("wrong", ["spec.actors.replicas=many", "spec.actors.replica=2"])
def test_a_wrong_field_is_refused_before_the_folder_is_created(desk: Desk, wrong: str) -> None:
    refused = desk.give("--set", wrong)

    assert refused.exit_code == 2
    assert "spec.actors.replica" in refused.output
    assert not desk.run.exists()


def test_more_actors_than_environments_is_a_warning(desk: Desk) -> None:
    desk.script("trainer", FINISH)

    result = desk.give("--set", "spec.actors.replicas=6")

    assert "warning: " in result.output
    assert result.exit_code == 0


def test_ctrl_c_before_the_start_of_processes_is_an_interruption(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rlsrl.runs.training.run_life", interrupted)

    assert desk.give().exit_code == 130


def test_a_finished_run_continues_with_a_further_stop(desk: Desk) -> None:
    desk.script("trainer", FINISH, [{"push": {**RESULT, "return_mean": 490.0}, "terminal": "returnMean"}, {"exit": 0}])
    desk.give()

    nearer = desk.give("--set", "spec.stop.returnMean=400")
    assert "has finished" in nearer.output
    assert len(desk.lives("trainer")) == 1

    further = desk.give("--set", "spec.stop.returnMean=485")
    assert further.exit_code == 0
    assert "changed: spec.stop.returnMean: 475.0 -> 485.0" in further.output
    assert "the run had ended, and continues" in further.output
    assert [life["attempt"] for life in desk.lives("trainer")] == [1, 2]
    assert desk.summary()["return_mean"] == 490.0


def test_an_edit_stays_when_the_run_resumes_with_its_file(desk: Desk) -> None:
    desk.script("trainer", INTERRUPT, FINISH)
    desk.give()
    edited = click.testing.CliRunner().invoke(main, ["edit", "toy", "--set", "stop.returnMean=400"])
    assert edited.exit_code == 0
    assert "spec.stop.returnMean: 475.0 -> 400.0 (live)" in edited.output
    assert "applied when `rlsrl run` resumes it" in edited.output

    resumed = desk.give()

    assert "changed: spec.stop.returnMean: 475.0 -> 400.0" in resumed.output
    settings = json.loads((desk.run / "settings.json").read_text())
    assert settings["trainer"]["stop"]["return_mean"] == 400.0
    assert not (desk.run / "experiment.edit.yaml").exists()


def test_an_edit_of_another_experiment_is_refused(desk: Desk) -> None:
    desk.script("trainer", INTERRUPT)
    desk.give()
    refused = click.testing.CliRunner().invoke(main, ["edit", "toy", "--set", "seed=5"])
    assert refused.exit_code == 2
    assert "cannot be edited: spec.seed: 0 -> 5" in refused.output
    assert not (desk.run / "experiment.edit.yaml").exists()
