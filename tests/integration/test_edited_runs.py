"""Edits of real runs: while workers train, and of a run that has finished."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rlsrl.testing.live_runs import GATED_EXPERIMENT, Desk, LiveRun, RunFolderFacts
from rlsrl.testing.scaling import SCALES

EVERY_ROLE = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {name: live}
spec:
  environment: {id: CartPole-v1}
  policy: {network: {mlp: {hiddenSizes: [16]}}}
  algorithm: {ppo: {epochs: 2, minibatchSize: 256}}
  actors: {replicas: 2, environments: 8, rolloutLength: 64}
  policyWorkers: {replicas: 1}
  bufferWorkers: {replicas: 1}
  trainers: {replicas: 2}
  evaluators: {replicas: 1, episodesPerEnvironment: 1}
  parameters: {everySteps: 10}
  stop: {wallSeconds: 3600}
"""


def steps_of(facts: RunFolderFacts) -> list[int]:
    """Return the train steps in the learning curve, by row."""
    rows = [json.loads(line) for line in (facts.folder / "metrics.jsonl").read_text().splitlines()]
    return [int(row["step"]) for row in rows if row["role"] == "trainer"]


def trained(run: LiveRun) -> int:
    """Return the train steps of the newest stored version."""
    newest = run.facts.newest()
    return 0 if newest is None else newest.version.step


def test_a_run_is_edited_while_it_trains_and_extended_after_its_end(tmp_path: Path) -> None:
    desk = Desk(tmp_path, GATED_EXPERIMENT.format(gate=tmp_path / "never"))
    facts = desk.facts()
    with desk.begin() as run:
        run.until(lambda: run.is_complete() and trained(run) > 0, "training with all workers")
        trainers = [worker.pid for worker in run.workers("trainer")]
        more = desk.call("edit", "live", "--set", "actors.replicas=3")
        assert more.returncode == 0, more.stderr
        assert "new processes: actor" in more.stdout
        assert "applied" in more.stdout
        run.until(lambda: run.is_complete() and len(run.workers("actor")) == 3, "three actors at work")
        before = trained(run)
        run.until(lambda: trained(run) > before, "training with three actors")
        assert [worker.pid for worker in run.workers("trainer")] == trainers, "only actors are replaced"
        end = trained(run) + 50
        shorter = desk.call("edit", "live", "--set", f"stop.trainSteps={end}")
        assert "new processes" not in shorter.stdout
        assert run.wait() == 0, run.output
        assert f"edited: spec.stop.trainSteps: not set -> {end}" in run.output
    first = facts.json("summary.json")
    reached = first["train_steps"]
    assert reached >= end, "training goes on until the edit arrives"
    assert (first["reason"], first["restarts"], first["attempts"]) == ("trainSteps", {}, 1)
    assert first["ledger"]["balanced"], first["ledger"]

    extended = desk.call("run", "live.yaml", "--set", f"stop.trainSteps={2 * reached}")

    assert extended.returncode == 0, extended.stderr
    assert f"changed: spec.stop.trainSteps: {end} -> {2 * reached}" in extended.stdout
    second = facts.json("summary.json")
    assert (second["run_uid"], second["attempts"]) == (first["run_uid"], 2)
    assert (second["reason"], second["train_steps"]) == ("trainSteps", 2 * reached)
    assert second["ledger"]["balanced"], second["ledger"]
    assert second["ledger"]["trained"] > first["ledger"]["trained"]
    steps = steps_of(facts)
    assert steps == sorted(steps), "one curve"
    assert steps[-1] == 2 * reached
    assert [info.version.step for info in facts.versions()][-1] == 2 * reached
    assert facts.leftovers() == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_role_is_scaled_while_a_run_trains(tmp_path: Path) -> None:
    """Only processes of the roles that ``rlsrl edit`` names are new, and no transition is lost."""
    desk = Desk(tmp_path, EVERY_ROLE)
    facts = desk.facts()
    with desk.begin() as run:
        run.until(lambda: run.is_complete() and facts.train_steps() > 0, "training with all workers")
        for field, role, replicas in SCALES:
            before = {worker for worker in run.workers() if worker.role != role}
            edited = desk.call("edit", "live", "--set", f"{field}.replicas={replicas}")
            assert edited.returncode == 0, edited.stderr
            what = f"{replicas} of {field}"
            run.until(lambda: run.is_complete() and len(run.workers(role)) == replicas, what)
            steps = facts.train_steps()
            run.until(lambda: facts.train_steps() > steps, f"training with {what}")
            named = re.search(r"new processes: (.*)", edited.stdout)
            renewed = set(named[1].split(", ")) if named else set()
            kept = {worker for worker in before if worker.role not in renewed}
            assert kept <= set(run.workers()), f"{field}: {edited.stdout}"
        end = facts.train_steps() + 20
        assert desk.call("edit", "live", "--set", f"stop.trainSteps={end}").returncode == 0
        assert run.wait() == 0, run.output
    summary = facts.json("summary.json")
    assert (summary["reason"], summary["restarts"]) == ("trainSteps", {})
    assert summary["ledger"]["balanced"], summary["ledger"]
    assert not any(summary["ledger"]["lost"].values()), summary["ledger"]
    assert facts.leftovers() == []
