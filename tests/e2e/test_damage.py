"""Stored files of a run on a real volume, damaged: the experiment fails once, names the file, and can begin again."""

from __future__ import annotations

import subprocess

import pytest

from rlsrl.testing.cluster_api import Object
from rlsrl.testing.kubectl import COMMAND_SECONDS, ClusterExperiment, Namespace, Nodes
from rlsrl.testing.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

_DAMAGE = """
import pathlib, sys
for path in pathlib.Path("/data").glob(sys.argv[1]):
    path.write_bytes(bytes(path.stat().st_size))
    print(path.name)
"""


def damage(experiment: ClusterExperiment, pattern: str) -> list[str]:
    """Fill files of the volume with zeros; return their names."""
    coordinator = f"{experiment.name}-coordinator-0"
    done = experiment.where.kubectl("exec", coordinator, "--", "python", "-c", _DAMAGE, pattern)
    return done.split()


def called(experiment: ClusterExperiment, command: str, *options: str) -> tuple[int, str]:
    words = ["kubectl", "rlsrl", command, experiment.name, "--namespace", experiment.where.name, *options]
    done = subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)
    return done.returncode, done.stdout + done.stderr


def await_failure(experiment: ClusterExperiment, attempt: int) -> str:
    """Wait until the attempt has failed for good; return the message."""
    status: Object = {}

    def has_failed() -> bool:
        # One read of both: between two reads a new attempt may begin.
        status.update(experiment.status)
        return (status.get("phase"), status.get("attempt")) == ("Failed", attempt)

    until(has_failed, f"attempt {attempt} fails")
    (finished,) = (each for each in status["conditions"] if each["type"] == "Finished")
    assert finished["reason"] == "RunDamaged", finished
    return str(finished["message"])


def test_a_run_without_an_intact_version_fails_and_begins_again_only_if_asked(
    where: Namespace, cartpole: Object, hands: Nodes
) -> None:
    cartpole["spec"] |= {"stop": {"wallSeconds": 600}, "parameters": {"everySeconds": 3600}}
    where.apply(cartpole)
    experiment = ClusterExperiment(where, cartpole["metadata"]["name"])
    experiment.await_phase("Running")
    until(experiment.env_steps, "training")
    damaged = damage(experiment, "*/parameters/*/*/*.safetensors")
    assert damaged
    for pod in experiment.pods("trainer"):
        hands.kill(pod)  # by SIGKILL, so that no rank stores a last version
    message = await_failure(experiment, 2)
    assert any(name in message for name in damaged), message
    assert "kubectl rlsrl retry --fresh" in message
    code, output = called(experiment, "why")
    assert (code, output.startswith("Finished: RunDamaged")) == (1, True), output
    assert called(experiment, "retry")[0] == 0
    await_failure(experiment, 3)
    assert called(experiment, "retry", "--fresh")[0] == 0
    experiment.await_phase("Running")
    assert (experiment.status["attempt"], experiment.status["freshAttempt"]) == (4, 4)


def test_a_coordinator_with_a_damaged_roster_fails_and_is_not_restarted(where: Namespace, cartpole: Object) -> None:
    cartpole["spec"]["stop"] = {"wallSeconds": 600}
    where.apply(cartpole)
    experiment = ClusterExperiment(where, cartpole["metadata"]["name"])
    experiment.await_phase("Running")
    assert damage(experiment, "*/coordinators.json")
    where.delete("pod", f"{experiment.name}-coordinator-0")
    message = await_failure(experiment, 1)
    assert "coordinators.json is not a list of coordinators" in message
    until(lambda: not experiment.pods(), "no pod is left")
    assert called(experiment, "retry", "--fresh")[0] == 0
    experiment.await_phase("Running")
