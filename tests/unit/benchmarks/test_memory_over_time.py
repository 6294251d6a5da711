"""Tells growth of a run's memory from noise."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from memory_over_time import ALL, PARTS, SAMPLE_SECONDS, growth, roles_of, sample_of, watch
from workloads import WORKLOADS

SECONDS = np.arange(0.0, 3600.0, 10.0)


def test_a_line_is_fitted_exactly() -> None:
    found = growth([*SECONDS], [*(100.0 + SECONDS / 3600.0 * 12.0)])
    assert found.per_hour == pytest.approx(12.0)
    assert found.error == pytest.approx(0.0, abs=1e-6)
    assert found.megabytes == pytest.approx(106.0, abs=0.1)
    assert found.grows


def test_noise_alone_is_growth_as_rarely_as_the_interval_claims() -> None:
    rng = np.random.default_rng(1)
    grows = [growth([*SECONDS], [*rng.normal(100.0, 1.0, SECONDS.size)]).grows for _ in range(200)]
    assert np.mean(grows) < 0.06, "2.5 % of them, by the interval"


def test_a_leak_is_seen_through_noise() -> None:
    rng = np.random.default_rng(2)
    found = growth([*SECONDS], [*(rng.normal(100.0, 1.0, SECONDS.size) + SECONDS / 3600.0 * 3.0)])
    assert found.grows
    assert abs(found.per_hour - 3.0) < 2 * found.error


def test_shrinking_memory_does_not_grow() -> None:
    assert not growth([*SECONDS], [*(100.0 - SECONDS / 3600.0)]).grows


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(ValueError, match=f"{PARTS - 1} samples are too few: {PARTS} are needed"):
        growth([1.0] * (PARTS - 1), [1.0] * (PARTS - 1))


def test_a_time_that_is_too_short_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match=f"1 seconds are too few: {PARTS} samples take {PARTS * SAMPLE_SECONDS:.0f}"):
        watch(WORKLOADS["W1"], warm_seconds=0.0, seconds=1.0)


def test_a_sample_has_the_memory_of_each_role(tmp_path: Path) -> None:
    roles = {"actor": [{"pid": os.getpid()}, {"pid": os.getpid()}], "trainer": [{"pid": os.getpid()}]}
    (tmp_path / "status.json").write_text(json.dumps({"roles": roles}))
    sample = sample_of(roles_of(tmp_path), os.getpid())
    assert sample.keys() == {"actor", "trainer", ALL}
    assert sample["trainer"] == pytest.approx(sample[ALL], rel=0.05)
    assert sample["actor"] == pytest.approx(2 * sample[ALL], rel=0.05)
