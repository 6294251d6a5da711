"""The terminal record: what a finished run ended with, kept with its last version. A run that has one never trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlsrl.parameters.protocols import ParameterDB

TERMINAL_KEY = "terminal"
"""Metadata of a finished run's last version: ``{"reason", "version", "result"}``."""


def terminal_record(db: ParameterDB, policy_name: str) -> Mapping[str, Any] | None:
    """What the run ended with, None if it has not."""
    versions = db.versions(policy_name) if policy_name in db.policies() else []
    if not versions:
        return None
    record = versions[-1].metadata.get(TERMINAL_KEY)
    return record if isinstance(record, dict) else None
