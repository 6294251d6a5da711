"""Environments in a server of its own on the cluster: the rule for the way there, its Secret, its ends and its faults.

Experiments reach the server through a pod that loses and delays answers, and counts those that arrive.
"""

from __future__ import annotations

import json
import subprocess
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rlsrl.testing.cluster_api import Object
from rlsrl.testing.faults import goes_on, lives, role_of
from rlsrl.testing.kubectl import CLUSTER_SECONDS, COMMAND_SECONDS, ClusterExperiment, Namespace, namespace, release
from rlsrl.testing.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(900)]

CHART = Path(__file__).parents[2] / "charts"
NAME, SERVER, FRONT = "remote", "simulators", "front"
PORT, POD_PORT = 80, 8765
ENVIRONMENTS, EVALUATORS, ROLLOUT, NUM_ENDS = 8, 2, 16, 10
FAULT_SHARE, TIMEOUT_SECONDS = 0.05, 1
"""Of the tries of steps; and the longest wait for an answer, which late ones exceed."""
LAST_STEPS = 20
"""Training steps between the last edit and the end: more than training grants credits ahead."""
ENFORCE_SECONDS = 20.0
"""How long a new NetworkPolicy may take to have an effect."""
TOKEN_FOLDER, STEPS, JOURNAL, WITNESS = "/var/run/simulator", "/steps/steps", "/steps/journal", "/tmp/witness.json"
SECRET: Object = {
    "apiVersion": "v1",
    "kind": "Secret",
    "metadata": {"name": "simulator"},
    "stringData": {"token": uuid.uuid4().hex},
}
TOKEN_VOLUME: Object = {"name": "simulator", "secret": {"secretName": "simulator"}}
TOKEN_MOUNT: Object = {"name": "simulator", "mountPath": TOKEN_FOLDER, "readOnly": True}
CONNECT = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=5).close()
except OSError:
    print("closed")
else:
    print("open")
"""
"""A program that tells whether a TCP connection can be made."""
READ_JOURNAL = """
import json, pathlib, sys
from rlsrl.testing.served_environments import journaled_steps
print(json.dumps(journaled_steps(pathlib.Path(sys.argv[1]))))
"""
"""A program that prints the steps in a journal, by purpose and rank."""


def service(name: str) -> Object:
    """Return the Service of the pods of that part."""
    ports = [{"port": PORT, "targetPort": POD_PORT}]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"selector": labels(name), "ports": ports},
    }


def labels(name: str) -> dict[str, str]:
    """Return the labels of that part's pods."""
    return {"app": SERVER, "part": name}


def pod_template(name: str, image: str, command: list[str], *mounts: Object, volumes: list[Object]) -> Object:
    """Return the template of that part's pods."""
    container = {
        "name": name,
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": command,
        "readinessProbe": {"tcpSocket": {"port": POD_PORT}, "periodSeconds": 1},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}, *mounts],
    }
    spec = {
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 10001,
            "fsGroup": 10001,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [{"name": "tmp", "emptyDir": {}}, *volumes],
    }
    return {"metadata": {"labels": labels(name)}, "spec": spec}


def server(image: str) -> list[Object]:
    """Return a server of environments, one pod whose files outlive it, and the faulty way to it."""
    address = ["--host", "0.0.0.0", "--port", str(POD_PORT), "--token-file", f"{TOKEN_FOLDER}/token"]
    environment = ["--factory", "rlsrl.testing.served_environments:JournaledCartPole"]
    arguments = ["--kwargs", json.dumps({"folder": JOURNAL}), "--steps-file", STEPS]
    steps = {"name": "steps", "mountPath": STEPS.rpartition("/")[0]}
    claim = {
        "metadata": {"name": "steps"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "64Mi"}}},
    }
    command = ["rlsrl", "serve-environment", *environment, *address, *arguments]
    stateful_set = {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": SERVER},
        "spec": {
            "replicas": 1,
            "serviceName": SERVER,
            "selector": {"matchLabels": labels(SERVER)},
            "template": pod_template(SERVER, image, command, TOKEN_MOUNT, steps, volumes=[TOKEN_VOLUME]),
            "volumeClaimTemplates": [claim],
        },
    }
    witness = ["python", "-m", "rlsrl.testing.step_witness", "--upstream", f"http://{SERVER}:{PORT}"]
    witness += ["--port", str(POD_PORT), "--share", str(FAULT_SHARE), "--file", WITNESS]
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": FRONT},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": labels(FRONT)},
            "template": pod_template(FRONT, image, witness, volumes=[]),
        },
    }
    return [SECRET, stateful_set, service(SERVER), deployment, service(FRONT)]


def experiment_at(simulators: Namespace, *, has_policy_worker: bool) -> Object:
    """Return an experiment whose environments are in that namespace's server. Each of its roles makes an environment.

    Without a policy worker the actors evaluate the policy.
    """
    template = {
        "spec": {"containers": [{"name": "worker", "volumeMounts": [TOKEN_MOUNT]}], "volumes": [TOKEN_VOLUME]},
    }
    url = f"http://{FRONT}.{simulators.name}:{PORT}"
    policy_workers = {"policyWorkers": {"replicas": 1, "podTemplate": template}} if has_policy_worker else {}
    return {
        "apiVersion": "rlsrl.dev/v1alpha1",
        "kind": "RLExperiment",
        "metadata": {"name": NAME},
        "spec": {
            "environment": {
                "http": {
                    "url": url,
                    "tokenFile": f"{TOKEN_FOLDER}/token",
                    "timeoutSeconds": TIMEOUT_SECONDS,
                    "backoffSeconds": 0.1,
                    "maxBackoffSeconds": 1,
                },
                "passPlace": True,
            },
            "policy": {"network": {"mlp": {"hiddenSizes": [16]}}},
            "algorithm": {"ppo": {"epochs": 1, "minibatchSize": ENVIRONMENTS * ROLLOUT}},
            "actors": {
                "replicas": 2,
                "environments": ENVIRONMENTS,
                "rolloutLength": ROLLOUT,
                "vectorization": "threads",
                "podTemplate": template,
            },
            **policy_workers,
            "trainers": {"podTemplate": template},
            "evaluators": {
                "replicas": 1,
                "environments": EVALUATORS,
                "episodesPerEnvironment": 1,
                "podTemplate": template,
            },
            "stop": {"trainSteps": 1_000_000},
        },
    }


@pytest.fixture
def simulators(system: Namespace) -> Iterator[Namespace]:
    """Yield a namespace for the server, whose pods the administrator allows to experiments."""
    with namespace(f"e2e-simulators-{uuid.uuid4().hex[:8]}", wait=False) as made:
        entry = "environments.egress[0]"
        label = "matchLabels.kubernetes\\.io/metadata\\.name"
        values = (f"{entry}.namespaceSelector.{label}={made.name}", f"{entry}.podSelector.matchLabels.app={SERVER}")
        with release(system, CHART, *values):
            yield made


def reaches(pod: Object, where: Namespace, host: str, port: int) -> bool:
    """Return whether a pod can connect."""
    name = pod["metadata"]["name"]
    return where.kubectl("exec", name, "--", "python", "-c", CONNECT, host, str(port)).strip() == "open"


def why(experiment: ClusterExperiment) -> str:
    """Return the output of ``kubectl rlsrl why``."""
    words = ["kubectl", "rlsrl", "why", NAME, "--namespace", experiment.where.name]
    return subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False).stdout


def enforces_policies(simulators: Namespace, actor: Object, where: Namespace, host: str) -> bool:
    """Return whether the cluster enforces NetworkPolicies: one that denies all ways to the server has an effect then.

    The cluster of hack/cluster enforces none.
    """
    deny = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "deny"},
        "spec": {"podSelector": {}, "policyTypes": ["Ingress"]},
    }
    simulators.apply(deny)
    try:
        until(lambda: not reaches(actor, where, host, PORT), "the way is closed", timeout=ENFORCE_SECONDS)
    except TimeoutError:
        return False
    finally:
        simulators.delete("networkpolicy", "deny", wait=True)
    return True


def end_pod(simulators: Namespace) -> None:
    """End the server's pod, and wait for another one."""
    pod = f"{SERVER}-0"
    simulators.delete("pod", pod, wait=True)
    await_server(simulators)


def await_server(simulators: Namespace) -> None:
    def is_ready(kind: str, name: str) -> bool:
        found = simulators.get(kind, name)
        return found is not None and found.get("status", {}).get("readyReplicas") == 1

    until(lambda: is_ready("statefulset", SERVER), "the server is ready", timeout=CLUSTER_SECONDS)
    until(lambda: is_ready("deployment", FRONT), "the way to it is ready", timeout=CLUSTER_SECONDS)


def away(experiment: ClusterExperiment) -> str:
    """Return the status of the condition about the server; empty before it exists."""
    return str(experiment.condition("EnvironmentServerAway").get("status", ""))


def test_an_experiment_trains_in_a_server_whose_pod_ends_again_and_again(
    where: Namespace, simulators: Namespace, actor_image: str
) -> None:
    where.apply(SECRET, experiment_at(simulators, has_policy_worker=True))
    experiment = ClusterExperiment(where, NAME)
    until(lambda: experiment.condition("Accepted").get("reason") == "ServiceUnusable", "there is no Service yet")
    assert f"Service {simulators.name}/{FRONT} does not exist" in experiment.condition("Accepted")["message"]
    assert not experiment.pods()

    simulators.apply(*server(actor_image))
    await_server(simulators)
    experiment.await_phase("Running")
    goes_on(experiment)
    assert experiment.condition("Accepted")["status"] == "True"
    began = lives(experiment)

    (coordinator,), (actor, *_) = experiment.pods("coordinator"), experiment.pods("actor")
    host = f"{FRONT}.{simulators.name}"
    assert reaches(actor, where, host, PORT)
    if enforces_policies(simulators, actor, where, host):
        assert not reaches(coordinator, where, host, PORT), "its role makes no environment: it has no rule"
    goes_on(experiment)

    simulators.kubectl("scale", "statefulset", SERVER, "--replicas=0")
    until(lambda: away(experiment) == "True", "the experiment says that the server is away", timeout=CLUSTER_SECONDS)
    message = experiment.condition("EnvironmentServerAway")["message"]
    assert f"the environment server http://{host}:{PORT} is away: " in message
    assert "have waited since" in message or "has waited since" in message
    assert "EnvironmentServerAway" in why(experiment)
    simulators.kubectl("scale", "statefulset", SERVER, "--replicas=1")
    await_server(simulators)
    goes_on(experiment)
    until(lambda: away(experiment) == "False", "no environment waits any more", timeout=CLUSTER_SECONDS)
    for _ in range(NUM_ENDS):
        end_pod(simulators)
        goes_on(experiment)
    assert lives(experiment) == began, "no worker was restarted"
    trained = experiment.env_steps()
    assert num_chosen_actions(experiment) >= trained > 0, "the policy worker has chosen the action of each step"

    stop = {"trainSteps": int(experiment.status["training"]["trainSteps"]) + LAST_STEPS}
    where.kubectl("patch", "rlexperiment", NAME, "--type=merge", "-p", json.dumps({"spec": {"stop": stop}}))
    experiment.await_phase("Succeeded")
    ledger = experiment.ledger()
    assert ledger["balanced"], ledger
    until(
        lambda: [role_of(pod) for pod in experiment.pods()] == ["coordinator"],
        "the evaluator has played the last version",
        timeout=CLUSTER_SECONDS,
    )
    explain(experiment, simulators, ledger["produced"])


def num_chosen_actions(experiment: ClusterExperiment) -> float:
    """Return the number of actions that the policy worker has chosen."""
    families = text_string_to_metric_families(experiment.page("policy", "/metrics"))
    found = {sample.name: sample.value for family in families for sample in family.samples}
    return found["rlsrl_inference_batch_environments_sum"]


def explain(experiment: ClusterExperiment, simulators: Namespace, produced: int) -> None:
    """Check that each step in the server belongs to a produced transition, an evaluation, or a step without answer."""
    read = ("exec", f"{SERVER}-0", "--", "python", "-c", READ_JOURNAL, JOURNAL)
    taken = {purpose: by_rank(found) for purpose, found in json.loads(simulators.kubectl(*read)).items()}
    num_steps = int(simulators.kubectl("exec", f"{SERVER}-0", "--", "cat", STEPS))
    # Written twice a second: so all is in the file.
    witness = json.loads(simulators.kubectl("exec", f"deployment/{FRONT}", "--", "cat", WITNESS))
    answered = {purpose: by_rank(found) for purpose, found in witness["answered"].items()}
    unanswered = {purpose: by_rank(found) for purpose, found in witness["unanswered"].items()}
    lines = [line for line in log_of_evaluator(experiment) if line.get("event") == "evaluated"]
    evaluated = sum(line["steps"] for line in lines)
    assert min(witness["faults"].values()) > 20, witness["faults"]
    assert max(witness["most_unanswered"].values()) <= 1, "a session ends with its first step without an answer"
    assert answered["training"].total() == produced
    assert answered["evaluation"].total() == evaluated, [(line["version"], line["steps"]) for line in lines]
    assert taken.pop("inspection", Counter()).total() == 0
    for purpose, found in taken.items():
        for rank, number in found.items():
            assert 0 <= number - answered[purpose][rank] <= unanswered[purpose][rank]
    # The server counts a step after the environment has: it may be ended in between.
    uncounted = sum(each.total() for each in taken.values()) - num_steps
    assert 0 <= uncounted <= (NUM_ENDS + 1) * (ENVIRONMENTS + EVALUATORS)


def log_of_evaluator(experiment: ClusterExperiment) -> list[Object]:
    """Return the lines that the run has kept of its evaluator's log."""
    role = ("--role", "evaluator", "--index", "0", "--tail", "-1", "--kept")
    words = ["kubectl", "rlsrl", "logs", experiment.name, *role, "--namespace", experiment.where.name]
    lines = subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=True).stdout
    return [json.loads(line[line.index("{") :]) for line in lines.splitlines() if "] {" in line]


def by_rank(found: Object) -> Counter[int]:
    """Return a counter from its JSON value."""
    return Counter({int(rank): number for rank, number in found.items()})


def test_the_way_to_the_server_follows_its_service(where: Namespace, simulators: Namespace, actor_image: str) -> None:
    """The same server, pod and moment: only the rule differs. The actors evaluate the policy themselves."""
    simulators.apply(*server(actor_image))
    await_server(simulators)
    where.apply(SECRET, experiment_at(simulators, has_policy_worker=False))
    experiment = ClusterExperiment(where, NAME)
    experiment.await_phase("Running")
    goes_on(experiment)
    began = lives(experiment)
    (actor, *_) = experiment.pods("actor")
    if not enforces_policies(simulators, actor, where, f"{SERVER}.{simulators.name}"):
        pytest.skip("the cluster enforces no NetworkPolicies")
    pod = simulators.get("pod", f"{SERVER}-0")
    assert pod is not None
    address = pod["status"]["podIP"]
    assert reaches(actor, where, address, POD_PORT)
    simulators.delete("service", SERVER, wait=True)
    until(lambda: experiment.condition("Accepted").get("reason") == "ServiceUnusable", "it is reported")
    until(lambda: not reaches(actor, where, address, POD_PORT), "the way is closed", timeout=CLUSTER_SECONDS)
    simulators.apply(*server(actor_image))
    until(lambda: reaches(actor, where, address, POD_PORT), "the way is open again", timeout=CLUSTER_SECONDS)
    until(lambda: experiment.condition("Accepted")["status"] == "True", "it is accepted again")
    goes_on(experiment, timeout=CLUSTER_SECONDS)
    assert lives(experiment) == began, "no worker was restarted"
