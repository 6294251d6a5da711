"""Edits of a run in its folder: what a running run takes, and when an edit waits or has no effect."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlsrl.api.load import load_text
from rlsrl.local.controller import RunPlan
from rlsrl.local.edits import EDIT, RunEdits, ask, claim, is_pending, recorded_experiment
from rlsrl.local.plans import check_and_write, resolve_locally, run_plan
from rlsrl.local.run_folder import RunFolder, RunFolderError

EXPERIMENT = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {name: toy}
spec:
  environment: {id: CartPole-v1}
  actors: {replicas: 2, environmentsPerActor: 2}
  trainers: {batchEnvironments: 4}
  stop: {envSteps: 1000}
"""


class Going:
    """A run that goes on, as its controller sees it."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.notes: list[str] = []
        experiment = claim(folder, load_text(EXPERIMENT), as_given=EXPERIMENT.encode()).experiment
        resolved = resolve_locally(experiment, folder.path, folder.record)
        check_and_write(folder, resolved)
        self.first = run_plan(folder.path, experiment, resolved)
        self.edits = RunEdits(folder, experiment, note=self.notes.append, on_applied=lambda _: None)

    def ask(self, *overrides: str) -> tuple[str, ...]:
        """Return the roles that are restarted."""
        return ask(self.folder.path, self.folder.record, lambda _: overrides).restarted

    def replaced(self, plan: RunPlan) -> list[str]:
        before = {each.role: each for each in self.first.roles}
        return [each.role for each in plan.roles if each.role in before and each.replaces(before[each.role])]


@pytest.fixture
def going(tmp_path: Path) -> Iterator[Going]:
    with RunFolder.open(tmp_path / "toy") as folder:
        yield Going(folder)


def taken(going: Going) -> RunPlan:
    plan = going.edits.take()
    assert plan is not None, going.notes
    return plan


def test_without_an_edit_nothing_changes(going: Going) -> None:
    assert going.edits.take() is None


def test_a_live_edit_replaces_no_process(going: Going) -> None:
    assert going.ask("stop.envSteps=2000", "restarts.budget=3") == ()
    plan = taken(going)
    assert going.replaced(plan) == []
    assert plan.limits.budget == 3
    settings = json.loads((going.folder.path / "settings.json").read_text())
    assert settings["trainer"]["stop"]["env_steps"] == 2000
    assert recorded_experiment(going.folder.path).spec.stop.env_steps == 2000
    assert "edited: spec.stop.envSteps: 1000 -> 2000" in going.notes
    assert not is_pending(going.folder.path)
    assert going.edits.take() is None, "an edit is applied once"


def test_another_edit_replaces_the_processes_of_its_roles(going: Going) -> None:
    assert going.ask("algorithm.ppo.epochs=2") == ("trainer",)
    assert going.replaced(taken(going)) == ["trainer"]


def test_more_actors_start_beside_the_others_and_fewer_replace_all(going: Going) -> None:
    assert going.ask("actors.replicas=3") == ()
    plan = taken(going)
    assert going.replaced(plan) == []
    assert {each.role: each.replicas for each in plan.roles}["actor"] == 3
    assert going.ask("actors.replicas=1") == ("actor",)
    assert going.replaced(taken(going)) == ["actor"]


def test_edits_add_up_until_they_are_applied(going: Going) -> None:
    going.ask("stop.envSteps=2000")
    going.ask("stop.trainSteps=7")
    taken(going)
    stop = recorded_experiment(going.folder.path).spec.stop
    assert (stop.env_steps, stop.train_steps) == (2000, 7)


def test_an_edit_that_is_taken_back_is_no_edit(going: Going) -> None:
    going.ask("stop.envSteps=2000")
    going.ask("stop.envSteps=1000")
    assert not is_pending(going.folder.path)


def test_an_edit_waits_while_another_process_holds_the_lock(going: Going) -> None:
    going.ask("stop.envSteps=2000")
    other = os.open(going.folder.path, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    assert going.edits.take() is None
    assert going.edits.take() is None
    (note,) = going.notes
    assert note.startswith("the edit waits: another process is editing")
    os.close(other)
    taken(going)


def test_a_damaged_edit_has_no_effect_and_is_shown(going: Going) -> None:
    (going.folder.path / EDIT).write_text("kind: [")
    assert going.edits.take() is None
    (note,) = going.notes
    assert note.startswith("the edit has no effect: ")
    assert EDIT in note
    assert not is_pending(going.folder.path)


def test_an_edit_to_a_version_that_does_not_exist_changes_nothing(going: Going) -> None:
    before = {path: path.read_bytes() for path in going.folder.path.rglob("*.json")}
    going.ask("evaluators={replicas: 1, parameters: {tag: best}}")
    assert going.edits.take() is None
    (note,) = going.notes
    assert "tag 'best'" in note
    assert {path: path.read_bytes() for path in going.folder.path.rglob("*.json")} == before


def test_an_edit_to_another_experiment_is_refused(going: Going) -> None:
    with pytest.raises(RunFolderError, match=r"cannot be edited: spec\.seed: 0 -> 5"):
        going.ask("seed=5")
    assert not is_pending(going.folder.path)


def test_a_file_changes_what_differs_from_the_last_file_and_edits_stay(going: Going) -> None:
    going.ask("stop.envSteps=2000")
    taken(going)
    asked = load_text(EXPERIMENT, overrides=["algorithm.ppo.epochs=2"])
    claimed = claim(going.folder, asked, as_given=b"")
    assert claimed.experiment.spec.stop.env_steps == 2000
    assert [change.path for change in claimed.changes] == ["spec.algorithm.ppo.epochs"]
    again = claim(going.folder, load_text(EXPERIMENT, overrides=["stop.envSteps=3000"]), as_given=b"")
    assert again.experiment.spec.stop.env_steps == 3000
