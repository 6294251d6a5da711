"""``metadata``: the standard fields of a Kubernetes object."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rlsrl.api.model import Ignored, Model

NAME_PATTERN = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
MAX_NAME_LENGTH = 40
"""Leaves room for the suffixes of derived names: Kubernetes allows 63 characters in a label."""


class Metadata(Model):
    """Standard object metadata, as in Kubernetes."""

    name: Annotated[str, Field(pattern=NAME_PATTERN, max_length=MAX_NAME_LENGTH, examples=["cartpole"])]
    """The experiment's name: lower-case letters, digits and dashes, beginning with a letter. It names the run folder
    and every object of the experiment on a cluster."""
    namespace: Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)] | None = None
    """The namespace on a cluster. Ignored on one machine."""
    labels: Annotated[
        dict[Annotated[str, Field(max_length=317)], Annotated[str, Field(max_length=63)]], Field(max_length=64)
    ] = Field(default_factory=dict)
    """Labels for selecting the experiment."""
    annotations: Annotated[
        dict[Annotated[str, Field(max_length=317)], Annotated[str, Field(max_length=262_144)]], Field(max_length=64)
    ] = Field(default_factory=dict)
    """Notes that tools attach."""
    creation_timestamp: Ignored = None
    """Written by Kubernetes; ignored."""
    deletion_timestamp: Ignored = None
    """Written by Kubernetes; ignored."""
    deletion_grace_period_seconds: Ignored = None
    """Written by Kubernetes; ignored."""
    finalizers: Ignored = None
    """Written by Kubernetes; ignored."""
    generation: Ignored = None
    """Written by Kubernetes; ignored."""
    managed_fields: Ignored = None
    """Written by Kubernetes; ignored."""
    owner_references: Ignored = None
    """Written by Kubernetes; ignored."""
    resource_version: Ignored = None
    """Written by Kubernetes; ignored."""
    self_link: Ignored = None
    """Written by Kubernetes; ignored."""
    uid: Ignored = None
    """Written by Kubernetes; ignored."""
