"""The terminal record: an ended run's result, stored with its last version. A run with such a record never trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlsrl.parameters.protocols import ParameterDB

TERMINAL_KEY = "terminal"
"""Metadata key of an ended run's last version.

The value is ``{"reason", "version", "result"}``. ``reason`` is a criterion of ``stop``, or ``UPDATES_SKIPPED``. In the
latter case the run has failed, and ``failure`` says why. None: the failure was withdrawn."""
UPDATES_SKIPPED = "updatesSkipped"
"""The reason of a run that ended since most of its minibatches were skipped."""


def terminal_record(db: ParameterDB, policy_name: str) -> Mapping[str, Any] | None:
    """Return the run's terminal record; None if the run has not ended."""
    versions = db.versions(policy_name) if policy_name in db.policies() else []
    if not versions:
        return None
    record = versions[-1].metadata.get(TERMINAL_KEY)
    return record if isinstance(record, dict) else None


def withdraw_failure(db: ParameterDB, policy_name: str, *, first_attempt: int) -> None:
    """Withdraw the failure that an attempt before ``first_attempt`` recorded, since the run is tried again. A finished
    run stays finished.
    """
    versions = db.versions(policy_name) if policy_name in db.policies() else []
    if versions and versions[-1].version.attempt < first_attempt and failure_of(terminal_record(db, policy_name)):
        db.annotate(policy_name, versions[-1].version, {TERMINAL_KEY: None})


def failure_of(record: Mapping[str, Any] | None) -> str | None:
    """Return why the run failed; None if its record names a criterion of ``stop``, or there is no record."""
    failure = (record or {}).get("failure")
    return failure if isinstance(failure, str) else None
