"""A real Prometheus measures the operator and an experiment's pods, and the coordinator shows its workers' metrics.

Prometheus scrapes the pods, found and labelled as the chart's PodMonitors say. It runs beside the cluster and reaches
pods through the API server; the test does the work of the Prometheus operator and of Prometheus's discovery, from a
PodMonitor to its targets.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlsrl.testing.cluster_api import Object
from rlsrl.testing.faults import role_of
from rlsrl.testing.kubectl import ClusterExperiment, Namespace, api_proxy, namespace, run
from rlsrl.testing.prometheus import Prometheus, Target
from rlsrl.testing.tensorboard import WORK_METRICS, roles_at_work
from rlsrl.testing.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

CHART = Path(__file__).parents[2] / "charts"
EXPERIMENT: Object = {
    "apiVersion": "rlsrl.dev/v1alpha1",
    "kind": "RLExperiment",
    "metadata": {"name": "watched"},
    "spec": {
        "environment": {
            "factory": "rlsrl.testing.environments:GatedEnv",
            "kwargs": {"gate": "/none"},
            "episodeInfo": ["is_open"],
        },
        "algorithm": {"ppo": {"epochs": 1, "minibatchSize": 256}},
        "actors": {"replicas": 1, "environments": 8, "rolloutLength": 64, "ringSize": 2},
        "policyWorkers": {"replicas": 1},
        "bufferWorkers": {"replicas": 1},
        # The image lacks the extra `video`: what is not recorded is counted, too.
        "evaluators": {"replicas": 1, "environments": 2, "episodesPerEnvironment": 1, "video": {}},
        "parameters": {"everySeconds": 2},
        "tracking": {"workerSeconds": 2},
        "stop": {"envSteps": 1_000_000_000},
    },
}
"""An experiment with every role that trains without end."""
CHOICES = {"$experiment": "watched", "$role": ".+", "$__rate_interval": "30s"}


@pytest.fixture(scope="module")
def watched(system: Namespace) -> Iterator[ClusterExperiment]:
    """Yield the experiment of all tests here, which runs."""
    assert system.name
    with namespace(f"e2e-watched-{uuid.uuid4().hex[:8]}", wait=False) as where:
        where.apply(EXPERIMENT)
        experiment = ClusterExperiment(where, "watched")
        experiment.await_phase("Running")
        yield experiment


def monitors(release_namespace: str) -> list[Object]:
    """Return the PodMonitors of the installed release."""
    made = run(
        "helm", "template", "rlsrl", str(CHART), "--namespace", release_namespace,
        "--set", "metrics.podMonitor.enabled=true", "--show-only", "templates/monitoring.yaml",
    )  # fmt: skip
    return [each for each in yaml.safe_load_all(made) if each["kind"] == "PodMonitor"]


def chooses(monitor: Object, pod: Object) -> bool:
    """Return whether the monitor selects the pod."""
    labels = pod["metadata"]["labels"]
    selector = monitor["spec"]["selector"]
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        each["operator"] == "Exists" and each["key"] in labels for each in selector.get("matchExpressions", ())
    )


def labels_of(endpoint: Object, pod: Object, port: Object) -> dict[str, str] | None:
    """Return a target's labels; None if the monitor drops it."""
    if endpoint.get("port", port["name"]) != port["name"]:
        return None
    known = {
        "__meta_kubernetes_pod_container_port_name": port["name"],
        **{
            f"__meta_kubernetes_pod_label_{re.sub('[^a-zA-Z0-9_]', '_', name)}": value
            for name, value in pod["metadata"]["labels"].items()
        },
    }
    labels = {"namespace": pod["metadata"]["namespace"], "pod": pod["metadata"]["name"]}
    for rule in endpoint["relabelings"]:
        value = ";".join(known.get(name, "") for name in rule.get("sourceLabels", ()))
        if rule.get("action") == "keep":
            if re.fullmatch(rule["regex"], value) is None:
                return None
        else:
            assert rule.keys() <= {"sourceLabels", "targetLabel", "replacement"}, "no more is done here"
            labels[rule["targetLabel"]] = rule.get("replacement", value)
    return labels


def targets(monitor: Object, where: Namespace, api_server: str) -> Iterator[Target]:
    """Return the targets of the monitor in a namespace."""
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    for pod in where.list("pods"):
        if not chooses(monitor, pod):
            continue
        for port in pod["spec"]["containers"][0]["ports"]:
            labels = labels_of(endpoint, pod, port)
            if labels is not None:
                name = f"{pod['metadata']['name']}:{port['containerPort']}"
                yield Target(
                    address=api_server,
                    path=f"/api/v1/namespaces/{where.name}/pods/{name}/proxy/metrics",
                    labels=labels,
                    honor_labels=endpoint.get("honorLabels", False),
                )


def queries(dashboard: str) -> Iterator[str]:
    """Yield the queries of a dashboard's panels."""
    document: dict[str, Any] = json.loads((CHART / "dashboards" / f"{dashboard}.json").read_text())
    for panel in document["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))


def test_every_panel_shows_data_and_no_alert_fires(
    system: Namespace, watched: ClusterExperiment, tmp_path: Path
) -> None:
    where = watched.where
    with ExitStack() as resources:
        api_server = resources.enter_context(api_proxy())
        found = [
            target
            for monitor in monitors(system.name)
            for place in (system, where)
            if "namespaceSelector" in monitor["spec"] or place is system
            for target in targets(monitor, place, api_server)
        ]
        roles = sorted(target.labels["role"] for target in found)
        assert roles == ["actor", "buffer", "coordinator", "evaluator", "operator", "policy", "trainer"]
        rules = sorted((CHART / "alerts").glob("*.yaml"))
        server = resources.enter_context(Prometheus(tmp_path / "prometheus", found, rules))
        until(lambda: not server.faults(), "every target answers")
        for dashboard in ("experiment", "operator"):
            for query in queries(dashboard):
                if "rlsrl_replay" in query or "rlsrl_train_steps_behind" in query:
                    continue  # the experiment replays nothing
                asked = re.sub(r"\$\w+", lambda match: {**CHOICES, "$namespace": where.name}[match[0]], query)
                until(lambda asked=asked: server.query(asked), f"{dashboard}: {asked}")
        until(lambda: set(server.evaluations().values()) == {"ok"}, "every rule was evaluated")
        until(lambda: not server.alerts(), "no alert is even pending")
        writes = server.query("sum by (kind, verb) (rlsrl_operator_api_writes_total)")
        written = {tuple(value for _, value in labels) for labels in writes}
        assert {("Deployment", "apply"), ("RLExperiment/status", "replace"), ("Secret", "create")} <= written


def test_tensorboard_shows_the_work_of_every_role(watched: ClusterExperiment, tmp_path: Path) -> None:
    def roles_shown() -> set[str]:
        watched.copy_run_files("tensorboard/*", tmp_path)
        return roles_at_work(tmp_path)

    assert {*WORK_METRICS, "coordinator"} == {role_of(pod) for pod in watched.pods()}, "each role has pods"
    until(lambda: roles_shown() == {*WORK_METRICS}, "the work of every role is shown")
