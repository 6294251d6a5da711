"""Whether training keeps pace with gathering, by the counts of a run."""

from __future__ import annotations

import pytest

from rlsrl.api.load import load_text
from rlsrl.testing.replayed_runs import is_in_pace, minibatches_behind

SPEC = load_text("""
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {name: replayed}
spec:
  environment: {id: CartPole-v1}
  algorithm: {dqn: {replay: {start: 1000}}}
  actors: {replicas: 2, environments: 8, rolloutLength: 16}
  trainers: {replicas: 2}
  pacing: {trainStepsPerEnvStep: 0.25}
  stop: {envSteps: 4000}
""").spec
STEP, BOUND = 32, 96
"""Minibatches of a training step; those by which a trainer may be behind."""


def test_the_settings_are_those_of_the_table() -> None:
    assert (SPEC.updates_per_train_step, SPEC.train_steps_behind) == (STEP, BOUND)


@pytest.mark.parametrize(
    ("env_steps", "behind", "has_all", "is_right"),
    [
        (900, 0, True, True),
        (4000, 0, True, True),
        (4000, -1, False, False),
        (4000, 2 * STEP, True, True),
        (4000, 2 * STEP + 1, True, False),
        (4000, 2 * BOUND, False, True),
        (4000, 2 * BOUND + 1, False, False),
    ],
)
def test_training_never_leads_and_is_behind_by_no_more_than_each_trainer_may_be(
    env_steps: int, behind: int, has_all: bool, is_right: bool
) -> None:
    due = max(0, env_steps - 1000) // 4
    counts = {"env_steps": env_steps, "minibatches": due - behind}
    assert minibatches_behind(SPEC, counts) == behind
    assert is_in_pace(SPEC, counts, has_all=has_all) is is_right
