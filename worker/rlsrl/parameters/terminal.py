"""The terminal record: a finished run's result, stored with its last version. A run with such a record never trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlsrl.parameters.protocols import ParameterDB

TERMINAL_KEY = "terminal"
"""Metadata key of a finished run's last version. The value is ``{"reason", "version", "result"}``."""


def terminal_record(db: ParameterDB, policy_name: str) -> Mapping[str, Any] | None:
    """Return the run's terminal record; None if the run has not finished."""
    versions = db.versions(policy_name) if policy_name in db.policies() else []
    if not versions:
        return None
    record = versions[-1].metadata.get(TERMINAL_KEY)
    return record if isinstance(record, dict) else None
