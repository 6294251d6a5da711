"""A HorizontalPodAutoscaler scales actors by what they wait for; Prometheus and prometheus-adapter are real ones."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import yaml

from rlsrl.testing.cluster_api import Object
from rlsrl.testing.faults import goes_on
from rlsrl.testing.kubectl import CLUSTER_SECONDS, Experiment, Namespace, namespace, run
from rlsrl.testing.recovery import Recovered
from rlsrl.testing.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(2400)]

REPOSITORY = Path(__file__).parents[2]
CHART, EXAMPLES = REPOSITORY / "charts", REPOSITORY / "examples" / "kubernetes"
NAME = "cartpole"
"""Of the experiment that the example scales."""
IMAGE = "localhost/prometheus:e2e"
SCALED_SECONDS = 300.0
"""For what takes two minutes: rates over a minute, a look every 15 s, a minute of patience before actors go."""
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
    """What the Prometheus operator makes of the chart's monitor of workers."""
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


def prometheus(configuration: Object) -> Iterator[Object]:
    """A Prometheus as the adapter expects it, at prometheus.monitoring.svc:9090."""

    def made(api: str, kind: str, **parts: Object | list[Object]) -> Object:
        return {"apiVersion": api, "kind": kind, "metadata": {"name": "prometheus"}, **parts}

    rbac, group = "rbac.authorization.k8s.io/v1", "rbac.authorization.k8s.io"
    yield made("v1", "ServiceAccount")
    yield made(rbac, "ClusterRole", rules=[{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}])
    yield made(
        rbac,
        "ClusterRoleBinding",
        roleRef={"apiGroup": group, "kind": "ClusterRole", "name": "prometheus"},
        subjects=[{"kind": "ServiceAccount", "name": "prometheus", "namespace": "monitoring"}],
    )
    yield made("v1", "ConfigMap", data={"prometheus.yaml": yaml.safe_dump(configuration)})
    yield made("v1", "Service", spec={"selector": {"app": "prometheus"}, "ports": [{"port": 9090}]})
    container = {
        "name": "prometheus",
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "args": ["--config.file=/etc/prometheus/prometheus.yaml", "--storage.tsdb.path=/data"],
        "readinessProbe": {"httpGet": {"path": "/-/ready", "port": 9090}, "periodSeconds": 1},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [
            {"name": "config", "mountPath": "/etc/prometheus"},
            {"name": "data", "mountPath": "/data"},
        ],
    }
    pod = {
        "serviceAccountName": "prometheus",
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "fsGroup": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [{"name": "config", "configMap": {"name": "prometheus"}}, {"name": "data", "emptyDir": {}}],
    }
    chosen = {"app": "prometheus"}
    template = {"metadata": {"labels": chosen}, "spec": pod}
    yield made("apps/v1", "Deployment", spec={"selector": {"matchLabels": chosen}, "template": template})


@pytest.fixture
def metrics(
    system: Namespace, install: Callable[[str], AbstractContextManager[None]], tmp_path: Path
) -> Iterator[None]:
    """Prometheus, which finds the workers' pods, and the adapter with the example's rule."""
    program = shutil.which("prometheus")
    assert program is not None, "hack/system-tools installs it"
    archive = tmp_path / "prometheus.tar"
    run(str(REPOSITORY / "hack" / "cluster.d" / "image.py"), str(archive), IMAGE, program)
    run(str(REPOSITORY / "hack" / "cluster"), "load", str(archive))
    archive.unlink()
    rules = yaml.safe_load((EXAMPLES / "prometheus-adapter.yaml").read_text())["rules"]["custom"]
    configuration = {"global": {"scrape_interval": "5s"}, "scrape_configs": [*scrape_configs(system)]}
    adapter = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "adapter-config"}}
    with namespace("monitoring") as monitoring:
        monitoring.apply(
            *prometheus(configuration), adapter | {"data": {"config.yaml": yaml.safe_dump({"rules": rules})}}
        )
        monitoring.kubectl("rollout", "status", "deployment/prometheus", f"--timeout={CLUSTER_SECONDS:.0f}s")
        with install("prometheus-adapter"):
            yield
        monitoring.delete("clusterrolebinding", "prometheus")
        monitoring.delete("clusterrole", "prometheus")


def busy(where: Namespace) -> list[str]:
    """The metric of each actor's pod, for the story."""
    path = f"/apis/custom.metrics.k8s.io/v1beta1/namespaces/{where.name}/pods/*/rlsrl_actor_busy"
    return [
        f"{each['describedObject']['name']}: {each['value']}"
        for each in json.loads(run("kubectl", "get", "--raw", path))["items"]
    ]


def test_actors_follow_what_trainers_can_use(metrics: None, where: Namespace, recovered: Recovered) -> None:
    assert metrics is None
    where.apply(EXPERIMENT)
    experiment = Experiment(where, NAME)
    experiment.await_phase("Running")
    goes_on(experiment)
    others = {pod["metadata"]["uid"] for role in ("coordinator", "trainer") for pod in experiment.pods(role)}
    began = time.monotonic()
    where.kubectl("apply", "--filename", str(EXAMPLES / "autoscaling.yaml"))

    def are(number: int) -> None:
        try:
            until(lambda: experiment.status["actors"]["ready"] == number, f"{number} actors", timeout=SCALED_SECONDS)
        except TimeoutError as error:
            said = where.kubectl("describe", "hpa", "cartpole-actors")
            raise AssertionError(f"{error}\n{busy(where)}\n{said}\n{experiment.story()}") from None

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
