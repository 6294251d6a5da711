"""Edits of a running experiment affect the workers that the field names, and no others.

All tests edit the same experiment, in turn. Each test but the last leaves the experiment running.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlsrl.local.metrics_log import fixed_evaluations, read_rows
from rlsrl.testing.cluster_api import Object
from rlsrl.testing.faults import goes_on
from rlsrl.testing.kubectl import ClusterExperiment, KubectlFailed, Namespace, namespace, run
from rlsrl.testing.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

LONG: Object = {
    "apiVersion": "rlsrl.dev/v1alpha1",
    "kind": "RLExperiment",
    "metadata": {"name": "long"},
    "spec": {
        "environment": {"id": "CartPole-v1"},
        "policy": {"network": {"mlp": {"hiddenSizes": [16]}}},
        "actors": {"environmentsPerActor": 8},
        "trainers": {"batchEnvironments": 8},
        "policyWorkers": {},
        "parameters": {"everySeconds": 1},
        "stop": {"wallSeconds": 3600},
    },
}
ROLES = ("coordinator", "trainer", "policy", "actor")


@pytest.fixture(scope="module")
def edited(system: Namespace) -> Iterator[ClusterExperiment]:
    """Wait until the experiment trains with all pods."""
    assert system.name
    with namespace(f"e2e-edits-{uuid.uuid4().hex[:8]}", wait=False) as where:
        where.apply(LONG)
        yield ClusterExperiment(where, "long")


@pytest.fixture
def long(edited: ClusterExperiment) -> ClusterExperiment:
    edited.await_phase("Running")
    until(lambda: edited.condition("Ready").get("status") == "True", "every pod is ready")
    goes_on(edited)
    return edited


def edit(experiment: ClusterExperiment, **spec: Any) -> float:
    """Merge into the spec; return the time."""
    patch = json.dumps({"spec": spec})
    experiment.where.kubectl("patch", "rlexperiment", experiment.name, "--type=merge", "-p", patch)
    return time.monotonic()


def lives(experiment: ClusterExperiment, *roles: str) -> set[tuple[str, int]]:
    """Return the pods of the roles with their restarts; they must not change."""
    return {
        (pod["metadata"]["uid"], sum(each["restartCount"] for each in pod["status"].get("containerStatuses", ())))
        for role in roles
        for pod in experiment.pods(role)
    }


def test_actors_scale_by_the_scale_subresource_and_other_roles_roll(long: ClusterExperiment) -> None:
    untouched, attempt = lives(long, *ROLES), long.status["attempt"]
    long.where.kubectl("scale", "rlexperiment/long", "--replicas=3")
    until(
        lambda: long.status["actors"] | {"selector": ""} == {"replicas": 3, "ready": 3, "selector": ""}, "three actors"
    )
    assert untouched < lives(long, *ROLES), "existing pods stay, and new pods start"
    goes_on(long)
    long.where.kubectl("scale", "rlexperiment/long", "--replicas=1")
    until(lambda: len(long.pods("actor")) == 1, "one is left")
    goes_on(long)
    assert lives(long, "coordinator", "trainer", "policy") < untouched

    others = lives(long, "coordinator", "trainer")
    acting = lives(long, "policy", "actor")
    edit(long, policyWorkers={"replicas": 2})
    # A deployment's old pod goes after its new one is ready, so their number alone says little.
    until(
        lambda: len(now := lives(long, "policy", "actor")) == 3 and now.isdisjoint(acting),
        "who acts is replaced",
    )
    until(lambda: long.condition("Ready").get("status") == "True", "every pod is ready")
    goes_on(long)
    assert lives(long, "coordinator", "trainer") == others
    assert long.status["attempt"] == attempt


def test_edits_to_another_experiment_are_refused_and_the_run_continues(long: ClusterExperiment) -> None:
    before = lives(long, *ROLES)
    with pytest.raises(KubectlFailed, match=r"spec\.seed: .*cannot be edited"):
        edit(long, seed=7)
    edit(long, environment={"kwargs": {"render_mode": "rgb_array"}})
    until(lambda: long.condition("Accepted").get("reason") == "EditRefused", "the status has the refusal")
    assert "spec.environment.kwargs" in long.condition("Accepted")["message"]
    goes_on(long)
    assert lives(long, *ROLES) == before
    edit(long, environment={"kwargs": None})
    until(lambda: long.condition("Accepted").get("reason") == "Accepted", "the edit is reverted and accepted")
    assert lives(long, *ROLES) == before


def test_a_suspended_experiment_has_no_pods_and_resumes_from_its_step(long: ClusterExperiment) -> None:
    attempt = long.status["attempt"]
    edit(long, suspend=True)
    long.await_phase("Suspended")
    until(lambda: not long.pods(), "no pod is left")
    until(lambda: long.condition("Ready").get("message") == "no pod is left", "the status reports that no pod is left")
    steps = long.env_steps()
    began = edit(long, suspend=False)
    long.await_phase("Running")
    until(lambda: long.env_steps() > steps, "training continues")
    print(f"resumed in {time.monotonic() - began:.1f} s")
    log = long.where.kubectl("logs", "long-trainer-0")
    assert '"resumed"' in log
    assert (long.status["attempt"], long.status["restarts"]) == (attempt + 1, 0)
    edit(long, pacing={"maxPolicyLag": 2})
    until(lambda: long.status["attempt"] == attempt + 2, "such an edit is a new attempt")
    long.await_phase("Running")
    goes_on(long)
    assert (long.status["restarts"], long.status["recentFailures"]) == (0, 0)


def test_the_evaluator_of_an_edit_plays_a_tag_once_it_exists_and_training_goes_on_without_it(
    long: ClusterExperiment, tmp_path: Path
) -> None:
    before, attempt = lives(long, *ROLES), long.status["attempt"]
    edit(long, evaluators={"environments": 2, "episodesPerEnvironment": 1, "parameters": {"tag": "reference"}})
    error = "evaluators.parameters.tag 'reference': policy 'default' has no version or tag"
    until(lambda: error in long.condition("Ready").get("message", ""), "the status has the evaluator's error")
    goes_on(long)
    words = ("kubectl", "rlsrl", "params", "tag", long.name, "latest", "reference")
    tagged = run(*words, "--namespace", long.where.name).partition(":")[0]

    def results() -> list[dict[str, Any]]:
        long.copy_run_files("metrics.jsonl", tmp_path)
        return fixed_evaluations(read_rows(tmp_path / "metrics.jsonl"))

    (result,) = until(results, "the result is on the learning curve")
    assert (result["version"], result["episodes"]) == (tagged, 2)
    assert result["return_mean"] >= 1, "the reward of each step"
    until(lambda: long.condition("Ready").get("status") == "True", "the evaluator waits for the end of the run")
    assert (lives(long, *ROLES), long.status["attempt"], long.phase) == (before, attempt, "Running")
    edit(long, evaluators=None)
    until(lambda: not long.pods("evaluator"), "its pod is gone")


def test_live_settings_reach_the_workers_without_a_restart(long: ClusterExperiment) -> None:
    before, attempt = lives(long, *ROLES), long.status["attempt"]
    began = edit(long, algorithm={"ppo": {"learningRate": 0.0625}}, parameters={"everySeconds": 2})
    log = lambda: long.where.kubectl("logs", "long-trainer-0")
    until(lambda: '"tuned"' in log(), "the trainer took it")
    print(f"live settings took {time.monotonic() - began:.1f} s")
    (taken,) = [line for line in log().splitlines() if '"settings_taken"' in line]
    assert 'learning_rate": 0.0625' in taken
    goes_on(long)
    assert lives(long, *ROLES) == before
    edit(long, stop={"trainSteps": 1})
    long.await_phase("Succeeded")
    assert long.condition("Finished")["message"].startswith("stop.trainSteps holds")
    assert (long.status["attempt"], long.status["restarts"]) == (attempt, 0)
