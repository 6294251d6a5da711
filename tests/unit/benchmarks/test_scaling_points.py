"""The settings of benchmarks/scaling.py."""

import json

import pytest
from scaling_points import DRAWN, FEATURES, GRID, Setting
from workloads import REPLAY_WORKLOADS

from rlsrl.api.load import load_text


@pytest.mark.parametrize("setting", [*GRID, *FEATURES], ids=str)
def test_each_setting_is_a_valid_experiment(setting: Setting) -> None:
    spec = load_text(json.dumps(setting.document())).spec

    assert spec.algorithm.name == (DRAWN[setting.feature].algorithm if setting.feature in DRAWN else "ppo")
    assert spec.actors.spread.num_workers == setting.actors


@pytest.mark.parametrize("name", REPLAY_WORKLOADS)
def test_no_setting_is_a_benchmark_that_is_to_be_predicted(name: str) -> None:
    spec = REPLAY_WORKLOADS[name].experiment()["spec"]
    ((algorithm, block),) = spec["algorithm"].items()

    for drawn in DRAWN.values():
        differs = drawn.network() != spec["policy"]["network"] or drawn.minibatch_size != block["minibatchSize"]
        assert drawn.algorithm != algorithm or differs
