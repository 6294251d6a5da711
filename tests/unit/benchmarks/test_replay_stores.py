"""Replay stores by themselves: which take part in a case, what rlsrl's take, and what is kept."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import results
from replay_stores import (
    CPPRB,
    DRAWS,
    KEPT_AS,
    LARGE,
    RLSRL,
    SIZE,
    STABLE_BASELINES3,
    STACK,
    contestants,
    keep,
    rlsrl_draw,
    table,
)

CASE = {
    "transitions": {RLSRL: 150_000, CPPRB: 150_000, LARGE: 1_000_000},
    "bytes_a_transition": {RLSRL: 7790, CPPRB: 7200, LARGE: 7790},
    "batches_a_second": {RLSRL: [900.0, 1000.0, 1100.0], CPPRB: [300.0, 250.0, 300.0], LARGE: [400.0, 500.0, 600.0]},
    "ratio": [3.0, 4.0, 3.67],
}


def test_the_large_store_is_of_images_and_stable_baselines3_draws_uniformly_only() -> None:
    assert contestants("pixels", "uniform", 8, 50) == {RLSRL: 8, STABLE_BASELINES3: 8, CPPRB: 8, LARGE: 50}
    assert contestants("pixels", "priority", 8, 50) == {RLSRL: 8, CPPRB: 8, LARGE: 50}
    assert contestants("vectors", "uniform", 8, 50) == {RLSRL: 8, STABLE_BASELINES3: 8, CPPRB: 8}


@pytest.mark.parametrize("draws", DRAWS)
def test_a_transition_of_images_takes_less_than_two_sevenths_of_a_stack(tmp_path: Path, draws: str) -> None:
    capacity = 3200
    filled = rlsrl_draw("pixels", draws, capacity, tmp_path)
    filled.draw()
    assert 0 < filled.file_bytes <= capacity * STACK * SIZE * SIZE / 3.5


def test_a_case_is_shown_with_bytes_and_ratio() -> None:
    shown = table("pixels, uniform", CASE)
    assert f"{RLSRL}  150,000  7,790  1,000" in shown
    assert f"{LARGE}  1,000,000  7,790  500" in shown
    assert "3.67 (3.00 to 4.00)" in shown


def test_results_are_kept_with_machine_and_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    keep({"pixels, uniform": CASE})
    kept = json.loads((tmp_path / f"{KEPT_AS}.json").read_text())
    assert kept["cases"]["pixels, uniform"] == CASE
    assert {"processor", "commit"} <= kept["machine"].keys()
    assert [*kept["absent"]] == ["torchrl"]
    assert np.median(kept["cases"]["pixels, uniform"]["ratio"]) == 3.67
