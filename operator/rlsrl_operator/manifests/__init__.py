"""Render an experiment into the Kubernetes objects that run it. Pure; the tests hold golden copies."""

from __future__ import annotations

from rlsrl_operator.manifests.config import token_secret
from rlsrl_operator.manifests.context import ExperimentContext
from rlsrl_operator.manifests.revision import (
    Revision,
    accepts_edit,
    derive_revision,
    first_revision,
    is_anothers,
    next_revision,
    read_revision,
    render,
    revision_object,
)
from rlsrl_operator.manifests.types import Manifest
from rlsrl_operator.manifests.workloads import shard_claims, volume_claim

__all__ = [
    "ExperimentContext",
    "Manifest",
    "Revision",
    "accepts_edit",
    "derive_revision",
    "first_revision",
    "is_anothers",
    "next_revision",
    "read_revision",
    "render",
    "revision_object",
    "shard_claims",
    "token_secret",
    "volume_claim",
]
