"""A volume claim that is deleted during training, and the weights of a suspended experiment."""

from __future__ import annotations

import subprocess
import time

import pytest

from rlsrl.testing.faults import begin, goes_on
from rlsrl.testing.kubectl import COMMAND_SECONDS, ClusterExperiment, Namespace
from rlsrl.testing.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

SOON_SECONDS = 20.0
"""`kubectl port-forward` would wait a minute for a pod."""


def told(experiment: ClusterExperiment, *arguments: str) -> tuple[int, str]:
    """Return the exit status and the output of a command of the plugin."""
    words = ["kubectl", "rlsrl", *arguments, experiment.name, "--namespace", experiment.where.name]
    done = subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)
    return done.returncode, done.stdout + done.stderr


def test_a_deleted_claim_is_reported_with_what_it_held(where: Namespace) -> None:
    experiment = begin(where)
    where.delete("persistentvolumeclaim", f"{experiment.name}-data")
    until(lambda: experiment.condition("VolumeIntact").get("reason") == "ClaimDeleting", "the deletion is reported")
    code, why = told(experiment, "why")
    assert code == 1
    assert f"volume claim {experiment.name}-data: Terminating" in why
    assert "Export the weights now" in why
    (coordinator,) = experiment.pods("coordinator")
    where.delete("pod", coordinator["metadata"]["name"])
    until(lambda: experiment.condition("VolumeIntact").get("reason") == "ClaimReplaced", "the loss is reported")
    assert "version 1." in experiment.condition("VolumeIntact")["message"]
    goes_on(experiment)


def test_the_weights_of_a_suspended_experiment_are_refused_at_once(where: Namespace) -> None:
    experiment = begin(where)
    where.kubectl("patch", "rlexperiment", experiment.name, "--type", "merge", "-p", '{"spec": {"suspend": true}}')
    until(lambda: not experiment.pods(), "no pod is left")
    began = time.monotonic()
    code, output = told(experiment, "params", "list")
    assert time.monotonic() - began < SOON_SECONDS
    assert code == 2
    assert f"no pod serves {experiment.name}: it is suspended" in output
