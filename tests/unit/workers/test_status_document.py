import json
import math
from dataclasses import replace

import pytest

from rlsrl.data.version import Version
from rlsrl.runtime.coordination import WorkerState
from rlsrl.workers.status import Experiment, Member, Phase, Report, build_status, derive_phase

EXPERIMENT = Experiment(name="cartpole", run_uid="u1", heartbeat_seconds=1.0, endpoints={"http": "h:1"}, done=False)


def member(role: str, index: int = 0, *, present: bool = True, heard_at: float = 100.0, **report: object) -> Member:
    return Member(
        role=role,
        index=index,
        incarnation=1,
        attempt=2,
        pid=41,
        host="here",
        endpoints={"metrics": "h:2"},
        report=Report(**{"state": WorkerState.RUNNING} | report),  # type: ignore[arg-type]
        heard_at=heard_at,
        present=present,
    )


def test_the_document_lists_who_is_there_by_role_and_index() -> None:
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
    document = build_status(EXPERIMENT, members, now=101.5)
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


def test_rank_0_speaks_for_the_experiment() -> None:
    stats = {
        "env_steps": 100.0,
        "train_steps": 3.0,
        "env_steps_per_second": 50.0,
        "return_mean": 9.5,
        "policy_lag": 1.0,
    }
    members = [member("trainer", 1, stats={"env_steps": 7.0}), member("trainer", stats=stats, version=Version(1, 3))]
    assert build_status(EXPERIMENT, members, now=0.0)["totals"] == stats | {"version": "1.3"}


def test_totals_stand_while_the_trainer_is_away_and_are_null_before_it_came() -> None:
    gone = member("trainer", present=False, stats={"env_steps": 8.0}, version=Version(1, 3))
    assert build_status(EXPERIMENT, [gone], now=0.0)["totals"]["env_steps"] == 8.0
    assert set(build_status(EXPERIMENT, [], now=0.0)["totals"].values()) == {None}


def test_the_ledger_sums_over_everybody_present_and_gone() -> None:
    members = [
        member("actor", 0, ledger={"produced": 10}),
        member("actor", 1, ledger={"produced": 5}, present=False),
        member("trainer", ledger={"trained": 12, "in_buffer": 3}),
    ]
    assert build_status(EXPERIMENT, members, now=0.0)["ledger"] == {"produced": 15, "trained": 12, "in_buffer": 3}


@pytest.mark.parametrize(("now", "stale"), [(103.0, False), (103.1, True)])
def test_a_worker_is_stale_after_three_heartbeats_of_silence(now: float, stale: bool) -> None:
    document = build_status(EXPERIMENT, [member("actor", heard_at=100.0)], now)
    assert document["roles"]["actor"][0]["stale"] is stale


def test_the_document_is_json_whatever_a_worker_reports() -> None:
    stats = {"return_mean": math.nan, "env_steps": math.inf, "train_steps": 1.0}
    document = build_status(EXPERIMENT, [member("trainer", stats=stats)], now=0.0)
    read = json.loads(json.dumps(document, allow_nan=False))
    assert read["totals"]["return_mean"] is None
    assert read["roles"]["trainer"][0]["stats"] == {"return_mean": None, "env_steps": None, "train_steps": 1.0}


TRAINED = {"train_steps": 1.0}


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
        ([member("trainer", present=False, stats=TRAINED), member("actor")], False, "recovering"),
        ([member("trainer", present=False, stats=TRAINED)], True, "finished"),
        ([], True, "finished"),
    ],
)
def test_the_phase_follows_from_the_trainers(members: list[Member], done: bool, phase: Phase) -> None:
    assert derive_phase(members, done=done) == phase
    assert build_status(replace(EXPERIMENT, done=done), members, 0.0)["phase"] == phase
