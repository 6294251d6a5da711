"""A HorizontalPodAutoscaler scales actors by their waits, with a real Prometheus and prometheus-adapter."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import yaml

from rlsrl.testing.cluster_api import Object
from rlsrl.testing.faults import goes_on
from rlsrl.testing.kubectl import ClusterExperiment, Namespace, namespace, run
from rlsrl.testing.recovery import Recovered
from rlsrl.testing.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(2400)]

REPOSITORY = Path(__file__).parents[2]
CHART, EXAMPLES = REPOSITORY / "charts", REPOSITORY / "examples" / "kubernetes"
NAME = "cartpole"
"""The name of the experiment in the example."""
SCALED_SECONDS = 300.0
"""Deadline of a scaling: rates over a minute, a check every 15 s, a minute before actors are removed."""
EXPERIMENT: Object = {
    "apiVersion": "rlsrl.dev/v1alpha1",
    "kind": "RLExperiment",
    "metadata": {"name": NAME},
    "spec": {
        # A step takes 2 ms of no processor: actors are what training waits for.
        "environment": {
            "factory": "rlsrl.testing.environments:GatedEnv",
            "kwargs": {"gate": "/none", "step_seconds": 0.002},
        },
        "policy": {"network": {"mlp": {"hiddenSizes": [16]}}},
        "algorithm": {"ppo": {"epochs": 1, "minibatchSize": 64}},
        "actors": {"replicas": 1, "environmentsPerActor": 8, "rolloutLength": 32},
        "trainers": {"batchEnvironments": 8},
        "stop": {"wallSeconds": 3600},
    },
}


def snake_case(name: str) -> str:
    return re.sub("[A-Z]", lambda match: f"_{match[0].lower()}", name)


def scrape_configs(system: Namespace) -> Iterator[Object]:
    """Return the scrape configuration for the chart's monitor of workers."""
    made = run(
        "helm", "template", "rlsrl", str(CHART), "--namespace", system.name,
        "--set", "metrics.podMonitor.enabled=true", "--show-only", "templates/monitoring.yaml",
    )  # fmt: skip
    (monitor,) = (each for each in yaml.safe_load_all(made) if each["metadata"]["name"] == "rlsrl-workers")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    (exists,) = monitor["spec"]["selector"]["matchExpressions"]
    label = re.sub("[^a-z]", "_", exists["key"])
    yield {
        "job_name": "workers",
        "kubernetes_sd_configs": [{"role": "pod"}],
        "relabel_configs": [
            {"action": "keep", "source_labels": [f"__meta_kubernetes_pod_label_{label}"], "regex": ".+"},
            {"source_labels": ["__meta_kubernetes_namespace"], "target_label": "namespace"},
            {"source_labels": ["__meta_kubernetes_pod_name"], "target_label": "pod"},
            *({snake_case(name): value for name, value in each.items()} for each in endpoint["relabelings"]),
        ],
    }


@pytest.fixture
def metrics(system: Namespace, install: Callable[[str], AbstractContextManager[None]]) -> Iterator[None]:
    """Install Prometheus, which finds the workers' pods, and the adapter with the example's rule."""
    rules = yaml.safe_load((EXAMPLES / "prometheus-adapter.yaml").read_text())["rules"]["custom"]
    scraped = {"global": {"scrape_interval": "5s"}, "scrape_configs": [*scrape_configs(system)]}
    with namespace("monitoring") as monitoring:
        monitoring.apply(
            config_map("prometheus", "prometheus.yaml", scraped),
            config_map("adapter-config", "config.yaml", {"rules": rules}),
        )
        with install("prometheus"), install("prometheus-adapter"):
            yield


def config_map(name: str, file: str, value: Object) -> Object:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {file: yaml.safe_dump(value)}}


def busy(where: Namespace) -> list[str]:
    """Return the metric of each actor's pod, for the output."""
    path = f"/apis/custom.metrics.k8s.io/v1beta1/namespaces/{where.name}/pods/*/rlsrl_actor_busy"
    return [
        f"{each['describedObject']['name']}: {each['value']}"
        for each in json.loads(run("kubectl", "get", "--raw", path))["items"]
    ]


def test_the_number_of_actors_follows_their_waits(metrics: None, where: Namespace, recovered: Recovered) -> None:
    assert metrics is None
    where.apply(EXPERIMENT)
    experiment = ClusterExperiment(where, NAME)
    experiment.await_phase("Running")
    goes_on(experiment)
    others = {pod["metadata"]["uid"] for role in ("coordinator", "trainer") for pod in experiment.pods(role)}
    began = time.monotonic()
    where.kubectl("apply", "--filename", str(EXAMPLES / "autoscaling.yaml"))

    def are(number: int) -> None:
        def settled() -> bool:
            actors = experiment.status["actors"]
            return bool(actors["replicas"] == actors["ready"] == number)

        try:
            until(settled, f"{number} actors", timeout=SCALED_SECONDS)
        except TimeoutError as error:
            description = where.kubectl("describe", "hpa", "cartpole-actors")
            raise AssertionError(f"{error}\n{busy(where)}\n{description}\n{experiment.status_text()}") from None

    are(3)
    recovered("HorizontalPodAutoscaler scales actors from 1 to 3", time.monotonic() - began, "as many as it may")
    goes_on(experiment)
    assert {pod["metadata"]["uid"] for role in ("coordinator", "trainer") for pod in experiment.pods(role)} == others
    # Now a batch takes the trainer many times as long as the actors.
    began = time.monotonic()
    patch = json.dumps({"spec": {"algorithm": {"ppo": {"epochs": 1000}}}})
    where.kubectl("patch", "rlexperiment", NAME, "--type=merge", "-p", patch)
    are(1)
    recovered("HorizontalPodAutoscaler scales actors from 3 to 1", time.monotonic() - began, "as many as are of use")
    goes_on(experiment)
