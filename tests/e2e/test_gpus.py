"""GPUs determine limits and ranks: pods with two each, on nodes with simulated GPUs."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from rlsrl.testing.cluster_api import Object
from rlsrl.testing.kubectl import ClusterExperiment, Namespace, run
from rlsrl.testing.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

RESOURCE = "example.com/gpu"
PATH = f"/status/capacity/{RESOURCE.replace('/', '~1')}"


def patch_nodes(change: Object) -> None:
    for node in run("kubectl", "get", "nodes", "-o", "name").split():
        run("kubectl", "patch", node, "--subresource=status", "--type=json", "-p", json.dumps([change]))


@pytest.fixture
def gpus() -> Iterator[None]:
    """Add two simulated devices to each node: an extended resource is only a count."""
    patch_nodes({"op": "add", "path": PATH, "value": "2"})
    yield
    patch_nodes({"op": "remove", "path": PATH})


@pytest.mark.full
@pytest.mark.usefixtures("gpus")
def test_four_ranks_in_two_pods_are_one_gang(where: Namespace, cartpole: Object) -> None:
    cartpole["spec"] |= {
        "trainers": {"replicas": 4, "gpusPerPod": 2, "gpuResource": RESOURCE},
        "stop": {"trainSteps": 30},
    }
    where.apply(cartpole)
    experiment = ClusterExperiment(where, cartpole["metadata"]["name"])
    experiment.await_phase("Running")
    pods = experiment.pods("trainer")
    assert len(pods) == 2
    for pod in pods:
        (container,) = pod["spec"]["containers"]
        assert container["resources"]["limits"][RESOURCE] == "2"
    experiment.await_phase("Succeeded")
    assert experiment.status["training"]["trainSteps"] == 30
    assert experiment.status["restarts"] == 0


def test_an_unsatisfiable_gpu_request_is_reported_with_the_pod(where: Namespace, cartpole: Object) -> None:
    cartpole["spec"]["trainers"] = {"replicas": 2, "gpusPerPod": 1, "gpuResource": "example.com/none"}
    where.apply(cartpole)
    experiment = ClusterExperiment(where, cartpole["metadata"]["name"])
    until(lambda: experiment.condition("Ready").get("reason") == "Unschedulable", "the status has Unschedulable")
    message = experiment.condition("Ready")["message"]
    assert "trainer 0/2" in message
    assert "cartpole-trainer-" in message
    assert "Insufficient example.com/none" in message
