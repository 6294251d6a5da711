"""CartPole trains as pods of every role, and its weights can be exported from the cluster."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rlsrl.testing.cluster_api import Object
from rlsrl.testing.faults import role_of
from rlsrl.testing.kubectl import TRAINED_CARTPOLE, ClusterExperiment, Namespace, Nodes, run
from rlsrl.testing.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

NUMBERS = ("FPS", "STEPS", "VERSION", "LAG", "RETURN")
GOAL = 475.0
COMPILE_SECONDS = 300.0
"""For two ranks, each in a pod with a cache of its own."""


@pytest.fixture
def trained(where: Namespace, cartpole: Object) -> ClusterExperiment:
    where.apply(cartpole)
    return ClusterExperiment(where, cartpole["metadata"]["name"])


def test_every_role_trains_to_the_goal_and_the_exported_weights_play(
    trained: ClusterExperiment, hands: Nodes, tmp_path: Path
) -> None:
    trained.await_phase("Running")
    listed = lambda: [line.split() for line in trained.where.kubectl("get", "rlx").splitlines()]
    header, _ = listed()
    assert header[1:] == ["PHASE", "READY", "PROGRESS", "ACTORS", *NUMBERS, "RESTARTS", "AGE"]
    running = ["cartpole", "Running", "Ready", "Progressing", "2"]
    until(lambda: listed()[1][: len(running)] == running, "both actors are ready")
    trainers = trained.pods("trainer")
    assert len({pod["spec"]["nodeName"] for pod in trainers}) == 2, "ranks on different nodes"
    addresses = {pod["status"]["podIP"]: role_of(pod) for pod in trained.pods()}
    services = {
        service["spec"]["clusterIP"]: service["metadata"]["labels"]["rlsrl.dev/role"]
        for service in trained.where.list("services", experiment=trained.name)
    }
    until(lambda: trained.env_steps() > 0, "the first numbers")
    seen = hands.connections(trained.pods())
    trained.await_phase("Succeeded", seconds=400)
    until(lambda: [role_of(pod) for pod in trained.pods()] == ["coordinator"], "only the coordinator stays")
    assert trained.status["attempt"] == 1
    assert trained.status["restarts"] == 0
    assert float(trained.status["training"]["returnMean"]) >= GOAL
    assert trained.status["training"]["lengthMean"] == trained.status["training"]["returnMean"], "1 a step"

    allowed = allowed_connections(trained)
    used = {(role, (addresses | services)[host], port) for role, host, port in seen if host in addresses | services}
    strangers = {(role, host, port) for role, host, port in seen if host not in addresses | services and port != 53}
    assert not strangers, f"connections out of the experiment: {strangers}"
    for role, target, port in used:
        assert (role, target, port) in allowed or (role, target, None) in allowed, f"{role} -> {target}:{port}"
    within = {(role, target) for role, target, _ in allowed}
    assert {(role, target) for role, target, _ in used} == within, "every allowed way is used"

    assert trained.exported_return(tmp_path) >= TRAINED_CARTPOLE


def test_trainers_compile_their_steps(where: Namespace, cartpole: Object) -> None:
    """In the learner image, without root and with a read-only file system."""
    cartpole["spec"]["trainers"]["compile"] = "upfront"
    cartpole["spec"]["stop"] = {"envSteps": 100_000_000}
    where.apply(cartpole)
    experiment = ClusterExperiment(where, cartpole["metadata"]["name"])
    until(lambda: experiment.env_steps() > 0, "training, which waits for the compiled step", timeout=COMPILE_SECONDS)
    assert len(experiment.pods("trainer")) == 2, "which switch together"
    assert "\nrlsrl_compiled 1.0\n" in experiment.page("trainer", "/metrics")


def test_a_trainer_without_memory_for_the_compiler_trains_uncompiled(where: Namespace, cartpole: Object) -> None:
    small = {"containers": [{"name": "worker", "resources": {"limits": {"memory": "1Gi"}}}]}
    cartpole["spec"]["trainers"] = {"replicas": 1, "compile": "upfront", "podTemplate": {"spec": small}}
    cartpole["spec"]["stop"] = {"envSteps": 100_000_000}
    where.apply(cartpole)
    experiment = ClusterExperiment(where, cartpole["metadata"]["name"])
    until(lambda: experiment.env_steps() > 0, "training")
    assert "\nrlsrl_compiled 0.0\n" in experiment.page("trainer", "/metrics")
    (trainer,) = experiment.pods("trainer")
    (line,) = (
        json.loads(line)
        for line in where.kubectl("logs", trainer["metadata"]["name"]).splitlines()
        if '"not_compiled"' in line
    )
    assert "GiB of memory are available, and compiling needs 1." in line["reason"]
    assert experiment.status["restarts"] == 0


def allowed_connections(experiment: ClusterExperiment) -> set[tuple[str, str, int | None]]:
    """Return the connections that NetworkPolicies allow: role, role, port; None for any port."""
    allowed: set[tuple[str, str, int | None]] = set()
    for policy in experiment.where.list("networkpolicies", experiment=experiment.name):
        target = policy["spec"]["podSelector"]["matchLabels"]["rlsrl.dev/role"]
        for rule in policy["spec"].get("ingress", ()):
            for peer in rule["from"]:
                source = peer.get("podSelector", {}).get("matchLabels", {}).get("rlsrl.dev/role")
                if source is not None:
                    ports = [port["port"] for port in rule.get("ports", ())] or [None]
                    allowed |= {(source, target, port) for port in ports}
    return allowed


def test_kubectl_explains_a_field(definition: None) -> None:
    assert definition is None
    assert re.search(r"replicas\s+<integer>", run("kubectl", "explain", "rlexperiment.spec.trainers"))
