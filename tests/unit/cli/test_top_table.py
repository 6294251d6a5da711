"""The table of ``top``."""

from __future__ import annotations

from typing import Any

import pytest

from rlsrl.cli.top_table import top_table
from rlsrl.local.worker_report import activity, busy, waits, works


def worker(index: int, host: str, shares: dict[str, float], rate: float, **more: Any) -> dict[str, Any]:
    stats = {"samples_per_second": rate}
    known = {"index": index, "host": host, "state": "running", "stale": False, "version": "1.6"}
    return {**known, "activity": shares, "stats": stats, **more}


DOCUMENT: dict[str, Any] = {
    "experiment": "cartpole",
    "phase": "training",
    "totals": {
        "env_steps": 62971.0,
        "train_steps": 62.0,
        "env_steps_per_second": 5381.4,
        "return_mean": 243.04,
        "policy_lag": 1.0,
        "version": "1.62",
    },
    "roles": {
        "actor": [
            worker(0, "a-x", {"working": 0.2, "working: environment": 0.7, "credit": 0.1}, 2500.4),
            worker(1, "b-y", {"working": 0.4, "credit": 0.6}, 1200.0),
        ],
        "policy": [worker(0, "c-z", {"working": 0.25, "requests": 0.75}, 312.0, stale=True)],
        "trainer": [worker(0, "d-w", {"working": 1.0}, 5000.0)],
    },
}
DOCUMENT["roles"]["trainer"][0]["stats"]["minibatches_skipped"] = 1234.0


def test_the_table_shows_roles_and_workers_with_their_waits() -> None:
    assert top_table(DOCUMENT).splitlines() == [
        "cartpole: training, env steps 62,971, train steps 62, env steps/s 5,381, return 243.0, lag 1, version 1.62",
        "",
        "ROLE     INDEX  HOST  STATE      BUSY  VERSION  PER SECOND         SKIPPED  WAITS FOR     WORK",
        "actor                 2 running  65%            3,700 transitions           credit 35%    environment 35%",
        "         0      a-x   running    90%   1.6      2,500                       credit 10%    environment 70%",
        "         1      b-y   running    40%   1.6      1,200                       credit 60%",
        "policy                1 silent   25%            312 requests                requests 75%",
        "         0      c-z   silent     25%   1.6      312                         requests 75%",
        "trainer               1 running  100%           5,000 transitions",
        "         0      d-w   running    100%  1.6      5,000              1,234",
    ]


def test_a_replay_store_and_its_pace_are_shown() -> None:
    totals = {**DOCUMENT["totals"], "replay_transitions": 50_000.0, "train_steps_behind": 12.25}
    first = top_table({**DOCUMENT, "totals": totals}).splitlines()[0]
    assert first.endswith("lag 1, replayed from 50,000, updates behind 12, version 1.62")


def test_versions_that_are_not_stored_are_shown() -> None:
    def second_line(**totals: Any) -> str:
        return top_table({**DOCUMENT, "totals": {**DOCUMENT["totals"], **totals}}).splitlines()[1]

    assert second_line(unstored_versions=2.0) == "NOT STORED: the newest 2 versions (logs: checkpoint_failed)"
    full = "1.62: disk full; training is over, and the trainer tries again until 22:14:20 UTC"
    assert second_line(unstored_versions=2.0, unstored_reason=full) == f"NOT STORED: the newest 2 versions ({full})"
    late = "version 1.62 was due 95 s ago and is not stored yet"
    assert second_line(late_version=late) == f"STORED LATE: {late}"
    assert second_line(late_version=late, unstored_versions=1.0).startswith("NOT STORED")
    assert second_line(late_version=None) == ""


def test_evaluations_that_fail_are_shown() -> None:
    failed = {"number": 2.0, "last": "evaluator-0: 1.60: No space left on device"}
    assert top_table({**DOCUMENT, "failed_evaluations": failed}).splitlines()[1] == (
        "EVALUATIONS FAILED: the newest 2, the last of evaluator-0: 1.60: No space left on device"
    )


def test_a_resumption_from_an_older_version_is_shown() -> None:
    lost = "attempt 2 resumed from version 1.1, since version 1.2 cannot be used (it is cut): training steps lost: 1"
    document = {**DOCUMENT, "totals": {**DOCUMENT["totals"], "rollback": lost}}
    assert top_table(document).splitlines()[1] == f"ROLLED BACK: {lost}"


def test_environments_that_raise_are_shown() -> None:
    text = "actor-0: environment rank 3 raised ValueError: stuck (error 2 of this environment)"
    document = {**DOCUMENT, "environment_errors": {"number": 3.0, "last": text}}
    assert top_table(document).splitlines()[1] == f"ENVIRONMENT ERRORS: 3, the last of {text} (logs: environment_fault)"


def test_an_actor_that_its_environment_ended_is_gone_with_the_last_error() -> None:
    text = "actor-2: environment rank 3 raised ValueError: stuck (error 6 of this environment)"
    gone = [{"role": "actor", "index": 2, "pid": 7, "age_seconds": 4.2}]
    document = {**DOCUMENT, "environment_errors": {"number": 6.0, "last": text}, "gone": gone}
    _, errors, _, _, actors, *workers = top_table(document).splitlines()
    assert errors.startswith("ENVIRONMENT ERRORS: 6, the last of actor-2: environment rank 3 raised ValueError: stuck")
    assert actors.split()[:4] == ["actor", "2", "running,", "1"]
    assert workers[2].split()[:3] == ["2", "-", "gone"]


def test_values_that_are_not_finite_are_shown() -> None:
    text = "actor-0: environment rank 3: reward is nan at step 50 of its episode"
    document = {**DOCUMENT, "non_finite_steps": {"number": 1234.0, "last": text}}
    assert top_table(document).splitlines()[1] == (
        f"NAN OR INFINITY: 1,234 steps or resets, the last of {text} (logs: environment_fault)"
    )


@pytest.mark.parametrize("call", ["step", "make"])
def test_the_environment_that_hangs_longest_is_named(call: str) -> None:
    def second_line(*calls: Any) -> str:
        return top_table({**DOCUMENT, "environment_calls": list(calls)}).splitlines()[1]

    text = f"environment rank 3 has been in {call} for 42 s (actor-0)"
    assert second_line({"text": text}) == text
    assert second_line({"text": text}, {"text": "x"}, {"text": "y"}) == f"{text} and 2 more"
    assert second_line() == second_line(3, {"call": "step"}) == ""


@pytest.mark.parametrize(
    ("reasons", "text"),
    [
        (["an environment hangs", "a trainer waits"], "an environment hangs; a trainer waits"),
        ([], "no worker reports why"),
        (None, "no worker reports why"),
    ],
)
def test_a_run_that_stands_still_says_why(reasons: Any, text: str) -> None:
    document = {**DOCUMENT, "stall": {"seconds": 61.2, "reasons": reasons}, "environment_calls": [{"text": "a call"}]}
    assert top_table(document).splitlines()[1] == f"NO STEP for 61 s: {text}"


def test_a_server_of_environments_that_is_away_is_named_instead_of_the_calls_that_wait_for_it() -> None:
    text = "8 environments have waited since 2026-01-01T12:00:00Z: the environment server http://sim is away (actor-0)"
    document = {**DOCUMENT, "server_waits": {"number": 8, "text": text}, "environment_calls": [{"text": "a call"}]}
    stalled = {**document, "stall": {"seconds": 61.2, "reasons": ["a reason"]}}
    assert top_table(document).splitlines()[1:3] == [f"ENVIRONMENT SERVER AWAY: {text}", ""]
    assert top_table(stalled).splitlines()[1:3] == [f"ENVIRONMENT SERVER AWAY: {text}", "NO STEP for 61 s: a reason"]


def test_workers_without_a_lease_are_shown_as_gone() -> None:
    gone = [{"role": "actor", "index": 2, "pid": 7, "age_seconds": 34.2}, {"role": "policy", "index": 1}, 3]
    lines = top_table({**DOCUMENT, "gone": gone}).splitlines()
    assert [line.split()[:4] for line in lines[3:7]] == [
        ["actor", "2", "running,", "1"],
        ["0", "a-x", "running", "90%"],
        ["1", "b-y", "running", "40%"],
        ["2", "-", "gone", "-"],
    ]
    assert any(line.split()[:4] == ["policy", "1", "silent,", "1"] for line in lines)


def test_large_roles_are_counted_unless_all_is_asked_for() -> None:
    document = {**DOCUMENT, "roles": {"actor": [worker(index, f"pod-{index}", {}, 1.0) for index in range(20)]}}
    told = top_table(document)
    assert "pod-6" in told
    assert "pod-7" not in told
    assert "and 13 more" in told
    assert "20 running" in told
    assert "pod-19" in top_table(document, whole=True)


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"roles": None, "totals": []},
        {"roles": {"actor": [{"host": "\x1b[2J", "activity": {"\x1b[2J": 1.0}}]}},
        {"roles": {"actor": 3, "trainer": [None, {"index": None, "stats": 4, "activity": {"working": "x"}}]}},
    ],
)
def test_an_unexpected_document_is_shown_as_far_as_possible(document: dict[str, Any]) -> None:
    assert "ROLE" in top_table(document)
    assert "\x1b" not in top_table(document)


def test_shares_are_means_over_reporting_workers() -> None:
    reports = [{"activity": {"working": 1.0}}, {"activity": {"working": 0.5, "batch": 0.5}}, {"activity": {}}, {}]
    assert activity(reports) == {"working": 0.75, "batch": 0.25}
    assert activity([]) == {}


def test_stages_of_work_are_listed_by_share() -> None:
    shares = {"working": 0.1, "working: inference": 0.25, "working: environment": 0.5, "inference": 0.15}
    assert (busy(shares), works(shares), waits(shares)) == (
        "85%",
        "environment 50%, inference 25%",
        "inference 15%",
    )


def test_unknown_shares_are_not_0_and_small_ones_are_left_out() -> None:
    assert (busy({}), works({}), waits({})) == ("-", "", "")
    assert (busy({"batch": 1.0}), waits({"batch": 0.996, "credit": 0.004})) == ("0%", "batch 100%")
