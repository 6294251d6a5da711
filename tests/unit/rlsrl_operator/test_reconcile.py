"""The writes of a pass and their order, with a stand-in for the API server."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
from collections import Counter
from datetime import timedelta
from typing import Any, cast

import pytest
from operator_world import NAME, POD_KINDS, Counting, Silent, World

from rlsrl.api.pods import EXPERIMENT_LABEL, ROLE_LABEL
from rlsrl.api.reasons import ACCEPTED, FINISHED, READY
from rlsrl_operator.cluster import ResourceConflict
from rlsrl_operator.informer_cache import REFUSED_SECONDS, RELIST_SECONDS
from rlsrl_operator.manifests import Manifest
from rlsrl_operator.manifests.context import ATTEMPT_ANNOTATION
from rlsrl_operator.reconcile import STEADY_SECONDS, Reconciler
from rlsrl_operator.settings import Images, OperatorSettings, SecretName
from rlsrl_operator.status import FIRST_NUMBERS_SECONDS, read
from rlsrl_operator.testing import SETTINGS


@pytest.fixture
def world() -> World:
    """An experiment whose pods are all ready."""
    world = World()
    world.settle()
    assert world.condition(READY) == ("True", "Ready")
    return world


def uids(objects: list[Manifest]) -> set[str]:
    return {each["metadata"]["uid"] for each in objects}


def test_a_steady_experiment_causes_no_writes() -> None:
    world = World()
    for _ in range(5):
        world.now += timedelta(seconds=1)
        world.run_pass()
        world.make_pods()
    assert world.condition(READY) == ("True", "Ready")
    for _ in range(3):
        world.now += timedelta(minutes=1)
        assert world.run_pass() == []


def test_a_new_experiment_writes_each_object_once_and_lists_only_pods() -> None:
    world = World()
    world.settle()
    made = Counter(write for write in world.server.writes if not write.startswith("replace RLExperiment/status"))
    assert set(made.values()) == {1}
    assert "list" not in {how for how, kind in world.server.reads if kind != "Pod"}


def test_a_revision_that_is_deleted_during_a_pass_comes_back_whole(world: World) -> None:
    world.run_pass()
    place = next(place for place in world.server.objects if place[2].startswith("a-record-"))
    before = world.server.objects[place]

    def delete(kind: str) -> None:
        if kind == "Pod":  # the pass lists the pods after it has found the revision unchanged
            world.server.meanwhile = lambda kind: None
            world.server.remove("ConfigMap", place[2])
            world.deliver_events()

    world.server.meanwhile = delete
    world.run_pass()
    world.settle()
    after = world.server.objects[place]
    assert (after["data"], after["immutable"]) == (before["data"], True)
    assert world.condition(ACCEPTED) == ("True", "Accepted")


def test_a_restarted_operator_does_not_apply_immutable_objects(world: World) -> None:
    other = Reconciler(world.cluster, SETTINGS, Silent(), key=b"key", now=lambda: world.now)
    before = len(world.server.writes)
    asyncio.run(other.reconcile(world.key))
    written = {write.partition(" ")[2] for write in world.server.writes[before:]}
    kept = {
        f"{each['kind']} {each['metadata']['name']}" for each in world.server.objects.values() if "immutable" in each
    }
    assert len(kept) > 3
    assert written
    assert not written & kept


def test_a_pass_over_unchanged_objects_reads_only_experiment_and_pods(world: World) -> None:
    world.server.reads.clear()
    assert world.run_pass() == []
    assert world.server.reads == [("get", "RLExperiment"), ("list", "Pod")]


@pytest.mark.parametrize("kind", ["Deployment", "Service", "ConfigMap", "Secret"])
@pytest.mark.parametrize("how", ["gone", "changed", "unlabelled"])
def test_a_reported_change_is_read_and_corrected(world: World, kind: str, how: str) -> None:
    world.run_pass()
    before = world.server.of_kind(kind)[0]
    name, metadata = before["metadata"]["name"], before["metadata"]
    if how == "gone":
        world.server.remove(kind, name)
    elif how == "changed":
        world.server.change(before, {"metadata": {**metadata, "labels": {**metadata["labels"], EXPERIMENT_LABEL: "b"}}})
    else:
        world.server.change(before, {"metadata": {each: metadata[each] for each in metadata if each != "labels"}})
    world.server.reads.clear()
    assert [write.split()[1:] for write in world.run_pass()] == [[kind, name]]
    assert Counter(world.server.reads)["get", kind] == 1
    after = world.server.objects[world.server.place(kind, name)]
    assert after["metadata"]["labels"] == metadata["labels"]
    assert {part: after.get(part) for part in ("spec", "data")} == {part: before.get(part) for part in ("spec", "data")}
    assert world.run_pass() == []


def test_a_relist_lists_each_kind_once_and_corrects_lost_reports(world: World) -> None:
    (actor,) = (each for each in world.server.of_kind("Deployment") if each["metadata"]["name"] == "a-actor")
    del world.server.objects[world.server.place("Deployment", "a-actor")]
    assert world.run_pass() == []
    world.now += timedelta(seconds=RELIST_SECONDS)
    world.server.reads.clear()
    assert world.run_pass() == ["apply Deployment a-actor"]
    assert world.contents("Deployment")["a-actor"]["spec"] == actor["spec"]
    assert Counter(world.server.reads) == {("get", "RLExperiment"): 1, ("get", "Deployment"): 1} | {
        ("list", kind): 1
        for kind in (
            *("ConfigMap", "Deployment", "NetworkPolicy", "PersistentVolumeClaim", "Pod"),
            *("Secret", "Service", "StatefulSet"),
        )
    }


def test_a_relist_without_changes_reads_each_kind_once(world: World) -> None:
    world.now += timedelta(seconds=RELIST_SECONDS)
    world.server.reads.clear()
    assert world.run_pass() == []
    assert set(Counter(world.server.reads).values()) == {1}
    assert len(world.server.reads) < len(world.server.objects) / 2


@pytest.fixture
def training() -> World:
    """A steady experiment whose coordinator answers."""
    world = World(Counting())
    world.settle()
    world.run_pass()
    return world


def test_a_steady_pass_reads_only_the_coordinators_numbers(training: World) -> None:
    training.server.reads.clear()
    for _ in range(3):
        training.now += timedelta(seconds=SETTINGS.status_seconds)
        steps = read(training.document).training
        assert training.run_unwoken_pass() == [f"replace RLExperiment/status {NAME}"]
        training_status = read(training.document).training
        assert training_status is not None and steps is not None
        assert training_status.env_steps == (steps.env_steps or 0) + 1
    assert training.server.reads == []


class Late:
    """A coordinator without numbers until a test gives it some."""

    def __init__(self) -> None:
        self.totals: dict[str, Any] = {}
        self.num_looks = 0

    async def fetch(self, host: str, token: str) -> dict[str, Any]:
        del host, token
        self.num_looks += 1
        return {"totals": self.totals}


def test_the_first_numbers_do_not_wait_for_a_status_period() -> None:
    coordinator = Late()
    world = World(coordinator)
    world.settle()
    world.due = world.now
    coordinator.totals = {"env_steps": 512, "env_steps_per_second": 300}
    world.run_for(FIRST_NUMBERS_SECONDS + 1)
    numbers = read(world.document).training
    assert numbers is not None
    assert (numbers.env_steps, numbers.env_steps_per_second) == (512, 300)
    written = len(world.server.writes)
    coordinator.totals = {"env_steps": 1024, "env_steps_per_second": 300}
    world.run_for(SETTINGS.status_seconds - FIRST_NUMBERS_SECONDS - 1)
    assert len(world.server.writes) == written, "the further ones wait"
    world.run_for(SETTINGS.status_seconds)
    numbers = read(world.document).training
    assert numbers is not None
    assert numbers.env_steps == 1024


def test_looks_for_the_first_numbers_become_rarer_and_write_no_more_than_others() -> None:
    coordinator = Late()
    world = World(coordinator)
    world.settle()
    world.due, written, looks = world.now, len(world.server.writes), coordinator.num_looks
    world.run_for(20)
    assert coordinator.num_looks - looks <= 5, "after 2, 4, 8 and 16 seconds, and once before"
    world.run_for(40)
    assert len(world.server.writes) - written <= 60 / SETTINGS.status_seconds + 1
    assert world.run_for(60) <= 60 / SETTINGS.status_seconds + 1


def test_own_writes_wake_nothing_and_all_other_changes_do(training: World) -> None:
    training.now += timedelta(seconds=SETTINGS.status_seconds)
    training.run_unwoken_pass()
    assert not any(training.deliver_events())
    (actor,) = (each for each in training.server.of_kind("Deployment") if each["metadata"]["name"] == "a-actor")
    training.server.reads.clear()
    training.run_unwoken_pass()
    assert training.server.reads == []
    for changed in (training.document, actor, training.pods()[0]):
        training.server.change(changed, {"status": {**changed.get("status", {}), "observedGeneration": 7}})
        assert training.deliver_events() == [True]
    training.server.reads.clear()
    training.run_unwoken_pass()
    assert training.server.reads != []


def test_a_deleted_experiment_wakes_the_operator_before_the_first_pass() -> None:
    world = World()
    world.server.remove("RLExperiment", NAME)
    assert True in world.deliver_events()


def test_lost_reports_are_corrected_after_the_steady_period(training: World) -> None:
    (actor,) = (each for each in training.server.of_kind("Deployment") if each["metadata"]["name"] == "a-actor")
    del training.server.objects[training.server.place("Deployment", "a-actor")]
    training.now += timedelta(seconds=STEADY_SECONDS - SETTINGS.status_seconds)
    training.run_unwoken_pass()
    assert "a-actor" not in training.contents("Deployment")
    training.now += timedelta(seconds=SETTINGS.status_seconds)
    training.run_unwoken_pass()
    assert training.contents("Deployment")["a-actor"]["spec"] == actor["spec"]


@pytest.mark.parametrize("how", ["run_pass", "run_unwoken_pass"])
def test_a_report_during_a_pass_causes_another_pass(training: World, how: str) -> None:
    coordinator = cast("Counting", training.coordinator)
    coordinator.meanwhile = lambda: training.reconciler.wake(training.key, kind="Pod", name="any")
    training.now += timedelta(seconds=SETTINGS.status_seconds)
    getattr(training, how)()
    coordinator.meanwhile = lambda: None
    training.server.reads.clear()
    training.run_unwoken_pass()
    assert training.server.reads != []


def test_a_coordinator_that_does_not_answer_delays_no_write(training: World) -> None:
    coordinator = cast("Counting", training.coordinator)
    written_before: list[str] = []
    coordinator.meanwhile = lambda: written_before.extend(training.server.writes)
    training.edit(stop={"envSteps": 2000})
    training.now += timedelta(seconds=SETTINGS.status_seconds)
    training.server.writes.clear()
    writes = training.run_pass()
    assert written_before == writes[: len(written_before)]
    assert [write for write in writes[len(written_before) :] if not write.startswith("create Event")] == [
        f"replace RLExperiment/status {NAME}"
    ]
    assert "apply ConfigMap a-settings" in written_before


def test_a_suspended_experiment_has_no_coordinator_to_ask(training: World) -> None:
    training.edit(suspend=True)
    training.settle()
    answers = cast("Counting", training.coordinator).answers
    training.server.reads.clear()
    for _ in range(3):
        training.now += timedelta(seconds=SETTINGS.status_seconds)
        assert training.run_unwoken_pass() == []
    assert training.server.reads == [], "it is steady"
    assert cast("Counting", training.coordinator).answers == answers


def test_numbers_are_not_written_to_an_edited_experiment(training: World) -> None:
    training.edit(suspend=True)
    before = copy.deepcopy(training.document)
    training.now += timedelta(seconds=SETTINGS.status_seconds)
    training.run_unwoken_pass()
    assert training.document == before
    training.run_unwoken_pass()
    assert read(training.document).phase == "Suspended"


def test_a_delete_spares_a_new_object_of_the_same_name(world: World) -> None:
    pod = world.pods()[0]
    successor = world.server.put(pod)
    asyncio.run(world.cluster.delete(pod))
    assert successor in world.pods()
    asyncio.run(world.cluster.delete(successor))
    assert successor not in world.pods()


def test_a_status_write_conflicts_with_a_change_meanwhile(world: World) -> None:
    before = copy.deepcopy(world.document)
    world.edit(suspend=True)
    with pytest.raises(ResourceConflict):
        asyncio.run(world.cluster.replace_status(before))


def test_a_new_attempt_is_written_before_the_pass_acts_on_it(world: World) -> None:
    world.end(world.pods()[1], exit_code=1)
    gang, sets = uids(world.pods()), world.contents("StatefulSet")
    world.server.refuses = lambda write: write.startswith("replace RLExperiment/status")
    world.run_pass()
    assert uids(world.pods()) == gang
    assert world.contents("StatefulSet") == sets
    world.server.refuses = lambda write: False
    world.settle()
    assert read(world.document).attempt == 2


def test_a_restart_replaces_the_whole_gang_and_no_other_pod(world: World) -> None:
    others = uids(world.pods("actor")) | uids(world.pods("coordinator"))
    gang = uids(world.pods())
    world.end(world.pods()[1], exit_code=1)
    world.settle()
    assert not uids(world.pods()) & gang
    assert [pod["metadata"]["annotations"][ATTEMPT_ANNOTATION] for pod in world.pods()] == ["2", "2"]
    assert uids(world.pods("actor")) | uids(world.pods("coordinator")) == others
    assert world.condition(READY) == ("True", "Ready")


def test_a_conflict_with_a_change_that_no_watch_reported_is_resolved_by_the_next_pass(world: World) -> None:
    gang = world.server.place("StatefulSet", "a-trainer")
    world.deliver_events()
    world.server.change(world.server.objects[gang], {"status": {"readyReplicas": 1}})
    world.server.events.clear()
    world.end(world.pods()[1], exit_code=1)
    world.server.forbids = lambda write: write == "apply StatefulSet a-trainer"
    for _ in range(2):
        assert "replace StatefulSet a-trainer" in world.run_pass()
    template = world.server.objects[gang]["spec"]["template"]
    assert template["metadata"]["annotations"][ATTEMPT_ANNOTATION] == "2"


class Killed(Exception):
    """The operator's process ends before a write."""


def settled_after_a_kill(write: int | None) -> tuple[World, int]:
    """Lose a trainer, kill the operator before that write, start another; return the writes before the kill."""
    world = World()
    world.settle()
    world.end(world.pods()[1], exit_code=1)
    first = len(world.server.writes)

    def kill(_: str) -> bool:
        if write is not None and len(world.server.writes) - first == write + 1:
            raise Killed
        return False

    world.server.refuses = kill
    with contextlib.suppress(Killed):
        world.settle()
    num_writes = len(world.server.writes) - first
    world.server.refuses = lambda write: False
    world.reconciler = world.new_reconciler()
    world.settle()
    return world, num_writes


def test_an_operator_killed_before_any_write_comes_to_the_same_attempt() -> None:
    expected, num_writes = settled_after_a_kill(None)
    assert num_writes > 5
    for write in range(num_writes):
        world, _ = settled_after_a_kill(write)
        status = read(world.document)
        assert (status.attempt, status.restarts, status.recent_failures) == (2, 1, 1), write
        assert world.condition(READY) == ("True", "Ready")
        assert world.contents(*POD_KINDS) == expected.contents(*POD_KINDS)


@pytest.mark.parametrize("kind", ["PersistentVolumeClaim", "Service", "NetworkPolicy", "StatefulSet", "Deployment"])
def test_a_refused_object_is_reported_once_and_retried_later(kind: str) -> None:
    world = World()
    world.server.forbids = lambda write: write.split()[1] == kind
    world.run_pass()
    assert world.condition(ACCEPTED) == ("False", "ObjectRefused")
    for _ in range(20):
        world.now += timedelta(seconds=1)
        assert world.run_pass() == []
    world.server.forbids = lambda write: False
    world.now += timedelta(seconds=REFUSED_SECONDS)
    world.settle()
    assert world.condition(ACCEPTED) == ("True", "Accepted")


def test_trainers_that_their_queue_refuses_are_retried_and_nothing_is_written_in_their_place() -> None:
    world = World(queue="gpus")
    world.settle()
    gang = world.server.place("StatefulSet", "a-trainer")
    world.end(world.pods()[1], exit_code=1)
    world.run_pass()
    assert world.server.objects[gang]["spec"]["replicas"] == 0
    world.make_pods()
    world.server.forbids = lambda write: write == "apply StatefulSet a-trainer"
    for _ in range(3):
        world.now += timedelta(seconds=1)
        writes = world.run_pass()
        assert "apply StatefulSet a-trainer" in writes
        assert "replace StatefulSet a-trainer" not in writes
    assert world.condition(ACCEPTED) == ("True", "Accepted")
    assert world.server.objects[gang]["spec"]["replicas"] == 0
    world.server.forbids = lambda write: False
    world.settle()
    assert world.condition(READY) == ("True", "Ready")


def test_own_status_writes_wake_nothing_at_any_time() -> None:
    world = World()
    world.deliver_events()
    world.run_unwoken_pass()
    events = [about for _, about in world.server.events if about["kind"] == "RLExperiment"]
    assert len(events) == 2, "an attempt written ahead, and the status at the end"
    assert not any(world.wake(about) for about in events)


def test_objects_of_an_earlier_generation_are_deleted_once_this_one_runs(world: World) -> None:
    def config_maps() -> set[str]:
        return set(world.contents("ConfigMap"))

    (config,) = (name for name in config_maps() if name.startswith("a-actor-"))
    found = world.server.objects[world.server.place("ConfigMap", config)]
    foreign = {**found["metadata"]["ownerReferences"][0], "uid": "somebody-else"}
    world.server.put({**found, "metadata": {**found["metadata"], "name": "theirs", "ownerReferences": [foreign]}})
    unlabelled = {name: value for name, value in found["metadata"].items() if name != "labels"}
    world.server.put({**found, "metadata": {**unlabelled, "name": "unlabelled"}})
    world.edit(environment={"id": "CartPole-v1"}, actors={"environments": 8, "rolloutLength": 32})
    world.run_pass()
    assert config in config_maps(), "pods of the earlier generation still need it"
    world.settle()
    for pod in [*world.pods("actor"), *world.pods()]:
        world.server.remove("Pod", pod["metadata"]["name"])
    world.settle()
    assert world.condition(READY) == ("True", "Ready")
    assert config not in config_maps()
    assert {"theirs", "unlabelled"} <= config_maps()


SHARDS = {
    "algorithm": {"dqn": {}},
    "pacing": {"trainStepsPerEnvStep": 1},
    "trainers": {"replicas": 1},
    "bufferWorkers": {"replicas": 1},
}
"""A Deployment or a StatefulSet may be what a later generation lacks."""


@pytest.mark.parametrize("suspend", [False, True])
@pytest.mark.parametrize(
    ("role", "section", "spec"),
    [("evaluator", "evaluators", {"evaluators": {"replicas": 1}}), ("buffer", "bufferWorkers", SHARDS)],
)
def test_a_role_removed_by_an_edit_is_deleted(role: str, section: str, spec: dict[str, Any], suspend: bool) -> None:
    world = World(**spec)
    world.settle()
    assert world.pods(role)
    kept = {name: value for name, value in world.document["spec"].items() if name != section}
    world.server.change(world.document, {"spec": {**kept, "suspend": suspend}})
    world.settle()
    for pod in world.pods("actor"):  # as their Deployment does if the edit changes them
        world.server.remove("Pod", pod["metadata"]["name"])
    world.settle()
    assert not world.pods(role)
    assert f"a-{role}" not in world.contents(*POD_KINDS)
    assert world.condition(READY) == (("False", "Suspended") if suspend else ("True", "Ready"))
    assert bool(world.server.of_kind("Pod")) is not suspend, "the coordinator goes last, but it goes"


def test_a_refused_edit_is_reported_and_changes_nothing(world: World) -> None:
    before, pods = world.contents(*POD_KINDS, "Service"), uids(world.server.of_kind("Pod"))
    world.edit(environment={"id": "Acrobot-v1"})
    world.settle()
    assert world.condition(ACCEPTED) == ("False", "EditRefused")
    assert world.contents(*POD_KINDS, "Service") == before
    assert uids(world.server.of_kind("Pod")) == pods


PRIVILEGED = {"environments": 8, "podTemplate": {"spec": {"hostNetwork": True}}}
"""Actors with a pod template that only ``podTemplates: any`` allows."""
ANY_TEMPLATE = SETTINGS.model_copy(update={"pod_templates": "any"})


def host_networks(world: World) -> set[bool]:
    return {each["spec"]["template"]["spec"].get("hostNetwork", False) for each in world.server.of_kind("Deployment")}


def test_a_new_experiment_begins_once_the_administrator_allows_its_pod_template() -> None:
    world = World(actors=PRIVILEGED)
    world.settle()
    assert (world.condition(ACCEPTED), world.server.of_kind("Deployment")) == (("False", "InvalidSpec"), [])
    world.reconciler = world.new_reconciler(ANY_TEMPLATE)
    world.settle()
    assert (world.condition(ACCEPTED), world.condition(READY)) == (("True", "Accepted"), ("True", "Ready"))
    assert True in host_networks(world)


def test_a_refused_edit_is_made_once_the_administrator_allows_its_pod_template(world: World) -> None:
    trainers = uids(world.pods())
    world.edit(actors=PRIVILEGED)
    world.settle()
    assert world.condition(ACCEPTED) == ("False", "InvalidSpec")
    assert host_networks(world) == {False}
    world.reconciler = world.new_reconciler()
    world.settle()
    assert world.condition(ACCEPTED) == ("False", "InvalidSpec"), "another operator with the same rules agrees"
    world.reconciler, before = world.new_reconciler(ANY_TEMPLATE), len(world.server.writes)
    world.settle()
    assert world.condition(ACCEPTED) == ("True", "Accepted")
    assert True in host_networks(world)
    assert uids(world.pods()) == trainers, "the edit is of actors alone"
    assert "create Secret a-token-uid-1" not in world.server.writes[before:]


@pytest.mark.parametrize("allowed", [SETTINGS, ANY_TEMPLATE])
def test_a_refused_edit_beside_a_pod_template_stays_refused(world: World, allowed: OperatorSettings) -> None:
    world.edit(actors=PRIVILEGED, environment={"id": "Acrobot-v1"})
    world.settle()
    world.reconciler = world.new_reconciler(allowed)
    world.settle()
    assert world.condition(ACCEPTED) == ("False", "InvalidSpec" if allowed is SETTINGS else "EditRefused")
    assert host_networks(world) == {False}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("Service", "a-coordinator"),
        ("StatefulSet", "a-trainer"),
        ("ConfigMap", "a-settings"),
        ("ConfigMap", "a-record-uid-1-1"),
        ("Secret", "a-token-uid-1"),
        ("PersistentVolumeClaim", "a-data"),
    ],
)
def test_an_object_of_somebody_else_is_reported_and_not_touched(kind: str, name: str) -> None:
    world = World()
    theirs = world.server.put({"apiVersion": "v1", "kind": kind, "metadata": {"name": name}, "data": {"it": "is"}})
    world.run_pass()
    world.run_pass()
    assert world.condition(ACCEPTED) == ("False", "NameConflict")
    assert world.server.objects[world.server.place(kind, name)] == theirs


def test_a_finished_experiment_gets_no_new_pods(world: World) -> None:
    result = json.dumps({"reason": "envSteps", "version": "1.3", "result": {}})
    first = next(pod for pod in world.pods() if pod["metadata"]["name"].endswith("-0"))
    world.end(first, exit_code=0, message=f"done {result}")
    world.settle()
    assert world.condition(FINISHED) == ("True", "Succeeded")
    for workload in world.server.of_kind(*POD_KINDS):
        world.server.remove(workload["kind"], workload["metadata"]["name"])
    world.settle()
    assert {pod["metadata"]["labels"][ROLE_LABEL] for pod in world.server.of_kind("Pod")} == {"coordinator"}
    assert read(world.document).phase == "Succeeded"


def test_a_suspended_experiment_ends_in_order_and_resumes_as_a_new_attempt(world: World) -> None:
    world.edit(suspend=True)
    gone: list[str] = []
    for _ in range(10):
        there = {pod["metadata"]["labels"][ROLE_LABEL] for pod in world.server.of_kind("Pod")}
        world.run_pass()
        world.make_pods()
        left = {pod["metadata"]["labels"][ROLE_LABEL] for pod in world.server.of_kind("Pod")}
        gone += sorted(there - left)
    assert gone == ["trainer", "actor", "coordinator"]
    world.edit(suspend=False)
    world.settle()
    assert (read(world.document).attempt, read(world.document).restarts) == (2, 0)
    assert world.condition(READY) == ("True", "Ready")


def test_of_two_operators_with_different_keys_one_manages_an_experiment() -> None:
    world = World()
    place = SecretName(namespace="elsewhere", name="its-key")
    theirs = SETTINGS.model_copy(update={"images": Images(actor="theirs:1", learner="theirs:2"), "key_secret": place})
    other = Reconciler(world.cluster, theirs, Silent(), key=b"another", now=lambda: world.now)
    world.settle()
    world.edit(stop={"envSteps": 2000})
    before = list(world.server.writes)
    asyncio.run(other.reconcile(world.key))
    assert world.server.writes == before, "neither the recorded objects nor later ones change"
    world.settle()
    settled = list(world.server.writes)
    asyncio.run(other.reconcile(world.key))
    assert world.run_pass() == []
    assert world.server.writes == settled
    assert "theirs" not in str(world.contents(*POD_KINDS))
