"""A failed experiment that is tried again: when, from what, and what of the failed attempt is left."""

from __future__ import annotations

import json
from typing import Any

import pytest
from operator_world import POD_KINDS, Silent, World

from rlsrl.api.failures import FUTILE_STARTS
from rlsrl.api.pods import ROLE_LABEL
from rlsrl.api.reasons import (
    ENVIRONMENT_ERRORS,
    FACTS,
    FINISHED,
    GANG_COMPLETE,
    NON_FINITE_VALUES,
    RESUMED,
    ROLLED_BACK,
)
from rlsrl.api.retry import FRESH_ANNOTATION, RETRY_ANNOTATION
from rlsrl.api.role_names import COORDINATOR, TRAINER
from rlsrl_operator.gang import attempt_of
from rlsrl_operator.manifests.context import DATA_FOLDER
from rlsrl_operator.reconcile import Reconciler
from rlsrl_operator.settings import Images
from rlsrl_operator.status import condition, read, with_condition, write
from rlsrl_operator.testing import SETTINGS

NO_RETRY = 2
"""Exit code of a worker that no restart helps."""


def fail(world: World) -> None:
    """End the experiment as failed."""
    attempt = read(world.document).attempt
    world.end(world.pods()[0], exit_code=NO_RETRY, message="rlsrl: no module named 'my_env'")
    world.settle()
    status = read(world.document)
    assert (status.phase, status.attempt) == ("Failed", attempt)


def ask(world: World, annotation: str, attempt: int) -> None:
    """Ask for a retry as the command does."""
    metadata = {**world.document["metadata"], "annotations": {annotation: str(attempt)}}
    world.server.change(world.document, {"metadata": metadata})


def coordinator_config(world: World) -> dict[str, Any]:
    """The config of the coordinator that runs."""
    (workload,) = (each for each in world.workloads() if each["metadata"]["labels"][ROLE_LABEL] == COORDINATOR)
    volumes = workload["spec"]["template"]["spec"]["volumes"]
    name = next(each["configMap"]["name"] for each in volumes if each["name"] == "config")
    config: dict[str, Any] = json.loads(world.contents("ConfigMap")[name]["data"]["coordinator.json"])
    return config


@pytest.fixture
def failed() -> World:
    """An experiment whose first attempt has failed."""
    world = World()
    world.settle()
    fail(world)
    return world


@pytest.mark.parametrize("how", ["annotation", "edit"])
def test_a_retry_is_the_next_attempt_with_a_whole_budget(failed: World, how: str) -> None:
    uids = {each["metadata"]["uid"] for each in failed.server.of_kind("Pod")}
    if how == "annotation":
        ask(failed, RETRY_ANNOTATION, 1)
    else:
        failed.edit(stop={"envSteps": 5_000})
    failed.settle()
    status = read(failed.document)
    assert (status.phase, status.attempt, status.first_attempt, status.fresh_attempt) == ("Running", 2, 2, None)
    assert (status.recent_failures, status.last_failure_at, status.finished_at) == (None, None, None)
    assert failed.condition(FINISHED) == ("False", "Retried")
    assert failed.condition(GANG_COMPLETE) == ("True", "Complete")
    assert {attempt_of(pod) for pod in failed.pods()} == {2}
    assert not uids & {each["metadata"]["uid"] for each in failed.server.of_kind("Pod")}, "not even the coordinator's"
    config = coordinator_config(failed)
    assert config["first_attempt"] == 2
    assert config["record_folder"] == f"{DATA_FOLDER}/{failed.document['metadata']['uid']}"


def test_the_next_attempt_begins_when_no_pod_of_the_failed_one_is_left(failed: World) -> None:
    ask(failed, RETRY_ANNOTATION, 1)
    for _ in range(3):
        failed.run_pass()
    assert read(failed.document).attempt == 1, "the coordinator's pod is still ending"
    failed.make_pods()
    assert failed.server.of_kind("Pod") == []
    written = [write for write in failed.run_pass() if " Event " not in write]
    assert read(failed.document).attempt == 2
    assert written == ["replace RLExperiment/status a"], "one status and nothing else"


def test_a_spent_budget_is_whole_again() -> None:
    world = World(restarts={"budget": 1})
    world.settle()
    for _ in range(2):
        world.end(world.pods()[0], exit_code=1, message="boom")
        world.settle()
    assert world.condition(FINISHED) == ("True", "BudgetExhausted")
    ask(world, RETRY_ANNOTATION, 2)
    world.settle()
    world.end(world.pods()[0], exit_code=1, message="boom")
    world.settle()
    status = read(world.document)
    assert (status.phase, status.attempt, status.recent_failures) == ("Running", 4, 1)


def test_a_request_applies_once(failed: World) -> None:
    ask(failed, RETRY_ANNOTATION, 1)
    failed.settle()
    fail(failed)
    assert read(failed.document).attempt == 2


def test_a_retry_forgets_a_failure_that_repeated() -> None:
    world = World()
    world.settle()
    for _ in range(FUTILE_STARTS):
        trainer = next(pod for pod in world.pods() if pod["metadata"]["labels"][ROLE_LABEL] == TRAINER)
        world.end(trainer, exit_code=1, message="KeyError: 'elbow'")
        world.settle()
    status = read(world.document)
    assert (status.phase, status.attempt) == ("Failed", FUTILE_STARTS)
    assert world.condition(FINISHED) == ("True", "RepeatedFailure")
    ask(world, RETRY_ANNOTATION, FUTILE_STARTS)
    world.settle()
    status = read(world.document)
    assert (status.phase, status.attempt, status.last_failure) == ("Running", FUTILE_STARTS + 1, None)


@pytest.mark.parametrize("annotation", [RETRY_ANNOTATION, FRESH_ANNOTATION])
def test_a_request_for_an_experiment_that_has_not_failed_is_ignored(annotation: str) -> None:
    world = World()
    world.settle()
    ask(world, annotation, 1)
    world.settle()
    assert read(world.document).attempt == 1


def test_an_edit_that_is_refused_tries_nothing_again(failed: World) -> None:
    failed.edit(environment={"id": "Acrobot-v1"})
    failed.settle()
    assert (read(failed.document).phase, read(failed.document).attempt) == ("Failed", 1)
    ask(failed, RETRY_ANNOTATION, 1)
    failed.settle()
    assert (read(failed.document).phase, read(failed.document).attempt) == ("Running", 2)
    assert "Acrobot-v1" not in json.dumps(failed.contents("ConfigMap", *POD_KINDS))


def test_a_suspended_experiment_is_tried_again_when_it_is_resumed(failed: World) -> None:
    failed.edit(suspend=True)
    ask(failed, RETRY_ANNOTATION, 1)
    failed.settle()
    assert read(failed.document).phase == "Failed"
    failed.edit(suspend=False)
    failed.settle()
    assert (read(failed.document).phase, read(failed.document).attempt) == ("Running", 2)


def test_a_fresh_retry_gets_a_new_folder_and_says_where_the_old_one_is(failed: World) -> None:
    uid = failed.document["metadata"]["uid"]
    ask(failed, FRESH_ANNOTATION, 1)
    failed.settle()
    status = read(failed.document)
    assert (status.phase, status.attempt, status.first_attempt, status.fresh_attempt) == ("Running", 2, 2, 2)
    config = coordinator_config(failed)
    assert (config["run_uid"], config["record_folder"]) == (f"{uid}-2", f"{DATA_FOLDER}/{uid}-2")
    assert config["parameter_store"]["folder"].startswith(f"{DATA_FOLDER}/{uid}-2/")
    finished = condition(status, FINISHED)
    assert finished is not None
    assert f"the folder {DATA_FOLDER}/{uid} of volume a-data keeps all earlier versions" in finished.message
    fail(failed)
    ask(failed, RETRY_ANNOTATION, 2)
    failed.settle()
    assert coordinator_config(failed)["run_uid"] == f"{uid}-2", "a later retry continues the fresh run"


@pytest.mark.parametrize("annotation", [RETRY_ANNOTATION, FRESH_ANNOTATION])
def test_a_fresh_run_has_lost_no_version_and_had_no_error(failed: World, annotation: str) -> None:
    status, now = read(failed.document), failed.now
    status = with_condition(status, ROLLED_BACK, "True", "OlderVersion", "lost", generation=1, now=now)
    status = with_condition(status, ENVIRONMENT_ERRORS, "True", "MadeAgain", "1 error", generation=1, now=now)
    status = with_condition(status, RESUMED, "True", "NextAttempt", "attempt 2", generation=1, now=now)
    status = with_condition(status, NON_FINITE_VALUES, "True", "Dropped", "NaN in 1 step", generation=1, now=now)
    failed.server.change(failed.document, {"status": write(status)})
    ask(failed, annotation, 1)
    failed.settle()
    for name in FACTS:
        kept = condition(read(failed.document), name)
        assert (kept is None) == (annotation == FRESH_ANNOTATION)


def test_a_fresh_retry_gets_a_new_prefix_in_a_bucket() -> None:
    world = World(parameters={"store": {"objectStore": {"url": "s3://weights/runs"}}})
    world.settle()
    fail(world)
    ask(world, FRESH_ANNOTATION, 1)
    world.settle()
    uid = world.document["metadata"]["uid"]
    assert coordinator_config(world)["parameter_store"]["object_store"]["url"] == f"s3://weights/runs/a-{uid}-2"
    finished = condition(read(world.document), FINISHED)
    assert finished is not None
    assert f"s3://weights/runs/a-{uid} keeps all earlier versions" in finished.message


def test_a_retry_uses_the_present_settings_and_leaves_no_object_of_the_failed_attempt(failed: World) -> None:
    newer = SETTINGS.model_copy(
        update={"images": Images(actor="registry.example/new:2", learner="registry.example/new:2")}
    )
    failed.reconciler = Reconciler(failed.cluster, newer, Silent(), key=b"key", now=lambda: failed.now)
    ask(failed, RETRY_ANNOTATION, 1)
    failed.settle()
    assert "registry.example/actor:1" not in json.dumps(failed.contents(*POD_KINDS))
    records = [name for name in failed.contents("ConfigMap") if "-record-" in name]
    assert [name.rpartition("-record-")[2] for name in records] == ["uid-1-1-2"]


def test_another_operator_continues_a_retry(failed: World) -> None:
    ask(failed, FRESH_ANNOTATION, 1)
    for _ in range(5):
        failed.run_pass()
        failed.make_pods()
        failed.reconciler = failed.new_reconciler()
    failed.settle()
    status = read(failed.document)
    assert (status.phase, status.attempt, status.fresh_attempt) == ("Running", 2, 2)


def test_an_edit_after_a_retry_keeps_the_pods_that_it_does_not_change(failed: World) -> None:
    ask(failed, RETRY_ANNOTATION, 1)
    failed.settle()
    before = {each["metadata"]["uid"] for each in failed.server.of_kind("Pod")}
    failed.edit(stop={"envSteps": 5_000})
    failed.settle()
    assert {each["metadata"]["uid"] for each in failed.server.of_kind("Pod")} == before
    assert read(failed.document).attempt == 2
    assert coordinator_config(failed)["first_attempt"] == 2
