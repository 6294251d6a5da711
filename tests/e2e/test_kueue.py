"""A real Kueue admits experiments to a quota, one gang of trainers at a time, and evicts them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from rlsrl.testing.cluster_api import Object
from rlsrl.testing.kubectl import ClusterExperiment, KubectlFailed, Namespace, run
from rlsrl.testing.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(2400)]

REPOSITORY = Path(__file__).parents[2]
CHART, EXAMPLES = REPOSITORY / "charts", REPOSITORY / "examples" / "kubernetes"
QUEUE = "team"
POOL, SPOT = "example.com/pool", "example.com/spot"
NUM_TRAINERS = 2
WAIT_SECONDS = 240.0
"""Deadline of a resize or an eviction, which takes a minute."""


@pytest.fixture(scope="module")
def kueue(system: Namespace, install: Callable[[str], AbstractContextManager[None]]) -> Iterator[None]:
    """Install the controller, with webhooks for pods and StatefulSets."""
    assert system
    with install("kueue"):
        until(answers, "Kueue's webhooks can be reached")
        yield


def answers() -> bool:
    """Wait until the webhook answers: nodes learn of a Service's pod some time after it is ready."""
    try:
        run("kubectl", "create", "--dry-run=server", "-f", "-", stdin=json.dumps(queue_object("ResourceFlavor", "any")))
    except KubectlFailed:
        return False
    return True


@pytest.fixture
def quota(kueue: None, where: Namespace) -> Iterator[str]:
    """Create a ClusterQueue with room for one gang, and its LocalQueue."""
    assert kueue is None
    name = where.name
    # The trainers request cpu and memory, too.
    amounts = {"pods": NUM_TRAINERS + 1, "cpu": 100, "memory": "100Gi"}
    flavor = {"name": name, "resources": [{"name": what, "nominalQuota": most} for what, most in amounts.items()]}
    groups = [{"coveredResources": [*amounts], "flavors": [flavor]}]
    where.apply(
        queue_object("ResourceFlavor", name),
        queue_object("ClusterQueue", name, {"namespaceSelector": {}, "resourceGroups": groups}),
        queue_object("LocalQueue", QUEUE, {"clusterQueue": name}, namespace=name),
    )
    yield name
    take_down(where, localqueue=QUEUE, clusterqueue=name, resourceflavor=name)


def take_down(where: Namespace, **objects: str) -> None:
    """Delete Kueue's objects while Kueue runs: it has to remove their finalizers."""
    where.kubectl("delete", "rlexperiments", "--all", "--wait=true")
    until(lambda: not where.list("workloads.kueue.x-k8s.io"), "Kueue let go of all", timeout=WAIT_SECONDS)
    for kind, name in objects.items():
        where.delete(f"{kind}.kueue.x-k8s.io", name, wait=True)


def queue_object(kind: str, name: str, spec: Object | None = None, **metadata: str) -> Object:
    api = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": kind, "metadata": {"name": name, **metadata}}
    return {**api, "spec": spec or {}}


def begin(where: Namespace, name: str) -> ClusterExperiment:
    """Return an experiment in the queue that trains longer than the test."""
    where.apply(
        {
            "apiVersion": "rlsrl.dev/v1alpha1",
            "kind": "RLExperiment",
            "metadata": {"name": name, "labels": {"kueue.x-k8s.io/queue-name": QUEUE}},
            "spec": {
                "environment": {"id": "CartPole-v1"},
                "policy": {"network": {"mlp": {"hiddenSizes": [16]}}},
                "actors": {"environmentsPerActor": 8},
                "trainers": {"replicas": NUM_TRAINERS, "batchEnvironments": 8},
                "parameters": {"everySeconds": 1},
                "stop": {"wallSeconds": 3600},
            },
        }
    )
    return ClusterExperiment(where, name)


def edit(experiment: ClusterExperiment, **spec: Any) -> None:
    patch = json.dumps({"spec": spec})
    experiment.where.kubectl("patch", "rlexperiment", experiment.name, "--type=merge", "-p", patch)


def trains_on(experiment: ClusterExperiment, beyond: int = 0) -> int:
    """Wait until it has trained more than that; return the trained transitions."""
    experiment.await_phase("Running", seconds=WAIT_SECONDS)
    until(lambda: experiment.env_steps() > beyond, f"{experiment.name} trains", timeout=WAIT_SECONDS)
    return experiment.env_steps()


def waits(experiment: ClusterExperiment) -> None:
    """Wait until only unscheduled trainers exist and the condition names the reason."""
    experiment.await_phase("Queued", seconds=WAIT_SECONDS)

    def only_held() -> bool:
        pods = experiment.pods()
        roles = [pod["metadata"]["labels"]["rlsrl.dev/role"] for pod in pods]
        return roles == ["trainer"] * NUM_TRAINERS and not any("nodeName" in pod["spec"] for pod in pods)

    until(only_held, "only its trainers wait", timeout=WAIT_SECONDS)

    def says_why() -> bool:
        ready = experiment.condition("Ready")
        return ready.get("status") == "False" and ready.get("reason") == "Queued"

    until(says_why, "Ready names the queue as the reason", timeout=WAIT_SECONDS)
    assert f"queue {QUEUE} has not admitted the trainers" in experiment.condition("Ready")["message"]


def uids(experiment: ClusterExperiment, *roles: str) -> set[str]:
    return {pod["metadata"]["uid"] for role in roles for pod in experiment.pods(role)}


def test_a_run_waits_until_the_one_before_it_makes_room(quota: str, where: Namespace) -> None:
    assert quota
    first = begin(where, "first")
    trains_on(first)
    second = begin(where, "second")
    waits(second)
    edit(first, suspend=True)
    first.await_phase("Suspended", seconds=WAIT_SECONDS)
    trained = first.env_steps()
    trains_on(second)
    edit(first, suspend=False)
    waits(first)
    where.delete("rlexperiment", "second")
    trains_on(first, beyond=trained)
    assert (first.status["attempt"], first.status["restarts"]) == (2, 0)


def test_an_evicted_run_resumes_when_it_is_admitted_again(quota: str, where: Namespace) -> None:
    taken = begin(where, "taken")
    trained = trains_on(taken)
    stop(quota, "HoldAndDrain")
    waits(taken)
    assert taken.status["recentFailures"] == 0, "an eviction is not a failure"
    stop(quota, "None")
    trains_on(taken, beyond=trained)
    assert taken.status["attempt"] == 2


def test_the_other_roles_stay_while_a_gang_restarts_or_is_resized(quota: str, where: Namespace) -> None:
    assert quota
    resized = begin(where, "resized")
    trained = trains_on(resized)
    others = uids(resized, "actor", "coordinator")
    where.kubectl("delete", "pod", "resized-trainer-1", "--wait=false")
    until(lambda: resized.status["attempt"] == 2, "the gang restarts", timeout=WAIT_SECONDS)
    trained = trains_on(resized, beyond=trained)
    edit(resized, trainers={"replicas": 1})
    until(lambda: len(resized.pods("trainer")) == 1, "one trainer is left", timeout=WAIT_SECONDS)
    trains_on(resized, beyond=trained)
    assert uids(resized, "coordinator") <= others


@pytest.fixture
def pools(system: Namespace) -> Iterator[tuple[str, str]]:
    """Label a reserved node and a spot node; install the example's values."""
    reserved, spot = sorted(run("kubectl", "get", "nodes", "-o", "jsonpath={.items[*].metadata.name}").split())
    run("kubectl", "label", "node", reserved, f"{POOL}=reserved")
    run("kubectl", "label", "node", spot, f"{POOL}=spot")
    run("kubectl", "taint", "node", spot, f"{SPOT}=true:NoSchedule")
    release = ("rlsrl", "--namespace", system.name, "--wait", "--timeout", "2m")
    run(
        "helm",
        "upgrade",
        *release,
        str(CHART),
        "--reuse-values",
        "--values",
        str(EXAMPLES / "values.yaml"),
        seconds=180,
    )
    yield reserved, spot
    run("helm", "rollback", *release, seconds=180)
    run("kubectl", "taint", "node", spot, f"{SPOT}-")
    run("kubectl", "label", "node", reserved, spot, f"{POOL}-")


def test_the_examples_train_on_their_nodes(kueue: None, where: Namespace, pools: tuple[str, str]) -> None:
    assert kueue is None
    reserved, spot = pools
    where.kubectl("apply", "--filename", str(EXAMPLES / "queue.yaml"))
    where.kubectl("apply", "--filename", str(EXAMPLES / "cartpole.yaml"))
    cartpole = ClusterExperiment(where, "cartpole")
    trains_on(cartpole)
    places = {(pod["metadata"]["labels"]["rlsrl.dev/role"], pod["spec"]["nodeName"]) for pod in cartpole.pods()}
    assert places == {("coordinator", reserved), ("trainer", reserved), ("actor", spot)}
    (workload,) = where.list("workloads.kueue.x-k8s.io")
    assert workload["spec"]["priority"] == 1000, "it is urgent"
    take_down(where, localqueue="research", clusterqueue="research", resourceflavor="reserved")
    where.kubectl("delete", "--filename", str(EXAMPLES / "queue.yaml"), "--ignore-not-found")


def stop(cluster_queue: str, policy: str) -> None:
    patch = json.dumps({"spec": {"stopPolicy": policy}})
    run("kubectl", "patch", "clusterqueue.kueue.x-k8s.io", cluster_queue, "--type=merge", "-p", patch)
