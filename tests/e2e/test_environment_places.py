"""Environments that know the number of all environments get the new number when actors are scaled."""

from __future__ import annotations

import uuid

import pytest

from rlsrl.testing.cluster_api import Object
from rlsrl.testing.faults import all_ready, goes_on, lives
from rlsrl.testing.kubectl import ClusterExperiment, Namespace, namespace
from rlsrl.testing.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(600)]

NUMBER = "num_environments"
OTHERS = ("coordinator", "trainer", "evaluator")
PLACED: Object = {
    "apiVersion": "rlsrl.dev/v1alpha1",
    "kind": "RLExperiment",
    "metadata": {"name": "placed"},
    "spec": {
        "environment": {
            "factory": "rlsrl.testing.environments:PlacedEnv",
            "kwargs": {"gate": "/tmp/gate", "record": "/tmp/places"},
            "kwargsByRank": {"cycle": {"level": ["easy", "hard"]}, "addRank": {"port": 9000}},
            "passPlace": True,
            "episodeInfo": [NUMBER],
        },
        "policy": {"network": {"mlp": {"hiddenSizes": [16]}}},
        "actors": {"environmentsPerActor": 4},
        "trainers": {"batchEnvironments": 4},
        "evaluators": {"environments": 2},
        "stop": {"wallSeconds": 3600},
    },
}


def test_scaled_actors_restart_with_the_new_number_and_other_roles_stay(system: Namespace) -> None:
    assert system.name
    with namespace(f"e2e-places-{uuid.uuid4().hex[:8]}", wait=False) as where:
        where.apply(PLACED)
        experiment = ClusterExperiment(where, "placed")

        experiment.await_phase("Running")
        until(lambda: newest_mean(experiment) == 4, "all environments know that they are 4")
        until(lambda: all_ready(experiment), "every pod is ready")
        others, actors = lives(experiment, without=["actor"]), lives(experiment, without=OTHERS)
        for replicas in (3, 1):
            where.kubectl("scale", "rlexperiment/placed", f"--replicas={replicas}")
            number = 4 * replicas
            until(lambda number=number: newest_mean(experiment) == number, f"all know that they are {number}")
            until(lambda: all_ready(experiment), "every pod is ready")
            goes_on(experiment)
            scaled = lives(experiment, without=OTHERS)
            assert len(scaled) == replicas
            assert not {*scaled.values()} & {*actors.values()}, "all actors are replaced"
            actors = scaled
        assert lives(experiment, without=["actor"]) == others


def newest_mean(experiment: ClusterExperiment) -> float | None:
    """Return the mean of the last episodes' number of environments."""
    info = experiment.status.get("training", {}).get("episodeInfo", ())
    return next((float(each["mean"]) for each in info if each["key"] == NUMBER and "mean" in each), None)
