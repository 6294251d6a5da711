"""A deleted experiment: its pods are gone within 15 seconds, and its last version is stored."""

from __future__ import annotations

import time

import pytest

from rlsrl.testing.cluster_api import Object
from rlsrl.testing.faults import NAME, begin, gated_experiment
from rlsrl.testing.kubectl import ClusterExperiment, Namespace
from rlsrl.testing.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

GONE_SECONDS = 15.0
"""From the request to delete an experiment to the end of its last pod."""
NEVER = {"everySeconds": 86_400}
"""Only the first version is stored while training goes on."""
NEWEST_STEP = """
from pathlib import Path
from rlsrl.api.role_configs import POLICY_NAME
from rlsrl.parameters.filesystem import FilesystemParameterDB
(folder,) = Path("/data").rglob("parameters")
print(FilesystemParameterDB(folder).versions(POLICY_NAME)[-1].version.step)
"""
USER = 10001


def delete(experiment: ClusterExperiment, cascade: str) -> float:
    """Delete the experiment; return the seconds until its last pod is gone."""
    began = time.monotonic()
    experiment.where.kubectl("delete", "rlexperiment", experiment.name, f"--cascade={cascade}", "--wait=false")
    until(lambda: not experiment.pods(), "all pods are gone")
    return time.monotonic() - began


def reader(image: str) -> Object:
    """Return a pod that prints the step of the newest version on the volume that the experiment has left."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "reader"},
        "spec": {
            "restartPolicy": "Never",
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER,
                "fsGroup": USER,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": "reader",
                    "image": image,
                    "command": ["python", "-c", NEWEST_STEP],
                    "volumeMounts": [{"name": "data", "mountPath": "/data"}],
                    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                }
            ],
            "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": f"{NAME}-data"}}],
        },
    }


@pytest.mark.parametrize("cascade", ["background", "foreground"])
def test_a_training_experiment_stores_its_last_version_and_is_gone(
    where: Namespace, actor_image: str, cascade: str
) -> None:
    experiment = begin(where, parameters=NEVER)
    assert delete(experiment, cascade) < GONE_SECONDS
    where.apply(reader(actor_image))
    phase = lambda: (where.get("pod", "reader") or {}).get("status", {}).get("phase")
    until(lambda: phase() in ("Succeeded", "Failed"), "the volume is read")
    printed = where.kubectl("logs", "reader")
    assert phase() == "Succeeded", printed
    assert int(printed) > 0, "the version of the last step"


@pytest.mark.parametrize("cascade", ["background", "foreground"])
def test_a_starting_experiment_is_gone(where: Namespace, cascade: str) -> None:
    where.apply(gated_experiment())
    experiment = ClusterExperiment(where, NAME)
    running = lambda: [pod for pod in experiment.pods("trainer") if pod["status"].get("phase") == "Running"]
    until(running, "a trainer starts")
    assert delete(experiment, cascade) < GONE_SECONDS
