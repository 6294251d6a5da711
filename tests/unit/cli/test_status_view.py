"""The text of ``status`` for an experiment on the cluster."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from rlsrl.cli.errors import UserError
from rlsrl.cli.status_view import read_status, status_view
from rlsrl.cli.text import span
from rlsrl.runs.text_table import columns
from rlsrl.testing.cluster_objects import condition, experiment, workload

NOW = datetime(2026, 1, 1, 12, 5, 3, tzinfo=UTC)
TRAINING = {
    "envSteps": 62971,
    "trainSteps": 62,
    "envStepsPerSecond": 5381,
    "version": "2.62",
    "policyLag": 1,
    "returnMean": "243.0",
    "lengthMean": "31.5",
    "episodeInfo": [{"key": "is_success", "mean": "0.93", "count": 1200}, {"key": "never", "count": 0}],
    "updatedAt": "2026-01-01T12:05:01Z",
}
ACCEPTED = condition("Accepted", "Accepted", "every object matches the spec", since="2026-01-01T12:00:00Z")
COMPLETE = condition("GangComplete", "Complete", "all 1 trainer pods of attempt 2 are ready")
RUNNING = experiment("Running", ACCEPTED, COMPLETE, attempt=2, restarts=1, recentFailures=1, training=TRAINING)


def test_a_running_experiment_on_a_screen() -> None:
    workloads = [workload("trainer", ready=1, replicas=1), workload("actor", ready=1, replicas=2)]
    assert status_view(RUNNING, workloads, NOW).splitlines() == [
        "experiment  research/cartpole, created 5m3s ago",
        "phase       Running for 4m3s: The trainers train.",
        "attempt     2, 1 restart, 1 of the 10 failures in restarts.budget",
        "trained     62,971 env steps, 62 train steps, 5,381 env steps/s",
        "policy      return 243.0, lag 1, version 2.62",
        "episodes    length 31.5, is_success 0.93 (mean of the last 100 of 1,200 episodes), never - in 0 episodes",
        "updated     2s ago",
        "stop        returnMean 475, envSteps 2,000,000",
        "parameters  volume cartpole-data: kubectl rlsrl params list cartpole",
        "",
        "ROLE     READY",
        "actor    1/2",
        "trainer  1/1",
        "",
        "CONDITION     STATUS  REASON    SINCE  MESSAGE",
        "Accepted      True    Accepted  5m3s   every object matches the spec",
        "GangComplete  True    Complete  4m3s   all 1 trainer pods of attempt 2 are ready",
    ]


def test_numbers_of_a_coordinator_that_stopped_answering_are_marked_stale() -> None:
    later = datetime(2026, 1, 1, 13, 0, 0, tzinfo=UTC)
    assert "updated     54m59s ago: The coordinator does not answer the operator" in status_view(RUNNING, [], later)


def test_a_suspended_experiment_shows_its_age_and_no_stale_numbers() -> None:
    suspended = condition("GangComplete", "Suspended", "suspend is true")
    text = status_view(
        experiment("Suspended", suspended, attempt=1, training=TRAINING), [], datetime(2026, 1, 2, tzinfo=UTC)
    )
    assert "phase       Suspended for 11h59m: `suspend` is true" in text
    assert "updated     11h54m ago\n" in text


def test_a_finished_experiment_shows_its_result_and_no_stale_numbers() -> None:
    message = "stop.returnMean holds: mean return 480.6 after 104869 transitions"
    over = experiment("Succeeded", condition("Finished", "Succeeded", message), attempt=1, training=TRAINING)
    text = status_view(over, [], datetime(2026, 1, 2, tzinfo=UTC))
    assert f"result      {message}" in text
    assert "phase       Succeeded for 11h59m" in text
    assert "updated" not in text


def test_a_missing_status_is_reported() -> None:
    assert "phase       none: No operator manages the experiment" in status_view(experiment(None), [], NOW)


def test_unknown_numbers_are_shown_as_unknown() -> None:
    text = status_view(experiment("Running", attempt=1, training={}), [], NOW)
    assert "trained     - env steps, - train steps, - env steps/s" in text
    assert "policy      return -, lag -, version -" in text
    assert "episodes    length -\n" in text


def test_weights_in_a_bucket_are_found_there() -> None:
    document = experiment("Running")
    document["spec"]["parameters"]["store"] = {"objectStore": {"url": "s3://weights/here"}}
    assert "parameters  s3://weights/here: kubectl rlsrl params list" in status_view(document, [], NOW)


def test_a_status_of_another_version_is_a_user_error() -> None:
    with pytest.raises(UserError, match=r"status\.phase: .* another version than this rlsrl"):
        read_status(experiment("Dreaming"))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-5, "0s"),
        (0, "0s"),
        (45.9, "45s"),
        (60, "1m"),
        (192, "3m12s"),
        (7500, "2h5m"),
        (86_400, "1d"),
        (90_000, "1d1h"),
    ],
)
def test_lengths_of_time(seconds: float, text: str) -> None:
    assert span(seconds) == text


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    assert columns([("A", "B"), ("long", "x"), ("s", "")]) == "A     B\nlong  x\ns"
