from __future__ import annotations

import numpy as np
import pytest

from rlsrl.policies.normalization import Standardization, standardizations, standardized

STATISTICS = {
    "observation/a/mean": np.array([1.0, -200.0, 0.0], np.float32),
    "observation/a/variance": np.array([4.0, 1e4, 0.0], np.float32),
}


def values(num_lanes: int = 7) -> np.ndarray:
    return (np.random.default_rng(0).standard_normal((num_lanes, 3)) * [3.0, 300.0, 1e-5]).astype(np.float32)


def test_values_get_the_mean_and_deviation_of_the_statistics_within_the_clip_range() -> None:
    raw = values(1000)
    (seen,) = standardized({"observation/a": raw}, standardizations(STATISTICS, ["observation/a"])).values()
    expected = (raw.astype(np.float64) - STATISTICS["observation/a/mean"]) / np.sqrt(
        STATISTICS["observation/a/variance"] + 1e-8
    )
    np.testing.assert_allclose(seen, np.clip(expected, -10, 10), rtol=1e-5, atol=1e-6)
    assert seen.dtype == np.float32


@pytest.mark.parametrize(("value", "seen"), [(1e30, 10.0), (-1e30, -10.0), (np.inf, 10.0), (-np.inf, -10.0)])
def test_values_far_out_are_clipped(value: float, seen: float) -> None:
    standardization = Standardization.of(STATISTICS, "observation/a")
    assert standardization is not None
    out = np.empty(3, np.float32)
    standardization.apply(np.array([value, 0.0, 0.0], np.float32), out=out)
    assert out[0] == seen


def test_lanes_first_and_lanes_last_give_equal_bits() -> None:
    standardization = Standardization.of(STATISTICS, "observation/a")
    assert standardization is not None
    raw = values()
    lanes_first, lanes_last = np.empty((7, 3), np.float32), np.empty((3, 7), np.float32)
    standardization.apply(raw, out=lanes_first)
    standardization.as_column().apply(raw.T, out=lanes_last)
    assert np.array_equal(lanes_first, lanes_last.T)


def test_only_what_has_statistics_changes_and_what_is_given_never_does() -> None:
    given = {"observation/a": values(), "observation/b": np.arange(7, dtype=np.uint8)}
    before = given["observation/a"].copy()
    by_path = standardizations(STATISTICS, given)
    assert set(by_path) == {"observation/a"}
    seen = standardized(given, by_path)
    assert seen["observation/b"] is given["observation/b"]
    assert not np.array_equal(seen["observation/a"], before)
    assert np.array_equal(given["observation/a"], before)


def test_a_version_without_statistics_changes_nothing() -> None:
    given = {"observation": values()}
    assert standardized(given, standardizations({}, given))["observation"] is given["observation"]
