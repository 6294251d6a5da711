"""Nested Dict observations and action masks in real runs: no illegal action, whoever evaluates the policy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlsrl.testing.live_runs import Desk

EXPERIMENT = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {{name: live}}
spec:
  environment:
    factory: rlsrl.testing.environments:MaskedEnv
    kwargs: {{in_info: {in_info}}}
    actionMask: action_mask
  policy: {{normalizeObservations: true}}
  algorithm: {{ppo: {{minibatchSize: 32, epochs: 1, entropyCoefficient: 0.01}}}}
  actors: {{environments: 4, rolloutLength: 32}}
  {more}
  stop: {{trainSteps: 8}}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("in_info", "more"),
    [
        pytest.param("false", "", id="inline, mask in the observation"),
        pytest.param("true", "policyWorkers: {replicas: 1}", id="policy worker, mask in info"),
    ],
)
def test_a_run_takes_only_legal_actions(tmp_path: Path, in_info: str, more: str) -> None:
    desk = Desk(tmp_path, EXPERIMENT.format(in_info=in_info, more=more))
    with desk.begin() as run:
        assert run.wait() == 0, run.output
    summary = desk.facts().json("summary.json")
    assert (summary["reason"], summary["restarts"]) == ("trainSteps", {}), "trained to the end"
    assert desk.facts().logged("actor-0", "environment_fault") == [], "the environment refuses illegal actions"
    assert summary["ledger"]["balanced"]
    newest = desk.facts().newest()
    assert newest is not None
    program = newest.metadata["program"]
    assert [path for path, _ in program["observation"]] == ["observation/state/legal", "observation/state/step"]
    assert program["head"]["mask"] == "observation/action_mask"

    played = desk.call("eval", "runs/live", "--episodes", "4", "--environments", "2", "--json")
    assert played.returncode == 0, played.stderr
    assert json.loads(played.stdout)["length_mean"] == 8.0
