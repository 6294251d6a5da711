"""`rlsrl control` of real runs: pause and resume of each role, versions on request, and the end."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlsrl.testing.live_runs import GATED_EXPERIMENT, Desk, LiveRun, RunFolderFacts
from rlsrl.testing.waiting import DEADLINE_SECONDS

CARTPOLE = Path(__file__).parents[2] / "examples" / "cartpole-two-ranks.yaml"
ROLES = ("actor", "buffer", "evaluator", "policy", "trainer")
LONG_SECONDS = 600.0


def with_all_roles(text: str) -> dict[str, Any]:
    """Return the experiment with two ranks and a policy worker, a buffer worker and an evaluator."""
    document: dict[str, Any] = yaml.safe_load(text)
    document["metadata"]["name"] = "live"
    spec = document["spec"]
    spec["trainers"] = {**spec.get("trainers", {}), "replicas": 2}
    spec["policyWorkers"] = {"replicas": 1}
    spec["bufferWorkers"] = {"replicas": 1}
    spec["evaluators"] = {"replicas": 1, "environments": 2, "episodesPerEnvironment": 1, "everySeconds": 2}
    return document


def control(desk: Desk, *arguments: str) -> str:
    """Call `rlsrl control` for the run; return its output."""
    done = desk.call("control", "live", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def paused(facts: RunFolderFacts) -> dict[str, set[int]]:
    """Return the indices of the paused workers by role, as the coordinator shows them."""
    status = facts.status() or {"roles": {}}
    found = {
        role: {each["index"] for each in workers if each["state"] == "paused"}
        for role, workers in status["roles"].items()
    }
    return {role: indices for role, indices in found.items() if indices}


def policy_waits_for(facts: RunFolderFacts) -> str:
    status = facts.status()
    return "" if status is None else str(status["roles"]["policy"][0]["waiting_for"])


def begin(desk: Desk) -> LiveRun:
    run = desk.begin()
    run.until(lambda: run.is_complete() and desk.facts().train_steps() > 0, "training with all workers")
    return run


def assert_ended_well(facts: RunFolderFacts) -> dict[str, Any]:
    summary = facts.json("summary.json")
    assert summary["ledger"]["balanced"], summary["ledger"]
    assert not any(summary["ledger"]["lost"].values()), summary["ledger"]
    assert (summary["restarts"], summary["attempts"]) == ({}, 1)
    assert facts.leftovers() == []
    return summary


def test_each_role_pauses_and_goes_on_and_the_run_ends_when_it_is_told_to(tmp_path: Path) -> None:
    experiment = with_all_roles(GATED_EXPERIMENT.format(gate=tmp_path / "never"))
    desk = Desk(tmp_path, yaml.safe_dump(experiment))
    facts = desk.facts()
    with begin(desk) as run:
        for role in ROLES:
            control(desk, "pause", "--role", role)
            run.until(lambda role=role: paused(facts).keys() == {role}, f"a paused {role}")
            if role == "policy":  # it answers until an actor needs newer weights than it has
                run.until(lambda: policy_waits_for(facts) == "resume", "requests that wait")
            control(desk, "resume", "--role", role)
            before = facts.train_steps()
            run.until(lambda: not paused(facts), "no paused worker")
            run.until(lambda before=before: facts.train_steps() > before, f"training goes on after the {role}")

        control(desk, "pause", "--role", "actor", "--index", "1")
        run.until(lambda: paused(facts) == {"actor": {1}}, "one paused actor")
        before = facts.train_steps()
        run.until(lambda: facts.train_steps() > before + 2, "training without it")
        status = facts.status()
        assert status is not None
        assert status["phase"] == "training"
        assert "actor-1" in status["paused"]["text"]
        control(desk, "resume")

        control(desk, "pause")
        run.until(lambda: set(paused(facts)) >= {"actor", "buffer", "policy", "trainer"}, "all roles pause")
        step = facts.train_steps()
        stored = control(desk, "checkpoint").splitlines()[-1]
        assert stored.startswith("stored version "), stored
        assert stored.removeprefix("stored version ") in [str(info.version) for info in facts.versions()]
        status = facts.status()
        assert status is not None
        assert (status["phase"], status["stall"], facts.train_steps()) == ("paused", None, step)
        assert "Paused since" in desk.call("top", "live").stdout

        control(desk, "stop")
        assert run.wait() == 0, run.output
    summary = assert_ended_well(facts)
    assert summary["reason"] == "now"
    refused = desk.call("control", "live", "pause")
    assert refused.returncode == 2
    assert "has ended" in refused.stderr
    again = desk.call("run", "live.yaml")
    assert again.returncode == 0, again.stderr
    assert facts.json("summary.json")["attempts"] == 1, "`stop.now` stays, so the run stays finished"


def test_workers_that_die_while_they_are_paused_come_back_paused(tmp_path: Path) -> None:
    experiment = with_all_roles(GATED_EXPERIMENT.format(gate=tmp_path / "gate"))
    desk = Desk(tmp_path, yaml.safe_dump(experiment))
    facts = desk.facts()
    with begin(desk) as run:
        control(desk, "pause", "--role", "actor")
        control(desk, "pause", "--role", "trainer")
        run.until(lambda: paused(facts) == {"actor": {0, 1}, "trainer": {0, 1}}, "paused workers")
        victims = [run.workers("actor")[0].pid, run.workers("coordinator")[0].pid, run.workers("trainer")[-1].pid]
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        run.until(
            lambda: (
                not {worker.pid for worker in run.workers()} & set(victims)
                and paused(facts) == {"actor": {0, 1}, "trainer": {0, 1}}
            ),
            "new workers, paused",
        )
        before = facts.train_steps()
        (tmp_path / "gate").touch()
        control(desk, "resume")
        assert run.wait() == 0, run.output
    assert facts.json("summary.json")["train_steps"] > before
    assert facts.json("summary.json")["ledger"]["balanced"]


@pytest.mark.slow
@pytest.mark.timeout(2 * LONG_SECONDS)
@pytest.mark.parametrize("seed", [1])
def test_twenty_pauses_at_random_cost_neither_the_goal_nor_the_ledger(tmp_path: Path, seed: int) -> None:
    """CartPole with two ranks, a policy worker and a buffer worker."""
    experiment = with_all_roles(CARTPOLE.read_text())
    del experiment["spec"]["evaluators"]
    goal = experiment["spec"]["stop"]["returnMean"]
    experiment["spec"]["stop"] = {"wallSeconds": LONG_SECONDS}
    desk = Desk(tmp_path, yaml.safe_dump(experiment))
    facts = desk.facts()
    rng = random.Random(seed)
    with begin(desk) as run:
        for _ in range(20):
            role = rng.choice([*ROLES, "all"])
            if role == "evaluator":
                role = "all"
            options = [] if role == "all" else ["--role", role]
            control(desk, "pause", *options)
            # With all paused, an actor may wait for a policy worker in the middle of a rollout.
            awaited = {"buffer", "policy", "trainer"} if role == "all" else {role}
            run.until(lambda awaited=awaited: set(paused(facts)) >= awaited, f"a paused {role}")
            before = facts.train_steps()
            control(desk, "resume")
            run.until(
                lambda before=before: not paused(facts) and facts.train_steps() > before,
                f"training goes on after {role}",
                timeout=2 * DEADLINE_SECONDS,
            )
        desk.call("edit", "live", "--set", f"stop.returnMean={goal}")
        assert run.wait(timeout=LONG_SECONDS) == 0, run.output
    assert assert_ended_well(facts)["reason"] == "returnMean"
