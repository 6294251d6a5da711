"""What the table of roles says of an experiment."""

from __future__ import annotations

import pytest

from rlsrl.api.load import load_text
from rlsrl.api.role_names import ACTOR, EVALUATOR, POLICY, TRAINER
from rlsrl.api.roles import ROLES

TEXT = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {name: one}
spec:
  environment: {id: CartPole-v1}
  actors: {environments: 8}
  evaluators: {}
  stop: {envSteps: 1000}
"""
DENSE = "{mlp: {}, encoders: [{key: pose, mlp: {}}]}"
WITH_IMAGE = "{mlp: {}, encoders: [{key: pose, mlp: {}}, {key: camera, cnn: {}}]}"


@pytest.mark.parametrize(
    ("network", "acts_with_torch"),
    [
        ("{mlp: {}}", False),
        ("{mlp: {}, recurrent: {}}", False),
        (DENSE, False),
        (WITH_IMAGE, True),
        (WITH_IMAGE.replace("cnn", "impalaCnn"), True),
        ("{cnn: {}}", True),
        ("{impalaCnn: {}}", True),
        ("{custom: {factory: 'package.module:make'}}", True),
    ],
)
def test_pods_that_evaluate_convolutions_need_torch(network: str, acts_with_torch: bool) -> None:
    alone = load_text(TEXT, overrides=[f"policy.network={network}"]).spec
    behind_policy_workers = load_text(TEXT, overrides=[f"policy.network={network}", "policyWorkers={}"]).spec
    evaluating = {ACTOR, EVALUATOR, POLICY} if acts_with_torch else set()
    assert {role.name for role in ROLES if role.needs_torch(alone)} - {TRAINER} == evaluating
    assert {role.name for role in ROLES if role.needs_torch(behind_policy_workers)} - {TRAINER} == evaluating - {ACTOR}
