"""The operator is killed between any two of its writes, misled by its watches and doubled: what it makes is the same.

It runs as a process of this machine and reaches the real API server through a proxy, which harms it. Nodes have no part
in this: the pods ask for one that only shows them to run (`rlsrl.testing.stand_in_node`), so a control plane is enough.
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

from rlsrl.api.edits import refused
from rlsrl.api.load import SpecError, load_text
from rlsrl.testing.cluster_api import Api
from rlsrl.testing.documents import JsonDocument, as_sent, variation
from rlsrl.testing.http_proxy import Request
from rlsrl.testing.kubectl import Namespace, api_proxy
from rlsrl.testing.manifest_diff import Manifests, Object, decided_by_spec, difference, normalized
from rlsrl.testing.operator_process import OperatorProcess
from rlsrl.testing.recovery import Recovered
from rlsrl.testing.stand_in_node import StandInNode, end_container
from rlsrl.testing.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

IDLE_SECONDS = 0.4
"""An operator that asked for nothing for that long has done what it had to."""
QUIET_SECONDS = 3.0
STEADY_SECONDS = 20.0
"""Of an operator whose news are lost: by itself it would take minutes to look whether there were any."""
NOT_READY = {"type": "Ready", "status": "False", "reason": "NodeNotReady"}
"""What the node controller says of pods on a node that it does not hear of."""
SAME = "the same objects"
SHOWN = 20_000
"""Of a difference, in characters: where an object is missing all of it differs."""
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
class Place:
    """A namespace with the experiment ``a``, and what its operators share."""

    name: str
    api: Api
    address: str
    node: StandInNode
    folder: Path
    num_operators: Iterator[int] = field(default_factory=itertools.count)

    def operator(
        self, *, kill_at: int | None = None, steady_seconds: float | None = None, **settings: Any
    ) -> OperatorProcess:
        """Another life of the operator that looks after this namespace alone."""
        told = {
            "namespaces": [self.name],
            "keySecret": {"namespace": self.name, "name": KEY},
            "statusSeconds": 3600,  # what it does, it does because of what it is told or finds
            "images": {"actor": "none/actor:1", "learner": "none/learner:1"},
            "roles": {"default": {"nodeSelector": self.node.selector}},
            **settings,
        }
        folder = self.folder / str(next(self.num_operators))
        api = f"http://{self.address}"
        return OperatorProcess(api, told, folder, kill_at=kill_at, steady_seconds=steady_seconds)

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
        """Put another spec in the place of the one that is there."""
        found = self.api.get(self.path("RLExperiment", "a"))
        assert found is not None
        assert self.api.send("PUT", self.path("RLExperiment", "a"), {**found, "spec": spec}) is not None

    def delete(self) -> None:
        assert self.api.send("DELETE", self.path("RLExperiment", "a")) is not None

    def finish(self) -> None:
        """Rank 0 says that the goal is reached; the evaluators have no more to play."""
        for pod in self.api.items(self.path("Pod")):
            role = pod["metadata"]["labels"]["rlsrl.dev/role"]
            if role in ("trainer", "evaluator"):
                end_container(self.api, pod, message='done {"reason": "envSteps"}' if role == "trainer" else "")

    def objects(self) -> list[Object]:
        return [
            {**each, "kind": kind}
            for kind in KINDS
            for each in self.api.items(self.path(kind))
            if each["metadata"]["name"] not in NOT_OURS
        ]

    def told(self) -> Manifests:
        return normalized(self.objects())

    def status(self) -> Object:
        found = self.api.get(self.path("RLExperiment", "a")) or {}
        status: Object = found.get("status", {})
        return status if status.get("observedGeneration") == found.get("metadata", {}).get("generation") else {}

    def is_ready(self) -> bool:
        status = self.status()
        conditions = {each["type"]: each["status"] for each in status.get("conditions", ())}
        # Who is replaced may be there for a while after whoever comes instead.
        ending = any("deletionTimestamp" in pod["metadata"] for pod in self.api.items(self.path("Pod")))
        return status.get("phase") == "Running" and conditions.get("Ready") == "True" and not ending

    def is_suspended(self) -> bool:
        return self.status().get("phase") == "Suspended" and not self.api.items(self.path("Pod"))

    def is_over(self) -> bool:
        return self.status().get("phase") == "Succeeded" and len(self.api.items(self.path("Pod"))) == 1

    def is_gone(self) -> bool:
        return not self.told()

    def await_end(self, operator: OperatorProcess, end: Callable[[Place], bool]) -> None:
        """Wait until it is so, and the operator has no more to do; or the operator has been killed."""
        since: float | None = None

        def settled() -> bool:
            nonlocal since
            operator.check()
            if not end(self):
                since = None
            elif since is None:
                since = time.monotonic()
            # Of what has just come to its end the operator may be about to hear, and then it has something to do.
            rested = since is not None and time.monotonic() - since > IDLE_SECONDS and operator.is_idle(IDLE_SECONDS)
            return operator.killed_at is not None or rested

        try:
            until(settled, "it is done")
        except TimeoutError as error:
            raise AssertionError(f"{error}\n{self.status()}\n{operator.log.read_text()[-3000:]}") from None

    def await_told(self, operator: OperatorProcess, expected: Manifests) -> None:
        """Wait until the objects say what they should, and the operator has no more to do."""

        def settled() -> bool:
            operator.check()
            return operator.is_idle(IDLE_SECONDS) and self.told() == expected

        try:
            until(settled, "the objects are as expected")
        except TimeoutError:
            log = operator.log.read_text()[-3000:]
            pytest.fail(f"{difference(expected, self.told())[:SHOWN]}\n{log}", pytrace=False)


MakePlace = Callable[[], Place]


@pytest.fixture(scope="module")
def lone(definition: None) -> Iterator[None]:
    """No operator of the suite's is there: it would look after these experiments, too."""
    system = Namespace("rlsrl-system")
    there = system.list("deployments")
    for each in there:
        system.kubectl("scale", f"deployment/{each['metadata']['name']}", "--replicas=0")
    until(lambda: not system.list("pods"), "no operator is there")
    yield
    for each in there:
        name, replicas = each["metadata"]["name"], each["spec"]["replicas"]
        system.kubectl("scale", f"deployment/{name}", f"--replicas={replicas}")
        system.kubectl("rollout", "status", f"deployment/{name}", "--timeout=60s")


@pytest.fixture(scope="module")
def address(lone: None) -> Iterator[str]:
    with api_proxy() as found:
        yield found


@pytest.fixture(scope="module")
def node(address: str) -> Iterator[StandInNode]:
    with StandInNode(address, f"stand-in-{uuid.uuid4().hex[:8]}") as made:
        yield made


@contextmanager
def new_place(address: str, node: StandInNode, folder: Path) -> Iterator[Place]:
    """A namespace, for as long as the context."""
    name = f"fire-{uuid.uuid4().hex[:8]}"
    labels = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn")}
    document = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
    place = Place(name, Api(address), address, node, folder / name)
    assert place.api.send("POST", "/api/v1/namespaces", document) is not None
    try:
        yield place
    finally:
        place.api.send("DELETE", f"/api/v1/namespaces/{name}")
        place.api.close()


@pytest.fixture
def make_place(address: str, node: StandInNode, tmp_path: Path) -> Iterator[MakePlace]:
    """Makes namespaces; they go when the test ends."""
    with ExitStack() as places:
        yield lambda: places.enter_context(new_place(address, node, tmp_path))


@dataclass(frozen=True, kw_only=True)
class Deed:
    """What a user or the run does, from one settled state to the next."""

    steps: tuple[Callable[[Place], None], ...]
    """The last of them is the deed; those before prepare it, and each is waited for."""
    ends: tuple[Callable[[Place], bool], ...]
    """Whether it has come about, one a step."""
    afterwards: Callable[[Place], None] | None = None
    """What is done while no operator is there."""


def create(spec: Object) -> Callable[[Place], None]:
    return lambda place: place.create(spec)


UPDATE = {
    "algorithm": {"ppo": {"learningRate": 0.0625}},
    "pacing": {"maxPolicyLag": 2},
    "policyWorkers": None,
    "evaluators": {"environments": 3},
    "parameters": {"store": {"filesystem": {"whenDeleted": "Delete"}}},
}
"""Live, of the gang, of others, of the volume, and a role less."""
OWNED: Object = SMALL | {"parameters": {"store": {"filesystem": {"whenDeleted": "Delete"}}}}
READY, SUSPENDED, OVER, GONE = Place.is_ready, Place.is_suspended, Place.is_over, Place.is_gone
DEEDS = {
    "create": Deed(steps=(create(SMALL),), ends=(READY,)),
    "create every role": Deed(steps=(create(LARGE),), ends=(READY,)),
    "update": Deed(steps=(create(LARGE), lambda place: place.edit(**UPDATE)), ends=(READY, READY)),
    "scale": Deed(steps=(create(SMALL), lambda place: place.scale(4)), ends=(READY, READY)),
    "suspend": Deed(steps=(create(LARGE), lambda place: place.edit(suspend=True)), ends=(READY, SUSPENDED)),
    "resume": Deed(
        steps=(create(LARGE | {"suspend": True}), lambda place: place.edit(suspend=False)), ends=(SUSPENDED, READY)
    ),
    "finish": Deed(steps=(create(LARGE), Place.finish), ends=(READY, OVER)),
    "expire": Deed(steps=(create(OWNED | {"ttlSecondsAfterFinished": 1}), Place.finish), ends=(READY, GONE)),
    "delete": Deed(steps=(create(OWNED), Place.delete), ends=(READY, GONE)),
    "delete while it is made": Deed(steps=(create(OWNED),), ends=(READY,), afterwards=Place.delete),
}


@dataclass(frozen=True)
class Killed:
    """A life that was cut short, and what came of it."""

    at: Request
    """The write that did not arrive."""
    seconds: float
    """From the start of the next life until everything was as it should be."""

    def __str__(self) -> str:
        path = self.at.path.partition("?")[0].partition("/namespaces/")[2].partition("/")[2]
        return f"{self.at.method} {path}"


def do(deed: Deed, place: Place, *, kill_at: int | None, expected: Manifests | None = None) -> Killed | None:
    """Do it; once the operator is killed, let another one come up and bring everything about that is expected."""
    *before, act = deed.steps
    if not before:
        act(place)
    with place.operator(kill_at=None if before else kill_at) as operator:
        for step, end in zip(before, deed.ends, strict=False):
            step(place)
            place.await_end(operator, end)
        if before:
            operator.count(kill_at=kill_at)
            act(place)
        place.await_end(operator, deed.ends[-1])
        killed_at = operator.killed_at
    if deed.afterwards is not None:
        deed.afterwards(place)
    if killed_at is None:
        return None
    began = time.monotonic()
    with place.operator() as operator:
        place.await_told(operator, expected or {})
        return Killed(killed_at, time.monotonic() - began)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] if name != "scale" else []) for name in DEEDS]
)
def test_a_kill_between_any_two_writes_leads_to_the_same_objects(
    name: str, make_place: MakePlace, recovered: Recovered
) -> None:
    deed = DEEDS[name]
    place = make_place()
    do(deed, place, kill_at=None)
    if deed.afterwards is not None:
        until(place.is_gone, "nothing is left")
    expected = place.told()

    def killed_before(n: int) -> Killed | None:
        killed = do(deed, make_place(), kill_at=n, expected=expected)
        if killed is not None:
            print(f"{name}, killed before write {n}, {killed}: {killed.seconds:.1f} s")
        return killed

    lives: list[Killed] = []
    with ThreadPoolExecutor(NUM_ROWS_AT_ONCE) as rows:
        for first in itertools.count(step=NUM_ROWS_AT_ONCE):
            found = list(rows.map(killed_before, range(first, first + NUM_ROWS_AT_ONCE)))
            lives += [each for each in found if each is not None]
            if None in found:
                break
    # The cluster's collector does what a deletion wants.
    assert lives or name == "delete", "what the operator writes goes through the proxy"
    slowest = max((each.seconds for each in lives), default=0.0)
    recovered(f"operator killed before any of {len(lives)} writes: {name}", slowest, SAME)


LIFE: tuple[tuple[Callable[[Place], None], Callable[[Place], bool]], ...] = (
    (create(LARGE), READY),
    (lambda place: place.edit(**UPDATE), READY),
    (lambda place: place.scale(3), READY),
    (lambda place: place.edit(suspend=True), SUSPENDED),
    (lambda place: place.edit(suspend=False), READY),
    (Place.finish, OVER),
)
"""One of each deed, and what is waited for."""


@pytest.fixture(scope="module")
def told_in_life(address: str, node: StandInNode, tmp_path_factory: pytest.TempPathFactory) -> tuple[Manifests, ...]:
    """What the objects say after each deed of a life that nobody disturbs."""
    folder = tmp_path_factory.mktemp("life")
    with new_place(address, node, folder) as place, place.operator() as operator:
        said = []
        for act, end in LIFE:
            act(place)
            place.await_end(operator, end)
            said.append(place.told())
        return tuple(said)


Line = Callable[[Request, bytes], bytes | None]


def is_about_children(request: Request) -> bool:
    return "/rlexperiments" not in request.path


def late() -> Line:
    """What comes after a silence comes two seconds late, as from an API server that is behind."""
    last: dict[int, float] = {}

    def line(request: Request, read: bytes) -> bytes:
        if time.monotonic() - last.get(request.number, 0.0) > 0.5:
            threading.Event().wait(2.0)
        last[request.number] = time.monotonic()
        return read

    return line


def lost(is_lost: Callable[[Request], bool]) -> Line:
    return lambda request, read: b"" if is_lost(request) else read


def cut() -> Line:
    """Every fourth event ends its watch, and is not told."""
    numbers = itertools.count(1)
    return lambda request, read: read if next(numbers) % 4 else None


def expired() -> Line:
    """Every fourth event is instead the news that the watch has fallen behind too far to go on."""
    numbers = itertools.count(1)
    status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Expired", "code": 410}
    told = json.dumps({"type": "ERROR", "object": status}).encode() + b"\n"
    return lambda request, read: read if next(numbers) % 4 else told


def created_only() -> Line:
    """Of experiments, nothing is told after their creation."""
    return lambda request, read: b"" if "/rlexperiments" in request.path and b'"ADDED"' not in read[:40] else read


FAULTS: dict[str, Callable[[], Line]] = {
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
    fault: str, make_place: MakePlace, told_in_life: tuple[Manifests, ...], recovered: Recovered
) -> None:
    place, seconds = make_place(), []
    with place.operator(statusSeconds=1, steady_seconds=STEADY_SECONDS) as operator:
        harmed = FAULTS[fault]()
        operator.proxy.line = lambda request, read: harmed(request, read) if "watch=true" in request.path else read
        for (act, _), expected in zip(LIFE, told_in_life, strict=True):
            began = time.monotonic()
            act(place)
            place.await_told(operator, expected)
            seconds.append(time.monotonic() - began)
    recovered(f"operator's watch events: {fault}", max(seconds), SAME)


def test_two_operators_by_mistake_reach_the_same_objects_and_stop_writing(
    make_place: MakePlace, told_in_life: tuple[Manifests, ...]
) -> None:
    place = make_place()
    with place.operator() as one, place.operator() as two:
        for (act, _), expected in zip(LIFE, told_in_life, strict=True):
            began = time.monotonic()
            act(place)
            place.await_told(one, expected)
            until(lambda: two.is_idle(IDLE_SECONDS), "the other has no more to do, either")
            print(f"{one.num_writes} and {two.num_writes} writes, {time.monotonic() - began:.1f} s")
            one.count()
            two.count()
        rest(one, two)


@pytest.mark.full
def test_a_node_that_was_marked_lost_by_mistake_changes_nothing(make_place: MakePlace) -> None:
    place = make_place()
    with place.operator() as operator:
        place.create(LARGE)
        place.await_end(operator, READY)
        expected = place.told()
        for pod in place.api.items(place.path("Pod")):  # as the node controller does
            told = {"metadata": {"uid": pod["metadata"]["uid"]}, "status": {"conditions": [NOT_READY]}}
            assert place.api.merge(place.path("Pod", f"{pod['metadata']['name']}/status"), told) is not None
        place.await_told(operator, expected)
        place.await_end(operator, READY)


@pytest.mark.full
def test_only_one_of_two_releases_manages_an_experiment(make_place: MakePlace) -> None:
    """They have keys of their own, and other images: what one makes the other one would make otherwise."""
    place = make_place()
    other = {
        "keySecret": {"namespace": place.name, "name": OTHER_KEY},
        "images": {"actor": "o/a:2", "learner": "o/l:2"},
    }
    with place.operator() as one, place.operator(**other) as two:
        until(lambda: one.is_idle(IDLE_SECONDS) and two.is_idle(IDLE_SECONDS), "both are there")
        for act, end in LIFE:
            one.count()
            two.count()
            act(place)
            place.await_end(one, end)
            until(lambda: two.is_idle(IDLE_SECONDS), "the other has no more to do, either")
            images = {each["spec"]["containers"][0]["image"] for each in place.api.items(place.path("Pod"))}
            assert images <= {"none/actor:1", "none/learner:1"} or images <= {"o/a:2", "o/l:2"}
            print(f"{one.num_writes} and {two.num_writes} writes")
            # As it is made both may begin its status; then one of them leaves it alone.
            assert min(one.num_writes, two.num_writes) <= 1
        rest(one, two)


def rest(*operators: OperatorProcess) -> None:
    """They write nothing any more."""
    for each in operators:
        each.count()
    time.sleep(QUIET_SECONDS)  # what is measured is that nothing happens
    assert [each.num_writes for each in operators] == [0] * len(operators)


NUM_EDITS = 5


@pytest.mark.parametrize("num_sequences", [1, pytest.param(20, marks=[pytest.mark.full, pytest.mark.timeout(1200)])])
def test_objects_depend_only_on_the_spec_and_not_on_its_history(num_sequences: int, make_place: MakePlace) -> None:
    def sequence(seed: int) -> None:
        began = time.monotonic()
        rng = random.Random(seed)
        document = within_reason(rng, variation(rng))
        edited, fresh = make_place(), make_place()
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
        expected, found = (decided_by_spec(place.objects()) for place in (fresh, edited))
        assert expected == found, f"seed {seed}: {difference(expected, found)[:SHOWN]}"
        print(f"seed {seed}: {NUM_EDITS} edits, {time.monotonic() - began:.1f} s")

    with ThreadPoolExecutor(NUM_ROWS_AT_ONCE) as rows:
        list(rows.map(sequence, range(num_sequences)))


def end_of(document: JsonDocument) -> Callable[[Place], bool]:
    return SUSPENDED if document["spec"].get("suspend") else READY


def is_legal(document: JsonDocument) -> bool:
    try:
        load_text(json.dumps(document))
    except SpecError:
        return False
    return True


def within_reason(rng: random.Random, document: JsonDocument) -> JsonDocument:
    """With no more pods than a test can watch, and now and then a gang of two."""
    spec = document["spec"]
    for role in ("policyWorkers", "evaluators"):
        if role in spec:
            spec[role]["replicas"] = rng.randint(1, 3)
    gang = {**document, "spec": {**spec, "trainers": {**spec["trainers"], "replicas": 2}}}
    document = as_sent(gang if rng.random() < 0.5 and is_legal(gang) else document)
    return {**document, "metadata": {"name": "a"}}


def legal_edit(rng: random.Random, before: JsonDocument) -> JsonDocument:
    """Another document that the experiment may be edited into."""
    for _ in range(1000):
        after = within_reason(rng, variation(rng))
        for _ in range(3):  # what cannot be edited is as before, and that may bring about more of it
            if not is_legal(after):
                break
            paths = refused(load_text(json.dumps(before)), load_text(json.dumps(after)))
            if not paths:
                return after
            for path in paths:
                copy_field(before, after, path.split("."))
    raise AssertionError(f"no edit of this is found: {before}")


def copy_field(source: JsonDocument, target: JsonDocument, path: list[str]) -> None:
    """Have a field of the target as the source has it; absent where it is absent."""
    *above, name = path
    for step in above:
        source = source.get(step, {})
        target = target.setdefault(step, {})
    if name in source:
        target[name] = copy.deepcopy(source[name])
    else:
        target.pop(name, None)
