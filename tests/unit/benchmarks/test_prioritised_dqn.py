"""The two variants of DQN differ in what is compared, and in nothing else."""

from __future__ import annotations

import pytest
import yaml
from prioritised_dqn import VARIANTS, experiment

from rlsrl.api.load import load_text
from rlsrl.api.spec import DqnSpec, RLExperiment


def told(variant: str) -> RLExperiment:
    """Return the experiment as rlsrl reads it."""
    return load_text(yaml.safe_dump(experiment(variant, seed=3, env_steps=300_000)).encode())


@pytest.mark.parametrize("variant", VARIANTS)
def test_experiments_are_valid(variant: str) -> None:
    spec = told(variant).spec
    assert (spec.seed, spec.stop.env_steps, spec.environment.id) == (3, 300_000, "LunarLander-v3")


def test_the_variants_differ_in_priorities_and_double_q_learning_alone() -> None:
    plain, prioritised = (told(variant).spec for variant in VARIANTS)
    for spec in (plain, prioritised):
        assert isinstance(spec.algorithm.chosen, DqnSpec)
    one, other = (spec.algorithm.chosen.model_dump() for spec in (plain, prioritised))
    assert (one.pop("double"), other.pop("double")) == (False, True)
    assert one["replay"].pop("priorities") is None
    assert other["replay"].pop("priorities") is not None
    assert other.pop("importance_exponent_schedule") is not None
    assert one.pop("importance_exponent_schedule") is None
    assert one == other
    without = [spec.model_dump(exclude={"algorithm"}) for spec in (plain, prioritised)]
    assert without[0] == without[1]
