"""The terminal record of a run that is tried again."""

from __future__ import annotations

import pytest

from rlsrl.data.version import Version
from rlsrl.parameters.terminal import TERMINAL_KEY, terminal_record, withdraw_failure, withdrawn_failure
from rlsrl.testing.memory_parameter_db import MemoryParameterDB
from rlsrl.testing.parameter_dbs import POLICY, make_parameters

LAST = Version(2, 5)
FAILURE = {"reason": "updatesSkipped", "version": str(LAST), "result": {}, "failure": "150 of the last 200"}
RESULT = {"reason": "envSteps", "version": str(LAST), "result": {}}


@pytest.mark.parametrize(
    ("record", "first_attempt", "is_withdrawn"),
    [(FAILURE, 3, True), (FAILURE, 2, False), (FAILURE, 1, False), (RESULT, 3, False)],
)
def test_only_the_failure_of_an_earlier_attempt_is_withdrawn(
    record: dict[str, object], first_attempt: int, is_withdrawn: bool
) -> None:
    db = MemoryParameterDB()
    db.push(POLICY, make_parameters(LAST))
    db.annotate(POLICY, LAST, {TERMINAL_KEY: record})
    withdraw_failure(db, POLICY, first_attempt=first_attempt)
    assert terminal_record(db, POLICY) == (None if is_withdrawn else record)
    assert withdrawn_failure(db, POLICY, LAST) == (FAILURE["failure"] if is_withdrawn else None)
    later = Version(LAST.attempt + 1, LAST.step)
    db.push(POLICY, make_parameters(later))
    assert withdrawn_failure(db, POLICY, later) is None, "of that version alone"


def test_a_run_without_versions_has_nothing_to_withdraw() -> None:
    withdraw_failure(MemoryParameterDB(), POLICY, first_attempt=2)
