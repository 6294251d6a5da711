"""How a run spent its time, from its workers' metrics."""

from __future__ import annotations

from pathlib import Path

import pytest
from profiles import RunProfile, spent, time_shares
from prometheus_client import CollectorRegistry, generate_latest

from rlsrl.runtime.metrics import Metrics


def test_seconds_are_read_from_the_workers_metrics() -> None:
    metrics = Metrics(CollectorRegistry())
    metrics.waiting_seconds.labels(reason="batch").inc(2.5)
    metrics.working_seconds.labels(stage="update").inc(0.5)
    metrics.working_seconds.labels(stage="update").inc(0.25)
    metrics.step_seconds.observe(0.75)
    metrics.inference_seconds.labels(stage="compute").observe(0.125)
    metrics.inference_seconds.labels(stage="queueing").observe(9.0)
    metrics.env_steps.inc(100)
    seconds = spent(generate_latest(metrics.registry).decode())
    assert seconds.pop("cpu") > 0.0
    assert seconds == {"waits for batch": 2.5, "update": 0.75, "inference": 0.125}


def test_shares_are_of_the_time_between_two_profiles_and_means_over_a_role() -> None:
    before = RunProfile(at=100.0, seconds={("actor", 0): {"waits for credit": 10.0, "cpu": 3.0}})
    after = RunProfile(
        at=110.0,
        seconds={
            ("actor", 0): {"waits for credit": 14.0, "cpu": 8.0},
            ("actor", 1): {"waits for credit": 2.0, "cpu": 1.0},
            ("trainer", 0): {"update": 9.0, "waits for batch": 0.5},
        },
    )
    assert time_shares(before, after) == {
        "actor": {"waits for credit": 0.3, "cpu": 0.3, "rest": 0.7},
        "trainer": {"update": 0.9, "waits for batch": 0.05, "rest": pytest.approx(0.05)},
    }


def test_without_two_profiles_there_are_no_shares() -> None:
    look = RunProfile(at=100.0, seconds={})
    assert time_shares(None, look) == time_shares(look, None) == time_shares(look, look) == {}


def test_a_run_without_a_status_has_no_profile(tmp_path: Path) -> None:
    assert RunProfile.read(tmp_path) is None
    (tmp_path / "status.json").write_text('{"roles": {"trainer": []}}')
    assert RunProfile.read(tmp_path) is None, "no worker has joined"


def test_workers_that_do_not_answer_have_no_times(tmp_path: Path) -> None:
    worker = '{"index": 0, "endpoints": {"metrics": "127.0.0.1:1"}}'
    (tmp_path / "status.json").write_text(f'{{"roles": {{"actor": [{worker}], "trainer": []}}}}')
    profile = RunProfile.read(tmp_path)
    assert profile is not None
    assert profile.seconds == {("actor", 0): {}}
