"""Kubernetes objects: their type, their key, their digest."""

from __future__ import annotations

import hashlib
import json
from typing import Any

Manifest = dict[str, Any]
"""A Kubernetes object as JSON."""
ObjectKey = tuple[str, str]
"""Kind and name of an object in the experiment's namespace."""


def key_of(manifest: Manifest) -> ObjectKey:
    """Return the kind and the name."""
    return manifest["kind"], manifest["metadata"]["name"]


def digest(value: object) -> str:
    """Return a digest that is equal for equal JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
