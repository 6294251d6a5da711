"""An experiment starts from the weights of another one of its namespace, which its coordinator serves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from rlsrl.testing.cluster_api import Object
from rlsrl.testing.kubectl import CLUSTER_SECONDS, ClusterExperiment, Namespace, run
from rlsrl.testing.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def experiment(name: str, **spec: Object) -> Object:
    return {
        "apiVersion": "rlsrl.dev/v1alpha1",
        "kind": "RLExperiment",
        "metadata": {"name": name},
        "spec": {
            "environment": {"id": "CartPole-v1"},
            "algorithm": {"ppo": {"minibatchSize": 64}},
            "actors": {"environments": 2, "rolloutLength": 32},
            "stop": {"trainSteps": 5},
            **spec,
        },
    }


def exported(where: Namespace, name: str, version: str, folder: Path) -> dict[str, np.ndarray]:
    path = folder / f"{name}.safetensors"
    run("kubectl", "rlsrl", "params", "export", name, version, "--output", str(path), "-n", where.name)
    return load_file(path)


def test_an_experiment_starts_from_the_weights_of_another(where: Namespace, tmp_path: Path) -> None:
    where.apply(experiment("teacher"))
    ClusterExperiment(where, "teacher").await_phase("Succeeded")
    where.apply(experiment("early", parameters={"from": {"experiment": "teach"}}))
    early = ClusterExperiment(where, "early")
    until(
        lambda: early.condition("Accepted").get("reason") == "SourceUnusable",
        "the source is missing",
        timeout=CLUSTER_SECONDS,
    )
    assert "'teach' does not exist" in early.condition("Accepted")["message"]
    assert "did you mean 'teacher'?" in early.condition("Accepted")["message"]
    assert not early.pods()

    where.apply(experiment("student", seed=1, stop={"trainSteps": 1}, parameters={"from": {"experiment": "teacher"}}))
    student = ClusterExperiment(where, "student")
    student.await_phase("Succeeded")
    before, first = exported(where, "teacher", "latest", tmp_path), exported(where, "student", "1.0", tmp_path)
    assert before.keys() == first.keys()
    for name, array in before.items():
        np.testing.assert_array_equal(first[name], array, err_msg=name)
    assert student.status["restarts"] == 0
