"""The operator beside training: ends, deletions, conflicts, and no writes without a reason."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from rlsrl.api.pods import is_ready
from rlsrl.testing.cluster_api import Object
from rlsrl.testing.faults import all_ready, begin, goes_on, lives, reach_the_goal
from rlsrl.testing.kubectl import ClusterExperiment, Namespace, release
from rlsrl.testing.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

REPOSITORY = Path(__file__).parents[2]
IDLE_SECONDS = 15
KINDS = "statefulsets,deployments,services,configmaps,secrets,networkpolicies,pods"
SHORT: Object = {
    "apiVersion": "rlsrl.dev/v1alpha1",
    "kind": "RLExperiment",
    "metadata": {"name": "short"},
    "spec": {
        "environment": {"id": "CartPole-v1"},
        "policy": {"network": {"mlp": {"hiddenSizes": [16]}}},
        "actors": {"environments": 8},
        "evaluators": {"environments": 2},
        "parameters": {"everySeconds": 1},
        "stop": {"trainSteps": 20},
    },
}


def short(**spec: object) -> Object:
    """Return an experiment of a few seconds."""
    return {**SHORT, "spec": {**SHORT["spec"], **spec}}


def start(where: Namespace, document: Object) -> ClusterExperiment:
    where.apply(document)
    return ClusterExperiment(where, document["metadata"]["name"])


def made_for(experiment: ClusterExperiment) -> list[str]:
    """Return all its objects except the volume."""
    found = experiment.where.kubectl("get", KINDS, "-l", f"rlsrl.dev/experiment={experiment.name}", "-o", "name")
    return found.split()


def writes_of_the_operator(where: Namespace, since: float) -> list[str]:
    """Return the operator's changes since then, from the API server's audit log."""
    log = os.environ.get("RLSRL_E2E_AUDIT_LOG", "")
    if not log:
        pytest.skip("RLSRL_E2E_AUDIT_LOG names no audit log: only the cluster's own backend has one")
    found = []
    for line in Path(log).read_text().splitlines():
        event = json.loads(line)
        if "rlsrl-operator" not in event["user"]["username"] or event["verb"] in ("get", "list", "watch"):
            continue
        ours = f"/namespaces/{where.name}/" in event["requestURI"]
        if ours and event["stage"] == "ResponseComplete" and event["requestReceivedTimestamp"] > stamp(since):
            found.append(f"{event['verb']} {event['requestURI']}")
    return found


def stamp(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))


def test_a_finished_experiment_is_left_alone_and_its_volume_outlives_it(where: Namespace, system: Namespace) -> None:
    experiment = start(where, short())
    experiment.await_phase("Succeeded")
    assert experiment.condition("Finished")["message"].startswith("stop.trainSteps holds")
    assert experiment.status["training"]["trainSteps"] == 20
    listed = lambda: [pod["metadata"]["labels"]["rlsrl.dev/role"] for pod in experiment.pods()]
    until(lambda: listed() == ["coordinator"], "only the coordinator stays")

    began = time.time()
    version = experiment.object["metadata"]["resourceVersion"]
    time.sleep(IDLE_SECONDS)  # the test measures that nothing is written in this time
    assert experiment.object["metadata"]["resourceVersion"] == version
    assert writes_of_the_operator(where, began + 2) == []

    # No operator runs during the deletion: the cluster's garbage collector deletes the objects.
    system.kubectl("scale", "deployment/rlsrl-operator", "--replicas=0")
    until(lambda: not system.list("pods"), "the operator is gone")
    where.delete("rlexperiment", experiment.name, wait=True)
    until(lambda: not made_for(experiment), "all that was made for it is gone")
    assert [claim["metadata"]["name"] for claim in where.list("persistentvolumeclaims")] == ["short-data"]
    system.kubectl("scale", "deployment/rlsrl-operator", "--replicas=1")
    system.kubectl("rollout", "status", "deployment/rlsrl-operator", "--timeout=60s")

    # Another of the same name is another run, on the same volume.
    again = start(where, short(ttlSecondsAfterFinished=3))
    again.await_phase("Succeeded")
    assert again.status["training"]["trainSteps"] == 20
    until(lambda: where.get("rlexperiment", again.name) is None, "its time is over")
    until(lambda: not made_for(again), "all that was made for it is gone")


def test_a_configuration_error_fails_at_once_with_pod_and_reason(where: Namespace) -> None:
    experiment = start(where, short(environment={"id": "CartPole-v9"}))
    experiment.await_phase("Failed")
    finished = experiment.condition("Finished")
    assert finished["reason"] == "ConfigurationError"
    assert "CartPole-v9" in finished["message"]
    assert finished["message"].startswith("short-")
    assert experiment.status["restarts"] == 0
    description = where.kubectl("describe", "rlexperiment", experiment.name)
    assert "Warning  ConfigurationError" in description


def test_forbidden_pods_are_reported(where: Namespace) -> None:
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "nothing"},
        "spec": {"hard": {"pods": "0"}},
    }
    where.apply(quota)
    until(lambda: "hard" in (where.get("resourcequota", "nothing") or {}).get("status", {}), "the quota is in force")
    experiment = start(where, short())
    until(lambda: experiment.condition("Ready").get("reason") == "FailedCreate", "the status has FailedCreate")
    message = experiment.condition("Ready")["message"]
    assert "trainer 0/1" in message
    assert "exceeded quota: nothing" in message
    where.delete("resourcequota", "nothing")
    experiment.await_phase("Succeeded", seconds=300)


def test_objects_of_others_are_never_taken_over(where: Namespace) -> None:
    theirs = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "short-coordinator"},
        "spec": {"selector": {"app": "theirs"}, "ports": [{"port": 80}]},
    }
    where.apply(theirs)
    experiment = start(where, short())
    until(lambda: experiment.condition("Accepted").get("reason") == "NameConflict", "the status has the conflict")
    assert "Service short-coordinator" in experiment.condition("Accepted")["message"]
    found = where.get("service", "short-coordinator")
    assert found is not None
    assert found["spec"]["selector"] == {"app": "theirs"}
    where.delete("service", "short-coordinator")
    where.kubectl("annotate", "rlexperiment", experiment.name, "look=again")
    experiment.await_phase("Succeeded")


def test_pod_templates_cannot_weaken_the_security_context(where: Namespace) -> None:
    def actors(**spec: object) -> Object:
        return short(actors={"environments": 8, "podTemplate": {"spec": spec}})

    experiment = start(where, actors(hostNetwork=True))
    until(lambda: experiment.condition("Accepted").get("reason") == "InvalidSpec", "the spec is refused")
    assert "spec.actors.podTemplate.spec.hostNetwork is not" in experiment.condition("Accepted")["message"]
    assert not experiment.pods()
    variable = {"name": "worker", "env": [{"name": "LEVEL", "value": "7"}]}
    where.apply(actors(containers=[variable]))
    (actor,) = until(lambda: experiment.pods("actor"), "an actor")
    assert {"name": "LEVEL", "value": "7"} in actor["spec"]["containers"][0]["env"]
    token = {"name": "api", "projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]}}
    where.apply(actors(containers=[variable], hostPID=True, volumes=[token], priorityClassName="system-node-critical"))
    # The condition may still be that of the first refusal: it follows the objects.
    refused = ("hostPID", "serviceAccountToken", "system-node-critical")
    until(lambda: all(each in experiment.condition("Accepted").get("message", "") for each in refused), "a refusal")
    assert experiment.condition("Accepted")["reason"] == "InvalidSpec"
    experiment.await_phase("Succeeded")


def test_environments_reach_nothing_that_the_administrator_has_not_listed(where: Namespace) -> None:
    """The suite's operator allows no destination: the chart's default."""

    def reaching(*rules: object) -> Object:
        return short(stop={"wallSeconds": 600}, environment={"id": "CartPole-v1", "egress": list(rules)})

    rule = {"to": {"cidr": "203.0.113.0/24"}, "ports": [{"port": 8443}]}
    experiment = start(where, reaching(rule))
    until(lambda: experiment.condition("Accepted").get("reason") == "InvalidSpec", "the spec is refused")
    assert "egress[0].to.cidr: 203.0.113.0/24 is not within" in experiment.condition("Accepted")["message"]
    assert not experiment.pods()
    where.apply(reaching())
    experiment.await_phase("Running")
    pods = {pod["metadata"]["uid"] for pod in experiment.pods()}
    where.apply(reaching(rule))
    until(lambda: experiment.condition("Accepted").get("reason") == "InvalidSpec", "the edit is refused")
    assert "203.0.113.0" not in str(where.list("networkpolicies"))
    assert {pod["metadata"]["uid"] for pod in experiment.pods()} == pods


def test_foreign_changes_are_reverted(where: Namespace) -> None:
    experiment = start(where, short(stop={"wallSeconds": 600}))
    experiment.await_phase("Running")
    kinds = ("deployment", "statefulset", "service", "networkpolicy", "configmap", "secret")
    before = {
        (kind, each["metadata"]["name"]): contents(each)
        for kind in kinds
        for each in where.list(kind, experiment="short")
    }
    where.kubectl("set", "env", "deployment/short-actor", "SOMEBODY=else")
    where.kubectl("set", "env", "statefulset/short-coordinator", "SOMEBODY=else")
    port = [{"op": "add", "path": "/spec/ports/-", "value": {"name": "theirs", "port": 81}}]
    where.kubectl("patch", "service", "short-coordinator", "--type=json", "-p", json.dumps(port))
    anybody = [
        {"op": "add", "path": "/spec/ingress/-", "value": {}},
        {"op": "add", "path": "/spec/podSelector/matchLabels/theirs", "value": "yes"},
    ]
    where.kubectl("patch", "networkpolicy", "short-coordinator", "--type=json", "-p", json.dumps(anybody))
    for kind in ("service", "configmap", "secret"):
        name = next(name for known, name in before if known == kind)
        where.kubectl("label", kind, name, "rlsrl.dev/uid-", "app.kubernetes.io/instance=theirs", "--overwrite")

    def now() -> dict[tuple[str, str], Object]:
        return {(kind, name): contents(found) for kind, name in before if (found := where.get(kind, name)) is not None}

    until(lambda: now() == before, "everything is as it was")
    experiment.await_phase("Running")


def contents(found: Object) -> Object:
    """Return an object's spec or data."""
    labels = found["metadata"]["labels"]
    return {"labels": labels, "spec": found.get("spec"), "data": found.get("data")}


def test_an_edit_replaces_affected_objects_and_removes_unneeded_ones(where: Namespace) -> None:
    experiment = start(where, short(stop={"wallSeconds": 600}, policyWorkers={}))
    experiment.await_phase("Running")
    assert {"short-policy"} <= {each["metadata"]["name"] for each in where.list("deployments", experiment="short")}
    steps = experiment.env_steps()
    edit = [
        {"op": "remove", "path": "/spec/policyWorkers"},
        {"op": "add", "path": "/spec/parameters/store", "value": {"filesystem": {"whenDeleted": "Delete"}}},
    ]
    where.kubectl("patch", "rlexperiment", "short", "--type=json", "-p", json.dumps(edit))

    def adopted() -> bool:
        claim = where.get("persistentvolumeclaim", "short-data")
        return claim is not None and bool(claim["metadata"].get("ownerReferences"))

    until(adopted, "the volume goes with the experiment")
    gone = {"deployments": "short-policy", "networkpolicies": "short-policy"}
    for kind, name in gone.items():
        until(lambda kind=kind, name=name: where.get(kind, name) is None, f"{kind} {name} is gone")  # type: ignore[misc]
    config_maps = lambda: [each["metadata"]["name"] for each in where.list("configmaps", experiment="short")]
    until(
        lambda: not any("short-policy-" in name for name in config_maps()),
        "the configs of the policy workers are deleted",
    )
    until(
        lambda: sum("short-record-" in name for name in config_maps()) == 1,
        "the record of the first generation is deleted",
    )
    until(lambda: experiment.env_steps() > steps, "training continues")
    assert experiment.status["attempt"] == 1, "the trainers went on"
    where.delete("rlexperiment", "short", wait=True)
    until(lambda: where.get("persistentvolumeclaim", "short-data") is None, "the volume went with it")


@pytest.mark.full
def test_an_upgrade_of_the_chart_restarts_no_pod(where: Namespace, system: Namespace) -> None:
    """Later pods of the run have the same image: a run keeps its settings."""
    experiment = begin(where)
    before = lives(experiment)
    image, variable = "images.actor.tag=another", "roles.default.extraEnv[0]"
    (operator,) = system.list("pods")
    with release(system, REPOSITORY / "charts", image, f"{variable}.name=A_VARIABLE", f"{variable}.value=a-value"):
        until(lambda: [pod for pod in system.list("pods") if is_ready(pod)] not in ([], [operator]), "another operator")
        goes_on(experiment)
        assert lives(experiment) == before
        victim = experiment.pods("actor")[0]
        where.delete("pod", victim["metadata"]["name"])
        until(lambda: lives(experiment) != before and all_ready(experiment), "another actor")
        containers = json.dumps([pod["spec"]["containers"] for pod in experiment.pods("actor")])
        assert "A_VARIABLE" not in containers
        assert "another" not in containers
        goes_on(experiment)
    assert lives(experiment, without=["actor"]).items() <= before.items()
    reach_the_goal(experiment)
