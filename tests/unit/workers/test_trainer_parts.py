"""Parts of a trainer that read numbers from its config."""

from __future__ import annotations

from pathlib import PurePosixPath

import pytest

from rlsrl.algorithms.schedules import LinearSchedule
from rlsrl.api.load import load_text
from rlsrl.api.placement import local_placement
from rlsrl.api.resolve import resolve
from rlsrl.api.resolved import TrainerConfig
from rlsrl.data.specs import ArraySpec, EnvSpec
from rlsrl.runtime.errors import ConfigurationError
from rlsrl.testing.rollouts import discrete_action, discrete_env_spec
from rlsrl.workers.build.learner import _normalizer, coefficients_of, learning_rate_of

TEXT = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {name: one}
spec:
  environment: {id: CartPole-v1}
  actors: {environments: 8}
  stop: {envSteps: 5000}
"""


def config(*overrides: str) -> TrainerConfig:
    placement = local_placement(run_uid="0f3a", run_folder=PurePosixPath("/runs/one"))
    return resolve(load_text(TEXT, overrides=overrides), placement).trainer


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (None, 0.3),
        ("{linear: {}}", LinearSchedule(start=0.3, end=0.0, env_steps=5000)),
        ("{linear: {to: 0.1, envSteps: 70}}", LinearSchedule(start=0.3, end=0.1, env_steps=70)),
    ],
)
def test_a_schedule_ends_as_configured_or_with_training(schedule: str | None, expected: float | LinearSchedule) -> None:
    def configured(field: str) -> TrainerConfig:
        further = [] if schedule is None else [f"algorithm.ppo.{field}Schedule={schedule}"]
        return config(f"algorithm.ppo.{field}=0.3", *further)

    assert learning_rate_of(configured("learningRate")) == expected
    assert coefficients_of(configured("clipRange"))["clip_range"] == expected


@pytest.mark.parametrize(
    ("overrides", "statistics", "state"),
    [
        ([], set(), set()),
        (
            ["policy.normalizeObservations=true"],
            {"observation/mean", "observation/variance", "observation/count"},
            {"observation/count"},
        ),
        (["algorithm.ppo.normalizeRewards=true"], set(), {"return/count"}),
    ],
)
def test_the_configured_values_are_normalised(overrides: list[str], statistics: set[str], state: set[str]) -> None:
    normalizer = _normalizer(config(*overrides), discrete_env_spec())
    assert set(normalizer.statistics) == statistics
    assert {path for path in normalizer.state_dict() if path.endswith("count")} == state


def test_observations_that_cannot_be_normalised_are_refused_by_name() -> None:
    pixels = EnvSpec(observation={"observation": ArraySpec(shape=(8, 8), dtype="uint8")}, action=discrete_action(2))
    with pytest.raises(ConfigurationError, match=r"policy\.normalizeObservations is true.* observes observation uint8"):
        _normalizer(config("policy.normalizeObservations=true"), pixels)
