from __future__ import annotations

import json
from dataclasses import replace

import pytest

from rlsrl.local.run_record import MAX_FAILURE_CHARACTERS, RunRecord, Span
from rlsrl.parameters.resumption import Rollback

NEW = RunRecord(run_uid="u", created_at=1.0, package_version="0.1")


def test_attempts_are_counted_and_never_used_twice() -> None:
    record = NEW.begin_attempt(10.0).end_attempt(12.0).begin_attempt(20.0)
    assert record.attempt == 2
    assert record.training == (Span(started_at=10.0, ended_at=12.0), Span(started_at=20.0))


def test_time_adds_up_over_lives() -> None:
    record = NEW.begin_life(0.0, last_sign=0.0).begin_attempt(1.0).end_attempt(4.0).end_life(5.0)
    record = record.begin_life(100.0, last_sign=50.0).begin_attempt(102.0).end_attempt(103.0).end_life(110.0)
    assert record.wall_seconds == 15.0
    assert record.training_seconds == 4.0


@pytest.mark.parametrize(("last_sign", "seconds"), [(7.0, 7.0), (-1.0, 0.0)])
def test_a_killed_life_counts_until_its_last_write(last_sign: float, seconds: float) -> None:
    killed = NEW.begin_life(0.0, last_sign=0.0).begin_attempt(0.0)
    resumed = killed.begin_life(100.0, last_sign=last_sign)
    assert resumed.wall_seconds == seconds
    assert resumed.training_seconds == seconds
    assert resumed.lives[-1] == Span(started_at=100.0)


def test_restarts_are_counted_by_role() -> None:
    record = NEW.count_restart("actor").count_restart("trainer").count_restart("actor")
    assert record.restarts == {"actor": 2, "trainer": 1}


def test_a_failure_lasts_until_the_next_life() -> None:
    failed = NEW.begin_life(0.0, last_sign=0.0).end_life(1.0, failure="actor-0 exited with code 1")
    assert failed.failure == "actor-0 exited with code 1"
    assert RunRecord.from_json(json.loads(json.dumps(failed.to_json()))) == failed
    assert failed.begin_life(2.0, last_sign=1.0).failure == ""


def test_of_a_long_failure_the_beginning_and_the_end_are_kept() -> None:
    long = "actor-0 exited with code 1" + "x" * MAX_FAILURE_CHARACTERS + "ValueError: the gripper is stuck"
    kept = NEW.end_life(1.0, failure=long).failure
    assert kept.startswith("actor-0 exited with code 1")
    assert kept.endswith("ValueError: the gripper is stuck")
    assert "(58 characters left out)" in kept


def test_a_record_survives_json() -> None:
    record = replace(NEW.begin_life(0.0, last_sign=0.0).begin_attempt(1.0).count_restart("actor"), modules="/mine")
    record = record.roll_back(Rollback(attempt=2, version="1.90", newest="1.100", reason="it is empty", lost_steps=10))
    assert RunRecord.from_json(json.loads(json.dumps(record.to_json()))) == record


def test_a_record_of_an_earlier_version_of_rlsrl_has_no_rollbacks_and_no_failure() -> None:
    value = {name: member for name, member in NEW.to_json().items() if name not in ("rollbacks", "failure")}
    assert RunRecord.from_json(value) == NEW


@pytest.mark.parametrize("value", [{}, {**NEW.to_json(), "lives": 3}, {**NEW.to_json(), "attempt": "first"}, []])
def test_an_invalid_record_is_refused(value: object) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        RunRecord.from_json(value)  # type: ignore[arg-type]
