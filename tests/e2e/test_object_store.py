"""The same experiment without a volume: its versions are in an object store, which runs as a pod."""

from __future__ import annotations

from pathlib import Path

import pytest
from s3_server import start_s3

from rlsrl.testing.cluster_api import Object
from rlsrl.testing.kubectl import TRAINED_CARTPOLE, ClusterExperiment, Namespace, run
from rlsrl.testing.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


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
    assert experiment.exported_return(tmp_path) >= TRAINED_CARTPOLE
