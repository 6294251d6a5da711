"""What one look at an experiment does to the objects, and in which order: with a stand-in for the API server.

The stand-in keeps what the operator relies on: uids, resourceVersions, generations, preconditions, conflicts. What it
cannot show (defaulting, field managers, admission) is tried on a real cluster in ``tests/e2e``.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import json
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
from kubernetes.aio.client.exceptions import ApiException

from rlsrl.api.pods import EXPERIMENT_LABEL, ROLE_LABEL
from rlsrl.api.reasons import ACCEPTED, FINISHED, READY
from rlsrl.api.role_names import TRAINER
from rlsrl.testing.documents import minimal
from rlsrl_operator.cluster import Cluster, ResourceConflict
from rlsrl_operator.coordinator_status import CoordinatorStatus
from rlsrl_operator.informer_cache import REFUSED_SECONDS, RELIST_SECONDS
from rlsrl_operator.manifests import Manifest
from rlsrl_operator.manifests.context import ATTEMPT_ANNOTATION
from rlsrl_operator.reconcile import STEADY_SECONDS, ExperimentKey, Reconciler
from rlsrl_operator.settings import Images, SecretName
from rlsrl_operator.status import condition, read, stamp
from rlsrl_operator.testing import SETTINGS, ended

NAMESPACE, NAME = "research", "a"
POD_KINDS = ("Deployment", "StatefulSet")
Place = tuple[str, str, str]


class Resource(SimpleNamespace):
    """A kind, as the dynamic client names it."""

    @property
    def subresources(self) -> Mapping[str, Resource]:
        return {"status": Resource(kind=self.kind, of_status=True)}


class ApiServer:
    """Kubernetes objects, behind the calls of the dynamic client that the operator makes."""

    def __init__(self) -> None:
        self.objects: dict[Place, Manifest] = {}
        self.writes: list[str] = []
        """What was written: verb, kind and name."""
        self.asked: list[tuple[str, str]] = []
        """What was read: how, and of which kind."""
        self.refuses: Callable[[str], bool] = lambda write: False
        """Which writes end in a conflict."""
        self.forbids: Callable[[str], bool] = lambda write: False
        """Which writes an admission policy or a quota refuses."""
        self.meanwhile: Callable[[str], object] = lambda kind: None
        """What happens whenever something of a kind is read."""
        self.news: list[tuple[str, Manifest]] = []
        """What a watch has not told yet: objects, and whether they are gone."""
        self.resources = self
        self._numbers = itertools.count(1)

    def place(self, kind: str, name: str) -> Place:
        return kind, NAMESPACE, name

    def of_kind(self, *kinds: str) -> list[Manifest]:
        return [each for (kind, *_), each in self.objects.items() if kind in kinds]

    def put(self, body: Manifest) -> Manifest:
        """Whatever the object was before, it is a new one now."""
        made = copy.deepcopy(body)
        number = next(self._numbers)
        made["metadata"] |= {"uid": f"uid-{number}", "resourceVersion": str(number), "generation": 1}
        made["metadata"] = {"namespace": NAMESPACE} | made["metadata"]
        self.objects[self.place(made["kind"], made["metadata"]["name"])] = made
        self.news.append(("MODIFIED", made))
        return made

    def remove(self, kind: str, name: str) -> Manifest:
        """Take it away."""
        found = self.objects.pop(self.place(kind, name))
        self.news.append(("DELETED", found))
        return found

    def change(self, found: Manifest, contents: Manifest) -> Manifest:
        """Give it these contents; its resourceVersion and generation move if they are others."""
        made = {**copy.deepcopy(found), **copy.deepcopy(contents)}
        moved = {name: value for name, value in made.items() if name not in ("metadata", "status")} != {
            name: value for name, value in found.items() if name not in ("metadata", "status")
        }
        if made != found:
            made["metadata"]["resourceVersion"] = str(next(self._numbers))
            made["metadata"]["generation"] = found["metadata"]["generation"] + moved
            self.objects[self.place(made["kind"], made["metadata"]["name"])] = made
            self.news.append(("MODIFIED", made))
        return made

    # What the dynamic client is called for, with the operator's serializer. ``get`` is that of its resources, too.

    async def get(self, resource: Resource | None = None, **asked: Any) -> Any:
        if resource is None:
            return Resource(kind=asked["kind"], of_status=False)
        self.asked.append(("get" if "name" in asked else "list", resource.kind))
        self.meanwhile(resource.kind)
        if "name" in asked:
            return self._answer(self._found(resource, asked["name"]))
        wanted = dict(pair.split("=") for pair in asked.get("label_selector", "").split(",") if pair)
        items = [
            each for each in self.of_kind(resource.kind) if wanted.items() <= each["metadata"].get("labels", {}).items()
        ]
        return self._answer({"items": [] if "field_selector" in asked else items})

    async def create(self, resource: Resource, *, body: Manifest, **_: Any) -> Any:
        self._write("create", resource, body["metadata"]["name"])
        if self.place(resource.kind, body["metadata"]["name"]) in self.objects:
            raise ApiException(status=409)
        return self._answer(self.put(body))

    async def server_side_apply(self, resource: Resource, *, body: Manifest, **_: Any) -> Any:
        name = body["metadata"]["name"]
        self._write("apply", resource, name)
        found = self.objects.get(self.place(resource.kind, name))
        if found is None:
            return self._answer(self.put(body))
        return self._answer(self.change(found, {**body, "metadata": {**found["metadata"], **body["metadata"]}}))

    async def replace(self, resource: Resource, *, body: Manifest, **_: Any) -> Any:
        name = body["metadata"]["name"]
        self._write("replace", resource, name)
        found = self._found(resource, name)
        if body["metadata"]["resourceVersion"] != found["metadata"]["resourceVersion"]:
            raise ApiException(status=409)
        return self._answer(self.change(found, {"status": body["status"]} if resource.of_status else body))

    async def patch(self, resource: Resource, *, body: Manifest, **_: Any) -> Any:
        name = body["metadata"]["name"]
        self._write("patch", resource, name)
        found = self._found(resource, name)
        if body["metadata"]["uid"] != found["metadata"]["uid"]:
            raise ApiException(status=409)
        annotations = {**found["metadata"].get("annotations", {}), **body["metadata"]["annotations"]}
        return self._answer(self.change(found, {"metadata": {**found["metadata"], "annotations": annotations}}))

    async def delete(self, resource: Resource, *, name: str, body: Manifest, **_: Any) -> Any:
        self._write("delete", resource, name)
        found = self._found(resource, name)
        if body.get("preconditions", {}).get("uid", found["metadata"]["uid"]) != found["metadata"]["uid"]:
            raise ApiException(status=409)
        self.remove(resource.kind, name)
        return self._answer({})

    def _found(self, resource: Resource, name: str) -> Manifest:
        found = self.objects.get(self.place(resource.kind, name))
        if found is None:
            raise ApiException(status=404)
        return found

    def _write(self, verb: str, resource: Resource, name: str) -> None:
        write = f"{verb} {resource.kind}{'/status' if resource.of_status else ''} {name}"
        self.writes.append(write)
        if self.refuses(write):
            raise ApiException(status=409, reason="refused by the test")
        if self.forbids(write):
            raise ApiException(status=403, reason="forbidden by the test")

    @staticmethod
    def _answer(value: Manifest) -> Any:
        return copy.deepcopy(value)


class Silent:
    """Coordinators that do not answer."""

    async def fetch(self, host: str, token: str) -> None:
        del host, token


class Counting:
    """A coordinator that answers each time, with one more step."""

    def __init__(self) -> None:
        self.answers = 0
        self.meanwhile: Callable[[], object] = lambda: None

    async def fetch(self, host: str, token: str) -> dict[str, Any]:
        del host, token
        self.answers += 1
        self.meanwhile()
        return {"totals": {"env_steps": self.answers}}


class World:
    """An experiment, the operator that looks at it, and the controllers that make its pods."""

    def __init__(self, coordinator: CoordinatorStatus | None = None, **spec: Any) -> None:
        document = minimal()
        document["spec"] |= {"trainers": {"replicas": 2}, **spec}
        self.server = ApiServer()
        self.now = datetime(2026, 1, 1, tzinfo=UTC)
        self.server.put(document)
        self.cluster = Cluster(cast("Any", self.server), on_write=lambda kind, verb: None)
        self.key = ExperimentKey(NAMESPACE, NAME)
        self.coordinator = coordinator or Silent()
        self.reconciler = self.new_reconciler()

    def new_reconciler(self) -> Reconciler:
        """An operator that has just started."""
        return Reconciler(self.cluster, SETTINGS, self.coordinator, key=b"key", now=lambda: self.now)

    @property
    def document(self) -> Manifest:
        return self.server.objects[self.server.place("RLExperiment", NAME)]

    def said(self, condition_type: Any) -> tuple[str, str]:
        """Whether it holds, and why."""
        found = condition(read(self.document), condition_type)
        assert found is not None
        return found.status, found.reason

    def hear(self) -> list[bool]:
        """What watches tell; returns what of it is news to the operator."""
        told, self.server.news = self.server.news, []
        return [self.wake(about, is_gone=event == "DELETED") for event, about in told]

    def wake(self, about: Manifest, *, is_gone: bool = False) -> bool:
        """One of them."""
        kind, metadata = about["kind"], about["metadata"]
        names = {metadata.get("labels", {}).get(EXPERIMENT_LABEL)}
        names |= {metadata["name"]} if kind == "RLExperiment" else set()
        names |= {owner["name"] for owner in metadata.get("ownerReferences", ())}
        version = "" if is_gone else metadata["resourceVersion"]
        return NAME in names and self.reconciler.wake(self.key, kind=kind, name=metadata["name"], version=version)

    def edit(self, **spec: Any) -> None:
        self.server.change(self.document, {"spec": {**self.document["spec"], **spec}})

    def look(self) -> list[str]:
        """Look once, after what watches tell and as if a pod had changed; returns what was written."""
        self.hear()
        self.reconciler.wake(self.key, kind="Pod", name="any")
        return self.come_back()

    def come_back(self) -> list[str]:
        """What it does when it was not woken; returns what was written."""
        before = len(self.server.writes)
        asyncio.run(self.reconciler.reconcile(self.key))
        return self.server.writes[before:]

    def settle(self) -> None:
        """Look, and let the controllers do their part, until nothing moves."""
        for _ in range(20):
            self.now += timedelta(seconds=1)
            if not self.look() and not self.make_pods():
                return
        pytest.fail(f"it never settles: {self.server.writes[-20:]}")

    def pods(self, role: str = TRAINER) -> list[Manifest]:
        return [pod for pod in self.server.of_kind("Pod") if pod["metadata"]["labels"][ROLE_LABEL] == role]

    def make_pods(self) -> bool:
        """What Kubernetes' controllers do; returns whether there was anything to do."""
        wanted: dict[str, Manifest] = {}
        for workload in self.server.of_kind(*POD_KINDS):
            template = workload["spec"]["template"]["metadata"]
            for index in range(workload["spec"]["replicas"]):
                labels = {**template["labels"], "apps.kubernetes.io/pod-index": str(index)}
                metadata = {**template, "labels": labels, "name": f"{workload['metadata']['name']}-{index}"}
                wanted[metadata["name"]] = metadata
        there = {pod["metadata"]["name"] for pod in self.server.of_kind("Pod")}
        for name in there - wanted.keys():
            self.server.remove("Pod", name)
        for name in wanted.keys() - there:
            metadata = {**wanted[name], "creationTimestamp": stamp(self.now)}
            container = {"name": "worker", "restartCount": 0, "state": {"running": {}}}
            status = {
                "phase": "Running",
                "conditions": [{"type": "Ready", "status": "True"}],
                "containerStatuses": [container],
            }
            self.server.put({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "status": status})
        return there != wanted.keys()

    def end(self, pod: Manifest, exit_code: int, message: str = "") -> None:
        """Its worker ends."""
        container = {"name": "worker", "restartCount": 0, "state": ended(exit_code, message)}
        self.server.change(pod, {"status": {"phase": "Running", "containerStatuses": [container]}})

    def contents(self, *kinds: str) -> dict[str, Manifest]:
        """What the objects of these kinds hold, by name."""
        kept = ("spec", "data")
        return {
            each["metadata"]["name"]: {part: each[part] for part in kept if part in each}
            for each in self.server.of_kind(*kinds)
        }


@pytest.fixture
def world() -> World:
    """A run whose pods are all ready."""
    world = World()
    world.settle()
    assert world.said(READY) == ("True", "Ready")
    return world


def uids(objects: list[Manifest]) -> set[str]:
    return {each["metadata"]["uid"] for each in objects}


def test_where_all_is_as_it_should_be_nothing_is_written() -> None:
    world = World()
    for _ in range(5):
        world.now += timedelta(seconds=1)
        world.look()
        world.make_pods()
    assert world.said(READY) == ("True", "Ready")
    for _ in range(3):
        world.now += timedelta(minutes=1)
        assert world.look() == []


def test_to_make_an_experiment_nothing_is_written_twice_and_nothing_listed_but_pods() -> None:
    world = World()
    world.settle()
    made = Counter(write for write in world.server.writes if not write.startswith("replace RLExperiment/status"))
    assert set(made.values()) == {1}
    assert "list" not in {how for how, kind in world.server.asked if kind != "Pod"}


def test_a_record_that_is_deleted_during_a_look_comes_back_whole(world: World) -> None:
    world.look()
    place = next(place for place in world.server.objects if place[2].startswith("a-record-"))
    before = world.server.objects[place]

    def delete(kind: str) -> None:
        if kind == "Pod":  # pods are asked for after the revision was found to be as it was left
            world.server.meanwhile = lambda kind: None
            world.server.remove("ConfigMap", place[2])
            world.hear()

    world.server.meanwhile = delete
    world.look()
    world.settle()
    after = world.server.objects[place]
    assert (after["data"], after["immutable"]) == (before["data"], True)
    assert world.said(ACCEPTED) == ("True", "Accepted")


def test_an_operator_that_comes_after_another_applies_nothing_that_cannot_be_changed(world: World) -> None:
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


def test_of_what_is_as_it_was_left_only_pods_are_asked_for(world: World) -> None:
    world.server.asked.clear()
    assert world.look() == []
    assert world.server.asked == [("get", "RLExperiment"), ("list", "Pod")]


@pytest.mark.parametrize("kind", ["Deployment", "Service", "ConfigMap", "Secret"])
@pytest.mark.parametrize("how", ["gone", "changed", "unlabelled"])
def test_an_object_of_which_there_is_news_is_looked_at_and_made_good(world: World, kind: str, how: str) -> None:
    world.look()
    before = world.server.of_kind(kind)[0]
    name, metadata = before["metadata"]["name"], before["metadata"]
    if how == "gone":
        world.server.remove(kind, name)
    elif how == "changed":
        world.server.change(before, {"metadata": {**metadata, "labels": {**metadata["labels"], EXPERIMENT_LABEL: "b"}}})
    else:
        world.server.change(before, {"metadata": {each: metadata[each] for each in metadata if each != "labels"}})
    world.server.asked.clear()
    assert [write.split()[1:] for write in world.look()] == [[kind, name]]
    assert Counter(world.server.asked)["get", kind] == 1
    after = world.server.objects[world.server.place(kind, name)]
    assert after["metadata"]["labels"] == metadata["labels"]
    assert {part: after.get(part) for part in ("spec", "data")} == {part: before.get(part) for part in ("spec", "data")}
    assert world.look() == []


def test_a_look_at_objects_of_which_there_was_no_news_for_long_asks_once_for_each_kind(world: World) -> None:
    (actor,) = (each for each in world.server.of_kind("Deployment") if each["metadata"]["name"] == "a-actor")
    del world.server.objects[world.server.place("Deployment", "a-actor")]
    assert world.look() == []
    world.now += timedelta(seconds=RELIST_SECONDS)
    world.server.asked.clear()
    assert world.look() == ["apply Deployment a-actor"]
    assert world.contents("Deployment")["a-actor"]["spec"] == actor["spec"]
    assert Counter(world.server.asked) == {("get", "RLExperiment"): 1, ("get", "Deployment"): 1} | {
        ("list", kind): 1
        for kind in (
            *("ConfigMap", "Deployment", "NetworkPolicy", "PersistentVolumeClaim", "Pod"),
            *("Secret", "Service", "StatefulSet"),
        )
    }


def test_a_look_at_what_is_well_asks_once_for_each_kind_and_not_for_each_object(world: World) -> None:
    world.now += timedelta(seconds=RELIST_SECONDS)
    world.server.asked.clear()
    assert world.look() == []
    assert set(Counter(world.server.asked).values()) == {1}
    assert len(world.server.asked) < len(world.server.objects) / 2


@pytest.fixture
def training() -> World:
    """A run whose coordinator tells of it, and that was looked at since it changed last."""
    world = World(Counting())
    world.settle()
    world.look()
    return world


def test_while_nothing_changes_only_the_numbers_are_asked_for_and_told(training: World) -> None:
    training.server.asked.clear()
    for _ in range(3):
        training.now += timedelta(seconds=SETTINGS.status_seconds)
        steps = read(training.document).training
        assert training.come_back() == [f"replace RLExperiment/status {NAME}"]
        told = read(training.document).training
        assert told is not None and steps is not None
        assert told.env_steps == (steps.env_steps or 0) + 1
    assert training.server.asked == []


def test_what_it_said_itself_is_no_news_and_everything_else_is(training: World) -> None:
    training.now += timedelta(seconds=SETTINGS.status_seconds)
    training.come_back()
    assert not any(training.hear())
    (actor,) = (each for each in training.server.of_kind("Deployment") if each["metadata"]["name"] == "a-actor")
    training.server.asked.clear()
    training.come_back()
    assert training.server.asked == []
    for changed in (training.document, actor, training.pods()[0]):
        training.server.change(changed, {"status": {**changed.get("status", {}), "observedGeneration": 7}})
        assert training.hear() == [True]
    training.server.asked.clear()
    training.come_back()
    assert training.server.asked != []


def test_that_an_experiment_is_gone_is_news_also_before_it_was_looked_at() -> None:
    world = World()
    world.server.remove("RLExperiment", NAME)
    assert True in world.hear()


def test_news_that_were_lost_are_made_good_after_a_while(training: World) -> None:
    (actor,) = (each for each in training.server.of_kind("Deployment") if each["metadata"]["name"] == "a-actor")
    del training.server.objects[training.server.place("Deployment", "a-actor")]
    training.now += timedelta(seconds=STEADY_SECONDS - SETTINGS.status_seconds)
    training.come_back()
    assert "a-actor" not in training.contents("Deployment")
    training.now += timedelta(seconds=SETTINGS.status_seconds)
    training.come_back()
    assert training.contents("Deployment")["a-actor"]["spec"] == actor["spec"]


@pytest.mark.parametrize("how", ["look", "come_back"])
def test_news_that_come_during_a_look_are_looked_at(training: World, how: str) -> None:
    coordinator = cast("Counting", training.coordinator)
    coordinator.meanwhile = lambda: training.reconciler.wake(training.key, kind="Pod", name="any")
    training.now += timedelta(seconds=SETTINGS.status_seconds)
    getattr(training, how)()
    coordinator.meanwhile = lambda: None
    training.server.asked.clear()
    training.come_back()
    assert training.server.asked != []


def test_numbers_are_not_told_of_an_experiment_that_has_changed(training: World) -> None:
    training.edit(suspend=True)
    before = copy.deepcopy(training.document)
    training.now += timedelta(seconds=SETTINGS.status_seconds)
    training.come_back()
    assert training.document == before
    training.come_back()
    assert read(training.document).phase == "Suspended"


def test_an_object_that_took_anothers_name_is_not_deleted_for_it(world: World) -> None:
    pod = world.pods()[0]
    successor = world.server.put(pod)
    asyncio.run(world.cluster.delete(pod))
    assert successor in world.pods()
    asyncio.run(world.cluster.delete(successor))
    assert successor not in world.pods()


def test_a_status_that_somebody_else_wrote_meanwhile_is_not_overwritten(world: World) -> None:
    before = copy.deepcopy(world.document)
    world.edit(suspend=True)
    with pytest.raises(ResourceConflict):
        asyncio.run(world.cluster.replace_status(before))


def test_a_new_attempt_is_written_down_before_anything_follows_from_it(world: World) -> None:
    world.end(world.pods()[1], exit_code=1)
    gang, sets = uids(world.pods()), world.contents("StatefulSet")
    world.server.refuses = lambda write: write.startswith("replace RLExperiment/status")
    world.look()
    assert uids(world.pods()) == gang
    assert world.contents("StatefulSet") == sets
    world.server.refuses = lambda write: False
    world.settle()
    assert read(world.document).attempt == 2


def test_the_gang_of_the_attempt_before_goes_as_one_and_nobody_else(world: World) -> None:
    others = uids(world.pods("actor")) | uids(world.pods("coordinator"))
    gang = uids(world.pods())
    world.end(world.pods()[1], exit_code=1)
    world.settle()
    assert not uids(world.pods()) & gang
    assert [pod["metadata"]["annotations"][ATTEMPT_ANNOTATION] for pod in world.pods()] == ["2", "2"]
    assert uids(world.pods("actor")) | uids(world.pods("coordinator")) == others
    assert world.said(READY) == ("True", "Ready")


class Killed(Exception):
    """The operator's process ends in front of a write."""


def settled_after_a_kill(write: int | None) -> tuple[World, int]:
    """A run that lost a trainer and an operator that is killed in front of that write; how many writes there were."""
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


def test_an_operator_that_is_killed_in_front_of_any_write_comes_to_the_same_attempt() -> None:
    expected, num_writes = settled_after_a_kill(None)
    assert num_writes > 5
    for write in range(num_writes):
        world, _ = settled_after_a_kill(write)
        status = read(world.document)
        assert (status.attempt, status.restarts, status.recent_failures) == (2, 1, 1), write
        assert world.said(READY) == ("True", "Ready")
        assert world.contents(*POD_KINDS) == expected.contents(*POD_KINDS)


@pytest.mark.parametrize("kind", ["PersistentVolumeClaim", "Service", "NetworkPolicy", "StatefulSet", "Deployment"])
def test_a_refused_object_is_reported_once_and_not_tried_again_for_a_while(kind: str) -> None:
    world = World()
    world.server.forbids = lambda write: write.split()[1] == kind
    world.look()
    assert world.said(ACCEPTED) == ("False", "InvalidSpec")
    for _ in range(20):
        world.now += timedelta(seconds=1)
        assert world.look() == []
    world.server.forbids = lambda write: False
    world.now += timedelta(seconds=REFUSED_SECONDS)
    world.settle()
    assert world.said(ACCEPTED) == ("True", "Accepted")


def test_what_the_operator_wrote_into_the_status_is_no_news_at_any_time() -> None:
    world = World()
    world.hear()
    world.come_back()
    told = [about for event, about in world.server.news if about["kind"] == "RLExperiment"]
    assert len(told) == 2, "an attempt written ahead, and the status at the end"
    assert not any(world.wake(about) for about in told)


def test_what_an_earlier_generation_needed_goes_once_this_one_runs_and_nothing_of_others(world: World) -> None:
    def config_maps() -> set[str]:
        return set(world.contents("ConfigMap"))

    (config,) = (name for name in config_maps() if name.startswith("a-actor-"))
    found = world.server.objects[world.server.place("ConfigMap", config)]
    foreign = {**found["metadata"]["ownerReferences"][0], "uid": "somebody-else"}
    world.server.put({**found, "metadata": {**found["metadata"], "name": "theirs", "ownerReferences": [foreign]}})
    unlabelled = {name: value for name, value in found["metadata"].items() if name != "labels"}
    world.server.put({**found, "metadata": {**unlabelled, "name": "unlabelled"}})
    world.edit(environment={"id": "CartPole-v1"}, actors={"environments": 8, "rolloutLength": 32})
    world.look()
    assert config in config_maps(), "pods of the earlier generation still need it"
    world.settle()
    for pod in [*world.pods("actor"), *world.pods()]:
        world.server.remove("Pod", pod["metadata"]["name"])
    world.settle()
    assert world.said(READY) == ("True", "Ready")
    assert config not in config_maps()
    assert {"theirs", "unlabelled"} <= config_maps()


@pytest.mark.parametrize("suspend", [False, True])
def test_a_role_that_an_edit_takes_away_goes(suspend: bool) -> None:
    world = World(evaluators={"replicas": 1})
    world.settle()
    assert world.pods("evaluator")
    kept = {name: value for name, value in world.document["spec"].items() if name != "evaluators"}
    world.server.change(world.document, {"spec": {**kept, "suspend": suspend}})
    world.settle()
    assert not world.pods("evaluator")
    assert "a-evaluator" not in world.contents(*POD_KINDS)
    assert world.said(READY) == (("False", "Suspended") if suspend else ("True", "Ready"))
    assert bool(world.server.of_kind("Pod")) is not suspend, "the coordinator goes last, but it goes"


def test_an_edit_that_cannot_be_is_told_and_changes_nothing(world: World) -> None:
    before, pods = world.contents(*POD_KINDS, "Service"), uids(world.server.of_kind("Pod"))
    world.edit(environment={"id": "Acrobot-v1"})
    world.settle()
    assert world.said(ACCEPTED) == ("False", "EditRefused")
    assert world.contents(*POD_KINDS, "Service") == before
    assert uids(world.server.of_kind("Pod")) == pods


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
def test_an_object_that_is_not_ours_is_left_alone_and_named(kind: str, name: str) -> None:
    world = World()
    theirs = world.server.put({"apiVersion": "v1", "kind": kind, "metadata": {"name": name}, "data": {"it": "is"}})
    world.look()
    world.look()
    assert world.said(ACCEPTED) == ("False", "NameConflict")
    assert world.server.objects[world.server.place(kind, name)] == theirs


def test_once_an_experiment_is_over_nobody_is_made_again(world: World) -> None:
    result = json.dumps({"reason": "envSteps", "version": "1.3", "result": {}})
    first = next(pod for pod in world.pods() if pod["metadata"]["name"].endswith("-0"))
    world.end(first, exit_code=0, message=f"done {result}")
    world.settle()
    assert world.said(FINISHED) == ("True", "Succeeded")
    for workload in world.server.of_kind(*POD_KINDS):
        world.server.remove(workload["kind"], workload["metadata"]["name"])
    world.settle()
    assert {pod["metadata"]["labels"][ROLE_LABEL] for pod in world.server.of_kind("Pod")} == {"coordinator"}
    assert read(world.document).phase == "Succeeded"


def test_a_suspended_experiment_ends_in_order_and_goes_on_as_a_new_attempt(world: World) -> None:
    world.edit(suspend=True)
    gone: list[str] = []
    for _ in range(10):
        there = {pod["metadata"]["labels"][ROLE_LABEL] for pod in world.server.of_kind("Pod")}
        world.look()
        world.make_pods()
        left = {pod["metadata"]["labels"][ROLE_LABEL] for pod in world.server.of_kind("Pod")}
        gone += sorted(there - left)
    assert gone == ["trainer", "actor", "coordinator"]
    world.edit(suspend=False)
    world.settle()
    assert (read(world.document).attempt, read(world.document).restarts) == (2, 0)
    assert world.said(READY) == ("True", "Ready")


def test_of_two_operators_with_keys_of_their_own_one_looks_after_an_experiment() -> None:
    world = World()
    place = SecretName(namespace="elsewhere", name="its-key")
    theirs = SETTINGS.model_copy(update={"images": Images(actor="theirs:1", learner="theirs:2"), "key_secret": place})
    other = Reconciler(world.cluster, theirs, Silent(), key=b"another", now=lambda: world.now)
    world.settle()
    world.edit(stop={"envSteps": 2000})
    before = list(world.server.writes)
    asyncio.run(other.reconcile(world.key))
    assert world.server.writes == before, "neither what is on record nor what would follow is touched"
    world.settle()
    settled = list(world.server.writes)
    asyncio.run(other.reconcile(world.key))
    assert world.look() == []
    assert world.server.writes == settled
    assert "theirs" not in str(world.contents(*POD_KINDS))
