import json
import math
from dataclasses import replace
from typing import Any

import pytest

from rlsrl.data.version import Version
from rlsrl.runtime.call_board import EnvironmentCall
from rlsrl.runtime.coordination import WorkerState
from rlsrl.runtime.ledger import Mark, PageRecord, Posted, PostedCount, key_of
from rlsrl.workers.ledger_copies import LedgerCopies
from rlsrl.workers.long_calls import WorkerCall
from rlsrl.workers.status import (
    ERRORS,
    FAILED_EVALUATIONS,
    NON_FINITE,
    PAUSED_SINCE,
    ExperimentInfo,
    Member,
    MemberReport,
    RunPhase,
    Stall,
    build_status,
    derive_phase,
    main_wait,
)

NO_PAGES = LedgerCopies({})
EXPERIMENT = ExperimentInfo(name="cartpole", run_uid="u1", heartbeat_seconds=1.0, endpoints={"http": "h:1"}, done=False)


def member(role: str, index: int = 0, *, present: bool = True, heard_at: float = 100.0, **report: object) -> Member:
    return Member(
        role=role,
        index=index,
        incarnation=1,
        instance="6f1c",
        attempt=2,
        pid=41,
        host="here",
        endpoints={"metrics": "h:2"},
        report=MemberReport(**{"state": WorkerState.RUNNING} | report),  # type: ignore[arg-type]
        heard_at=heard_at,
        present=present,
    )


def test_the_document_lists_workers_by_role_and_index() -> None:
    members = [
        member("actor", 1, stats={"env_steps": 5.0}),
        member(
            "trainer",
            version=Version(2, 9),
            stats={"train_steps": 9.0},
            activity={"working": 2 / 3, "batch": 1 / 3},
        ),
        member("actor", 0, waiting_for="credit"),
        member("actor", 2, present=False),
    ]
    document = build_status(EXPERIMENT, members, NO_PAGES, now=101.5)
    assert document["experiment"] == "cartpole"
    assert document["run_uid"] == "u1"
    assert document["endpoints"] == {"http": "h:1"}
    assert [worker["index"] for worker in document["roles"]["actor"]] == [0, 1]
    assert document["roles"]["trainer"] == [
        {
            "index": 0,
            "incarnation": 1,
            "attempt": 2,
            "pid": 41,
            "host": "here",
            "state": "running",
            "paused_since": None,
            "waiting_for": "",
            "activity": {"batch": 0.333, "working": 0.667},
            "stats": {"train_steps": 9.0},
            "version": "2.9",
            "age_seconds": 1.5,
            "stale": False,
            "records_dropped": 0,
            "endpoints": {"metrics": "h:2"},
        }
    ]


def test_the_totals_are_those_of_rank_0() -> None:
    stats = {
        "env_steps": 100.0,
        "train_steps": 3.0,
        "return_mean": 9.5,
        "length_mean": 20.0,
        "policy_lag": 1.0,
        "unstored_versions": 0.0,
        "replay_transitions": 500.0,
        "train_steps_behind": 2.5,
    }
    members = [member("trainer", 1, stats={"env_steps": 7.0}), member("trainer", stats=stats, version=Version(1, 3))]
    document = build_status(EXPERIMENT, members, NO_PAGES, now=0.0, env_steps_per_second=50.0)
    assert document["totals"] == stats | {
        "version": "1.3",
        "env_steps_per_second": 50.0,
        "episode_info": None,
        "unstored_reason": None,
        "late_version": None,
        "rollback": None,
        "stored_on_request": None,
    }


def test_the_totals_have_the_statistics_of_info() -> None:
    stats = {"episode_info/won/mean": math.inf, "episode_info/won/count": 3.0, "episode_info/never/count": 0.0}
    totals = build_status(EXPERIMENT, [member("trainer", stats=stats)], NO_PAGES, now=0.0)["totals"]
    assert totals["episode_info"] == {"won": {"mean": None, "count": 3.0}, "never": {"mean": None, "count": 0.0}}


def test_a_text_of_rank_0_says_why_versions_are_not_stored() -> None:
    members = [member("trainer", texts={"unstored_reason": "disk full", "other": "x"})]
    totals = build_status(EXPERIMENT, members, NO_PAGES, now=0.0)["totals"]
    assert totals["unstored_reason"] == "disk full"
    assert "other" not in totals


def test_environments_that_wait_for_their_server_are_counted_with_the_first_ones_reason() -> None:
    def waiting(role: str, index: int, number: float, since: float, text: str, *, present: bool = True) -> Member:
        stats = {"server_waits": number, "server_away_since": since}
        return member(role, index, present=present, stats=stats, texts={"server_waits": text})

    def waits(*members: Member) -> Any:
        return build_status(EXPERIMENT, members, NO_PAGES, now=0.0)["server_waits"]

    later, first = (
        waiting("actor", 0, 4.0, 1000.0, "no answer"),
        waiting("trainer", 0, 1.0, 900.0, "http://sim is away"),
    )
    assert waits(later, first) == {
        "number": 5,
        "since": "1970-01-01T00:15:00Z",
        "text": "5 environments have waited since 1970-01-01T00:15:00Z: http://sim is away (trainer-0)",
    }
    assert waits(first)["text"].startswith("1 environment has waited since ")
    ended, gone = waiting("actor", 0, 0.0, 1000.0, ""), waiting("actor", 1, 4.0, 900.0, "x", present=False)
    assert waits(member("actor"), ended, gone, waiting("actor", 2, math.nan, 1.0, "x")) is None


def test_totals_remain_while_the_trainer_is_absent_and_are_null_before_it_joins() -> None:
    gone = member("trainer", present=False, stats={"env_steps": 8.0}, version=Version(1, 3))
    assert build_status(EXPERIMENT, [gone], NO_PAGES, now=0.0)["totals"]["env_steps"] == 8.0
    assert set(build_status(EXPERIMENT, [], NO_PAGES, now=0.0)["totals"].values()) == {None}


REACHED = MemberReport(stats={"train_steps": 1231.0, "env_steps": 157500.0})


@pytest.mark.parametrize(
    ("resumed_from", "former", "version", "text"),
    [
        (
            "1.1200",
            REACHED,
            "1.1200",
            "attempt 2 resumed from version 1.1200; training steps lost after it: at least 31 (to 157,500 env steps)",
        ),
        ("1.1231", REACHED, "1.1231", "attempt 2 resumed from version 1.1231"),
        ("1.1200", MemberReport(), "1.1200", "attempt 2 resumed from version 1.1200"),
        ("1.1200", MemberReport(stats={"train_steps": math.nan}), "1.1200", "attempt 2 resumed from version 1.1200"),
        ("none", REACHED, None, "attempt 2 began from step 0: no version was stored"),
    ],
)
def test_a_resumption_names_its_version_and_what_the_trainer_before_had_reached(
    resumed_from: str, former: MemberReport, version: str | None, text: str
) -> None:
    trainer = replace(member("trainer", texts={"resumed_from": resumed_from}), former=former)
    document = build_status(EXPERIMENT, [member("trainer", 1), trainer], NO_PAGES, now=0.0)
    assert document["resumption"] == {"attempt": 2, "version": version, "text": text}


@pytest.mark.parametrize("texts", [{}, {"resumed_from": ""}, {"resumed_from": "the newest"}])
def test_a_trainer_that_does_not_say_from_where_it_resumed_reports_no_resumption(texts: dict[str, str]) -> None:
    assert build_status(EXPERIMENT, [member("trainer", texts=texts)], NO_PAGES, now=0.0)["resumption"] is None
    assert build_status(EXPERIMENT, [], NO_PAGES, now=0.0)["resumption"] is None


def page(role: str, index: int = 0, *left: Posted, **counters: int) -> PageRecord:
    accounts = {0: PostedCount(0, counters["produced"])} if "produced" in counters else {}
    record = PageRecord(role=role, index=index, lives=1, incarnation=0, posted_counts=accounts, unacknowledged=left)
    return record.count(**counters)


def test_the_ledger_covers_present_and_former_workers() -> None:
    trainer = replace(page("trainer", trained=12, in_buffer=1), marks={0: Mark(0, 3, 8), 1: Mark(0, 2, 5)})
    pages = LedgerCopies({"actor": 2, "trainer": 1})
    for each in (page("actor", 0, Posted(0, 4, 2, 0), produced=10), page("actor", 1, produced=5), trainer):
        pages.put(each)
    members = [member("actor", 0), member("actor", 1, present=False), member("trainer")]
    found = build_status(EXPERIMENT, members, pages, now=0.0)["ledger"]
    assert found["balanced"], found
    assert (found["produced"], found["trained"], found["in_buffer"], found["unsettled"]) == (15, 12, 1, 2)
    over = build_status(EXPERIMENT, [replace(each, present=False) for each in members], pages, now=0.0)["ledger"]
    assert over["balanced"], over
    assert over["lost"] == {"receiver_died": 1, "producer_died": 2, "rolled_back": 0}


def test_what_buffer_workers_keep_counts_as_evicted_while_the_experiment_lacks_them() -> None:
    pages = LedgerCopies({"actor": 2, "buffer": 2, "trainer": 1})
    for index in range(2):
        pages.put(
            replace(page("actor", index), posted_counts={key_of("buffer", index): PostedCount(0, 9)}).count(produced=9)
        )
        buffer = replace(page("buffer", index, trained=2, in_buffer=7), marks={index: Mark(0, 3, 9)}, keeps=True)
        pages.put(buffer)

    def ledger(**capacity: int) -> tuple[bool, int, int]:
        pages.resize(capacity)
        found = pages.ledger(["actor"])
        return found["balanced"], found["in_buffer"], found["dropped"]["evicted"]

    assert ledger(actor=2, buffer=1, trainer=1) == (True, 7, 7)
    assert ledger(actor=2, trainer=1) == (True, 0, 14)
    assert ledger(actor=2, buffer=2, trainer=1) == (True, 14, 0), "a volume that comes back has what it had"


@pytest.mark.parametrize(("now", "stale"), [(103.0, False), (103.1, True)])
def test_a_worker_is_stale_after_three_heartbeats_of_silence(now: float, stale: bool) -> None:
    document = build_status(EXPERIMENT, [member("actor", heard_at=100.0)], NO_PAGES, now)
    assert document["roles"]["actor"][0]["stale"] is stale


def test_a_worker_without_a_lease_is_listed_with_its_last_sign() -> None:
    document = build_status(EXPERIMENT, [member("trainer", heard_at=100.0, present=False)], NO_PAGES, now=103.5)
    assert document["roles"]["trainer"] == []
    assert document["gone"] == [{"role": "trainer", "index": 0, "pid": 41, "age_seconds": 3.5}]


def test_a_call_is_listed_whether_its_worker_has_its_lease_or_not() -> None:
    call = EnvironmentCall(first_rank=3, num_environments=1, name="step", seconds=42.04)
    found = WorkerCall(role="actor", index=0, call=call)
    for present in (True, False):
        members = [member("actor", present=present)]
        (shown,) = build_status(EXPERIMENT, members, NO_PAGES, now=0.0, long_calls=[found])["environment_calls"]
        assert shown == {
            "role": "actor",
            "index": 0,
            "first_rank": 3,
            "num_environments": 1,
            "call": "step",
            "seconds": 42.0,
            "text": "environment rank 3 has been in step for 42 s (actor-0)",
        }


def test_errors_of_environments_are_counted_with_the_last_of_the_actor_with_most() -> None:
    def errors(*members: Member) -> object:
        return build_status(EXPERIMENT, members, NO_PAGES, now=0.0)["environment_errors"]

    well = member("actor", 2)
    few = member("actor", 0, stats={ERRORS: 1.0}, texts={ERRORS: "environment rank 0 raised ValueError"})
    most = member("actor", 1, stats={ERRORS: 4.0}, texts={ERRORS: "environment rank 9 raised OSError"})
    assert errors(well, member("trainer", stats={ERRORS: 7.0})) is None
    expected = {"number": 5.0, "last": "actor-1: environment rank 9 raised OSError"}
    assert errors(few, most, well) == expected
    assert errors(few, replace(most, present=False), well) == expected, "until its successor joins"
    assert errors(replace(few, report=MemberReport(stats={ERRORS: 1.0}))) == {
        "number": 1.0,
        "last": "actor-0: its log has the error",
    }


def test_other_failures_that_end_no_worker_are_counted_by_the_role_that_reports_them() -> None:
    members = [
        member("actor", stats={NON_FINITE: 7.0, FAILED_EVALUATIONS: 3.0}, texts={NON_FINITE: "reward is nan"}),
        member("evaluator", stats={FAILED_EVALUATIONS: 2.0}, texts={FAILED_EVALUATIONS: "1.9: disk full"}),
    ]
    document = build_status(EXPERIMENT, members, NO_PAGES, now=0.0)
    assert document["non_finite_steps"] == {"number": 7.0, "last": "actor-0: reward is nan"}
    assert document["failed_evaluations"] == {"number": 2.0, "last": "evaluator-0: 1.9: disk full"}
    assert document["environment_errors"] is None
    stored = replace(members[1], report=MemberReport(stats={FAILED_EVALUATIONS: 0.0}))
    assert build_status(EXPERIMENT, [stored], NO_PAGES, now=0.0)["failed_evaluations"] is None


@pytest.mark.parametrize(
    ("activity", "waiting_for", "expected"),
    [
        ({"batch": 0.98, "working": 0.02}, "", "batch"),
        ({"working: update": 0.4, "working": 0.2, "batch": 0.4}, "batch", ""),
        ({"credit": 0.4, "parameters": 0.4, "working": 0.2}, "credit", ""),
        ({}, "trainer", "trainer"),
        ({}, "", ""),
    ],
)
def test_a_wait_is_what_a_worker_does_most_of_the_time(
    activity: dict[str, float], waiting_for: str, expected: str
) -> None:
    assert main_wait(MemberReport(activity=activity, waiting_for=waiting_for)) == expected


def test_a_run_that_stands_still_says_since_when_and_why() -> None:
    assert build_status(EXPERIMENT, [], NO_PAGES, now=0.0)["stall"] is None
    stall = Stall(seconds=61.04, reasons=("trainer-0 has waited for batch for 61 s",))
    assert build_status(EXPERIMENT, [], NO_PAGES, now=0.0, stall=stall)["stall"] == {
        "seconds": 61.0,
        "reasons": ["trainer-0 has waited for batch for 61 s"],
    }


def test_the_document_is_json_whatever_a_worker_reports() -> None:
    stats = {"return_mean": math.nan, "env_steps": math.inf, "train_steps": 1.0}
    document = build_status(EXPERIMENT, [member("trainer", stats=stats)], NO_PAGES, now=0.0)
    read = json.loads(json.dumps(document, allow_nan=False))
    assert read["totals"]["return_mean"] is None
    assert read["roles"]["trainer"][0]["stats"] == {"return_mean": None, "env_steps": None, "train_steps": 1.0}


TRAINED = {"train_steps": 1.0}


def test_the_document_names_paused_workers_and_since_when() -> None:
    def paused(role: str, index: int, since: float) -> Member:
        return member(role, index, state=WorkerState.PAUSED, stats={PAUSED_SINCE: since})

    members = [member("trainer"), member("actor", 0, stats={PAUSED_SINCE: 5.0}), paused("actor", 1, 90.0)]
    document = build_status(EXPERIMENT, members, NO_PAGES, now=100.0)
    text = "paused since 1970-01-01T00:01:30Z: actor-1"
    assert document["paused"] == {"number": 1, "since": "1970-01-01T00:01:30Z", "text": text}
    assert [each["paused_since"] for each in document["roles"]["actor"]] == [None, "1970-01-01T00:01:30Z"]
    members = [member("trainer"), *(paused("actor", index, 60.0) for index in range(7))]
    document = build_status(EXPERIMENT, members, NO_PAGES, now=100.0)
    assert document["phase"] == "paused"
    assert document["paused"]["text"].endswith("actor-4 and 2 more")
    assert build_status(EXPERIMENT, [member("trainer")], NO_PAGES, now=1.0)["paused"] is None


@pytest.mark.parametrize(
    ("members", "done", "phase"),
    [
        ([], False, "starting"),
        ([member("actor")], False, "starting"),
        ([member("trainer", state=WorkerState.CONFIGURING)], False, "starting"),
        ([member("trainer")], False, "starting"),
        ([member("trainer", stats=TRAINED)], False, "training"),
        ([member("trainer", stats=TRAINED), member("trainer", 1, state=WorkerState.CONFIGURING)], False, "starting"),
        ([member("trainer", state=WorkerState.PAUSED, stats=TRAINED)], False, "paused"),
        ([member("trainer", stats=TRAINED), member("actor", state=WorkerState.PAUSED)], False, "paused"),
        (
            [member("trainer", stats=TRAINED), member("actor"), member("actor", 1, state=WorkerState.PAUSED)],
            False,
            "training",
        ),
        ([member("trainer", stats=TRAINED), member("evaluator", state=WorkerState.PAUSED)], False, "training"),
        ([member("trainer", present=False, stats=TRAINED), member("actor")], False, "recovering"),
        ([member("trainer", present=False, stats=TRAINED)], True, "finished"),
        ([], True, "finished"),
    ],
)
def test_the_phase_follows_from_the_workers(members: list[Member], done: bool, phase: RunPhase) -> None:
    assert derive_phase(members, done=done) == phase
    assert build_status(replace(EXPERIMENT, done=done), members, NO_PAGES, 0.0)["phase"] == phase
