"""From one experiment to the objects that run it. Pure; YAML's golden twins are in the tests."""

from __future__ import annotations

from rlsrl_operator.manifests.config import token_secret
from rlsrl_operator.manifests.record import (
    Record,
    first_record,
    is_anothers,
    next_record,
    read_record,
    record_object,
    render,
)
from rlsrl_operator.manifests.subject import Subject
from rlsrl_operator.manifests.types import Manifest
from rlsrl_operator.manifests.workloads import volume_claim

__all__ = [
    "Manifest",
    "Record",
    "Subject",
    "first_record",
    "is_anothers",
    "next_record",
    "read_record",
    "record_object",
    "render",
    "token_secret",
    "volume_claim",
]
