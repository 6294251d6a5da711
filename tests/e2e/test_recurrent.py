"""Recurrent policies train as pods: their states travel with requests, so that a policy worker keeps none."""

from __future__ import annotations

import json
import signal
from functools import partial
from pathlib import Path

import pytest
import yaml

from rlsrl.testing.cluster_api import Object
from rlsrl.testing.faults import Faults, all_ready, role_of
from rlsrl.testing.kubectl import ClusterExperiment, Namespace, Nodes
from rlsrl.testing.recovery import Recovered
from rlsrl.testing.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

CUE = Path(__file__).parents[2] / "examples" / "delayed-cue.yaml"
KILLS = 5


@pytest.mark.full
def test_a_cue_is_learned_while_its_policy_worker_is_killed_five_times(
    where: Namespace, hands: Nodes, recovered: Recovered
) -> None:
    document: Object = yaml.safe_load(CUE.read_text())
    # It trains without a goal until the last kill: the cue is learned in less time than a container needs to restart.
    document["spec"] |= {"policyWorkers": {"replicas": 1}, "stop": {"envSteps": 10_000_000}}
    where.apply(document)
    experiment = ClusterExperiment(where, document["metadata"]["name"])
    experiment.await_phase("Running")
    until(lambda: all_ready(experiment), "every pod is ready")
    until(lambda: experiment.env_steps() > 0, "it trains")
    faults = Faults(experiment, recovered)
    for number in range(1, KILLS + 1):
        kill = partial(hands.kill, experiment.pods("policy")[0], sig=signal.SIGKILL)
        faults.make(f"SIGKILL {number} of policy with recurrent states", ["policy"], kill)
    goal = json.dumps({"spec": {"stop": {"returnMean": 0.98, "episodes": 100}}})
    where.kubectl("patch", "rlexperiment", experiment.name, "--type=merge", "-p", goal)
    experiment.await_phase("Succeeded", seconds=600)
    assert float(experiment.status["training"]["returnMean"]) >= 0.98
    assert experiment.status["restarts"] == 0, "trainers go on without a policy worker"
    until(lambda: [role_of(pod) for pod in experiment.pods()] == ["coordinator"], "only the coordinator remains")
    until(lambda: experiment.ledger()["unsettled"] == 0, "the ledger is settled")
    ledger = experiment.ledger()
    assert ledger["balanced"], ledger
    assert ledger["dropped"]["evicted"] == 0, ledger
