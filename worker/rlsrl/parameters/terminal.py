"""The terminal record: an ended run's result, stored with its last version. A run with such a record never trains.

An end can be withdrawn: a failure is tried again, a finished run gets another ``stop``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlsrl.data.version import Version
from rlsrl.parameters.protocols import ParameterDB, VersionInfo

TERMINAL_KEY = "terminal"
"""Metadata key of an ended run's last version.

The value is ``{"reason", "version", "result"}``. ``reason`` is a criterion of ``stop``, or ``UPDATES_SKIPPED``. In the
latter case the run has failed, and ``failure`` says why. None: the end was withdrawn."""
WITHDRAWN_KEY = "withdrawn_failure"
"""Metadata key of the version with which a run failed before it was tried again, and of later ones until the run has
made a training step: why it failed."""
UPDATES_SKIPPED = "updatesSkipped"
"""The reason of a run that ended since most of its minibatches were skipped."""


def terminal_record(db: ParameterDB, policy_name: str) -> Mapping[str, Any] | None:
    """Return the run's terminal record; None if the run has not ended."""
    newest = _newest(db, policy_name)
    record = None if newest is None else newest.metadata.get(TERMINAL_KEY)
    return record if isinstance(record, dict) else None


def withdraw_failure(db: ParameterDB, policy_name: str, *, first_attempt: int) -> None:
    """Withdraw the failure that an attempt before ``first_attempt`` recorded, since the run is tried again. A finished
    run stays finished.
    """
    newest, failure = _newest(db, policy_name), failure_of(terminal_record(db, policy_name))
    if newest is not None and newest.version.attempt < first_attempt and failure is not None:
        withdraw_end(db, policy_name)


def withdraw_end(db: ParameterDB, policy_name: str) -> None:
    """Withdraw the terminal record, so that training continues from the last version."""
    newest, record = _newest(db, policy_name), terminal_record(db, policy_name)
    if newest is not None and record is not None:
        failure = failure_of(record)
        db.annotate(
            policy_name,
            newest.version,
            {TERMINAL_KEY: None, **({} if failure is None else {WITHDRAWN_KEY: failure})},
        )


def withdrawn_failure(db: ParameterDB, policy_name: str, version: Version) -> str | None:
    """Return why the run had failed with a version, if it is tried again since; otherwise None."""
    failures = [info.metadata.get(WITHDRAWN_KEY) for info in db.versions(policy_name) if info.version == version]
    return next((failure for failure in failures if isinstance(failure, str)), None)


def failure_of(record: Mapping[str, Any] | None) -> str | None:
    """Return why the run failed; None if its record names a criterion of ``stop``, or there is no record."""
    failure = (record or {}).get("failure")
    return failure if isinstance(failure, str) else None


def _newest(db: ParameterDB, policy_name: str) -> VersionInfo | None:
    versions = db.versions(policy_name) if policy_name in db.policies() else []
    return versions[-1] if versions else None
