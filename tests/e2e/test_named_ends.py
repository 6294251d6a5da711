"""Problems that need help have a named condition, and after their cure the run reaches its goal."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from s3_server import SLOW_STORE, start_s3, start_slow_proxy

from rlsrl.api.pods import terminations
from rlsrl.testing.faults import (
    GATE,
    NAME,
    STEP_SECONDS,
    Faults,
    all_ready,
    begin,
    gated_experiment,
    goes_on,
    lives,
    reach_the_goal,
)
from rlsrl.testing.kubectl import (
    CLUSTER_SECONDS,
    COMMAND_SECONDS,
    ClusterExperiment,
    Namespace,
    Nodes,
    release,
    run,
)
from rlsrl.testing.recovery import GOAL, Recovered
from rlsrl.testing.waiting import until
from rlsrl.workers.checkpoints import LATE_SECONDS

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(900)]

REPOSITORY = Path(__file__).parents[2]
CHART = REPOSITORY / "charts"
CLUSTER = REPOSITORY / "hack" / "cluster"
AWAY_SECONDS = 60.0
DEVICE = "example.com/spare"
DEVICE_PATH = f"/status/capacity/{DEVICE.replace('/', '~1')}"
SMALL = "small"
"""A StorageClass and the folder of its one volume, a few megabytes of memory."""
SMALL_FOLDER = f"/run/{SMALL}"


def apply(where: Namespace, **spec: object) -> ClusterExperiment:
    where.apply(gated_experiment(**spec))
    return ClusterExperiment(where, NAME)


def suspend(where: Namespace, holds: bool) -> None:
    where.kubectl("patch", "rlexperiment", NAME, "--type=merge", "-p", json.dumps({"spec": {"suspend": holds}}))


def await_reason(experiment: ClusterExperiment, aspect: str, *reasons: str) -> str:
    """Wait for one of the reasons; return the message."""
    what = f"{aspect} is {' or '.join(reasons)}"
    until(lambda: experiment.condition(aspect).get("reason") in reasons, what, timeout=CLUSTER_SECONDS)
    return str(experiment.condition(aspect)["message"])


def touch(experiment: ClusterExperiment, role: str, path: str) -> None:
    """Create a file in each pod of the role."""
    for pod in experiment.pods(role):
        experiment.where.kubectl("exec", pod["metadata"]["name"], "--", "touch", path)


def why(experiment: ClusterExperiment) -> subprocess.CompletedProcess[str]:
    words = ["kubectl", "rlsrl", "why", NAME, "--namespace", experiment.where.name]
    return subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)


def after_the_cure(
    recovered: Recovered, what: str, end: str, experiment: ClusterExperiment, cure: Callable[[], object]
) -> None:
    """Wait until the run is ready again and reaches its goal."""
    began = time.monotonic()
    cure()
    experiment.await_phase("Running")
    until(lambda: all_ready(experiment), "every pod is ready")
    goes_on(experiment)
    recovered(what, time.monotonic() - began, f"{end}, then {GOAL}")
    reach_the_goal(experiment)


def test_an_image_that_cannot_be_pulled(where: Namespace, system: Namespace, recovered: Recovered) -> None:
    with release(system, CHART, "images.actor.tag=nowhere") as take_back:
        experiment = apply(where)
        message = await_reason(experiment, "Ready", "ErrImagePull", "ImagePullBackOff")
        assert "actor 0/2" in message
        assert f"{NAME}-" in message

        def cure() -> None:
            take_back()
            # A run keeps the images that it began with, until it is suspended.
            suspend(where, True)
            until(lambda: not experiment.pods(), "no pod is left")
            suspend(where, False)

        after_the_cure(recovered, "image that cannot be pulled", "Ready: ImagePullBackOff", experiment, cure)


def test_a_device_that_no_node_has(where: Namespace, recovered: Recovered) -> None:
    trainers = {"replicas": 2, "gpusPerPod": 1, "gpuResource": DEVICE}
    experiment = apply(where, trainers=trainers)
    message = await_reason(experiment, "Ready", "Unschedulable")
    assert f"Insufficient {DEVICE}" in message
    names = run("kubectl", "get", "nodes", "-o", "name").split()

    def patch_nodes(**change: str) -> None:
        for node in names:
            patch = json.dumps([{"path": DEVICE_PATH, **change}])
            run("kubectl", "patch", node, "--subresource=status", "--type=json", "-p", patch)

    try:
        after_the_cure(
            recovered, "GPU request that no node has", "Ready: Unschedulable", experiment,
            lambda: patch_nodes(op="add", value="1"),
        )  # fmt: skip
    finally:
        patch_nodes(op="remove")


@pytest.fixture
def small_volume(where: Namespace, hands: Nodes) -> Iterator[str]:
    """Create the StorageClass of a volume of 16 MB on the first node."""
    node = min(hands.by_node)
    hands.on_node(node, f"mkdir -p {SMALL_FOLDER} && mount -t tmpfs -o size=16m,mode=0777 tmpfs {SMALL_FOLDER}")
    here = {"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}
    where.apply(
        {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "metadata": {"name": SMALL},
            "provisioner": "kubernetes.io/no-provisioner",
            "volumeBindingMode": "WaitForFirstConsumer",
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": SMALL},
            "spec": {
                "capacity": {"storage": "16Mi"},
                "accessModes": ["ReadWriteOnce"],
                "storageClassName": SMALL,
                "hostPath": {"path": SMALL_FOLDER},
                "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [here]}]}},
            },
        },
    )
    yield SMALL
    where.delete("rlexperiment", NAME, wait=True)
    until(lambda: not where.list("pods"), "its pods are gone")
    where.delete("pvc", f"{NAME}-data", wait=True)
    run("kubectl", "delete", "pv", SMALL)
    run("kubectl", "delete", "storageclass", SMALL)
    hands.on_node(node, f"umount {SMALL_FOLDER}")


def test_a_full_volume(where: Namespace, small_volume: str, recovered: Recovered) -> None:
    volume = {"size": "16Mi", "storageClassName": small_volume}
    experiment = begin(where, parameters={"everySeconds": 1, "store": {"filesystem": volume}})
    before = lives(experiment)
    (coordinator,) = (pod["metadata"]["name"] for pod in experiment.pods("coordinator"))
    where.kubectl("exec", coordinator, "--", "sh", "-c", "! head -c 64M /dev/zero > /data/fill")
    message = await_reason(experiment, "Durable", "NotStored")
    assert "could not be stored" in message
    assert "No space left on device: '/data/" in message
    assert "bytes" in message
    goes_on(experiment)

    def cure() -> None:
        where.kubectl("exec", coordinator, "--", "rm", "/data/fill")
        until(lambda: experiment.condition("Durable").get("reason") == "Stored", "versions are stored again")
        assert lives(experiment) == before

    after_the_cure(recovered, "full volume", "Durable: NotStored", experiment, cure)


def test_a_volume_that_is_full_at_the_end(where: Namespace, small_volume: str, recovered: Recovered) -> None:
    volume = {"size": "16Mi", "storageClassName": small_volume}
    parameters = {"everySeconds": 1, "retryLastSeconds": 5, "store": {"filesystem": volume}}
    experiment = begin(where, parameters=parameters)
    (coordinator,) = (pod["metadata"]["name"] for pod in experiment.pods("coordinator"))
    where.kubectl("exec", coordinator, "--", "sh", "-c", "! head -c 64M /dev/zero > /data/fill")
    await_reason(experiment, "Durable", "NotStored")
    began = time.monotonic()
    reached = json.dumps({"spec": {"stop": {"trainSteps": 1}}})
    where.kubectl("patch", "rlexperiment", NAME, "--type=merge", "-p", reached)
    experiment.await_phase("Failed")
    recovered("volume that is full at the end", time.monotonic() - began, "Failed: NotStored")
    finished = experiment.condition("Finished")
    assert finished["reason"] == "NotStored"
    assert "could not be stored for 5 s" in finished["message"]
    assert "No space left on device: '/data/" in finished["message"]
    assert experiment.status["restarts"] == 0


def test_a_slow_store(where: Namespace, actor_image: str, recovered: Recovered) -> None:
    """The store takes longer for a version than a version may be late, and fails no request."""
    start_s3(where, actor_image)
    store = start_slow_proxy(where, actor_image, seconds=2 * int(LATE_SECONDS)) | {"answerSeconds": 4 * LATE_SECONDS}
    experiment = begin(where, parameters={"everySeconds": 1, "store": {"objectStore": store}})
    before = lives(experiment)
    where.kubectl("exec", "s3-proxy", "--", "touch", SLOW_STORE)
    message = await_reason(experiment, "Durable", "StoredLate")
    assert re.search(r"the store is slow: version [0-9.]+ ", message), message
    assert "StoredLate" in why(experiment).stdout

    def cure() -> None:
        where.kubectl("exec", "s3-proxy", "--", "rm", SLOW_STORE)
        until(lambda: experiment.condition("Durable").get("reason") == "Stored", "versions are stored in time again")
        assert lives(experiment) == before

    after_the_cure(recovered, "slow object store", "Durable: StoredLate", experiment, cure)


def test_an_exhausted_budget(where: Namespace, hands: Nodes, recovered: Recovered) -> None:
    experiment = begin(where, restarts={"budget": 1, "decaySeconds": 600})
    for attempt in (1, 2):
        until(lambda: experiment.status["attempt"] == attempt and all_ready(experiment), f"attempt {attempt}")
        began = time.monotonic()
        hands.kill(experiment.pods("trainer")[0])
    experiment.await_phase("Failed")
    recovered("exhausted budget", time.monotonic() - began, "Failed: BudgetExhausted")
    finished = experiment.condition("Finished")
    assert finished["reason"] == "BudgetExhausted"
    assert "restarts.budget 1" in finished["message"]
    until(lambda: len(experiment.pods()) == 1, "only the coordinator stays")


def test_a_container_that_is_out_of_memory(
    where: Namespace, system: Namespace, hands: Nodes, recovered: Recovered
) -> None:
    with release(system, CHART, "roles.actor.resources.limits.memory=512Mi"):
        experiment = begin(where)
        victim = experiment.pods("actor")[0]
        name = victim["metadata"]["name"]
        Faults(experiment, recovered).make("OOM kill of actor", ["actor"], lambda: hands.exhaust_memory(victim))
        (container,) = next(pod for pod in experiment.pods("actor") if pod["metadata"]["name"] == name)["status"][
            "containerStatuses"
        ]
        assert container["lastState"]["terminated"]["exitCode"] == 137
        reach_the_goal(experiment)


def test_a_network_that_is_too_large_for_its_memory(where: Namespace, system: Namespace, recovered: Recovered) -> None:
    """Its weights alone, a gigabyte, are over the limit."""
    with release(system, CHART, "resources.trainer.limits.memory=1Gi"):
        large = {"network": {"mlp": {"hiddenSizes": [16_000, 16_000]}}}
        began = time.monotonic()
        experiment = apply(where, policy=large, trainers={"replicas": 1}, restarts={"budget": 0})
        experiment.await_phase("Failed")
        recovered("a network over the memory limit", time.monotonic() - began, "Failed: OOMKilled")
        assert "OOMKilled" in experiment.condition("Finished")["message"]
        assert "cure: Raise the memory limit" in why(experiment).stdout


def test_the_api_server_is_away_for_a_minute(where: Namespace, recovered: Recovered) -> None:
    experiment = begin(where)
    before = experiment.env_steps()

    def fault() -> None:
        subprocess.run([CLUSTER, "api-stop"], check=True, timeout=COMMAND_SECONDS)
        time.sleep(AWAY_SECONDS)  # the test needs an absence of this length
        subprocess.run([CLUSTER, "api-start"], check=True, timeout=COMMAND_SECONDS)

    Faults(experiment, recovered).make("60 s without the API server", [], fault)
    assert experiment.env_steps() > before
    assert experiment.status["restarts"] == 0
    reach_the_goal(experiment)


def test_an_environment_that_hangs(where: Namespace, recovered: Recovered) -> None:
    """It is named as the cause of a stall; at its limit its actor is restarted, and training goes on by itself."""
    experiment = begin(
        where,
        environment={
            "factory": "rlsrl.testing.environments:HangingEnv",
            "kwargs": {"gate": GATE, "hang": "/tmp/hang", "step_seconds": STEP_SECONDS},
            "stepSeconds": 120,
        },
        actors={"replicas": 1, "environments": 8, "rolloutLength": 64},
    )
    assert await_reason(experiment, "Progressing", "Progressing") == "steps are taken"
    until(lambda: experiment.status["training"].get("envStepsPerSecond"), "two training steps show a speed")
    began = time.monotonic()
    touch(experiment, "actor", "/tmp/hang")
    message = await_reason(experiment, "Progressing", "Stalled")
    assert re.search(r"environment rank [37] has been in step for ", message)
    assert "has waited for batch for " in message
    until(lambda: experiment.status["training"]["envStepsPerSecond"] == 0, "FPS falls to 0")
    await_reason(experiment, "Progressing", "Progressing")
    (actor,) = experiment.pods("actor")
    assert [(end["exitCode"], "was in step for " in end["message"]) for end in terminations(actor)] == [(12, True)]
    goes_on(experiment)
    recovered("environment that hangs", time.monotonic() - began, f"Progressing: Stalled, then {GOAL}")
    reach_the_goal(experiment)


def test_an_environment_that_hangs_while_it_is_made(where: Namespace, hands: Nodes, recovered: Recovered) -> None:
    experiment = begin(
        where,
        environment={
            "factory": "rlsrl.testing.environments:HangingEnv",
            "kwargs": {"gate": GATE, "hang": "/tmp/hang", "method": "make", "step_seconds": STEP_SECONDS},
        },
        actors={"replicas": 1, "environments": 8, "rolloutLength": 64},
    )
    touch(experiment, "actor", "/tmp/hang")
    (actor,) = experiment.pods("actor")
    hands.kill(actor)  # the container starts again in the same pod, with the same /tmp
    message = await_reason(experiment, "Progressing", "Stalled")
    assert "environment rank 3 has been in make for " in message
    assert "has waited for batch for " in message
    explained = why(experiment)
    assert explained.returncode == 1
    assert "environment rank 3 has been in make for " in explained.stdout
    after_the_cure(
        recovered, "environment that hangs while it is made", "Progressing: Stalled", experiment,
        lambda: where.delete("pod", actor["metadata"]["name"]),
    )  # fmt: skip


def test_an_environment_that_raises_within_its_budget(where: Namespace, recovered: Recovered) -> None:
    """It is named while the run goes on, and no pod is restarted."""
    experiment = begin(
        where,
        environment={
            "factory": "rlsrl.testing.environments:FaultyEnv",
            "kwargs": {"gate": GATE, "fault": "/tmp/fault", "step_seconds": STEP_SECONDS},
        },
        actors={"replicas": 1, "environments": 8, "rolloutLength": 64},
    )
    before = lives(experiment)
    began = time.monotonic()
    touch(experiment, "actor", "/tmp/fault")
    message = await_reason(experiment, "EnvironmentErrors", "MadeAgain")
    assert message.startswith("1 error of environments since their actors started; ")
    assert re.search(
        r"the last of actor-0: environment rank [37] raised ConnectionError: the simulator hung up ", message
    )
    assert experiment.condition("EnvironmentErrors")["status"] == "True"
    explained = why(experiment)
    assert message in explained.stdout
    assert explained.returncode == 0, explained.stdout
    goes_on(experiment)
    assert lives(experiment) == before
    recovered("environment that raises", time.monotonic() - began, f"EnvironmentErrors: MadeAgain, then {GOAL}")
    reach_the_goal(experiment)


def test_an_environment_that_gives_nan(where: Namespace, recovered: Recovered) -> None:
    """The value is named while the run goes on, and the ledger has its step as dropped."""
    experiment = begin(
        where,
        environment={
            "factory": "rlsrl.testing.environments:FaultyEnv",
            "kwargs": {"gate": GATE, "fault": "/tmp/fault", "kind": "nan", "step_seconds": STEP_SECONDS},
        },
        actors={"replicas": 1, "environments": 8, "rolloutLength": 64},
    )
    before = lives(experiment)
    began = time.monotonic()
    touch(experiment, "actor", "/tmp/fault")
    message = await_reason(experiment, "NonFiniteValues", "Dropped")
    assert message.startswith("NaN or infinity in 1 step or reset of environments since their actors started; ")
    assert re.search(r"the last of actor-0: environment rank [37].*reward.*nan", message), message
    explained = why(experiment)
    assert message in explained.stdout
    assert explained.returncode == 0, explained.stdout
    goes_on(experiment)
    assert lives(experiment) == before
    assert experiment.ledger()["dropped"]["non_finite"] == 1
    recovered("environment that gives NaN", time.monotonic() - began, f"NonFiniteValues: Dropped, then {GOAL}")
    reach_the_goal(experiment)
