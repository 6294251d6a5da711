"""`kubectl rlsrl control` of pods: pause and resume, versions on request, and the end."""

from __future__ import annotations

import json
import random
import subprocess

import pytest

from rlsrl.testing.cluster_api import Object
from rlsrl.testing.faults import goes_on, lives
from rlsrl.testing.kubectl import COMMAND_SECONDS, ClusterExperiment, Namespace
from rlsrl.testing.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

ROLES = ("actor", "buffer", "policy", "trainer")


def control(experiment: ClusterExperiment, *arguments: str) -> str:
    """Call `kubectl rlsrl control` for the experiment; return its output."""
    words = ["kubectl", "rlsrl", "control", experiment.name, "--namespace", experiment.where.name, *arguments]
    done = subprocess.run(words, capture_output=True, text=True, timeout=2 * COMMAND_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def begin(where: Namespace, document: Object) -> ClusterExperiment:
    where.apply(document)
    experiment = ClusterExperiment(where, document["metadata"]["name"])
    experiment.await_phase("Running")
    until(lambda: experiment.condition("Ready").get("status") == "True", "every pod is ready")
    goes_on(experiment)
    return experiment


def await_paused(experiment: ClusterExperiment, role: str) -> None:
    def is_paused() -> bool:
        condition = experiment.condition("Progressing")
        return condition.get("reason") == "Paused" and f"{role}-0" in condition["message"]

    until(is_paused, f"a paused {role}")


def test_paused_pods_keep_their_lives_and_the_experiment_ends_when_it_is_told_to(
    where: Namespace, cartpole: Object
) -> None:
    cartpole["spec"]["stop"] = {"wallSeconds": 3600}
    experiment = begin(where, cartpole)
    before = lives(experiment)
    control(experiment, "pause")
    await_paused(experiment, "trainer")
    stored = control(experiment, "checkpoint").splitlines()[-1]
    assert stored.startswith("stored version "), stored
    steps = experiment.env_steps()
    killed = experiment.pods("actor")[0]["metadata"]
    where.kubectl("delete", "pod", killed["name"], "--wait=true")
    until(lambda: experiment.condition("Ready").get("status") == "True", "the actor's successor is ready")
    await_paused(experiment, "actor")
    assert experiment.env_steps() == steps
    assert experiment.phase == "Running"
    control(experiment, "resume")
    until(lambda: experiment.condition("Progressing").get("reason") == "Progressing", "steps are taken")
    goes_on(experiment)
    changed = {uid for uid, _ in {*lives(experiment).values()} ^ {*before.values()}}
    assert len(changed) == 2, "the deleted actor and its successor"
    assert killed["uid"] in changed
    control(experiment, "stop")
    experiment.await_phase("Succeeded")
    assert experiment.ledger()["balanced"]
    assert experiment.status["restarts"] == 0


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_twenty_pauses_at_random_cost_neither_the_goal_nor_the_ledger(where: Namespace, cartpole: Object) -> None:
    goal = cartpole["spec"]["stop"]
    cartpole["spec"]["stop"] = {"wallSeconds": 3600}
    experiment = begin(where, cartpole)
    rng = random.Random(1)
    for _ in range(20):
        role = rng.choice([*ROLES, "all"])
        options = [] if role == "all" else ["--role", role]
        control(experiment, "pause", *options)
        await_paused(experiment, "trainer" if role == "all" else role)
        control(experiment, "resume")
        until(lambda: experiment.condition("Progressing").get("reason") == "Progressing", "steps are taken")
        goes_on(experiment)
    patch = json.dumps({"spec": {"stop": {"returnMean": goal["returnMean"]}}})
    where.kubectl("patch", "rlexperiment", experiment.name, "--type=merge", "-p", patch)
    experiment.await_phase("Succeeded", seconds=1800.0)
    assert experiment.condition("Finished")["reason"] == "Succeeded"
    ledger = experiment.ledger()
    assert ledger["balanced"], ledger
    assert not any(ledger["lost"].values()), ledger
    assert (experiment.status["restarts"], experiment.status["attempt"]) == (0, 1)
