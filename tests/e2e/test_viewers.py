"""A user with Kubernetes' role ``view`` sees an experiment's state, and no Secret."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from rlsrl.testing.cluster_api import Object
from rlsrl.testing.kubectl import COMMAND_SECONDS, ClusterExperiment, Namespace, run
from rlsrl.testing.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def kubeconfig_of_viewer(where: Namespace, folder: Path) -> Path:
    """Return a kubeconfig of a user who has the role ``view`` in the namespace."""
    where.kubectl("create", "serviceaccount", "viewer")
    where.kubectl("create", "rolebinding", "viewer", "--clusterrole=view", f"--serviceaccount={where.name}:viewer")
    token = where.kubectl("create", "token", "viewer").strip()
    config = json.loads(run("kubectl", "config", "view", "--raw", "--minify", "--flatten", "--output", "json"))
    config["users"] = [{"name": each["name"], "user": {"token": token}} for each in config["users"]]
    path = folder / "viewer.json"
    path.write_text(json.dumps(config))
    return path


def test_a_viewer_sees_the_state_without_secrets(where: Namespace, cartpole: Object, tmp_path: Path) -> None:
    cartpole["spec"]["stop"] = {"wallSeconds": 600}
    where.apply(cartpole)
    experiment = ClusterExperiment(where, cartpole["metadata"]["name"])
    experiment.await_phase("Running")
    until(lambda: experiment.env_steps() > 0, "the first numbers")
    environment = {**os.environ, "KUBECONFIG": str(kubeconfig_of_viewer(where, tmp_path))}

    def told(*words: str) -> tuple[int, str]:
        command = ["kubectl", *words, "--namespace", where.name]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False, env=environment
        )
        return done.returncode, done.stdout + done.stderr

    assert told("auth", "can-i", "list", "secrets")[0] == 1
    assert told("auth", "can-i", "create", "pods/portforward")[0] == 1
    for command in ("status", "top"):
        code, output = told("rlsrl", command, experiment.name)
        assert code == 0, output
        assert f"experiment  {where.name}/cartpole" in output
        assert "train steps" in output
    assert "permission to read Secrets" in told("rlsrl", "top", experiment.name)[1]
    assert told("rlsrl", "why", experiment.name)[0] in (0, 1)
    assert told("rlsrl", "logs", experiment.name, "--role", "trainer", "--tail", "1")[0] == 0
    code, output = told("rlsrl", "params", "list", experiment.name)
    assert code == 2
    assert "is forbidden" in output
    assert {pod["status"]["qosClass"] for pod in experiment.pods()} == {"Burstable"}, "no pod is BestEffort"
