from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from rlsrl.data.specs import ActionSpec, ArraySpec, EnvSpec
from rlsrl.testing.rollouts import CHOICES_AND_FLAGS, MIXED, categories_env_spec, continuous_action, discrete_action

HALF_OPEN = ActionSpec(
    kind="continuous",
    array=ArraySpec(shape=(3,), dtype="float32"),
    low=(-math.inf, 0.0, -1.5),
    high=(2.0, math.inf, 1.5),
)


@pytest.mark.parametrize("spec", [discrete_action(3), continuous_action(2), HALF_OPEN, CHOICES_AND_FLAGS, MIXED])
def test_an_action_spec_goes_through_strict_json(spec: ActionSpec) -> None:
    text = json.dumps(spec.to_json(), allow_nan=False)
    assert ActionSpec.from_json(json.loads(text)) == spec


def test_so_does_an_environment_spec() -> None:
    pixels, flag = ArraySpec(shape=(4, 84, 84), dtype="uint8"), ArraySpec(shape=(), dtype="bool")
    spec = EnvSpec(observation={"observation/pixels": pixels, "observation/flag": flag}, action=HALF_OPEN)
    assert EnvSpec.from_json(json.loads(json.dumps(spec.to_json(), allow_nan=False))) == spec


def test_categories_go_through_json_and_numbers_stay_as_they_were() -> None:
    numbers = ArraySpec(shape=(2,), dtype="int64")
    assert numbers.to_json() == {"shape": [2], "dtype": "int64"}, "layouts of earlier runs keep their digests"
    categories = replace(numbers, categories=((0, 3), (5, 4)))
    assert ArraySpec.from_json(json.loads(json.dumps(categories.to_json()))) == categories
    assert (numbers.num_features, categories.num_features, categories.size) == (2, 7, 2)
    assert EnvSpec.from_json(categories_env_spec().to_json()) == categories_env_spec()


@pytest.mark.parametrize("value", [{"shape": [2], "dtype": "int64"}, {"shape": [], "dtype": "float32"}])
def test_categories_that_do_not_fit_their_array_are_refused(value: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"1 categories do not fit an array of"):
        ArraySpec.from_json({**value, "categories": [[0, 3]]})


def test_a_distribution_has_a_logit_a_choice_or_a_mean_and_a_deviation_an_entry() -> None:
    assert discrete_action(5).distribution_size == 5
    assert continuous_action(5).distribution_size == 10
    assert (CHOICES_AND_FLAGS.distribution_size, CHOICES_AND_FLAGS.array.shape) == (9, (4,))
    assert (MIXED.distribution_size, MIXED.num_outputs, MIXED.array.shape) == (11, 8, (6,))
