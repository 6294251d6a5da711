"""The same experiment without a volume: its versions are in an object store, which runs as a pod."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from s3_server import start_s3

from rlsrl.testing.cluster_api import Object
from rlsrl.testing.kubectl import ClusterExperiment, Namespace, run
from rlsrl.testing.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

TRAINED = 300.0
"""A return that no network reaches without its training: one with random weights has 9 to 25. The run ends when the
mean over its last episodes is 475; of a single version, greedy episodes had a mean of 449 once."""


def test_it_trains_to_the_goal_and_its_exported_weights_play(
    where: Namespace, cartpole: Object, actor_image: str, tmp_path: Path
) -> None:
    store = start_s3(where, actor_image)
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
    assert json.loads(evaluation)["return_mean"] >= TRAINED
