"""The same experiment without a volume: its versions are in an object store, which runs as a pod."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlsrl.testing.cluster_api import Object
from rlsrl.testing.kubectl import ClusterExperiment, Namespace, run
from rlsrl.testing.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

GOAL = 475.0
PORT = 7070
USER = 10001
KEYS = {"AWS_ACCESS_KEY_ID": "e2e-access-key", "AWS_SECRET_ACCESS_KEY": "e2e-secret-key"}
CONTAINER = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
MOUNTS = [{"name": "data", "mountPath": "/data"}]
LABELS = {"app": "s3"}


def server(image: str) -> Object:
    """Start a pod with the real S3 server and a bucket."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "s3", "labels": LABELS},
        "spec": {
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER,
                "fsGroup": USER,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "initContainers": [
                {
                    "name": "bucket",
                    "image": image,
                    "command": ["mkdir", "-p", "/data/versions"],
                    "volumeMounts": MOUNTS,
                    "securityContext": CONTAINER,
                }
            ],
            "containers": [
                {
                    "name": "s3",
                    "image": "localhost/s3:e2e",
                    "args": ["--port", f":{PORT}", "--region", "us-east-1", "--quiet", "posix", "/data"],
                    "env": [
                        {"name": "ROOT_ACCESS_KEY", "value": KEYS["AWS_ACCESS_KEY_ID"]},
                        {"name": "ROOT_SECRET_KEY", "value": KEYS["AWS_SECRET_ACCESS_KEY"]},
                    ],
                    "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 1},
                    "volumeMounts": MOUNTS,
                    "securityContext": CONTAINER,
                }
            ],
            "volumes": [{"name": "data", "emptyDir": {}}],
        },
    }


def test_it_trains_to_the_goal_and_its_exported_weights_play(
    where: Namespace, cartpole: Object, actor_image: str, tmp_path: Path
) -> None:
    where.apply(
        server(actor_image),
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "s3"},
            "spec": {"selector": LABELS, "ports": [{"port": PORT}]},
        },
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "bucket-keys"}, "stringData": KEYS},
    )
    where.kubectl("wait", "--for=condition=Ready", "pod/s3", "--timeout=60s")
    store = {
        "url": "s3://versions",
        "endpoint": f"http://s3.{where.name}.svc:{PORT}",
        "credentialsSecret": "bucket-keys",
    }
    cartpole["spec"]["parameters"]["store"] = {"objectStore": store}
    where.apply(cartpole)
    experiment = ClusterExperiment(where, cartpole["metadata"]["name"])
    experiment.await_phase("Running")
    until(lambda: experiment.env_steps() > 0, "the experiment trains")
    # Nothing of the coordinator stays with its pod.
    (coordinator,) = experiment.pods("coordinator")
    where.delete("pod", coordinator["metadata"]["name"], wait=True)
    experiment.await_phase("Succeeded", seconds=400)
    assert experiment.status["restarts"] == 0
    assert where.list("persistentvolumeclaims") == []
    logs = run("kubectl", "rlsrl", "logs", experiment.name, "-n", where.name, "--role", "actor", "--tail", "-1")
    assert '"configuring"' in logs, "the lines from before the coordinator's deletion"

    weights, document = tmp_path / "weights.safetensors", tmp_path / "experiment.yaml"
    document.write_text(json.dumps(cartpole))
    run("kubectl", "rlsrl", "params", "export", experiment.name, "-n", where.name, "-o", str(weights))
    evaluation = run("rlsrl", "eval", str(weights), "--experiment", str(document), "--json")
    assert json.loads(evaluation)["return_mean"] >= GOAL
