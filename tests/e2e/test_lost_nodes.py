"""Power loss and network cut of the second node, with each of the roles on it in turn, and with the operator; a drain.

The node returns at the end. By then other pods have replaced its pods: their further work counts nowhere.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlsrl.testing.cluster_api import Object
from rlsrl.testing.faults import ROLES, Faults, all_ready, begin, goes_on, reach_the_goal, role_of, wanted
from rlsrl.testing.kubectl import COMMAND_SECONDS, ClusterExperiment, Namespace, run
from rlsrl.testing.recovery import Recovered
from rlsrl.testing.replayed_runs import found_transitions, reach_the_goal_by_the_ratio
from rlsrl.testing.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(2400)]

CLUSTER = Path(__file__).parents[2] / "hack" / "cluster"
LOST_SECONDS = 400.0
"""Deadline until a lost node's pods are replaced."""
DRAINED_SECONDS = 75.0
"""Deadline until a drained node's pods are replaced. It took this long while DNS ran on the drained node alone."""
LOSSES = {"power loss": ("node-kill", "node-up"), "network cut": ("node-cut", "node-heal")}
VERSIONS = """
import json, pathlib
found = sorted(pathlib.Path("/data").rglob("versions/*.safetensors"), key=lambda path: path.stat().st_mtime_ns)
print(json.dumps([int(path.name.partition("-")[0]) for path in found]))
"""
"""Prints the attempts of the stored versions in the order of storing."""


def node_names() -> tuple[str, str]:
    """Return the node that stays and the node that is lost."""
    names = sorted(run("kubectl", "get", "nodes", "--output", "name").split())
    assert len(names) == 2, f"two nodes are wanted, there are {names}"
    near, far = (name.removeprefix("node/") for name in names)
    return near, far


def node_is_ready(name: str) -> bool:
    node: Object = json.loads(run("kubectl", "get", "node", name, "--output", "json"))
    return any(each["type"] == "Ready" and each["status"] == "True" for each in node["status"]["conditions"])


@contextmanager
def nothing_new_on(node: str) -> Iterator[None]:
    run("kubectl", "cordon", node)
    try:
        yield
    finally:
        run("kubectl", "uncordon", node)


@contextmanager
def drained(node: str) -> Iterator[None]:
    """Evict all pods of a node, those of DNS, too. New ones run on other nodes."""
    try:
        run("kubectl", "drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=90s")
        yield
    finally:
        run("kubectl", "uncordon", node)


class SecondNode:
    """A node that is lost and returns."""

    def __init__(self) -> None:
        self.near, self.name = node_names()

    def lose(self, how: str) -> None:
        subprocess.run([CLUSTER, LOSSES[how][0], "2"], check=True, timeout=COMMAND_SECONDS)

    def restore(self, how: str) -> None:
        subprocess.run([CLUSTER, LOSSES[how][1], "2"], check=True, timeout=COMMAND_SECONDS)
        until(lambda: node_is_ready(self.name), f"{self.name} is back")

    def take(self, experiment: ClusterExperiment, *pods: Object) -> None:
        """Replace the pods, and wait until no others run there than the new ones."""
        roles = {role_of(pod) for pod in pods}
        with nothing_new_on(self.near):
            for pod in pods:
                experiment.where.delete("pod", pod["metadata"]["name"])
            until(lambda: self.roles(experiment) == roles and all_ready(experiment), f"{roles} run on {self.name}")
        goes_on(experiment)

    def roles(self, experiment: ClusterExperiment) -> set[str]:
        return {role_of(pod) for pod in experiment.pods() if pod["spec"].get("nodeName") == self.name}


@pytest.fixture
def second() -> SecondNode:
    return SecondNode()


@pytest.mark.parametrize("how", LOSSES)
def test_a_lost_node_affects_only_its_own_pods(
    where: Namespace, second: SecondNode, how: str, recovered: Recovered
) -> None:
    with nothing_new_on(second.name):
        experiment = begin(where)
    faults = Faults(experiment, recovered)
    for role in ("policy", "actor", "trainer", "coordinator"):
        second.take(experiment, *experiment.pods(role))
        faults.make(f"{how}: the node of {role}", [role], lambda: second.lose(how), timeout=LOST_SECONDS)
        second.restore(how)
        until(lambda: not second.roles(experiment), "nothing of it is left on the node that came back")
        until(lambda: all_ready(experiment), "all are there")
        goes_on(experiment)
    reach_the_goal(experiment)
    assert experiment.status["attempt"] > 1


REPLAYING = {
    # So few updates that much of what a shard holds was never trained, and counts as lost with it.
    "algorithm": {"dqn": {"minibatchSize": 64, "replay": {"capacity": 20_000, "start": 500}}},
    "pacing": {"trainStepsPerEnvStep": 0.01},
    "trainers": {"replicas": 1},
    "bufferWorkers": {"replicas": 2, "volume": {"size": "16Mi"}},
}
ON_THE_WAY = 4 * 64 * 4
"""Transitions of four slots: those that a killed shard may have taken and not stored."""
FILLED = 8_000
"""Env steps after which each shard has several times as many that were never trained."""


@pytest.mark.parametrize(
    ("how", "keeps_disk"),
    [
        pytest.param("power loss", True, id="power loss, and the disk is attached to another node"),
        pytest.param("network cut", False, id="network cut, and the disk is given up"),
    ],
)
def test_a_lost_node_costs_no_more_than_the_shard_on_it(
    where: Namespace, second: SecondNode, how: str, keeps_disk: bool, recovered: Recovered
) -> None:
    """The nodes of `hack/cluster` share a disk and a boot: a killed shard leaves all that it stored."""
    with nothing_new_on(second.name):
        experiment = begin(where, **REPLAYING)
    shard = experiment.pods("buffer")[-1]
    name, num_steps = shard["metadata"]["name"], experiment.env_steps()
    second.take(experiment, shard)
    until(lambda: experiment.env_steps() > num_steps + FILLED, "the shard has stored transitions on its new node")
    before = experiment.ledger()["lost"]

    def lose() -> None:
        if not keeps_disk:  # it goes with the last pod that uses it
            where.delete("persistentvolumeclaim", f"state-{name}")
        second.lose(how)

    disk = "" if keeps_disk else " and its disk"
    faults = Faults(experiment, recovered)
    faults.make(f"{how}: the node of a replay shard{disk}", ["buffer"], lose, timeout=LOST_SECONDS)
    found = found_transitions(experiment, name)
    assert found > ON_THE_WAY if keeps_disk else found == 0
    second.restore(how)
    until(lambda: not second.roles(experiment), "nothing of it is left on the node that came back")
    reach_the_goal_by_the_ratio(experiment)
    lost = experiment.ledger()["lost"]
    never_trained = lost["receiver_died"] - before["receiver_died"]
    assert (never_trained <= ON_THE_WAY) is keeps_disk, f"{never_trained} of those on the disk: {lost}"
    assert lost["rolled_back"] == 0, "the trainer went on"
    assert (experiment.status["attempt"], experiment.status["restarts"]) == (1, 0)


@pytest.mark.parametrize("how", LOSSES)
def test_the_operator_restarts_on_another_node(
    where: Namespace, system: Namespace, second: SecondNode, how: str, recovered: Recovered
) -> None:
    with nothing_new_on(second.name):
        experiment = begin(where)
    with nothing_new_on(second.near):
        (before,) = system.list("pods")
        system.delete("pod", before["metadata"]["name"])
        system.kubectl("rollout", "status", "deployment/rlsrl-operator", "--timeout=60s")
    service = f"{experiment.name}-trainer"

    def lose() -> None:
        second.lose(how)
        where.delete("service", service)
        until(lambda: where.get("service", service), "a deleted Service comes again", timeout=LOST_SECONDS)

    Faults(experiment, recovered).make(f"{how}: the node of the operator", [], lose, timeout=LOST_SECONDS)
    second.restore(how)
    until(lambda: len(system.list("pods")) == 1, "one operator is left")
    reach_the_goal(experiment)
    assert experiment.status["attempt"] == 1


def test_a_drained_run_is_ready_on_another_node_within_a_minute(
    where: Namespace, second: SecondNode, recovered: Recovered
) -> None:
    """The drained node is the first one, which had all of the cluster's DNS once."""
    with nothing_new_on(second.name):
        experiment = begin(where)
    began = time.monotonic()
    with drained(second.near):
        until(
            lambda: second.roles(experiment) == {*ROLES} and all_ready(experiment),
            "all over again on the other node",
            timeout=DRAINED_SECONDS - (time.monotonic() - began),
        )
        recovered("drain: the node of everybody", time.monotonic() - began)
    reach_the_goal(experiment)


def test_a_cut_off_run_that_returns_writes_nothing_more(
    where: Namespace, second: SecondNode, recovered: Recovered
) -> None:
    """The cut-off run trains on, with its own coordinator and the same disk, while a new run replaces it."""
    with nothing_new_on(second.near):
        experiment = begin(where)
    began = time.monotonic()
    second.lose("network cut")
    until(lambda: experiment.status["attempt"] == 2 and all_ready(experiment), "all over again", timeout=LOST_SECONDS)
    goes_on(experiment, timeout=LOST_SECONDS)
    recovered("network cut: the node of everybody", time.monotonic() - began)
    second.restore("network cut")
    until(lambda: not second.roles(experiment), "nothing of it is left on the node that came back")
    coordinator = experiment.pods("coordinator")[0]["metadata"]["name"]

    def attempts() -> list[int]:
        found: list[int] = json.loads(where.kubectl("exec", coordinator, "--", "python", "-c", VERSIONS))
        return found

    until(lambda: attempts()[-1] == 2, "the new attempt stores versions")
    stored = attempts()
    assert stored == sorted(stored), "no version of the old attempt came after one of the new"
    assert len(experiment.pods()) == wanted(experiment).total()
    reach_the_goal(experiment)
