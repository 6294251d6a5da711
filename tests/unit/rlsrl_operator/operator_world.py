"""An experiment, its operator and a stand-in for the API server, for the tests of passes.

The stand-in has the features on which the operator relies: uids, resourceVersions, generations, preconditions and
conflicts. ``tests/e2e`` tests the others (defaulting, field managers, admission) on a real cluster.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast

from kubernetes.aio.client.exceptions import ApiException

from rlsrl.api.pods import EXPERIMENT_LABEL, ROLE_LABEL
from rlsrl.api.role_names import TRAINER
from rlsrl.testing.documents import minimal
from rlsrl_operator.cluster import Cluster
from rlsrl_operator.coordinator_status import CoordinatorStatus
from rlsrl_operator.keyed_queue import PAUSE_SECONDS
from rlsrl_operator.manifests import Manifest
from rlsrl_operator.manifests.kueue import QUEUE_LABEL
from rlsrl_operator.reconcile import ExperimentKey, Reconciler
from rlsrl_operator.settings import OperatorSettings
from rlsrl_operator.status import condition, read, stamp
from rlsrl_operator.testing import SETTINGS, ended

NAMESPACE, NAME = "research", "a"
POD_KINDS = ("Deployment", "StatefulSet")
Place = tuple[str, str, str]


class Resource(SimpleNamespace):
    """A kind, as the dynamic client represents it."""

    @property
    def subresources(self) -> Mapping[str, Resource]:
        return {"status": Resource(kind=self.kind, of_status=True)}


class ApiServer:
    """Kubernetes objects, behind the calls of the dynamic client that the operator makes."""

    def __init__(self) -> None:
        self.objects: dict[Place, Manifest] = {}
        self.writes: list[str] = []
        """Each write: verb, kind and name."""
        self.reads: list[tuple[str, str]] = []
        """Each read: verb and kind."""
        self.refuses: Callable[[str], bool] = lambda write: False
        """Selects the writes that end in a conflict."""
        self.forbids: Callable[[str], bool] = lambda write: False
        """Selects the writes that an admission policy or a quota refuses."""
        self.refusal = (403, "forbidden by the test")
        """Status and message of the refusals."""
        self.meanwhile: Callable[[str], object] = lambda kind: None
        """Called with the kind at each read."""
        self.hides: Callable[[Place], bool] = lambda place: False
        """Selects the objects that the operator has no permission to get."""
        self.events: list[tuple[str, Manifest]] = []
        """Watch events that no watch has received: type and object."""
        self.resources = self
        self._numbers = itertools.count(1)

    def place(self, kind: str, name: str, namespace: str = NAMESPACE) -> Place:
        return kind, namespace, name

    def of_kind(self, *kinds: str) -> list[Manifest]:
        return [each for (kind, *_), each in self.objects.items() if kind in kinds]

    def put(self, body: Manifest) -> Manifest:
        """Store a new object, with a new uid."""
        made = copy.deepcopy(body)
        number = next(self._numbers)
        made["metadata"] |= {"uid": f"uid-{number}", "resourceVersion": str(number), "generation": 1}
        made["metadata"] = {"namespace": NAMESPACE} | made["metadata"]
        self.objects[self.place(made["kind"], made["metadata"]["name"], made["metadata"]["namespace"])] = made
        self.events.append(("MODIFIED", made))
        return made

    def remove(self, kind: str, name: str, namespace: str = NAMESPACE) -> Manifest:
        """Delete an object."""
        found = self.objects.pop(self.place(kind, name, namespace))
        self.events.append(("DELETED", found))
        return found

    def change(self, found: Manifest, contents: Manifest) -> Manifest:
        """Replace contents; resourceVersion and generation change as on a real server."""
        made = {**copy.deepcopy(found), **copy.deepcopy(contents)}
        moved = {name: value for name, value in made.items() if name not in ("metadata", "status")} != {
            name: value for name, value in found.items() if name not in ("metadata", "status")
        }
        if made != found:
            made["metadata"]["resourceVersion"] = str(next(self._numbers))
            made["metadata"]["generation"] = found["metadata"]["generation"] + moved
            self.objects[self.place(made["kind"], made["metadata"]["name"])] = made
            self.events.append(("MODIFIED", made))
        return made

    # The methods of the dynamic client. ``get`` is also the method of its ``resources``.

    async def get(self, resource: Resource | None = None, **asked: Any) -> Any:
        if resource is None:
            return Resource(kind=asked["kind"], of_status=False)
        self.reads.append(("get" if "name" in asked else "list", resource.kind))
        self.meanwhile(resource.kind)
        if "name" in asked:
            return self._answer(self._readable(self.place(resource.kind, asked["name"], asked["namespace"])))
        wanted = dict(pair.split("=") for pair in asked.get("label_selector", "").split(",") if pair)
        items = [
            each for each in self.of_kind(resource.kind) if wanted.items() <= each["metadata"].get("labels", {}).items()
        ]
        fields = dict(pair.split("=") for pair in asked.get("field_selector", "").split(",") if pair)
        if fields:
            about, reason = fields["involvedObject.uid"], fields["reason"]
            items = [each for each in items if (each["involvedObject"]["uid"], each["reason"]) == (about, reason)]
        return self._answer({"items": items})

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

    def _readable(self, place: Place) -> Manifest:
        if self.hides(place):
            error = ApiException(status=403)
            error.body = json.dumps({"message": "forbidden by the test"})
            raise error
        if place not in self.objects:
            raise ApiException(status=404)
        return self.objects[place]

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
            status, message = self.refusal
            error = ApiException(status=status)
            error.body = json.dumps({"message": message})
            raise error

    @staticmethod
    def _answer(value: Manifest) -> Any:
        return copy.deepcopy(value)


class Silent:
    """Coordinators that do not answer."""

    async def fetch(self, host: str, token: str) -> None:
        del host, token


class Counting:
    """A coordinator that answers with one more step each time."""

    def __init__(self) -> None:
        self.answers = 0
        self.meanwhile: Callable[[], object] = lambda: None

    async def fetch(self, host: str, token: str) -> dict[str, Any]:
        del host, token
        self.answers += 1
        self.meanwhile()
        return {"totals": {"env_steps": self.answers}}


class World:
    """An experiment, its operator, and the controllers that create its pods."""

    def __init__(self, coordinator: CoordinatorStatus | None = None, queue: str | None = None, **spec: Any) -> None:
        document = minimal()
        if queue is not None:
            document["metadata"]["labels"] = {QUEUE_LABEL: queue}
        document["spec"] |= {"trainers": {"replicas": 2}, **spec}
        self.server = ApiServer()
        self.now = datetime(2026, 1, 1, tzinfo=UTC)
        self.server.put(document)
        self.cluster = Cluster(cast("Any", self.server), on_write=lambda kind, verb: None)
        self.key = ExperimentKey(NAMESPACE, NAME)
        self.coordinator = coordinator or Silent()
        self.max_pods = 1000
        """How many pods a quota allows."""
        self.due: datetime | None = self.now
        """When the next pass is due."""
        self.reconciler = self.new_reconciler()

    def new_reconciler(self, settings: OperatorSettings = SETTINGS) -> Reconciler:
        """An operator that has just started."""
        return Reconciler(self.cluster, settings, self.coordinator, key=b"key", now=lambda: self.now)

    @property
    def document(self) -> Manifest:
        return self.server.objects[self.server.place("RLExperiment", NAME)]

    def condition(self, condition_type: Any) -> tuple[str, str]:
        """Return the status and the reason of a condition."""
        found = condition(read(self.document), condition_type)
        assert found is not None
        return found.status, found.reason

    def deliver_events(self) -> list[bool]:
        """Deliver the watch events; return which of them wake the operator."""
        received, self.server.events = self.server.events, []
        return [self.wake(about, is_gone=event == "DELETED") for event, about in received]

    def wake(self, about: Manifest, *, is_gone: bool = False) -> bool:
        """Deliver one watch event."""
        kind, metadata = about["kind"], about["metadata"]
        names = {metadata.get("labels", {}).get(EXPERIMENT_LABEL)}
        names |= {metadata["name"]} if kind == "RLExperiment" else set()
        names |= {owner["name"] for owner in metadata.get("ownerReferences", ())}
        version = "" if is_gone else metadata["resourceVersion"]
        return NAME in names and self.reconciler.wake(self.key, kind=kind, name=metadata["name"], version=version)

    def edit(self, **spec: Any) -> None:
        self.server.change(self.document, {"spec": {**self.document["spec"], **spec}})

    def run_pass(self) -> list[str]:
        """Run a full pass after delivering all events; return its writes."""
        self.deliver_events()
        self.reconciler.wake(self.key, kind="Pod", name="any")
        return self.run_unwoken_pass()

    def run_unwoken_pass(self) -> list[str]:
        """Run a pass without a wake-up; return its writes."""
        before = len(self.server.writes)
        asyncio.run(self.reconciler.reconcile(self.key))
        return self.server.writes[before:]

    def run_for(self, seconds: float) -> int:
        """Run passes when they are due, woken by watches or not, and the controllers; return the number of passes."""
        end, num_passes = self.now + timedelta(seconds=seconds), 0
        self._add_if_woken()
        while self.due is not None and self.due < end:
            self.now, num_passes = self.due, num_passes + 1
            after = asyncio.run(self.reconciler.reconcile(self.key))
            self.due = None if after is None else self.now + timedelta(seconds=after)
            self.make_pods()
            self._add_if_woken()
        self.now = end
        return num_passes

    def _add_if_woken(self) -> None:
        if any(self.deliver_events()):
            self.due = self.now + timedelta(seconds=PAUSE_SECONDS)

    def settle(self) -> None:
        """Run passes and controllers until nothing changes."""
        for _ in range(20):
            self.now += timedelta(seconds=1)
            if not self.run_pass() and not self.make_pods():
                return
        raise AssertionError(f"it never settles: {self.server.writes[-20:]}")

    def pods(self, role: str = TRAINER) -> list[Manifest]:
        return [pod for pod in self.server.of_kind("Pod") if pod["metadata"]["labels"][ROLE_LABEL] == role]

    def workloads(self) -> list[Manifest]:
        """The experiment's: somebody else's have no label."""
        found = self.server.of_kind(*POD_KINDS)
        return [each for each in found if EXPERIMENT_LABEL in each["metadata"].get("labels", {})]

    def make_pods(self) -> bool:
        """Create and delete pods as Kubernetes' controllers do; return whether anything changed."""
        wanted: dict[str, Manifest] = {}
        for workload in self.workloads():
            template = workload["spec"]["template"]["metadata"]
            for index in range(workload["spec"]["replicas"]):
                labels = {**template["labels"], "apps.kubernetes.io/pod-index": str(index)}
                metadata = {**template, "labels": labels, "name": f"{workload['metadata']['name']}-{index}"}
                wanted[metadata["name"]] = metadata
        there = {pod["metadata"]["name"] for pod in self.server.of_kind("Pod")}
        for name in there - wanted.keys():
            self.server.remove("Pod", name)
        for name in sorted(wanted.keys() - there):
            if len(self.server.of_kind("Pod")) >= self.max_pods:
                self._refuse_pod(name)
                continue
            metadata = {**wanted[name], "creationTimestamp": stamp(self.now)}
            container = {"name": "worker", "restartCount": 0, "state": {"running": {}}}
            status = {
                "phase": "Running",
                "conditions": [{"type": "Ready", "status": "True"}],
                "containerStatuses": [container],
            }
            self.server.put({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "status": status})
        return there != {each["metadata"]["name"] for each in self.server.of_kind("Pod")}

    def _refuse_pod(self, name: str) -> None:
        """Report a pod that a quota forbids as Kubernetes' controllers do: a Deployment in its status, a StatefulSet by
        an Event, again and again.
        """
        workload = next(each for each in self.workloads() if name[:-2] == each["metadata"]["name"])
        message = f'pods "{name}" is forbidden: exceeded quota'
        if workload["kind"] == "Deployment":
            failure = {"type": "ReplicaFailure", "status": "True", "message": message}
            if "status" not in workload:
                self.server.change(workload, {"status": {"conditions": [failure]}})
            return
        about = {"metadata": {"name": f"{name}.refused"}, "involvedObject": {"uid": workload["metadata"]["uid"]}}
        what = {"reason": "FailedCreate", "message": message, "lastTimestamp": stamp(self.now)}
        self.server.objects[self.server.place("Event", f"{name}.refused")] = {"kind": "Event", **about, **what}

    def end(self, pod: Manifest, exit_code: int, message: str = "") -> None:
        """End the pod's worker."""
        container = {"name": "worker", "restartCount": 0, "state": ended(exit_code, message)}
        self.server.change(pod, {"status": {"phase": "Running", "containerStatuses": [container]}})

    def contents(self, *kinds: str) -> dict[str, Manifest]:
        """Return spec and data of the objects of these kinds, by name."""
        kept = ("spec", "data")
        return {
            each["metadata"]["name"]: {part: each[part] for part in kept if part in each}
            for each in self.server.of_kind(*kinds)
        }
