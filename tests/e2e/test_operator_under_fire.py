"""Kill the operator between any two writes, break its watches and run two of it: the objects must stay the same.

The operator runs as a local process and reaches the real API server through a proxy that injects the faults. A control
plane is enough: a stand-in node (`rlsrl.testing.stand_in_node`) reports the pods as running.
"""

from __future__ import annotations

import copy
import itertools
import json
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from operator_process import OperatorProcess

from rlsrl.api.edits import refused
from rlsrl.api.load import SpecError, load_text
from rlsrl.testing.cluster_api import Api
from rlsrl.testing.documents import ALLOWED_EGRESS, JsonDocument, as_sent, variation
from rlsrl.testing.http_proxy import Request
from rlsrl.testing.kubectl import Namespace, api_proxy
from rlsrl.testing.manifest_diff import Manifests, Object, decided_by_spec, difference, normalized
from rlsrl.testing.recovery import Recovered
from rlsrl.testing.stand_in_node import StandInNode, end_container
from rlsrl.testing.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

IDLE_SECONDS = 0.4
"""An operator that sends no request for this long has finished its work."""
QUIET_SECONDS = 3.0
"""How long a settled operator must write nothing."""
STEADY_SECONDS = 20.0
"""Reconcile interval of an operator whose watch events are lost; the default interval is minutes."""
NOT_READY = {"type": "Ready", "status": "False", "reason": "NodeNotReady"}
"""The condition that the node controller sets on the pods of an unreachable node."""
SAME = "the same objects"
SHOWN = 20_000
"""Longest difference to print, in characters: a missing object differs as a whole."""
NUM_ROWS_AT_ONCE = 4
KEY = "operator-key"
KINDS = {
    "ConfigMap": "/api/v1/namespaces/{}/configmaps",
    "PersistentVolumeClaim": "/api/v1/namespaces/{}/persistentvolumeclaims",
    "Pod": "/api/v1/namespaces/{}/pods",
    "Secret": "/api/v1/namespaces/{}/secrets",
    "Service": "/api/v1/namespaces/{}/services",
    "Deployment": "/apis/apps/v1/namespaces/{}/deployments",
    "StatefulSet": "/apis/apps/v1/namespaces/{}/statefulsets",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/namespaces/{}/networkpolicies",
    "RLExperiment": "/apis/rlsrl.dev/v1alpha1/namespaces/{}/rlexperiments",
}
OTHER_KEY = "other-key"
NOT_OURS = ("kube-root-ca.crt", KEY, OTHER_KEY)
SMALL: Object = {
    "environment": {"id": "CartPole-v1"},
    "policy": {"network": {"mlp": {"hiddenSizes": [16]}}},
    "actors": {"environmentsPerActor": 8, "replicas": 2},
    "trainers": {"batchEnvironments": 16},
    "parameters": {"everySeconds": 1},
    "stop": {"wallSeconds": 600},
}
LARGE: Object = SMALL | {
    "policyWorkers": {"replicas": 1},
    "bufferWorkers": {"replicas": 1},
    "evaluators": {"replicas": 1},
}


@dataclass
class ExperimentNamespace:
    """A namespace with the experiment ``a``, and the settings that its operators share."""

    name: str
    api: Api
    address: str
    node: StandInNode
    folder: Path
    num_operators: Iterator[int] = field(default_factory=itertools.count)

    def operator(
        self, *, kill_at: int | None = None, steady_seconds: float | None = None, **settings: Any
    ) -> OperatorProcess:
        """Return a new operator process that manages only this namespace."""
        config = {
            "namespaces": [self.name],
            "keySecret": {"namespace": self.name, "name": KEY},
            "statusSeconds": 3600,  # so that every write follows an event, not the timer
            "images": {"actor": "none/actor:1", "learner": "none/learner:1"},
            "roles": {"default": {"nodeSelector": self.node.selector}},
            "environments": {"egress": ALLOWED_EGRESS},
            **settings,
        }
        folder = self.folder / str(next(self.num_operators))
        api = f"http://{self.address}"
        return OperatorProcess(api, config, folder, kill_at=kill_at, steady_seconds=steady_seconds)

    def path(self, kind: str, name: str = "") -> str:
        return KINDS[kind].format(self.name) + (f"/{name}" if name else "")

    def create(self, spec: Object) -> None:
        document = {"apiVersion": "rlsrl.dev/v1alpha1", "kind": "RLExperiment", "metadata": {"name": "a"}, "spec": spec}
        assert self.api.send("POST", self.path("RLExperiment"), document) is not None

    def scale(self, replicas: int) -> None:
        assert self.api.merge(self.path("RLExperiment", "a/scale"), {"spec": {"replicas": replicas}}) is not None

    def edit(self, **spec: Any) -> None:
        """Merge into the spec."""
        assert self.api.merge(self.path("RLExperiment", "a"), {"spec": spec}) is not None

    def replace(self, spec: Object) -> None:
        """Replace the spec."""
        found = self.api.get(self.path("RLExperiment", "a"))
        assert found is not None
        assert self.api.send("PUT", self.path("RLExperiment", "a"), {**found, "spec": spec}) is not None

    def delete(self) -> None:
        assert self.api.send("DELETE", self.path("RLExperiment", "a")) is not None

    def finish(self) -> None:
        """End the trainers with the message that the goal is reached, and end the evaluators."""
        for pod in self.api.items(self.path("Pod")):
            role = pod["metadata"]["labels"]["rlsrl.dev/role"]
            if role in ("trainer", "evaluator"):
                end_container(self.api, pod, message='done {"reason": "envSteps"}' if role == "trainer" else "")

    def objects(self) -> list[Object]:
        return [
            {**found, "kind": kind}
            for kind in KINDS
            for found in self.api.items(self.path(kind))
            if found["metadata"]["name"] not in NOT_OURS
        ]

    def manifests(self) -> Manifests:
        return normalized(self.objects())

    def status(self) -> Object:
        """Return the status of the newest generation, or an empty object if the operator has not written it yet."""
        found = self.api.get(self.path("RLExperiment", "a")) or {}
        status: Object = found.get("status", {})
        return status if status.get("observedGeneration") == found.get("metadata", {}).get("generation") else {}

    def is_ready(self) -> bool:
        status = self.status()
        conditions = {condition["type"]: condition["status"] for condition in status.get("conditions", ())}
        # A replaced pod may still exist for a while after its replacement is ready.
        ending = any("deletionTimestamp" in pod["metadata"] for pod in self.api.items(self.path("Pod")))
        return status.get("phase") == "Running" and conditions.get("Ready") == "True" and not ending

    def is_suspended(self) -> bool:
        return self.status().get("phase") == "Suspended" and not self.api.items(self.path("Pod"))

    def is_succeeded(self) -> bool:
        return self.status().get("phase") == "Succeeded" and len(self.api.items(self.path("Pod"))) == 1

    def is_gone(self) -> bool:
        return not self.manifests()

    def await_end(self, operator: OperatorProcess, end: Callable[[ExperimentNamespace], bool]) -> None:
        """Wait until `end` holds and the operator is idle, or until the operator has been killed."""
        since: float | None = None

        def settled() -> bool:
            nonlocal since
            operator.check()
            if not end(self):
                since = None
            elif since is None:
                since = time.monotonic()
            # The event that ends the wait may not have reached the operator yet, so `end` must hold for a while.
            rested = since is not None and time.monotonic() - since > IDLE_SECONDS and operator.is_idle(IDLE_SECONDS)
            return operator.killed_at is not None or rested

        try:
            until(settled, "the namespace is settled")
        except TimeoutError as error:
            raise AssertionError(f"{error}\n{self.status()}\n{operator.log.read_text()[-3000:]}") from None

    def await_manifests(self, operator: OperatorProcess, expected: Manifests) -> None:
        """Wait until the objects equal `expected` and the operator is idle."""

        def settled() -> bool:
            operator.check()
            return operator.is_idle(IDLE_SECONDS) and self.manifests() == expected

        try:
            until(settled, "the objects are as expected")
        except TimeoutError:
            log = operator.log.read_text()[-3000:]
            pytest.fail(f"{difference(expected, self.manifests())[:SHOWN]}\n{log}", pytrace=False)


MakeNamespace = Callable[[], ExperimentNamespace]


@pytest.fixture(scope="module")
def no_other_operator(definition: None) -> Iterator[None]:
    """Stop the suite's own operators: they would manage these experiments too."""
    system = Namespace("rlsrl-system")
    deployments = system.list("deployments")
    for deployment in deployments:
        system.kubectl("scale", f"deployment/{deployment['metadata']['name']}", "--replicas=0")
    until(lambda: not system.list("pods"), "no operator runs")
    yield
    for deployment in deployments:
        name, replicas = deployment["metadata"]["name"], deployment["spec"]["replicas"]
        system.kubectl("scale", f"deployment/{name}", f"--replicas={replicas}")
        system.kubectl("rollout", "status", f"deployment/{name}", "--timeout=60s")


@pytest.fixture(scope="module")
def address(no_other_operator: None) -> Iterator[str]:
    with api_proxy() as found:
        yield found


@pytest.fixture(scope="module")
def node(address: str) -> Iterator[StandInNode]:
    with StandInNode(address, f"stand-in-{uuid.uuid4().hex[:8]}") as made:
        yield made


@contextmanager
def new_namespace(address: str, node: StandInNode, folder: Path) -> Iterator[ExperimentNamespace]:
    """Create a namespace for the duration of the context."""
    name = f"fire-{uuid.uuid4().hex[:8]}"
    labels = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn")}
    document = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
    namespace = ExperimentNamespace(name, Api(address), address, node, folder / name)
    assert namespace.api.send("POST", "/api/v1/namespaces", document) is not None
    try:
        yield namespace
    finally:
        namespace.api.send("DELETE", f"/api/v1/namespaces/{name}")
        namespace.api.close()


@pytest.fixture
def make_namespace(address: str, node: StandInNode, tmp_path: Path) -> Iterator[MakeNamespace]:
    """Return a function that creates namespaces; the test's end deletes them."""
    with ExitStack() as namespaces:
        yield lambda: namespaces.enter_context(new_namespace(address, node, tmp_path))


@dataclass(frozen=True, kw_only=True)
class Transition:
    """Actions of a user or of the run that lead from one settled state to the next."""

    steps: tuple[Callable[[ExperimentNamespace], None], ...]
    """The last step is under test; the steps before it prepare the state."""
    ends: tuple[Callable[[ExperimentNamespace], bool], ...]
    """A condition for each step: the test waits for it before the next step."""
    afterwards: Callable[[ExperimentNamespace], None] | None = None
    """An action while no operator runs."""


def create(spec: Object) -> Callable[[ExperimentNamespace], None]:
    return lambda namespace: namespace.create(spec)


UPDATE = {
    "algorithm": {"ppo": {"learningRate": 0.0625}},
    "pacing": {"maxPolicyLag": 2},
    "policyWorkers": None,
    "evaluators": {"environments": 3},
    "parameters": {"store": {"filesystem": {"whenDeleted": "Delete"}}},
}
"""Edits a live field, the gang, other roles and the volume, and removes a role."""
OWNED: Object = SMALL | {"parameters": {"store": {"filesystem": {"whenDeleted": "Delete"}}}}
READY, SUSPENDED, SUCCEEDED, GONE = (
    ExperimentNamespace.is_ready,
    ExperimentNamespace.is_suspended,
    ExperimentNamespace.is_succeeded,
    ExperimentNamespace.is_gone,
)
TRANSITIONS = {
    "create": Transition(steps=(create(SMALL),), ends=(READY,)),
    "create every role": Transition(steps=(create(LARGE),), ends=(READY,)),
    "update": Transition(steps=(create(LARGE), lambda namespace: namespace.edit(**UPDATE)), ends=(READY, READY)),
    "scale": Transition(steps=(create(SMALL), lambda namespace: namespace.scale(4)), ends=(READY, READY)),
    "suspend": Transition(
        steps=(create(LARGE), lambda namespace: namespace.edit(suspend=True)), ends=(READY, SUSPENDED)
    ),
    "resume": Transition(
        steps=(create(LARGE | {"suspend": True}), lambda namespace: namespace.edit(suspend=False)),
        ends=(SUSPENDED, READY),
    ),
    "finish": Transition(steps=(create(LARGE), ExperimentNamespace.finish), ends=(READY, SUCCEEDED)),
    "expire": Transition(
        steps=(create(OWNED | {"ttlSecondsAfterFinished": 1}), ExperimentNamespace.finish), ends=(READY, GONE)
    ),
    "delete": Transition(steps=(create(OWNED), ExperimentNamespace.delete), ends=(READY, GONE)),
    "delete while it is made": Transition(steps=(create(OWNED),), ends=(READY,), afterwards=ExperimentNamespace.delete),
}


@dataclass(frozen=True)
class Kill:
    """A kill of the operator and the recovery from it."""

    write: Request
    """The write that did not reach the API server."""
    seconds: float
    """From the start of the next operator until the objects were as expected."""

    def __str__(self) -> str:
        path = self.write.path.partition("?")[0].partition("/namespaces/")[2].partition("/")[2]
        return f"{self.write.method} {path}"


def perform(
    transition: Transition, namespace: ExperimentNamespace, *, kill_at: int | None, expected: Manifests | None = None
) -> Kill | None:
    """Perform the transition; after a kill, start another operator and wait until the objects are as expected."""
    *before, act = transition.steps
    if not before:
        act(namespace)
    with namespace.operator(kill_at=None if before else kill_at) as operator:
        for step, end in zip(before, transition.ends, strict=False):
            step(namespace)
            namespace.await_end(operator, end)
        if before:
            operator.count(kill_at=kill_at)
            act(namespace)
        namespace.await_end(operator, transition.ends[-1])
        killed_at = operator.killed_at
    if transition.afterwards is not None:
        transition.afterwards(namespace)
    if killed_at is None:
        return None
    began = time.monotonic()
    with namespace.operator() as operator:
        namespace.await_manifests(operator, expected or {})
        return Kill(killed_at, time.monotonic() - began)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] if name != "scale" else []) for name in TRANSITIONS]
)
def test_a_kill_between_any_two_writes_leads_to_the_same_objects(
    name: str, make_namespace: MakeNamespace, recovered: Recovered
) -> None:
    transition = TRANSITIONS[name]
    namespace = make_namespace()
    perform(transition, namespace, kill_at=None)
    if transition.afterwards is not None:
        until(namespace.is_gone, "nothing is left")
    expected = namespace.manifests()

    def kill_before(n: int) -> Kill | None:
        kill = perform(transition, make_namespace(), kill_at=n, expected=expected)
        if kill is not None:
            print(f"{name}, killed before write {n}, {kill}: {kill.seconds:.1f} s")
        return kill

    kills: list[Kill] = []
    with ThreadPoolExecutor(NUM_ROWS_AT_ONCE) as rows:
        for first in itertools.count(step=NUM_ROWS_AT_ONCE):
            batch = list(rows.map(kill_before, range(first, first + NUM_ROWS_AT_ONCE)))
            kills += [kill for kill in batch if kill is not None]
            if None in batch:
                break
    # A deletion may need no write: the garbage collector deletes the objects.
    assert kills or name == "delete", "no write of the operator went through the proxy"
    slowest = max((kill.seconds for kill in kills), default=0.0)
    recovered(f"operator killed before any of {len(kills)} writes: {name}", slowest, SAME)


LIFE_CYCLE: tuple[tuple[Callable[[ExperimentNamespace], None], Callable[[ExperimentNamespace], bool]], ...] = (
    (create(LARGE), READY),
    (lambda namespace: namespace.edit(**UPDATE), READY),
    (lambda namespace: namespace.scale(3), READY),
    (lambda namespace: namespace.edit(suspend=True), SUSPENDED),
    (lambda namespace: namespace.edit(suspend=False), READY),
    (ExperimentNamespace.finish, SUCCEEDED),
)
"""A life cycle with each kind of action, and the condition that ends it."""


@pytest.fixture(scope="module")
def life_cycle_manifests(
    address: str, node: StandInNode, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Manifests, ...]:
    """Return the manifests after each action of an undisturbed life cycle."""
    folder = tmp_path_factory.mktemp("life")
    with new_namespace(address, node, folder) as namespace, namespace.operator() as operator:
        snapshots = []
        for act, end in LIFE_CYCLE:
            act(namespace)
            namespace.await_end(operator, end)
            snapshots.append(namespace.manifests())
        return tuple(snapshots)


WatchFilter = Callable[[Request, bytes], bytes | None]
"""Returns the bytes of a watch event to pass on; None ends the watch."""


def is_about_children(request: Request) -> bool:
    return "/rlexperiments" not in request.path


def late() -> WatchFilter:
    """Delay the first event after a silence by two seconds, like an API server that is behind."""
    last: dict[int, float] = {}

    def line(request: Request, read: bytes) -> bytes:
        if time.monotonic() - last.get(request.number, 0.0) > 0.5:
            threading.Event().wait(2.0)
        last[request.number] = time.monotonic()
        return read

    return line


def lost(is_lost: Callable[[Request], bool]) -> WatchFilter:
    return lambda request, read: b"" if is_lost(request) else read


def cut() -> WatchFilter:
    """Drop every fourth event and end its watch."""
    numbers = itertools.count(1)
    return lambda request, read: read if next(numbers) % 4 else None


def expired() -> WatchFilter:
    """Replace every fourth event with the error that the watch has expired."""
    numbers = itertools.count(1)
    status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Expired", "code": 410}
    error = json.dumps({"type": "ERROR", "object": status}).encode() + b"\n"
    return lambda request, read: read if next(numbers) % 4 else error


def created_only() -> WatchFilter:
    """Drop every event of an experiment but its creation."""
    return lambda request, read: b"" if "/rlexperiments" in request.path and b'"ADDED"' not in read[:40] else read


FAULTS: dict[str, Callable[[], WatchFilter]] = {
    "late": late,
    "cut": cut,
    "expired": expired,
    "children lost": lambda: lost(is_about_children),
    "edits lost": created_only,
}


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=[pytest.mark.full] if name != "cut" else []) for name in FAULTS]
)
def test_wrong_watch_events_lead_to_the_same_objects(
    fault: str, make_namespace: MakeNamespace, life_cycle_manifests: tuple[Manifests, ...], recovered: Recovered
) -> None:
    namespace, seconds = make_namespace(), []
    with namespace.operator(statusSeconds=1, steady_seconds=STEADY_SECONDS) as operator:
        harmed = FAULTS[fault]()
        operator.proxy.line = lambda request, read: harmed(request, read) if "watch=true" in request.path else read
        for (act, _), expected in zip(LIFE_CYCLE, life_cycle_manifests, strict=True):
            began = time.monotonic()
            act(namespace)
            namespace.await_manifests(operator, expected)
            seconds.append(time.monotonic() - began)
    recovered(f"operator's watch events: {fault}", max(seconds), SAME)


def test_two_operators_by_mistake_reach_the_same_objects_and_stop_writing(
    make_namespace: MakeNamespace, life_cycle_manifests: tuple[Manifests, ...]
) -> None:
    namespace = make_namespace()
    with namespace.operator() as one, namespace.operator() as two:
        for (act, _), expected in zip(LIFE_CYCLE, life_cycle_manifests, strict=True):
            began = time.monotonic()
            act(namespace)
            namespace.await_manifests(one, expected)
            until(lambda: two.is_idle(IDLE_SECONDS), "the other operator is idle too")
            print(f"{one.num_writes} and {two.num_writes} writes, {time.monotonic() - began:.1f} s")
            one.count()
            two.count()
        assert_quiet(one, two)


@pytest.mark.full
def test_a_node_that_was_marked_lost_by_mistake_changes_nothing(make_namespace: MakeNamespace) -> None:
    namespace = make_namespace()
    with namespace.operator() as operator:
        namespace.create(LARGE)
        namespace.await_end(operator, READY)
        expected = namespace.manifests()
        for pod in namespace.api.items(namespace.path("Pod")):  # as the node controller does
            patch = {"metadata": {"uid": pod["metadata"]["uid"]}, "status": {"conditions": [NOT_READY]}}
            assert namespace.api.merge(namespace.path("Pod", f"{pod['metadata']['name']}/status"), patch) is not None
        namespace.await_manifests(operator, expected)
        namespace.await_end(operator, READY)


@pytest.mark.full
def test_only_one_of_two_releases_manages_an_experiment(make_namespace: MakeNamespace) -> None:
    """The releases have different keys and images, so that they would create different objects."""
    namespace = make_namespace()
    other = {
        "keySecret": {"namespace": namespace.name, "name": OTHER_KEY},
        "images": {"actor": "o/a:2", "learner": "o/l:2"},
    }
    with namespace.operator() as one, namespace.operator(**other) as two:
        until(lambda: one.is_idle(IDLE_SECONDS) and two.is_idle(IDLE_SECONDS), "both are idle")
        for act, end in LIFE_CYCLE:
            one.count()
            two.count()
            act(namespace)
            namespace.await_end(one, end)
            until(lambda: two.is_idle(IDLE_SECONDS), "the other operator is idle too")
            images = {pod["spec"]["containers"][0]["image"] for pod in namespace.api.items(namespace.path("Pod"))}
            assert images <= {"none/actor:1", "none/learner:1"} or images <= {"o/a:2", "o/l:2"}
            print(f"{one.num_writes} and {two.num_writes} writes")
            # Both may write the first status of a new experiment; then one of them leaves the experiment alone.
            assert min(one.num_writes, two.num_writes) <= 1
        assert_quiet(one, two)


def assert_quiet(*operators: OperatorProcess) -> None:
    """Fail if an operator still writes."""
    for operator in operators:
        operator.count()
    time.sleep(QUIET_SECONDS)  # the test needs a span without writes
    assert [operator.num_writes for operator in operators] == [0] * len(operators)


NUM_EDITS = 5


@pytest.mark.parametrize("num_sequences", [1, pytest.param(20, marks=[pytest.mark.full, pytest.mark.timeout(1200)])])
def test_objects_depend_only_on_the_spec_and_not_on_its_history(
    num_sequences: int, make_namespace: MakeNamespace
) -> None:
    def sequence(seed: int) -> None:
        began = time.monotonic()
        rng = random.Random(seed)
        document = with_few_pods(rng, variation(rng))
        edited, fresh = make_namespace(), make_namespace()
        with edited.operator() as operator:
            edited.create(document["spec"])
            edited.await_end(operator, end_of(document))
            for _ in range(NUM_EDITS):
                document = legal_edit(rng, document)
                edited.replace(document["spec"])
                edited.await_end(operator, end_of(document))
        with fresh.operator() as operator:
            fresh.create(document["spec"])
            fresh.await_end(operator, end_of(document))
        expected, found = (decided_by_spec(namespace.objects()) for namespace in (fresh, edited))
        assert expected == found, f"seed {seed}: {difference(expected, found)[:SHOWN]}"
        print(f"seed {seed}: {NUM_EDITS} edits, {time.monotonic() - began:.1f} s")

    with ThreadPoolExecutor(NUM_ROWS_AT_ONCE) as rows:
        list(rows.map(sequence, range(num_sequences)))


def end_of(document: JsonDocument) -> Callable[[ExperimentNamespace], bool]:
    return SUSPENDED if document["spec"].get("suspend") else READY


def is_legal(document: JsonDocument) -> bool:
    try:
        load_text(json.dumps(document))
    except SpecError:
        return False
    return True


def with_few_pods(rng: random.Random, document: JsonDocument) -> JsonDocument:
    """Return the document with at most three pods a role and, half of the time, a gang of two."""
    spec = document["spec"]
    for role in ("policyWorkers", "evaluators"):
        if role in spec and "parameters" not in spec[role]:  # an evaluator of one version has no second one
            spec[role]["replicas"] = rng.randint(1, 3)
    # Values for each environment fix the number of environments, which most edits change.
    by_rank = spec["environment"].get("kwargsByRank", {})
    by_rank.pop("each", None)
    if not by_rank:
        spec["environment"].pop("kwargsByRank", None)
    gang = {**document, "spec": {**spec, "trainers": {**spec["trainers"], "replicas": 2}}}
    document = as_sent(gang if rng.random() < 0.5 and is_legal(gang) else document)
    return {**document, "metadata": {"name": "a"}}


def legal_edit(rng: random.Random, before: JsonDocument) -> JsonDocument:
    """Return a variation that the experiment may be edited into."""
    for _ in range(1000):
        after = with_few_pods(rng, variation(rng))
        for _ in range(3):  # restoring an immutable field may make another edit illegal
            if not is_legal(after):
                break
            paths = refused(load_text(json.dumps(before)), load_text(json.dumps(after)))
            if not paths:
                return after
            for path in paths:
                copy_field(before, after, path.split("."))
    raise AssertionError(f"found no legal edit of {before}")


def copy_field(source: JsonDocument, target: JsonDocument, path: list[str]) -> None:
    """Copy a field from source to target; remove it from target if source lacks it."""
    *above, name = path
    for step in above:
        source = source.get(step, {})
        target = target.setdefault(step, {})
    if name in source:
        target[name] = copy.deepcopy(source[name])
    else:
        target.pop(name, None)
